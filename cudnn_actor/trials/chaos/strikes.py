"""When which fault is injected.

Signals come from outside, after random pauses. Before a signal to the serving worker, the pause begins when
that worker is ready: else, where a start takes longer than a pause, each worker would be killed as soon as it
is ready. Other faults are injected inside the service by a fault plan, with a probability per message: so
they hit the service in the middle of requests, also of those that accumulate. Everything is drawn from the
seed; which request a signal hits depends on timing.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Mapping

from cudnn_actor.service.client import CudnnRef
from cudnn_actor.supervision import Fault, FaultPlan, FaultRule, Restarted, Restarting
from cudnn_actor.trials.chaos import processes
from cudnn_actor.trials.chaos.faults import (
    CAUSES,
    ERRORS,
    HANGS,
    KILLS,
    NEEDED_LOAD,
    OF_A_WRITE,
    RULES,
    TARGETS,
    FaultKind,
)
from cudnn_actor.trials.chaos.load_kinds import LoadKind
from cudnn_actor.trials.chaos.processes import Found, Role
from cudnn_actor.trials.chaos.settings import Settings
from cudnn_actor.trials.chaos.tally import Tally

__all__ = ["Striker", "fault_plan", "injected_errors", "watch"]

_OF_THE_SERVING = (FaultKind.KILL, FaultKind.HANG)
_WEIGHTS = dict.fromkeys(HANGS, 1) | dict.fromkeys(KILLS, 2) | {FaultKind.KILL: 5}
_OUTLASTED = 0.75
"""The fraction of stopped serving workers that are left to the watchdog; the others are killed, or continued,
before. Of the other stopped processes, the same fraction stays stopped until something ends them."""
_CONTINUED_WITHIN_S = 2.0
_AT_ONCE = 0.1
"""The fraction of signals to a serving worker that do not wait until it has served for a while."""
_LOOK_S, _SEARCH_S = 0.002, 0.05
"""Seconds between two checks of the serving worker, and between two of all processes."""
_PATIENCE_S = 1.0
"""How long to look for a process of a kind before another kind of fault is chosen."""
_IDLE_S = 0.25
"""A forkserver that has been idle this long has imported its modules. Before that it gets no signal: if it
were hit again and again during its start, nothing could start all that time."""
_FAILING_STARTS = 0.2
_MOST_STARTS = 5000
_MESSAGES_PER_S = {"cpu": 3000, "cuda": 15000}
"""Rough rate of a service under faults: only this is known of the rates beforehand."""


def fault_plan(settings: Settings) -> FaultPlan:
    """The faults that are injected inside the service."""
    per_message = 1 / (_MESSAGES_PER_S[settings.engine] * settings.kill_every)
    injected = [RULES[kind] for kind in settings.faults if kind in RULES]
    rules = [
        FaultRule(fault=fault, probability=min(1.0, per_strike * per_message), of=name)
        for fault, per_strike, names in injected
        for name in names
    ]
    if LoadKind.SWAPS in settings.load:
        rules += [
            FaultRule(fault=fault, probability=chance, of="WriteWeights")
            for kind, (fault, chance) in OF_A_WRITE.items()
            if kind in settings.faults
        ]
    if FaultKind.START in settings.faults:
        chance = random.Random(f"{settings.seed} starts")
        starts = min(_MOST_STARTS, 50 + int(8 * settings.seconds / settings.kill_every))
        rules += [
            FaultRule(fault=Fault.CRASH_IN_START, at=number, times=1)
            for number in range(2, starts)
            if chance.random() < _FAILING_STARTS
        ]
    return FaultPlan(seed=settings.seed, rules=tuple(rules))


def injected_errors(settings: Settings) -> dict[type[Exception], FaultKind]:
    """The errors that callers get from injected faults, and the kind of each."""
    return {error: kind for error, kind in ERRORS if kind in settings.faults}


async def watch(gpu: CudnnRef, tally: Tally, *, pauses: bool) -> None:
    """Count a service's events, and the faults that only events reveal.

    `pauses`: the service waits before its restarts, as it does on a thread: up to 5 s, which do not count as
    a stall.
    """
    async for event in gpu.events():
        tally.events[type(event).__name__] += 1
        if isinstance(event, Restarted):
            tally.serves(event.generation)
        if isinstance(event, Restarting):
            tally.ends(event.generation)
            if pauses:
                tally.excuse(event.delay_s)
            for exit, words, kind in CAUSES:
                if event.cause.kind is exit and words in event.cause.cause:
                    tally.note_fault(kind, event.generation)


class Striker:
    """Sends signals to the processes of a service.

    Parameters
    ----------
    gpu, tally
        The service, and the counters.
    settings
        Which signals, and how often.
    victims
        The process ids that other faults than those of the service's processes may hit now.
    """

    def __init__(
        self, gpu: CudnnRef, tally: Tally, settings: Settings, victims: Mapping[FaultKind, int]
    ) -> None:
        self._victims = victims
        self._gpu = gpu
        self._tally = tally
        self._every = settings.kill_every
        self._kinds = [kind for kind in settings.faults if kind in TARGETS]
        self.chance = random.Random(f"{settings.seed} strikes")
        self._continuing: set[asyncio.Task[None]] = set()
        self._idle: dict[tuple[int, int], float] = {}
        """When a process was first seen with a given amount of CPU time used; by its id and that amount."""

    async def run(self) -> None:
        """Inject until cancelled: each kind once, then at random.

        A client or a server that has not started when its turn comes is struck as soon as there is one.
        """
        late: set[FaultKind] = set()
        first = self.chance.sample(self._kinds, len(self._kinds))
        try:
            while self._kinds:
                pause_s = self._every * self.chance.uniform(0.5, 1.5)
                await asyncio.sleep(pause_s)
                (kind,) = self.chance.choices(self._kinds, [_WEIGHTS[kind] for kind in self._kinds])
                kind = first.pop() if first else next((each for each in late if each in self._victims), kind)
                outlasted = self.chance.random() < _OUTLASTED
                at_once = self.chance.random() < _AT_ONCE
                struck = await self._strike(kind, 0.0 if at_once else pause_s)
                if struck is None:
                    late.update({kind}.intersection(NEEDED_LOAD))
                    continue
                late.discard(kind)
                if kind is FaultKind.HANG and outlasted:
                    await self._until_replaced(struck.pid)
                elif kind in HANGS and not outlasted:
                    self._continue_later(struck)
        finally:
            for task in self._continuing:
                task.cancel()

    async def _strike(self, kind: FaultKind, served_s: float) -> Found | None:
        """Send one signal to a process of this kind; None if none was found for a while.

        A worker that serves is struck after it has served for `served_s`.
        """
        patience_s = self._tally.now_s + _PATIENCE_S
        number = signal.SIGSTOP if kind in HANGS else signal.SIGKILL
        while True:
            generation = self._gpu.generation
            target = self._target(kind, served_s)
            if target is not None and processes.send_signal(target, number):
                self._tally.note_fault(kind, generation if kind in _OF_THE_SERVING else None, signal=True)
                if kind is FaultKind.KILL:
                    self._tally.ends(generation)
                return target
            if kind not in _OF_THE_SERVING and self._tally.now_s > patience_s:
                return None
            await asyncio.sleep(_LOOK_S if kind in _OF_THE_SERVING else _SEARCH_S)

    def _target(self, kind: FaultKind, served_s: float) -> Found | None:
        serving = self._gpu.worker_pid
        if kind in _OF_THE_SERVING:
            if serving is None or (self._tally.served_s or 0.0) < served_s:
                return None
            return Found(serving, Role.WORKER)
        if kind in NEEDED_LOAD:
            pid = self._victims.get(kind)
            return None if pid is None else Found(pid, TARGETS[kind])
        running = [each for each in processes.find() if each.role is TARGETS[kind] and each.pid != serving]
        if TARGETS[kind] is Role.FORKSERVER:
            running = [each for each in running if self._is_idle(each)]
        return self.chance.choice(running) if running else None

    def _is_idle(self, found: Found) -> bool:
        now_s = self._tally.now_s
        return now_s - self._idle.setdefault((found.pid, found.ticks), now_s) > _IDLE_S

    async def _until_replaced(self, worker: int) -> None:
        while True:  # polls, since no event reports it at once: a standby takes over without one
            if self._gpu.worker_pid != worker:
                return
            await asyncio.sleep(_LOOK_S)

    def _continue_later(self, stopped: Found) -> None:
        async def go_on() -> None:
            await asyncio.sleep(self.chance.uniform(0.0, _CONTINUED_WITHIN_S))
            processes.send_signal(stopped, signal.SIGCONT)

        task = asyncio.create_task(go_on())
        self._continuing.add(task)
        task.add_done_callback(self._continuing.discard)
