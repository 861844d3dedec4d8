"""Pings from a loop that is busy with other work."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import asynccontextmanager
from typing import Any

from cudnn_actor import spawn
from cudnn_actor.actors import LoopBridge
from cudnn_actor.trials.bench.record import LOADS, Starving
from cudnn_actor.trials.measure import Plan, rate
from cudnn_actor.trials.placement import place

__all__ = ["busy_loops"]


async def busy_loops(plan: Plan, loop: str, placement: str) -> list[Starving]:
    """Every load, with one and many pings in flight, with and without releasing the GIL."""
    rows = []
    async with spawn(device="cpu", isolation="thread") as gpu:
        place(placement)
        bridge = LoopBridge.of_running_loop()
        for load, in_flight, lets_go in itertools.product(LOADS, (1, 64), (False, True)):
            bridge.lets_go, before = lets_go, bridge.let_go
            async with _busy_with(load) as turns:
                began = time.perf_counter()
                per_s, timing = await rate(gpu.ping, in_flight, plan.starving_s)
                took_s = time.perf_counter() - began  # with the wait for the last reply, which may be long
            rows.append(
                Starving(
                    loop=loop,
                    placement=placement,
                    load=load,
                    in_flight=in_flight,
                    lets_go=lets_go,
                    timing=timing,
                    per_s=per_s,
                    callbacks_per_s=turns[0] / took_s,
                    let_go=bridge.let_go - before,
                )
            )
        bridge.lets_go = True
    return rows


@asynccontextmanager
async def _busy_with(load: str) -> Any:
    """Run a load on the loop while the block runs; yields a list whose only item counts the load's turns."""
    turns = [0]

    async def turn() -> None:
        while True:
            if load == "50 us callbacks":
                end = time.perf_counter() + 50e-6
                while time.perf_counter() < end:
                    pass
            turns[0] += 1
            await asyncio.sleep(0)

    if load == "idle":
        yield turns
        return
    task = asyncio.create_task(turn())
    yield turns
    task.cancel()
    await asyncio.wait([task])
