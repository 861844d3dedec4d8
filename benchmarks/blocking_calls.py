"""The blocking client beside asyncio and pykka: one request at a time, and many.

    python -m benchmarks.blocking_calls --out benchmarks/results

On the CPU engine, whose trivial convolution (1×1×1×1) costs nearly nothing, each way with a service of its
own; in each round all ways in turn. Rows have microseconds a request, the median of the rounds: of one
request at a time (of each round, p50), of `submit` with 64 in flight, and of 8 threads that wait for their
answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table

from cudnn_actor import ConvFwd, ConvSpec, CudnnRef, start
from cudnn_actor.blocking import BlockingRef

from .recording import Row, attempted, keep

__all__ = ["main"]

IN_FLIGHT, THREADS = 64, 8
Isolation = Literal["thread", "process"]
ISOLATIONS: tuple[Isolation, ...] = ("thread", "process")
Ways = dict[str, Callable[[int], list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--count", type=int, default=1024, help="requests of a way in a round")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    def rows() -> Iterator[Row]:
        for isolation in ISOLATIONS:
            part = functools.partial(measured, isolation, args.rounds, args.count)
            yield from attempted(isolation, part)

    known = {"python": platform.python_version(), "cores": os.cpu_count(), "rounds": args.rounds}
    keep(rows(), table, args.out, "blocking_calls", **known, count=args.count)


def measured(isolation: Isolation, rounds: int, count: int) -> list[Row]:
    """The rows of one isolation."""
    with contextlib.ExitStack() as stack:
        ways = {
            **stack.enter_context(awaiting(isolation)),
            **stack.enter_context(blocking(isolation)),
            **stack.enter_context(by_pykka(isolation)),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            way(count)
        for _ in range(rounds):
            for name, way in ways.items():
                found[name].append(statistics.median(way(count)))
    return [
        {
            "isolation": isolation,
            "way": name,
            "us": round(statistics.median(each) * 1e6, 1),
            "rounds_us": [round(one * 1e6, 1) for one in each],
        }
        for name, each in found.items()
    ]


@contextlib.contextmanager
def awaiting(isolation: Isolation) -> Iterator[Ways]:
    """Time calls of the client for asyncio."""
    with start(device="cpu", isolation=isolation) as service, asyncio.Runner() as runner:
        gpu = CudnnRef(service)
        message = trivial(lambda array: runner.run(gpu.upload(array)))

        async def one_by_one(count: int) -> list[float]:
            return [await timed(message) for _ in range(count)]

        async def timed(message: ConvFwd) -> float:
            begun = time.perf_counter()
            await gpu.ask(message)
            return time.perf_counter() - begun

        async def many(count: int) -> list[float]:
            begun = time.perf_counter()
            for _ in range(count // IN_FLIGHT):
                await asyncio.gather(*[gpu.submit(message) for _ in range(IN_FLIGHT)])
            return [(time.perf_counter() - begun) / count]

        yield {
            "await gpu.ask": lambda count: runner.run(one_by_one(count)),
            f"gpu.submit, asyncio, {IN_FLIGHT} in flight": lambda count: runner.run(many(count)),
        }


@contextlib.contextmanager
def blocking(isolation: Isolation) -> Iterator[Ways]:
    """Time calls of the blocking client."""
    with BlockingRef(start(device="cpu", isolation=isolation)) as gpu, ThreadPoolExecutor(THREADS) as pool:
        message = trivial(gpu.upload)

        def many(count: int) -> list[float]:
            begun = time.perf_counter()
            for _ in range(count // IN_FLIGHT):
                for future in [gpu.submit(message) for _ in range(IN_FLIGHT)]:
                    future.result()
            return [(time.perf_counter() - begun) / count]

        def together(count: int) -> list[float]:
            begun = time.perf_counter()
            each = lambda _: [gpu.ask(message) for _ in range(count // THREADS)]  # noqa: E731
            list(pool.map(each, range(THREADS)))
            return [(time.perf_counter() - begun) / count]

        yield {
            "blocking gpu.ask": lambda count: asked(lambda: gpu.ask(message), count),
            f"blocking gpu.submit, {IN_FLIGHT} in flight": many,
            f"blocking gpu.ask, {THREADS} threads": together,
        }


@contextlib.contextmanager
def by_pykka(isolation: Isolation) -> Iterator[Ways]:
    """Time calls of pykka's reference, which needs no event loop."""
    with start(device="cpu", isolation=isolation) as service:
        with asyncio.Runner() as runner:
            gpu = CudnnRef(service)
            message = trivial(lambda array: runner.run(gpu.upload(array)))
        yield {"actor_ref.ask": lambda count: asked(lambda: service.actor_ref.ask(message), count)}


def asked(ask: Callable[[], Any], count: int) -> list[float]:
    """Seconds of each of so many calls."""
    found = []
    for _ in range(count):
        begun = time.perf_counter()
        ask()
        found.append(time.perf_counter() - begun)
    return found


def trivial(upload: Callable[[np.ndarray], Any]) -> ConvFwd:
    """A 1×1×1×1 convolution: all costs of a request except arithmetic."""
    x, w, y = (upload(np.ones((1, 1, 1, 1), "float32")) for _ in range(3))
    return ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))


def table(found: list[Row]) -> Table:
    """µs a request, by way and isolation."""
    shown = Table("way", *("thread isolation, us", "process isolation, us"), title="A request")
    by_way: dict[str, dict[str, str]] = {}
    for row in found:
        by_way.setdefault(row["way"], {})[row["isolation"]] = f"{row['us']:.0f}"
    for way, us in by_way.items():
        shown.add_row(way, us.get("thread", "-"), us.get("process", "-"))
    return shown


if __name__ == "__main__":
    main()
