"""What is counted while the harness runs: outcomes, faults, and how soon after a fault the service answers.

All of it happens on the event loop's thread. A fault that takes the worker is over with the first receipt of
a later generation: an answer that was on its way when the fault struck proves nothing. One that a single
request feels is over with the next answer to anybody.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from cudnn_actor.cli.chaos.oracle import Deed, Wrong, describe
from cudnn_actor.cli.chaos.settings import FaultKind
from cudnn_actor.protocol import Receipt

__all__ = ["BIN_S", "LostRequest", "Recovery", "Strike", "Tally", "WrongAnswer"]

BIN_S = 0.05
"""Seconds of one figure of the throughput."""
_MOST_KEPT = 100


class Strike(NamedTuple):
    """A fault; seconds since the load began."""

    kind: FaultKind
    at_s: float


class Recovery(NamedTuple):
    """A fault that is over: when it struck, and how many seconds later the service answered."""

    kind: FaultKind
    at_s: float
    took_s: float


class WrongAnswer(NamedTuple):
    """A wrong answer, and where in which program."""

    task: int
    burst: int
    request: str
    expected: str
    got: str
    story: tuple[str, ...]


class LostRequest(NamedTuple):
    """A request that never ended, where in which program, and when it was sent."""

    task: int
    burst: int
    request: str
    sent_s: float


class _Open(NamedTuple):
    strike: Strike
    generation: int | None


class Tally:
    """The figures of one run.

    Parameters
    ----------
    injected
        The errors that are faults, and of which kind: they strike when their caller sees them.
    """

    def __init__(self, injected: Mapping[type[Exception], FaultKind] | None = None) -> None:
        self._injected = injected or {}
        self._origin = time.perf_counter()
        self.requests = 0
        """Sent."""
        self.finished = 0
        """Answered without an error."""
        self.outcomes: Counter[str] = Counter()
        """Errors, by class."""
        self.torn = 0
        """Buffers that were lost and replaced."""
        self.bins: Counter[int] = Counter()
        """Requests finished, by `BIN_S` since the load began."""
        self.strikes: list[Strike] = []
        self.recoveries: list[Recovery] = []
        self.wrong = 0
        self.wrongs: list[WrongAnswer] = []
        """The first of them."""
        self.events: Counter[str] = Counter()
        self._open: list[_Open] = []
        self._last_outage_s = 0.0
        self._outstanding: dict[asyncio.Future[object], tuple[Deed, int, int, float]] = {}

    @property
    def now_s(self) -> float:
        """Seconds since the load began."""
        return time.perf_counter() - self._origin

    @property
    def answered(self) -> int:
        """Requests that have ended, however."""
        return self.finished + self.outcomes.total()

    def begin(self) -> None:
        """The load begins now: times are counted from here."""
        self._origin = time.perf_counter()

    # Requests.

    def sent(self, request: asyncio.Future[object], deed: Deed, task: int, burst: int) -> None:
        """A request is on its way."""
        self.requests += 1
        self._outstanding[request] = (deed, task, burst, self.now_s)

    def ended(self, request: asyncio.Future[object] | None, outcome: object) -> None:
        """A request has an outcome; one that was refused before it was sent has no future."""
        if request is None:
            self.requests += 1
        else:
            self._outstanding.pop(request, None)
        if isinstance(outcome, BaseException):
            self.outcomes[type(outcome).__name__] += 1
            for error, kind in self._injected.items():
                if isinstance(outcome, error):
                    self.struck(kind)
        else:
            self._finished(outcome.generation if isinstance(outcome, Receipt) else None)

    def judged(self, task: int, burst: int, wrongs: list[Wrong]) -> None:
        """The oracle has found answers wrong."""
        self.wrong += len(wrongs)
        for wrong in wrongs[: _MOST_KEPT - len(self.wrongs)]:
            self.wrongs.append(
                WrongAnswer(task, burst, wrong.request, wrong.expected, wrong.got, wrong.story)
            )

    def lost(self) -> list[LostRequest]:
        """The requests that have not ended."""
        return [
            LostRequest(task, burst, describe(deed), sent_s)
            for request, (deed, task, burst, sent_s) in self._outstanding.items()
            if not request.done()
        ]

    def give_up(self) -> None:
        """Cancel the requests that have not ended: nobody waits for them any more."""
        for request in self._outstanding:
            request.cancel()

    def overdue(self, after_s: float) -> int:
        """How many requests have been on their way for longer than that: they look lost."""
        since = self.now_s - after_s
        return sum(sent_s < since for _, _, _, sent_s in self._outstanding.values())

    def _finished(self, generation: int | None) -> None:
        self.finished += 1
        now = self.now_s
        self.bins[int(now / BIN_S)] += 1
        if self._open:
            self._close(now, generation)

    # Faults.

    def struck(self, kind: FaultKind, generation: int | None = None) -> None:
        """A fault strikes now.

        Parameters
        ----------
        kind
            Which.
        generation
            Which incarnation it takes; None where it takes none.
        """
        strike = Strike(kind, self.now_s)
        self.strikes.append(strike)
        if generation is not None:
            self._last_outage_s = strike.at_s
        self._open.append(_Open(strike, generation))

    @property
    def last_outage_s(self) -> float:
        """When a fault that takes the worker struck last; 0 where none has."""
        return self._last_outage_s

    @property
    def unrecovered(self) -> int:
        """Faults after which nothing has finished yet."""
        return len(self._open)

    def _close(self, now: float, generation: int | None) -> None:
        still = []
        for each in self._open:
            if each.generation is None or (generation is not None and generation > each.generation):
                self.recoveries.append(Recovery(*each.strike, now - each.strike.at_s))
            else:
                still.append(each)
        self._open = still
