"""Threads that run the calls of a step side by side: one team for all services of a process.

How many lanes a step has is decided when its kernel is bound, by the time that it takes: for most kernels in
`kernels.lanes_worth`, and for convolutions in `convolution.make`. Here, a step of one call runs on the
caller's thread, and so does every step while another service has the team.

What is shared: the calls of one step, which write disjoint memory. Only who holds the
team's lock gives it calls: each member at most one call of a step, through a queue of
its own. The holder makes its own call, and waits until each member has made its one. So
no call of a step is still running when the next step begins, and no lane's memory is
used by two calls at a time. While one service holds the team, another makes all calls of
its step itself: so services that compute at the same time do not take more processors
than one would.

A signal handler may raise in the holder at any place, as Ctrl-C does. A call that no
member has begun is withdrawn then, and one that a member has begun is waited for. Who
makes a call is decided by `dict.setdefault`, which is atomic, and gives the same answer
if the question is repeated. So is which thread a member's is, since it is not known
whether an interrupted `Thread.start` has started one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from cudnn_actor.actors import forks
from cudnn_actor.engines.cpu.fast.buffering import caller_with_settings, with_settings
from cudnn_actor.engines.cpu.fast.kernels import Call, Step, of_calls

__all__ = ["Lanes", "run_alone"]


class _Work:
    """A call that is given to a member."""

    __slots__ = ("_done", "_owner", "call", "failure", "finished")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.failure: BaseException | None = None
        self.finished = False
        self._owner: dict[str, str] = {}
        self._done = threading.Lock()
        self._done.acquire()

    def make(self) -> None:
        """Make the call, unless it was withdrawn. Only a member."""
        if self._owner.setdefault("is", "member") != "member":
            return
        try:
            self.call()
        except BaseException as error:  # noqa: BLE001 - the engine's thread raises it
            self.failure = error
        self.finished = True
        self._done.release()

    def withdraw(self) -> bool:
        """Take the call back from the members. Returns whether no member makes it or has made it. Only the
        holder may call this."""
        return self._owner.setdefault("is", "holder") == "holder"

    def wait(self) -> None:
        """Wait until a member has made the call. It may be interrupted, and repeated."""
        while not self.finished:
            self._done.acquire()


class _Member:
    """A thread, and the queue of the calls that it is given."""

    def __init__(self, name: str) -> None:
        self.given: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self.started = False
        self._name = name
        self._owner: dict[str, threading.Thread | None] = {}

    def start(self) -> None:
        """Start the thread, if it is not known to run. It may be interrupted, and repeated.

        What an interrupted `Thread.start` leaves behind may be no thread, one that runs, or one that waits
        for ever for a lock of its `Thread`, which the interrupted thread holds. So the next attempt is made
        with a new `Thread`. Of all that run, the first to ask owns the queue, and the others end. So calls
        are made by one thread, and that is one that runs.
        """
        if not self.started:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self.started = True

    def end(self) -> Callable[[], None]:
        """End the thread once it has made the calls that it was given. Returns a function that waits for
        that."""
        owner = self._owner.setdefault("is", None)  # none that runs later owns the queue
        self.given.put(None)
        return (lambda: None) if owner is None else owner.join

    def _work(self) -> None:
        own = threading.current_thread()
        if self._owner.setdefault("is", own) is not own:
            return
        with with_settings():  # of this thread alone; the engine's thread has its own
            while (work := self.given.get()) is not None:
                work.make()
                del work  # what its call refers to is not kept until the next one


class _Team:
    """The threads. They end with the last `Lanes` that is open."""

    def __init__(self) -> None:
        self.busy = threading.Lock()
        self.members: list[_Member] = []
        """Written by the holder of `busy`."""
        self._users: set[Lanes] = set()

    def join(self, lanes: Lanes) -> None:
        """Note who uses the team. It may be interrupted, and repeated."""
        self._users.add(lanes)

    def leave(self, lanes: Lanes) -> None:
        """Blocks while another service computes a step, if this one is the last to leave.

        It may be interrupted, and repeated. Who joins meanwhile grows the team again.
        """
        self._users.discard(lanes)
        if self._users:
            return
        with self.busy:
            members, self.members = self.members, []
        for wait in [member.end() for member in members]:
            wait()

    def grow(self, count: int) -> None:
        """Add members until there are `count`. Only the holder of `busy` may call this. It may be
        interrupted, and repeated."""
        for number in range(len(self.members), count):
            self.members.append(_Member(f"cpu-lane-{number + 1}"))
        for member in self.members:
            member.start()


_team = _Team()


def _renew() -> None:
    """Forget the team in a forked child: its threads are the parent's."""
    global _team  # noqa: PLW0603 - of the process
    _team = _Team()


forks.call_in_child(_renew)


def run_alone(call: Call, on_progress: Callable[[], None]) -> None:
    """Make the calls of one lane on this thread. `on_progress` is called after each."""
    for each in of_calls(call):
        each()
        on_progress()


class Lanes:
    """Lanes: the first is the caller's thread, and the threads of the others start at the first use.

    Used by one thread. Blocks while a step runs.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.call_with_settings = caller_with_settings()
        """Calls a function on this thread as the calls of steps are made, see `buffering`."""
        self._team: _Team | None = None

    def run(self, step: Step, on_progress: Callable[[], None]) -> None:
        """Make the calls of a step, and wait for all of them. `on_progress` is called after each own one.

        Raises what a call raises, when all have ended.
        """
        if len(step) == 1:
            run_alone(step[0], on_progress)
            return
        team = self._team = self._team or _team
        team.join(self)
        if team.busy.locked():
            for lane in step:
                run_alone(lane, on_progress)
            return
        # Who is late here waits for one step of another service. `acquire(blocking=False)` would not wait,
        # but a handler that raises right behind it would leave the lock taken; `with` has no such place.
        with team.busy:
            self._share(team, step, on_progress)

    def _share(self, team: _Team, step: Step, on_progress: Callable[[], None]) -> None:
        others = [_Work(call) for call in step[1:]]
        failure: BaseException | None = None
        all_given = False
        try:
            team.grow(len(others))
            for member, work in zip(team.members, others, strict=False):
                member.given.put(work)
            all_given = True
            run_alone(step[0], on_progress)
        except BaseException as error:  # noqa: BLE001 - raised below, when the others have ended
            failure = error
        waiting = True
        while waiting:
            try:
                for work in others:
                    if all_given or not work.withdraw():
                        work.wait()
                        failure = failure or work.failure
                waiting = False
            except BaseException as error:  # noqa: BLE001 - a signal handler's; raised when the others have ended
                failure = error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the threads, if no other service uses them. Safe to call twice."""
        if self._team is not None:
            self._team.leave(self)
            self._team = None
