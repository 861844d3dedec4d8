"""Measures how many runs of a model there are in a second, and how long each takes, with several in
flight."""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
from rich.table import Table

__all__ = ["MOST_IN_FLIGHT", "Throughput", "in_flight", "measure_runs", "sheet", "timed_runs"]

MOST_IN_FLIGHT = 1024


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements with `in_flight` runs at a time: runs, runs a second, and percentiles in milliseconds.

    A run takes NumPy arrays and returns NumPy arrays. `mean_batch`: the mean number of samples in a batch;
    None if runs are not batched.
    """

    in_flight: int
    runs: int
    per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    mean_batch: float | None = None


def in_flight(text: str) -> tuple[int, ...]:
    """Parse an argument `8`, or `1:64` for 1, 2, 4, ... 64, for `argparse`."""
    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most <= MOST_IN_FLIGHT:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a number from 1 to {MOST_IN_FLIGHT}, or a range of two, such as 1:64"
        )
    return tuple(dict.fromkeys([*(least << step for step in range(11) if least << step < most), most]))


async def timed_runs(
    run: Callable[[], Awaitable[object]], tasks: int, seconds: float
) -> tuple[list[float], float]:
    """Let `tasks` tasks call `run` again and again for `seconds` seconds, each at least twice. Returns the
    seconds of all runs except the first of each task, and the number of runs in a second.
    """
    took: list[float] = []

    async def work() -> None:
        await run()
        while True:
            began = time.perf_counter()
            await run()
            ended = time.perf_counter()
            took.append(ended - began)
            if ended > end:
                return

    end = time.perf_counter() + seconds
    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(tasks)))
    return took, (len(took) + tasks) / (time.perf_counter() - start)


async def measure_runs(run: Callable[[], Awaitable[object]], tasks: int, seconds: float) -> Throughput:
    """Measure runs of a model by `timed_runs`."""
    took, per_s = await timed_runs(run, tasks, seconds)
    p50, p90, p99 = (float(each) * 1e3 for each in np.percentile(took, (50, 90, 99)))
    return Throughput(in_flight=tasks, runs=len(took), per_s=per_s, p50_ms=p50, p90_ms=p90, p99_ms=p99)


def sheet(found: list[Throughput]) -> Table:
    """The table for a terminal."""
    table = Table(title="runs, from arrays to arrays")
    batched = any(each.mean_batch is not None for each in found)
    names = ("in flight", "runs", "per second", "p50, ms", "p90, ms", "p99, ms")
    for name in (*names, *(["samples a batch"] if batched else [])):
        table.add_column(name, justify="right")
    for each in found:
        times = (f"{ms:,.2f}" for ms in (each.p50_ms, each.p90_ms, each.p99_ms))
        mean = "by itself" if each.mean_batch is None else f"{each.mean_batch:,.1f}"
        row = (str(each.in_flight), f"{each.runs:,}", f"{each.per_s:,.1f}", *times)
        table.add_row(*row, *([mean] if batched else []))
    return table
