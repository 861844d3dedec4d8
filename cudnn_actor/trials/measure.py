"""The measurements of the benchmark: latencies, and rates with several in flight; how long to measure."""

from __future__ import annotations

import asyncio
import queue
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pykka

__all__ = [
    "FULL",
    "QUICK",
    "BareHop",
    "Plan",
    "PykkaWay",
    "Request",
    "Timing",
    "median_ratio",
    "one_by_one",
    "percentile",
    "rate",
]

Request = Callable[[], Awaitable[Any]]
"""Sends one request and awaits its reply."""

_SAMPLES = 16


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies in microseconds."""

    count: int
    p50_us: float
    p99_us: float
    max_us: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """The summary of latencies in seconds."""
        ordered = sorted(seconds)
        return cls(
            count=len(ordered),
            p50_us=1e6 * percentile(ordered, 50),
            p99_us=1e6 * percentile(ordered, 99),
            max_us=1e6 * ordered[-1],
        )


def percentile(ordered: list[float], percent: float) -> float:
    """The value below which `percent` of the sorted values lie, without interpolation."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


async def one_by_one(
    request: Request, seconds: float, now_and_then: Callable[[], None] | None = None
) -> Timing:
    """Latencies with one request in flight; `now_and_then` runs between requests and is not timed."""
    latencies: list[float] = []
    end, pause = time.perf_counter() + seconds, seconds / _SAMPLES
    look = time.perf_counter() + pause
    while (began := time.perf_counter()) < end:
        await request()
        latencies.append(time.perf_counter() - began)
        if now_and_then is not None and began >= look:
            now_and_then()
            look = began + pause
    return Timing.of(latencies)


async def rate(request: Request, in_flight: int, seconds: float) -> tuple[float, Timing]:
    """Requests per second, and their latencies, with `in_flight` requests in flight at any time."""
    latencies: list[float] = []
    began = time.perf_counter()
    end = began + seconds

    async def sender() -> None:
        now = time.perf_counter()
        while True:
            sent = now
            await request()
            now = time.perf_counter()
            latencies.append(now - sent)
            if now >= end:
                return

    await asyncio.gather(*(sender() for _ in range(in_flight)))
    return len(latencies) / (time.perf_counter() - began), Timing.of(latencies)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long to measure."""

    rounds: int
    slice_s: float
    """Seconds of each measurement of a round."""
    starving_s: float
    repeats: int
    moves: int
    """How many copies of 64 MiB are timed, each way."""
    kills: int
    """How many kills of each kind are timed."""
    idle_rounds: int
    idle_s: float


FULL = Plan(
    rounds=7,
    slice_s=0.15,
    starving_s=1.5,
    repeats=15,
    moves=15,
    kills=20,
    idle_rounds=3,
    idle_s=1.0,
)
QUICK = Plan(
    rounds=1,
    slice_s=0.003,
    starving_s=0.02,
    repeats=2,
    moves=1,
    kills=2,
    idle_rounds=1,
    idle_s=0.02,
)


class BareHop:
    """The minimal round trip between a loop and a thread: a queue there, `call_soon_threadsafe` back."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self.thread = threading.Thread(target=self._work, name="bare-hop", daemon=True)
        self.thread.start()

    async def __call__(self) -> None:
        """Go there and back."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._queue.put((loop, future))
        await future

    def close(self) -> None:
        """End the thread. Blocks for a moment."""
        self._queue.put(None)
        self.thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            loop, future = item
            loop.call_soon_threadsafe(future.set_result, None)


class PykkaWay:
    """The usual way with pykka: `ask`, and wait for its future in another thread."""

    class _Plain(pykka.ThreadingActor):
        use_daemon_thread = True

        def on_start(self) -> None:
            self.native_id = threading.get_native_id()

        def on_receive(self, message: Any) -> Any:
            return message

    def __init__(self) -> None:
        self._ref = self._Plain.start()

    async def __call__(self) -> None:
        """Ask and await the reply."""
        await asyncio.to_thread(self._ref.ask(None, block=False).get)

    def native_id(self) -> int:
        """The native id of the actor's thread."""
        thread: int = self._ref.proxy().native_id.get()
        return thread

    def close(self) -> None:
        """End the actor. Blocks for a moment."""
        self._ref.stop()


def median_ratio(values: list[float], others: list[float]) -> float:
    """The median of the rounds' ratios: a disturbance of a whole round cancels out."""
    return statistics.median(value / other for value, other in zip(values, others, strict=True))
