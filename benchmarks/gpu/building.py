"""Measures what a stream of hot requests notices of plans that are built meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator

import msgspec

from benchmarks.gpu.problems import Conv, Direction, Problem
from benchmarks.gpu.rates import on_loop
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.sheet import Sheet, median, number, ratio
from benchmarks.gpu.small import placed
from cudnn_actor import CudnnRef
from cudnn_actor.protocol.messages.messages import Compute
from cudnn_actor.trials.measure import Timing, rate

__all__ = ["Building", "measure", "sheets"]

IN_FLIGHT = 8
COLD = 50
_PROCESS_STARTS_S = 5.0
"""After that the process is there that builds plans; until then they are built where the actor lives."""


class Building(msgspec.Struct, kw_only=True):
    """Latencies of the hot request, eight in flight; an item a round."""

    idle: list[Timing] = []
    building: list[Timing] = []
    idle_per_s: list[float] = []
    building_per_s: list[float] = []
    cold: int = COLD
    """Shapes that were new in each round, all asked for at once."""
    took_s: list[float] = []
    """Seconds from asking for them to the last one's reply."""


def measure(setting: Setting) -> Building:
    """Blocks for a few seconds."""
    return on_loop("asyncio", _rounds(setting))  # type: ignore[no-any-return]


async def _rounds(setting: Setting) -> Building:
    found = Building(cold=setting.choose(COLD, 4))
    channels = itertools.count(1)
    async with setting.service() as gpu:
        hot = await placed(gpu, setting.small)
        await rate(lambda: gpu.ask(hot), IN_FLIGHT, setting.choose(0.5, 0.02))
        if setting.on_gpu:
            await asyncio.sleep(_PROCESS_STARTS_S)
        for number_of_round in range(setting.choose(5, 1)):
            setting.say(f"building plans, round {number_of_round + 1}")
            cold = [await _cold(gpu, next(channels)) for _ in range(found.cold)]
            await _building_round(gpu, hot, cold, found)
            per_s, timing = await rate(lambda: gpu.ask(hot), IN_FLIGHT, max(found.took_s[-1], 0.05))
            found.idle.append(timing)
            found.idle_per_s.append(per_s)
    return found


async def _cold(gpu: CudnnRef, step: int) -> Compute:
    """A request of a shape that no other has."""
    return await placed(gpu, Problem(Conv(8 * step, 12, 16, 3, pad=1), 1, Direction.FWD, "bfloat16", "NHWC"))


async def _building_round(gpu: CudnnRef, hot: Compute, cold: list[Compute], found: Building) -> None:
    latencies: list[float] = []
    began = time.perf_counter()
    building = asyncio.gather(*(gpu.ask(message) for message in cold))

    async def sender() -> None:
        while True:
            sent = time.perf_counter()
            await gpu.ask(hot)
            latencies.append(time.perf_counter() - sent)
            if building.done():
                return

    await asyncio.gather(*(sender() for _ in range(IN_FLIGHT)))
    await building
    took_s = time.perf_counter() - began
    found.took_s.append(took_s)
    found.building.append(Timing.of(latencies))
    found.building_per_s.append(len(latencies) / took_s)


def sheets(found: Building) -> Iterator[Sheet]:
    """The tables: a row for the idle service, one while it builds, and one for their ratio."""
    rows = []
    for name, timings, per_s in (
        ("nothing else", found.idle, found.idle_per_s),
        (f"{found.cold} plans are built", found.building, found.building_per_s),
    ):
        figures = (median(getattr(t, what) for t in timings) for what in ("p50_us", "p99_us", "max_us"))
        rows.append((name, *(number(us, 0) for us in figures), number((median(per_s) or 0.0) / 1e3)))
    pairs = [
        ratio([getattr(t, what) for t in found.building], [getattr(t, what) for t in found.idle])
        for what in ("p50_us", "p99_us", "max_us")
    ]
    rows.append(
        (
            "ratio",
            *(number(pair, 2) for pair in pairs),
            number(ratio(found.building_per_s, found.idle_per_s), 2),
        )
    )
    took = number(1e3 * (median(found.took_s) or 0.0), 0)
    yield Sheet(
        f"The small convolution, {IN_FLIGHT} in flight, while plans are built",
        ("meanwhile", "p50 µs", "p99 µs", "max µs", "k/s"),
        tuple(rows),
        f"The new shapes are asked for at once, and took {took} ms until the last reply.",
    )
