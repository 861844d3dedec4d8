"""Measures what waiting costs: of an idle service, and of one whose device is busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec

from benchmarks.gpu.problems import Conv, Direction, Problem
from benchmarks.gpu.rates import burst_us, on_loop
from benchmarks.gpu.setting import Setting, actor_thread, cpu_s
from benchmarks.gpu.sheet import Sheet, median, number
from benchmarks.gpu.small import placed
from cudnn_actor import CudnnRef
from cudnn_actor.protocol.messages.messages import Compute

__all__ = ["Polling", "measure", "sheets"]

_BIG = Conv(256, 56, 256, 3, pad=1)
_BATCH = 64
_BUSY_US = 50e3


class Polling(msgspec.Struct, kw_only=True):
    """Percent of one core; an item a round."""

    idle_process: list[float] = []
    """Of all threads, while nothing is asked."""
    busy_actor: list[float] = []
    """Of the actor's thread, while one burst of convolutions runs."""
    busy_process: list[float] = []
    burst_ms: list[float] = []
    requests: int = 0


def measure(setting: Setting) -> Polling:
    """Blocks for a few seconds."""
    return on_loop("asyncio", _rounds(setting))  # type: ignore[no-any-return]


async def _rounds(setting: Setting) -> Polling:
    found = Polling()
    big = Problem(_BIG, _BATCH, Direction.FWD, "bfloat16", "NHWC")
    if not setting.on_gpu:
        big = big._replace(conv=Conv(64, 28, 64, 3, pad=1), batch=1)
    async with setting.service() as gpu:
        message = await placed(gpu, big)
        await burst_us(gpu, message, 4)
        found.requests = max(1, round(_BUSY_US / await burst_us(gpu, message, setting.choose(16, 2))))
        for number_of_round in range(setting.choose(5, 1)):
            setting.say(f"polling, round {number_of_round + 1}")
            found.idle_process.append(await _idle_share(setting.choose(1.0, 0.05)))
            await _burst(gpu, message, found)
    return found


async def _burst(gpu: CudnnRef, message: Compute, found: Polling) -> None:
    actor = actor_thread()
    one, all_of_them, wall = cpu_s(actor), time.process_time(), time.perf_counter()
    await burst_us(gpu, message, found.requests)
    took_s = time.perf_counter() - wall
    found.busy_actor.append(100 * (cpu_s(actor) - one) / took_s)
    found.busy_process.append(100 * (time.process_time() - all_of_them) / took_s)
    found.burst_ms.append(1e3 * took_s)


async def _idle_share(seconds: float) -> float:
    await asyncio.sleep(seconds / 4)  # what was asked before is then well over
    wall, began = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    return 100 * (time.process_time() - began) / (time.perf_counter() - wall)


def sheets(found: Polling) -> Iterator[Sheet]:
    """The tables: a row for the idle service, and two for the busy one."""
    took = number(median(found.burst_ms), 0)
    rows = [
        (name, number(median(shares), 2), number(max(shares, default=None), 2))
        for name, shares in (
            ("idle: all threads", found.idle_process),
            (f"{found.requests} convolutions of {took} ms in all: the actor's thread", found.busy_actor),
            ("the same: all threads", found.busy_process),
        )
    ]
    yield Sheet("Waiting, % of one core", ("while", "median", "most"), tuple(rows))
