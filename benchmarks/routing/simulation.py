"""A pool as a discrete-event simulation: a function of its arguments, without a clock, threads or I/O.

Requests arrive at random (a Poisson process) and are given to members by `cudnn_actor.pool`'s own routing.
A member runs one request after the other, in the order in which it was given them. It fails at random, and
what it was running is thrown away. The pool goes on giving it requests until the failure is noticed. Then all
that it has is given to others, and it restarts. All times are microseconds of the simulation.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from cudnn_actor.pool.choosing import Choose
from cudnn_actor.pool.routing import Ended, Given, Routing

from .service_times import Mix

__all__ = ["Failures", "Found", "Setting", "simulate"]


@dataclass(frozen=True, kw_only=True)
class Failures:
    """The failures of members.

    Parameters
    ----------
    mtbf_us
        The mean time from a restart to the next failure; it is exponentially distributed.
    noticed_us
        From a failure until it is noticed: a process on a GPU takes that long to end.
    restart_us
        From then until the member runs requests again.
    elsewhere
        Whether what a member had runs elsewhere; else it waits for the member.
    """

    mtbf_us: float
    noticed_us: float
    restart_us: float
    elsewhere: bool = True


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The setting that is simulated.

    Parameters
    ----------
    members
        How many there are.
    mix
        What the requests are.
    load
        Their device time in a second, over that of all members that are up at their own speeds.
    requests
        How many arrive.
    failures
        How members fail; None for never.
    slow, slowness
        The first `slow` members take `slowness` times as long as was estimated.
    """

    members: int
    mix: Mix
    load: float
    requests: int
    failures: Failures | None = None
    slow: int = 0
    slowness: float = 2.0


@dataclass(kw_only=True)
class Found:
    """The result of a simulation.

    Parameters
    ----------
    waits_us
        Of each request that was answered, in the order of the answers: from its arrival to its answer.
    runs
        By request: how many runs of it were finished.
    unanswered
        Requests that ended without an answer: they were lost with too many members.
    span_us
        From the first arrival to the last answer.
    useful_us
        Time in which members ran what was answered, in sum.
    thrown_away_us
        Time in which they ran what a failure has ended.
    down_us
        Time in which they were down.
    failures
        How often they failed.
    given_while_down
        Requests that were given to a member whose failure had been noticed and that was not back: there is
        a fault in the routing unless there are none.
    """

    waits_us: list[float] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    unanswered: list[int] = field(default_factory=list)
    span_us: float = 0.0
    useful_us: float = 0.0
    thrown_away_us: float = 0.0
    down_us: float = 0.0
    failures: int = 0
    given_while_down: int = 0

    def percentile_us(self, percent: float, *, skip: float = 0.1) -> float:
        """A percentile of the waits, in microseconds, without the first part, in which queues fill."""
        waits = sorted(self.waits_us[int(len(self.waits_us) * skip) :])
        return waits[min(len(waits) - 1, math.ceil(len(waits) * percent / 100) - 1)]


class _Kind(enum.Enum):
    FINISHED = enum.auto()
    FAILED = enum.auto()
    NOTICED = enum.auto()
    BACK = enum.auto()


@dataclass(slots=True)
class _Member:
    speed: float  # times the estimate
    queue: deque[int] = field(default_factory=deque)
    running: int | None = None
    since_us: float = 0.0
    life: int = 0  # ends of runs that a failure has ended name an older one
    works: bool = True
    down_since_us: float = 0.0


class _Pool:
    """The state of a simulation."""

    def __init__(self, setting: Setting, choose: Choose, seed: int) -> None:
        self._setting, self._random = setting, Random(seed)
        self._routing = Routing[int](setting.members, choose=choose, seed=seed + 1, max_losses=1000)
        slow = [setting.slowness if each < setting.slow else 1.0 for each in range(setting.members)]
        self._members = [_Member(speed) for speed in slow]
        self._events: list[tuple[float, int, _Kind, int, int]] = []
        self._order = 0
        self._arrived_us: list[float] = []
        self._takes_us: list[float] = []
        self._now = 0.0
        self.found = Found(runs=[0] * setting.requests)
        if setting.failures is not None:
            self._begin_amid_failures(setting.failures)

    def run(self) -> Found:
        setting, random = self._setting, self._random
        capacity = sum(1.0 / member.speed for member in self._members) * self._up_share()
        apart_us = setting.mix.mean_us / (setting.load * capacity)
        arrival, number = random.expovariate(1.0) * apart_us, 0
        left = setting.requests
        steps: dict[_Kind, Callable[[int, int], int]] = {
            _Kind.FINISHED: self._finished,
            _Kind.FAILED: self._failed,
            _Kind.NOTICED: self._noticed,
            _Kind.BACK: self._back,
        }
        while left:
            if number < setting.requests and (not self._events or arrival <= self._events[0][0]):
                self._now = arrival
                self._arrive(number)
                number += 1
                arrival += random.expovariate(1.0) * apart_us
                continue
            self._now, _, kind, member, life = heapq.heappop(self._events)
            left -= steps[kind](member, life)
        self.found.span_us = self._now
        self.found.down_us += sum(self._now - m.down_since_us for m in self._members if not m.works)
        return self.found

    def _begin_amid_failures(self, failures: Failures) -> None:
        """Begin with as many members down as there are on average."""
        down_us, share = failures.noticed_us + failures.restart_us, 1.0 - self._up_share()
        for number, member in enumerate(self._members):
            if self._random.random() < share:
                member.works = False
                self._routing.note_loss(number)
                self._later(self._random.random() * down_us, _Kind.BACK, number, 0)
            else:
                self._fail_later(number, failures)

    def _up_share(self) -> float:
        failures = self._setting.failures
        if failures is None:
            return 1.0
        down = failures.noticed_us + failures.restart_us
        return failures.mtbf_us / (failures.mtbf_us + down)

    def _arrive(self, request: int) -> None:
        times = self._setting.mix.times_us
        estimate = times[int(self._random.random() * len(times))]
        self._takes_us.append(estimate * math.exp(self._random.gauss(0.0, self._setting.mix.sigma)))
        self._arrived_us.append(self._now)
        member = self._routing.submit(request, round(estimate))
        if member is not None:
            self._give(member, request)

    def _give(self, number: int, request: int) -> None:
        member = self._members[number]
        self.found.given_while_down += not self._routing.is_up(number)
        member.queue.append(request)
        if member.works and member.running is None:
            self._start(number, member)

    def _start(self, number: int, member: _Member) -> None:
        if not member.queue:
            member.running = None
            return
        member.running = member.queue.popleft()
        member.since_us = self._now
        self._later(self._takes_us[member.running] * member.speed, _Kind.FINISHED, number, member.life)

    def _finished(self, number: int, life: int) -> int:
        """End a run. Returns how many requests have ended."""
        member = self._members[number]
        if life != member.life:
            return 0  # a failure has ended it
        request = member.running
        assert request is not None, "this life's run has not ended before"
        ended = self._routing.end_answered(request, number)
        self.found.runs[request] += 1
        self.found.waits_us.append(self._now - self._arrived_us[request])
        self.found.useful_us += self._now - member.since_us
        self._start(number, member)
        return ended

    def _failed(self, number: int, _life: int) -> int:
        failures, member = self._setting.failures, self._members[number]
        assert failures is not None
        if member.running is not None:
            self.found.thrown_away_us += self._now - member.since_us
            member.queue.appendleft(member.running)
            member.running = None
        member.life += 1
        member.works = False
        member.down_since_us = self._now
        self.found.failures += 1
        self._later(failures.noticed_us, _Kind.NOTICED, number, 0)
        return 0

    def _noticed(self, number: int, _life: int) -> int:
        failures, member = self._setting.failures, self._members[number]
        assert failures is not None
        self._later(failures.restart_us, _Kind.BACK, number, 0)
        if not failures.elsewhere:
            self._routing.pause(number)
            return 0
        member.queue.clear()
        return self._do(self._routing.note_loss(number))

    def _back(self, number: int, _life: int) -> int:
        failures, member = self._setting.failures, self._members[number]
        assert failures is not None
        member.works = True
        self.found.down_us += self._now - member.down_since_us
        self._fail_later(number, failures)
        moved = self._do(list(self._routing.back(number)))
        if member.running is None:
            self._start(number, member)
        return moved

    def _do(self, moved: list[Given[int] | Ended[int]] | list[Given[int]]) -> int:
        ended = 0
        for each in moved:
            if isinstance(each, Given):
                self._give(each.member, each.request)
            else:
                self.found.unanswered.append(each.request)
                ended += 1
        return ended

    def _fail_later(self, member: int, failures: Failures) -> None:
        self._later(self._random.expovariate(1.0) * failures.mtbf_us, _Kind.FAILED, member, 0)

    def _later(self, after_us: float, kind: _Kind, member: int, life: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (self._now + after_us, self._order, kind, member, life))


def simulate(setting: Setting, choose: Choose, seed: int) -> Found:
    """The result for a setting's requests. The same arguments give the same result."""
    return _Pool(setting, choose, seed).run()
