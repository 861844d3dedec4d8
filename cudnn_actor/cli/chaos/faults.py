"""Who strikes when.

Signals come from outside, after random pauses. What is injected strikes inside the service, by a fault plan:
its chances are per message, so it finds the service in the middle of a request, of those that accumulate too.
All of it is drawn from the seed; when a signal meets which request is up to the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal

from cudnn_actor.cli.chaos.settings import FaultKind, Settings
from cudnn_actor.cli.chaos.tally import Tally
from cudnn_actor.client import CudnnRef
from cudnn_actor.protocol import ExecutionFailed, OutOfMemory
from cudnn_actor.supervision import ExitKind, Fault, FaultPlan, FaultRule, Restarting

__all__ = ["Striker", "fault_plan", "injected_errors", "watch"]

_SIGNALS = {FaultKind.KILL: signal.SIGKILL, FaultKind.HANG: signal.SIGSTOP}
_WEIGHTS = {FaultKind.KILL: 5, FaultKind.HANG: 1}
_OUTLASTED = 0.75
"""Of the workers that were stopped, how many are left to the watchdog; the others are killed meanwhile."""
_LOOK_S = 0.002
_FAILING_STARTS = 0.2
_MOST_STARTS = 5000
_MESSAGES_PER_S = {"cpu": 3000, "cuda": 15000}
"""What a service does about, with faults: only this much of the rates is known beforehand."""
_PER_STRIKE = {FaultKind.POISON: 0.5, FaultKind.FAIL: 4.0, FaultKind.MEMORY: 4.0}
"""Injected faults for each signal, about."""
_INJECTED = {
    FaultKind.POISON: Fault.STICKY,
    FaultKind.FAIL: Fault.FAIL_EXECUTION,
    FaultKind.MEMORY: Fault.OUT_OF_MEMORY,
}
_FALLIBLE = ("ConvFwd", "ConvBwdData", "ConvBwdFilter", "Allocate", "Upload", "Download", "Copy", "Fill")
_STRUCK: dict[FaultKind, tuple[str | None, ...]] = {
    FaultKind.POISON: (None,),
    FaultKind.FAIL: _FALLIBLE,
    FaultKind.MEMORY: _FALLIBLE,
}
"""Which messages; None: all. No `Free` is made to fail: nobody repeats that of a buffer nobody received."""
_FELT = ((ExecutionFailed, FaultKind.FAIL), (OutOfMemory, FaultKind.MEMORY))
"""The errors by which callers learn of the kinds that one request feels."""
_CAUSES = (
    (ExitKind.CRASH, "INJECTED_STICKY_ERROR", FaultKind.POISON),
    (ExitKind.START_FAILED, "injected crash in start", FaultKind.START),
)
"""What a restart's cause says where it was injected."""


def fault_plan(settings: Settings) -> FaultPlan:
    """What strikes inside the service."""
    per_message = 1 / (_MESSAGES_PER_S[settings.engine] * settings.kill_every)
    rules = [
        FaultRule(fault=_INJECTED[kind], probability=min(1.0, _PER_STRIKE[kind] * per_message), of=name)
        for kind in settings.faults
        for name in _STRUCK.get(kind, ())
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
    """The errors that callers are to see of it, and what each stands for."""
    return {error: kind for error, kind in _FELT if kind in settings.faults}


async def watch(gpu: CudnnRef, tally: Tally) -> None:
    """Count the events of a service, and the faults that only they tell of."""
    async for event in gpu.events():
        tally.events[type(event).__name__] += 1
        if isinstance(event, Restarting):
            for exit, words, kind in _CAUSES:
                if event.cause.kind is exit and words in event.cause.cause:
                    tally.struck(kind, event.generation)


class Striker:
    """Sends signals to the worker of a service.

    Parameters
    ----------
    gpu, tally
        Whom, and where it is counted.
    settings
        How often, and which.
    """

    def __init__(self, gpu: CudnnRef, tally: Tally, settings: Settings) -> None:
        self._gpu = gpu
        self._tally = tally
        self._every = settings.kill_every
        self._kinds = [kind for kind in settings.faults if kind in _SIGNALS]
        self._chance = random.Random(f"{settings.seed} strikes")

    async def run(self) -> None:
        """Strike until cancelled: each kind once, then as chance has it."""
        first = self._chance.sample(self._kinds, len(self._kinds))
        while self._kinds:
            await asyncio.sleep(self._every * self._chance.uniform(0.5, 1.5))
            (kind,) = self._chance.choices(self._kinds, [_WEIGHTS[kind] for kind in self._kinds])
            kind = first.pop() if first else kind
            outlasted = self._chance.random() < _OUTLASTED
            worker = await self._strike(kind)
            if kind is FaultKind.HANG and outlasted:
                await self._until_replaced(worker)

    async def _strike(self, kind: FaultKind) -> int:
        """Send one signal, to whichever worker there is next; returns its process id."""
        while True:
            worker = self._gpu.worker_pid
            if worker is not None and self._signalled(worker, kind):
                return worker
            await asyncio.sleep(_LOOK_S)

    async def _until_replaced(self, worker: int) -> None:
        while True:  # no event tells of it at once: a standby takes over without one
            if self._gpu.worker_pid != worker:
                return
            await asyncio.sleep(_LOOK_S)

    def _signalled(self, worker: int, kind: FaultKind) -> bool:
        """Whether the worker got the signal.

        A number may have been given to another process since it was read. The descriptor names one process;
        the service, asked again, still has a worker of this number: then they are the same, unless that
        worker has been reaped and the service has yet to notice, which is a matter of microseconds against
        the turn of all process numbers.
        """
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(worker)
            try:
                if self._gpu.worker_pid == worker:
                    generation = self._gpu.generation
                    signal.pidfd_send_signal(process, _SIGNALS[kind])
                    self._tally.struck(kind, generation)
                    return True
            finally:
                os.close(process)
        return False
