"""Threads that run the calls of a step side by side: one team for all services of a process.

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
if the question is repeated.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cudnn_actor.actors import forks
from cudnn_actor.engines.cpu.fast.kernels import Call, Step, of_calls

__all__ = ["Lanes"]


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
        """Have no member make the call. Returns whether none does, or has. Only the holder."""
        return self._owner.setdefault("is", "holder") == "holder"

    def wait(self) -> None:
        """Wait until a member has made the call. It may be interrupted, and repeated."""
        while not self.finished:
            self._done.acquire()


class _Member(NamedTuple):
    thread: threading.Thread
    given: queue.SimpleQueue[_Work | None]


class _Team:
    """The threads. They end with the last `Lanes` that is open."""

    def __init__(self) -> None:
        self.busy = threading.Lock()
        self.members: list[_Member] = []
        """Written by the holder of `busy`."""
        self._users = 0
        self._counting = threading.Lock()

    def join(self) -> None:
        with self._counting:
            self._users += 1

    def leave(self) -> None:
        """Blocks while another service computes a step, if this one is the last to leave."""
        with self._counting:
            self._users -= 1
            if self._users:
                return
            with self.busy:
                members, self.members = self.members, []
        for member in members:
            member.given.put(None)
        for member in members:
            member.thread.join()

    def grow(self, count: int) -> None:
        """Have at least so many members. Only the holder of `busy`. It may be interrupted, and repeated."""
        for number in range(len(self.members), count):
            given: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
            thread = threading.Thread(target=_work, args=(given,), name=f"cpu-lane-{number + 1}", daemon=True)
            self.members.append(_Member(thread, given))
        for member in self.members:
            if member.thread.ident is None:
                member.thread.start()


_team = _Team()


def _renew() -> None:
    """In a forked child: the threads are the parent's."""
    global _team  # noqa: PLW0603 - of the process
    _team = _Team()


forks.call_in_child(_renew)


class Lanes:
    """So many lanes, the first of which is the caller's thread. The others' threads start at the first use.

    Used by one thread. Blocks while a step runs.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._team: _Team | None = None

    def run(self, step: Step, on_progress: Callable[[], None]) -> None:
        """Make the calls of a step, and wait for all of them. `on_progress` is called after each own one.

        Raises what a call raises, when all have ended.
        """
        if len(step) == 1:
            for call in of_calls(step[0]):
                call()
                on_progress()
            return
        if self._team is None:
            self._team = _team
            self._team.join()
        team = self._team
        if not team.busy.acquire(blocking=False):
            for lane in step:
                self.run((lane,), on_progress)
            return
        try:
            self._share(team, step, on_progress)
        finally:
            team.busy.release()

    def _share(self, team: _Team, step: Step, on_progress: Callable[[], None]) -> None:
        others = [_Work(call) for call in step[1:]]
        failure: BaseException | None = None
        all_given = False
        try:
            team.grow(len(others))
            for member, work in zip(team.members, others, strict=False):
                member.given.put(work)
            all_given = True
            self.run(step[:1], on_progress)
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
        """Let the threads end, if no other service uses them. Safe to call twice."""
        team, self._team = self._team, None
        if team is not None:
            team.leave()


def _work(given: queue.SimpleQueue[_Work | None]) -> None:
    with np.errstate(all="ignore"):  # of this thread alone; the engine's thread has its own
        while (work := given.get()) is not None:
            work.make()
            del work  # what its call refers to is not kept until the next one
