"""Measures the time from a worker's end to the next finished request, as its caller sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from cudnn_actor import ConvFwd, CudnnRef, Fault, FaultPlan, spawn
from cudnn_actor.protocol.messages.messages import Compute
from cudnn_actor.service import StandbyState
from cudnn_actor.trials.bench.convolutions import crash
from cudnn_actor.trials.bench.hops import trivial_convolution
from cudnn_actor.trials.measure import Plan

__all__ = ["FOR_EVER", "after_kills", "recoveries", "standby_ready"]

FOR_EVER = 1_000_000
"""More restarts than any measurement uses up."""
_STANDBY_WITHIN_S = 60.0
_LOOK_S = 0.002
_APART = 5
"""Requests from one scripted fault to the next; the second run of the failed request counts too."""


async def recoveries(plan: Plan) -> dict[str, list[float]]:
    """Milliseconds, by what ended the worker and whether there was a standby."""
    found: dict[str, list[float]] = {}
    for standby, name in ((1, "with standby"), (0, "without")):
        async with spawn(device="cpu", isolation="process", standby=standby, max_restarts=FOR_EVER) as gpu:
            found[f"SIGKILL, {name}"] = await after_kills(gpu, await trivial_convolution(gpu), plan.kills)
        found[f"sticky error, {name}"] = await _after_sticky_errors(plan.kills, standby)
    found["sticky error, thread"] = [await crash() for _ in range(plan.kills)]
    return found


async def after_kills(gpu: CudnnRef, message: Compute, count: int) -> list[float]:
    """Milliseconds from SIGKILL to the next receipt. At each kill the standby, if any, is ready, and no
    request is in flight."""
    taken = []
    for _ in range(count):
        await gpu.ask(message)
        await standby_ready(gpu)
        pid, generation = gpu.worker_pid, gpu.generation
        assert pid is not None, "a request has just been answered"
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        while (await gpu.ask(message)).generation == generation:
            pass  # the old worker had answered before it died
        taken.append(1e3 * (time.perf_counter() - began))
    return taken


async def _after_sticky_errors(count: int, standby: int) -> list[float]:
    """Milliseconds from sending a request that fails with a sticky error to the reply of its second run."""
    faults = FaultPlan()
    for number in range(1, count + 1):
        faults = faults.at(_APART * number, Fault.STICKY, of=ConvFwd)
    options: Any = {"isolation": "process", "standby": standby, "max_restarts": FOR_EVER}
    async with spawn(device="cpu", faults=faults, **options) as gpu:
        trivial = await trivial_convolution(gpu)
        taken: list[float] = []
        while len(taken) < count:
            await standby_ready(gpu)
            before, began = len(gpu.faults_fired), time.perf_counter()
            await gpu.ask(trivial)
            if len(gpu.faults_fired) > before:
                taken.append(1e3 * (time.perf_counter() - began))
        return taken


async def standby_ready(gpu: CudnnRef) -> None:
    """Wait until the standby can take over, and has built what it is warmed with. Returns at once if the
    service keeps none. Raises `TimeoutError`.

    It polls, because a standby is no event of the service's.
    """
    async with asyncio.timeout(_STANDBY_WITHIN_S):
        while gpu.metrics().standby not in (StandbyState.NONE, StandbyState.WARM):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
