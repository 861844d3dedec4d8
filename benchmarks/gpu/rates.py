"""Measures how fast requests and plain calls go: one at a time, in a loop, and with so many in flight."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import time
from collections.abc import Coroutine
from importlib import util
from typing import Any

from benchmarks.gpu.stage import Call
from cudnn_actor import CudnnRef
from cudnn_actor.protocol.messages.messages import Compute
from cudnn_actor.trials.measure import Timing

__all__ = ["burst_us", "call_rate", "loops", "on_loop", "one_call_at_a_time", "submit_rate"]

_AT_ONCE = 256


def loops() -> tuple[str, ...]:
    """The kinds of event loop that there are here."""
    return ("asyncio",) if util.find_spec("uvloop") is None else ("asyncio", "uvloop")


def on_loop(loop: str, measurement: Coroutine[Any, Any, Any]) -> Any:
    """Run on an event loop of that kind."""
    uvloop = loop == "uvloop"
    factory = importlib.import_module("uvloop").new_event_loop if uvloop else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(measurement)


def call_rate(call: Call, wait: Call, seconds: float) -> float:
    """Calls a second, one behind the other, waiting for the device at the end only. Blocks."""
    began = time.perf_counter()
    count = 0
    while time.perf_counter() - began < seconds:
        for _ in itertools.repeat(None, _AT_ONCE):
            call()
        count += _AT_ONCE
    wait()
    return count / (time.perf_counter() - began)


def one_call_at_a_time(call: Call, wait: Call, seconds: float) -> Timing:
    """Latencies of a call and waiting for it. Blocks."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        call()
        wait()
        latencies.append(time.perf_counter() - began)
    return Timing.of(latencies)


async def submit_rate(gpu: CudnnRef, message: Compute, in_flight: int, seconds: float) -> float:
    """Requests a second without tasks: each reply's callback submits the next request."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    count, left = 0, in_flight
    began = time.perf_counter()
    end = began + seconds

    def answered(reply: asyncio.Future[Any]) -> None:
        nonlocal count, left
        count += 1
        if reply.exception() is None and time.perf_counter() < end:
            gpu.submit(message).add_done_callback(answered)
            return
        left -= 1
        if not done.done() and (reply.exception() is not None or not left):
            error = reply.exception()
            done.set_result(None) if error is None else done.set_exception(error)

    for _ in range(in_flight):
        gpu.submit(message).add_done_callback(answered)
    await done
    return count / (time.perf_counter() - began)


async def burst_us(gpu: CudnnRef, message: Compute, count: int) -> float:
    """Microseconds for each of `count` requests submitted at once, until the last has been answered."""
    began = time.perf_counter()
    replies = [gpu.submit(message) for _ in range(count)]
    await asyncio.gather(*replies)
    return 1e6 * (time.perf_counter() - began) / count
