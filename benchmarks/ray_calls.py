"""A request to a pool of one Ray replica, beside a call of an empty Ray actor and a request in process.

    python -m benchmarks.ray_calls --out benchmarks/results

All on the CPU engine: a product of an array with (256, 256) weights, which were uploaded. The actor is an
async one whose method gets the same array, and returns one of the product's size that it has. In each round,
all three in turn, one at a time. Rows have the p50 of all rounds in microseconds; `ratio` is the pool's
request over the sum of the other two, by rounds. Ray's own processes need cores, too: on two it measures how
these are shared.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
from rich.table import Table

from cudnn_actor import GraphBuilder, spawn
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.ray import RayPool

from .recording import Row, keep

__all__ = ["main", "measured", "table"]

ROWS = (32, 1024)
"""Of the matrix: 32 KiB, which Ray sends with the call, and 1 MiB, which goes by its object store."""
Call = Callable[[], Awaitable[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--count", type=int, default=100, help="requests of each kind in a round")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    def rows() -> Iterator[Row]:
        with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else it writes into the home folder
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(
                num_cpus=4,
                object_store_memory=200_000_000,
                include_dashboard=False,
                logging_level="warning",
                _temp_dir=folder,
            )
            try:
                yield from asyncio.run(measured(args.rounds, args.count))
            finally:
                ray.shutdown()

    known = {"python": platform.python_version(), "cores": os.cpu_count(), "rounds": args.rounds}
    keep(rows(), table, args.out, "ray_calls", **known, count=args.count)


async def measured(rounds: int, count: int) -> list[Row]:
    """The rows for all sizes."""

    class Empty:
        def __init__(self) -> None:
            self.known = {rows: np.zeros((rows, 256), "float32") for rows in ROWS}

        async def returns(self, a: np.ndarray) -> np.ndarray:
            return self.known[len(a)]

    actor: Any = ray.remote(Empty).options(num_cpus=1).remote()
    chance = np.random.default_rng(0)
    weights = chance.random((256, 256), "float32")
    found = []
    async with (
        RayPool(num_replicas=1, num_gpus=0) as pool,
        spawn(device="cpu", isolation="process") as gpu,
    ):
        for rows in ROWS:
            product, x = product_of(rows), chance.random((rows, 256), "float32")
            calls: dict[str, Call] = {
                "pool": functools.partial(pool.compute, product, x=x, w=await pool.upload(weights)),
                "actor": functools.partial(actor.returns.remote, x),
                "in process": functools.partial(gpu.compute, product, x=x, w=await gpu.upload(weights)),
            }
            found += await in_turns(rows, calls, rounds, count)
    return found


def product_of(rows: int) -> Graph:
    """y = x @ w, of (rows, 256) by (256, 256)."""
    g = GraphBuilder()
    return g.build(y=g.matmul(g.input("x", (rows, 256)), g.input("w", (256, 256))))


async def in_turns(rows: int, calls: dict[str, Call], rounds: int, count: int) -> list[Row]:
    """The p50 of each kind, all of them in each round, and the first over the sum of the others."""
    p50: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            took = statistics.median([await timed(call) for _ in range(count)])
            if number:  # the first round warms
                p50[name].append(took)
    ratios = [pool / (actor + alone) for pool, actor, alone in zip(*p50.values(), strict=True)]
    us = {name: round(statistics.median(each) * 1e6) for name, each in p50.items()}
    spread = sorted(round(ratio, 3) for ratio in ratios)
    return [{"rows": rows, **us, "ratio": round(statistics.median(ratios), 3), "ratios": spread}]


async def timed(call: Call) -> float:
    begun = time.perf_counter()
    await call()
    return time.perf_counter() - begun


def table(found: list[Row]) -> Table:
    """Microseconds of each kind, and the ratio."""
    names = ("pool", "actor", "in process", "ratio")
    shown = Table("rows", *names, title="One request at a time, p50, us")
    for row in found:
        shown.add_row(str(row["rows"]), *(str(row[name]) for name in names))
    return shown


if __name__ == "__main__":
    main()
