"""Measures what counting costs: a request with its counts and latencies, and without.

    python -m benchmarks.metrics_cost --out benchmarks/results

On the CPU engine, whose trivial convolution (1×1×1×1) costs nearly nothing, 64 in flight. In each round, with
and without counting in turn, on the same service: without it, an answer is counted in `finished` alone.
In process isolation, that calls a function that does nothing for each answer, which counting does not do.
Rounds are short and many, so that what else runs on the machine takes part in both alike. Rows have
microseconds of processor time that a request takes of the caller's process, the means of the rounds; their
ratio, with its standard error; and what reading the metrics takes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from cudnn_actor import CudnnRef, start
from cudnn_actor.broker.request_counts import NO_TALLY, NONE_MOVED, RequestCounters

from .blocking_calls import IN_FLIGHT, trivial
from .recording import Row, attempted, keep

__all__ = ["main"]

Isolation = Literal["thread", "process"]
ISOLATIONS: tuple[Isolation, ...] = ("thread", "process")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--count", type=int, default=512, help="requests of a round, each way")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    def rows() -> Iterator[Row]:
        for isolation in ISOLATIONS:
            yield from attempted(isolation, functools.partial(measured, isolation, args.rounds, args.count))

    known = {"python": platform.python_version(), "cores": os.cpu_count(), "rounds": args.rounds}
    keep(rows(), table, args.out, "metrics_cost", **known, count=args.count)


def measured(isolation: Isolation, rounds: int, count: int) -> list[Row]:
    """The row of one isolation."""
    with start(device="cpu", isolation=isolation) as service, asyncio.Runner() as runner:
        gpu = CudnnRef(service)
        message = trivial(lambda array: runner.run(gpu.upload(array)))

        async def many() -> float:
            begun = time.process_time()
            for _ in range(count // IN_FLIGHT):
                await asyncio.gather(*[gpu.submit(message) for _ in range(IN_FLIGHT)])
            return (time.process_time() - begun) / count * 1e6

        counting: list[float] = []
        without: list[float] = []
        runner.run(many())
        for turn in range(rounds):
            for counts in (True, False) if turn % 2 else (False, True):
                with contextlib.nullcontext() if counts else not_counting(service.state.counters):
                    (counting if counts else without).append(runner.run(many()))
        return [
            {
                "isolation": isolation,
                "counting_us": round(statistics.mean(counting), 2),
                "without_us": round(statistics.mean(without), 2),
                "ratio": round(sum(counting) / sum(without), 4),
                "ratio_error": round(ratio_error(counting, without), 4),
                "metrics_us": round(per_call(gpu.metrics), 1),
                "scrape_us": round(per_call(scraping(gpu)), 1),
            }
        ]


def ratio_error(of: list[float], to: list[float], draws: int = 200) -> float:
    """The standard error of the ratio of two sums, by drawing the rounds anew."""
    pairs = list(zip(of, to, strict=True))
    drawn = (random.choices(pairs, k=len(pairs)) for _ in range(draws))
    return statistics.stdev(sum(a for a, _ in each) / sum(b for _, b in each) for each in drawn)


@contextlib.contextmanager
def not_counting(counters: RequestCounters) -> Iterator[None]:
    """Have a service count answers in `finished` and `failed` alone."""
    nothing: tuple[Any, ...] = [], (), NO_TALLY, NONE_MOVED

    def no_count(self: RequestCounters, _: Any, __: Any, error: object, *___: float) -> None:
        if error is None:
            self.finished += 1
        else:
            self.failed += 1

    owner: Any = RequestCounters
    kept, plain = (owner.count, owner.measure), counters._plain
    owner.count, owner.measure = no_count, lambda *_: nothing
    counters._plain = {}  # else nearly all answers are counted without a call of these
    try:
        yield
    finally:
        owner.count, owner.measure = kept
        counters._plain = plain


def scraping(gpu: CudnnRef) -> Callable[[], object]:
    """A scrape of Prometheus, without its way over a socket. The package must be there."""
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415 - in an extra

    from cudnn_actor.metrics.prometheus import ServiceCollector  # noqa: PLC0415

    registry = CollectorRegistry()
    registry.register(ServiceCollector(gpu))
    return lambda: generate_latest(registry)


def per_call(call: Callable[[], object], calls: int = 101) -> float:
    """Microseconds of processor time of a call: the median."""
    found = []
    for _ in range(calls):
        begun = time.thread_time()
        call()
        found.append(time.thread_time() - begun)
    return statistics.median(found) * 1e6


def table(found: list[Row]) -> Table:
    """µs of processor time, by isolation."""
    columns = ("counting, us", "without, us", "ratio", "its error", "gpu.metrics(), us", "a scrape, us")
    shown = Table("isolation", *columns, title="A request, and reading the metrics")
    for row in found:
        names = ("counting_us", "without_us", "ratio", "ratio_error", "metrics_us", "scrape_us")
        shown.add_row(row["isolation"], *[f"{row[name]}" for name in names])
    return shown


if __name__ == "__main__":
    main()
