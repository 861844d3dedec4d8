"""A request to a pool of one Ray replica, beside a call of an empty method and a request in process.

    python -m benchmarks.ray_calls --out benchmarks/results
    python -m benchmarks.ray_calls --device cuda:0 --out benchmarks/results

A product of an array with (256, 256) weights, which were uploaded. The four kinds of calls carry the same
bytes, and their services have the same isolation:

- `pool`: a request to a pool of one replica. That is on this machine, so large arrays lie in memory that both
  processes map
- `actor`: a call of a method that gets the same array, and returns one of the product's size that it has
- `in process`: the request to a service of this process
- `plain`: a call of a method that asks a service which its actor started, without a pool. This is the least
  that a replica can take.

`actor` and `plain` are methods of one asynchronous Ray actor. In each round, all four in turn, one call at a
time. Rows have the p50 of all rounds in microseconds. `ratio` is the pool's request over the sum of a call of
the actor and a request in process, by rounds; `plain ratio` is the plain call over the same sum. `p10` has
microseconds below which a tenth of all calls are: of those that other programs have disturbed least. `cpu`
has microseconds of CPU time of a call, of this process, the actor's and the workers. They have ratios, too.
Ray's own processes need cores, too: on two, calls measure how these are shared.
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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from rich.table import Table

from cudnn_actor import GraphBuilder, spawn
from cudnn_actor.options import make_options
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.ray import RayPool
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.service.service import start_checked
from cudnn_actor.trials.bench.cpu_time import process_cpu_s

from .recording import Row, keep

__all__ = ["main", "measured", "table"]

ROWS = (32, 1024)
"""How many rows the arrays have: 32 KiB, which Ray sends with the call, and 1 MiB, which goes by its object
store, but to the pool's replica."""
SHARE = 0.3
"""The share of a GPU that each of the two actors gets."""
Call = Callable[[], Awaitable[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--count", type=int, default=30, help="calls of each kind in a round")
    parser.add_argument("--isolation", nargs="+", default=["process"], choices=("process", "thread"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    def rows() -> Iterator[Row]:
        with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else it writes into the home folder
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(
                num_cpus=4,
                num_gpus=int(args.device != "cpu"),
                object_store_memory=200_000_000,
                include_dashboard=False,
                logging_level="warning",
                _temp_dir=folder,
            )
            try:
                for isolation in args.isolation:
                    yield from asyncio.run(measured(args.rounds, args.count, isolation, args.device))
            finally:
                ray.shutdown()

    known = {"python": platform.python_version(), "cores": os.cpu_count(), "device": args.device}
    keep(rows(), table, args.out, "ray_calls", **known, rounds=args.rounds, count=args.count)


class Beside:
    """A Ray actor with a service, without a pool."""

    def __init__(self, options: dict[str, Any], weights: np.ndarray) -> None:
        self.gpu = CudnnRef(start_checked(make_options(options)))
        self.products = {rows: product_of(rows) for rows in ROWS}
        self.known = {rows: np.zeros((rows, 256), "float32") for rows in ROWS}
        self.weights = weights
        self.uploaded: BufferRef | None = None

    async def begin(self) -> list[int]:
        """Upload the weights, and return the ids of the processes."""
        self.uploaded = await self.gpu.upload(self.weights)
        return [pid for pid in (os.getpid(), self.gpu.worker_pid) if pid is not None]

    async def returns(self, x: np.ndarray) -> np.ndarray:
        return self.known[len(x)]

    async def product(self, x: np.ndarray) -> np.ndarray:
        found: np.ndarray = await self.gpu.compute(self.products[len(x)], x=x, w=self.uploaded)
        return found

    async def end(self) -> None:
        await self.gpu.aclose()


async def measured(rounds: int, count: int, isolation: str = "process", device: str = "cpu") -> list[Row]:
    """The rows for all sizes."""
    chance = np.random.default_rng(0)
    weights = chance.random((256, 256), "float32")
    share = SHARE if device != "cpu" else 0
    own: dict[str, Any] = {"isolation": isolation, "device": device}
    actor: Any = ray.remote(Beside).options(num_cpus=1, num_gpus=share).remote(own, weights)
    found = []
    async with (
        RayPool(num_replicas=1, num_gpus=share, isolation=isolation) as pool,
        spawn(**own) as gpu,
    ):
        [replica] = pool.statistics().members
        theirs = [replica.pid, replica.worker_pid, gpu.worker_pid, *await actor.begin.remote()]
        pids = [os.getpid(), *(pid for pid in theirs if pid is not None)]
        for rows in ROWS:
            product, x = product_of(rows), chance.random((rows, 256), "float32")
            calls: dict[str, Call] = {
                "pool": functools.partial(pool.compute, product, x=x, w=await pool.upload(weights)),
                "actor": functools.partial(actor.returns.remote, x),
                "in process": functools.partial(gpu.compute, product, x=x, w=await gpu.upload(weights)),
                "plain": functools.partial(actor.product.remote, x),
            }
            row = await in_turns(calls, pids, rounds, count)
            found.append({"rows": rows, "isolation": isolation, **row})
        await actor.end.remote()
        ray.kill(actor)
    return found


def product_of(rows: int) -> Graph:
    """y = x @ w, of (rows, 256) by (256, 256)."""
    g = GraphBuilder()
    return g.build(y=g.matmul(g.input("x", (rows, 256)), g.input("w", (256, 256))))


async def in_turns(calls: dict[str, Call], pids: Sequence[int], rounds: int, count: int) -> Row:
    """The p50 and the CPU time of each kind, all of them in each round, and their ratios."""
    took: dict[str, list[list[float]]] = {name: [] for name in calls}
    cpu_s = dict.fromkeys(calls, 0.0)
    for number in range(rounds + 1):
        for name, call in calls.items():
            before_s = sum(map(process_cpu_s, pids))
            seconds = [await timed(call) for _ in range(count)]
            if number:  # the first round warms
                took[name].append(seconds)
                cpu_s[name] += sum(map(process_cpu_s, pids)) - before_s
    p50 = {name: [statistics.median(each) for each in by_rounds] for name, by_rounds in took.items()}
    p10 = {name: float(np.quantile(by_rounds, 0.1)) for name, by_rounds in took.items()}
    by_rounds = [dict(zip(p50, each, strict=True)) for each in zip(*p50.values(), strict=True)]
    ratios = [of_sum("pool", each) for each in by_rounds]
    return {
        **{name: micro(statistics.median(each)) for name, each in p50.items()},
        "ratio": round(statistics.median(ratios), 3),
        "plain ratio": round(statistics.median(of_sum("plain", each) for each in by_rounds), 3),
        "ratios": sorted(round(ratio, 3) for ratio in ratios),
        "p10": {name: micro(each) for name, each in p10.items()},
        "p10 ratio": round(of_sum("pool", p10), 3),
        "plain p10 ratio": round(of_sum("plain", p10), 3),
        "cpu": {name: micro(each / rounds / count) for name, each in cpu_s.items()},
        "cpu ratio": round(of_sum("pool", cpu_s), 3),
        "plain cpu ratio": round(of_sum("plain", cpu_s), 3),
    }


def of_sum(kind: str, took: dict[str, float]) -> float:
    """A kind's time as a multiple of an actor's call and a request in process; NaN if these took none."""
    both = took["actor"] + took["in process"]
    return took[kind] / both if both else float("nan")


def micro(seconds: float) -> int:
    return round(seconds * 1e6)


async def timed(call: Call) -> float:
    begun = time.perf_counter()
    await call()
    return time.perf_counter() - begun


def table(found: list[Row]) -> Table:
    """Microseconds of each kind, and the ratios."""
    ratios = [f"{whose}{of}ratio" for of in ("", "p10 ", "cpu ") for whose in ("", "plain ")]
    names = ("pool", "actor", "in process", "plain", *ratios)
    shown = Table("rows", "isolation", *names, title="One call at a time, p50, us")
    for row in found:
        shown.add_row(str(row["rows"]), row["isolation"], *(str(row[name]) for name in names))
    return shown


if __name__ == "__main__":
    main()
