"""The counters of a run: outcomes, faults, and how soon after a fault the service answers.

Any thread may call it, under one lock, since several send requests. A fault that takes the worker is over
with the first receipt of a later generation: an answer that was already on its way when the fault came proves
nothing. A fault that affects a single request, or another process, is over with the next answer to any
caller.

A life is the time in which one incarnation serves. Faults say little about how soon the service answers if
its lives are short: so each life is noted, with its first answer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cudnn_actor.protocol import Receipt
from cudnn_actor.trials.chaos.faults import FaultKind
from cudnn_actor.trials.chaos.load_kinds import LoadKind
from cudnn_actor.trials.chaos.oracle import Deed, ModelRun, Wrong, describe
from cudnn_actor.trials.chaos.settings import STALL_S

__all__ = [
    "BIN_S",
    "InjectedFault",
    "Life",
    "LostRequest",
    "Recovery",
    "Stall",
    "Tally",
    "Waiting",
    "WrongAnswer",
]

BIN_S = 0.05
"""Seconds per bin of the throughput."""
_MOST_KEPT = 100


class InjectedFault(NamedTuple):
    """A fault; seconds since the load began."""

    kind: FaultKind
    at_s: float


class Recovery(NamedTuple):
    """A fault that is over: when it came, and how many seconds later the service answered."""

    kind: FaultKind
    at_s: float
    took_s: float


class Life(NamedTuple):
    """The time in which one incarnation serves."""

    at_s: float
    """When it began."""
    lasted_s: float
    """Seconds until a fault ended it, or its end was reported."""
    finished: int
    """Requests that were answered until the next life."""
    first_s: float | None
    """How long after its beginning the first of them was answered; None if none was."""


class WrongAnswer(NamedTuple):
    """A wrong answer, and its place in the program."""

    task: int
    burst: int
    request: str
    expected: str
    got: str
    story: tuple[str, ...]


class LostRequest(NamedTuple):
    """A request that never ended: its sender, its place in the program, and when it was sent."""

    sender: LoadKind
    task: int
    burst: int
    request: str
    sent_s: float


class Stall(NamedTuple):
    """A request that took longer than `STALL_S`, or has not ended."""

    sender: LoadKind
    task: int
    burst: int
    request: str
    sent_s: float
    took_s: float


Waiting = asyncio.Future[Any] | concurrent.futures.Future[None]
"""A request in flight: of a caller with an event loop, or of one without, which completes it itself."""


class _Sent(NamedTuple):
    sender: LoadKind
    deed: Deed | ModelRun
    task: int
    burst: int
    at_s: float
    excused_s: float


class _Open(NamedTuple):
    fault: InjectedFault
    generation: int | None


class _Living:
    """A life that has begun."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s
        self.until_s: float | None = None
        self.finished = 0
        self.first_s: float | None = None

    def life(self, now_s: float) -> Life:
        until_s = now_s if self.until_s is None else self.until_s
        return Life(self.at_s, until_s - self.at_s, self.finished, self.first_s)


class Tally:
    """The figures of one run.

    Parameters
    ----------
    injected
        The errors that are injected faults, with their kinds. Such a fault counts from when its caller sees
        it.
    clock
        Seconds.
    """

    def __init__(
        self,
        injected: Mapping[type[Exception], FaultKind] | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._injected = injected or {}
        self._clock = clock
        self._lock = threading.RLock()
        self._origin = self._clock()
        self._excused_s = 0.0
        self.requests = 0
        """How many requests were sent."""
        self.senders: Counter[LoadKind] = Counter()
        """How many requests were sent, by kind of sender."""
        self.messages: Counter[str] = Counter()
        """How many requests were sent, by class of message."""
        self.stalls: list[Stall] = []
        self.longest_s = 0.0
        """The longest time that a request has taken."""
        self.finished = 0
        """How many requests were answered without an error."""
        self.elsewhere = 0
        """How many requests were answered without an error by the server that is killed."""
        self.outcomes: Counter[str] = Counter()
        """Errors, by class."""
        self.impure: Counter[str] = Counter()
        """Outcomes of requests that read what they write: "applied", or errors, by class."""
        self.torn = 0
        """Buffers that were lost and replaced."""
        self.bins: Counter[int] = Counter()
        """Requests finished in each interval of `BIN_S` since the load began."""
        self.faults: list[InjectedFault] = []
        self.recoveries: list[Recovery] = []
        self.wrong = 0
        self.wrongs: list[WrongAnswer] = []
        """The first of them."""
        self.events: Counter[str] = Counter()
        self._open: list[_Open] = []
        self._lives = [_Living(0.0)]
        self._ended_life = 0
        """The last incarnation whose end is known."""
        self.last_outage_s = 0.0
        """When the last fault that ends or stops a process came; 0 before the first."""
        self.last_ended_s = 0.0
        """When a request last ended; 0 before the first."""
        self._outstanding: dict[Waiting, _Sent] = {}

    @property
    def now_s(self) -> float:
        """Seconds since the load began."""
        return self._clock() - self._origin

    @property
    def ended_requests(self) -> int:
        """Requests that have ended in any way."""
        return self.finished + self.elsewhere + self.outcomes.total()

    def begin(self) -> None:
        """Note that the load begins: times are counted from here."""
        self._origin = self._clock()
        self._lives = [_Living(0.0)]

    # Requests.

    def note_sent(
        self, request: Waiting, deed: Deed | ModelRun, sender: LoadKind, task: int, burst: int
    ) -> None:
        """Note that a request was sent."""
        with self._lock:
            self.requests += 1
            self.senders[sender] += 1
            self.messages[type(deed.message).__name__] += 1
            self._outstanding[request] = _Sent(sender, deed, task, burst, self.now_s, self._excused_s)

    def note_outcome(self, request: Waiting | None, outcome: object, generation: int | None = None) -> None:
        """Note a request's outcome.

        Parameters
        ----------
        request
            None if it was refused before it was sent.
        outcome
            The answer or the error. A receipt says which incarnation has answered.
        generation
            For other answers: the incarnation that served when the request was sent, if that is known.
        """
        with self._lock:
            sent = None if request is None else self._outstanding.pop(request, None)
            self.last_ended_s = self.now_s
            if sent is None:
                self.requests += 1
            else:
                self._note_duration(sent)
                failed = isinstance(outcome, BaseException)
                self.impure[type(outcome).__name__ if failed else "applied"] += sent.deed.accumulates
            if isinstance(outcome, BaseException):
                self.outcomes[type(outcome).__name__] += 1
                for error, kind in self._injected.items():
                    if isinstance(outcome, error):
                        self.note_fault(kind)
            elif sent is not None and sent.sender is LoadKind.DOOMED:
                self.elsewhere += 1  # it says nothing of the service
            else:
                self._note_finished(outcome.generation if isinstance(outcome, Receipt) else generation)

    def _note_duration(self, sent: _Sent) -> None:
        took_s = self._waited_s(sent)
        self.longest_s = max(self.longest_s, took_s)
        if took_s > STALL_S:
            self.stalls.append(self._stall(sent))

    def _waited_s(self, sent: _Sent) -> float:
        """Seconds since it was sent, without the excused time."""
        return self.now_s - sent.at_s - (self._excused_s - sent.excused_s)

    def _stall(self, sent: _Sent) -> Stall:
        request = describe(sent.deed)
        return Stall(sent.sender, sent.task, sent.burst, request, sent.at_s, self._waited_s(sent))

    def excuse(self, seconds: float) -> None:
        """Excuse this many seconds for all requests: nothing ran, or the service waited on purpose."""
        with self._lock:
            self._excused_s += seconds

    def note_wrongs(self, task: int, burst: int, wrongs: list[Wrong]) -> None:
        """Note answers that the oracle found wrong."""
        with self._lock:
            self.wrong += len(wrongs)
            for wrong in wrongs[: _MOST_KEPT - len(self.wrongs)]:
                self.wrongs.append(WrongAnswer(task, burst, *wrong))

    def lost_requests(self) -> list[LostRequest]:
        """The requests that have not ended."""
        with self._lock:
            return [
                LostRequest(sent.sender, sent.task, sent.burst, describe(sent.deed), sent.at_s)
                for request, sent in self._outstanding.items()
                if not request.done()
            ]

    def stalled_requests(self) -> list[Stall]:
        """The requests that have taken too long: those that have ended, then those that have not.

        It includes requests that were given up, since they were not answered.
        """
        with self._lock:
            waiting = self._outstanding.values()
            still = [self._stall(sent) for sent in waiting if self._waited_s(sent) > STALL_S]
            return [*self.stalls, *still]

    def give_up(self, *senders: LoadKind) -> None:
        """Cancel the unfinished requests of some senders. On the thread that sent them."""
        with self._lock:
            waiting = [each for each, sent in self._outstanding.items() if sent.sender in senders]
        for request in waiting:
            request.cancel()

    def overdue(self, after_s: float) -> int:
        """How many requests have been in flight for longer than `after_s`: they are probably lost."""
        with self._lock:
            return sum(self._waited_s(sent) > after_s for sent in self._outstanding.values())

    def unmoved_s(self, since_s: float) -> float:
        """For how long no request has ended, and no fault has ended or stopped a process; from `since_s` on,
        in seconds since the load began.

        A request that was sent a moment ago is not lost, however long the run has gone on: on a slow machine,
        reading all buffers back takes long.
        """
        return self.now_s - max(since_s, self.last_outage_s, self.last_ended_s)

    def _note_finished(self, generation: int | None) -> None:
        self.finished += 1
        now = self.now_s
        self.bins[int(now / BIN_S)] += 1
        life = self._lives[-1]
        life.finished += 1
        if life.first_s is None:
            life.first_s = now - life.at_s
        if self._open:
            self._close(now, generation)

    # Lives.

    def serves(self, generation: int) -> None:
        """Note that an incarnation begins to serve. Its end may have been noted before."""
        with self._lock:
            life = _Living(self.now_s)
            if generation <= self._ended_life:
                life.until_s = life.at_s
            self._lives.append(life)

    def ends(self, generation: int) -> None:
        """Note that an incarnation serves no longer. For each, the first call counts."""
        with self._lock:
            self._ended_life = max(self._ended_life, generation)
            life = self._lives[-1]
            if life.until_s is None:
                life.until_s = self.now_s

    @property
    def served_s(self) -> float | None:
        """For how long the present incarnation has served; None if none serves."""
        life = self._lives[-1]
        return None if life.until_s is not None else self.now_s - life.at_s

    def lives(self) -> list[Life]:
        """All lives since the load began, also the one that goes on."""
        with self._lock:
            return [each.life(self.now_s) for each in self._lives]

    # Faults.

    def note_fault(self, kind: FaultKind, generation: int | None = None, *, signal: bool = False) -> None:
        """Note that a fault comes now.

        Parameters
        ----------
        kind
            Which.
        generation
            The incarnation that it ends; None if it ends none.
        signal
            Whether it is sent to a process.
        """
        with self._lock:
            fault = InjectedFault(kind, self.now_s)
            self.faults.append(fault)
            if signal or generation is not None:
                self.last_outage_s = fault.at_s
            self._open.append(_Open(fault, generation))

    @property
    def unrecovered_faults(self) -> int:
        """Faults after which no request has finished yet."""
        return len(self._open)

    def _close(self, now: float, generation: int | None) -> None:
        still = []
        for each in self._open:
            if each.generation is None or (generation is not None and generation > each.generation):
                self.recoveries.append(Recovery(*each.fault, now - each.fault.at_s))
            else:
                still.append(each)
        self._open = still
