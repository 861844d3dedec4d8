"""Clients with one picture each, batched, against the best fixed batch: pictures a second and times.

    python -m benchmarks.batching --device cuda:0 --out benchmarks/results
    python -m benchmarks.batching --device cuda:0 --model resnet50.onnx

Without a file it is ViT-B/16 in bfloat16 with random weights. A file must have one input, whose one open
dim is that of the batch. Every run takes NumPy arrays and gives NumPy arrays. Of fixed batches, one and two
are in flight. Each client sends its next picture when it has its answer; its times have all that it waited.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table

from cudnn_actor import CudnnRef, Model, spawn
from cudnn_actor.cli.throughput import Throughput, measure_runs
from cudnn_actor.models import Feature
from cudnn_actor.models.source import Specialised
from cudnn_actor.protocol import DType, TensorSpec

from .gpu.setting import gpu_versions
from .recording import Row, attempted, keep
from .vit import Network, Size

__all__ = ["main"]

_SMALL = Size(layers=1, width=32, heads=2, image=32, classes=10)
Isolation = Literal["thread", "process"]


class _AnyBatch:
    """The vision transformer for every size of a batch, as a source of a model."""

    defaults = ()

    def __init__(self, size: Size) -> None:
        self._size = size
        self._weights = Network(1, size).specialise().weights
        dims = ("N", 3, size.image, size.image)
        self.inputs = (Feature(name="images", dtype=DType.BFLOAT16, dims=dims),)
        self.outputs = (Feature(name="scores", dtype=DType.BFLOAT16, dims=("N", size.classes)),)

    def specialise(self, specs: Mapping[str, TensorSpec], *_: object) -> Specialised:
        """The graph for a batch."""
        graph = Network(specs["images"].dims[0], self._size).graph
        return Specialised(
            graph=graph,
            inputs={"images": "images"},
            outputs={"scores": "y"},
            weights=self._weights,
            constants={},
        )


def _pictures(model: Model, count: int) -> dict[str, np.ndarray]:
    (feature,) = model.inputs
    assert feature.dims is not None
    assert feature.dtype is not None
    dims = (count, *(int(dim or 0) for dim in feature.dims[1:]))
    values = np.random.default_rng(0).standard_normal(dims)
    return {feature.name: values.astype(feature.dtype.numpy)}


def _row(what: str, found: Throughput, pictures: float, **more: Any) -> Row:
    return {
        "what": what,
        "pictures_per_s": round(found.per_s * pictures, 1),
        "p50_ms": round(found.p50_ms, 3),
        "p90_ms": round(found.p90_ms, 3),
        "p99_ms": round(found.p99_ms, 3),
        **more,
    }


async def _fixed(gpu: CudnnRef, model: Model, batch: int, tasks: int, seconds: float) -> Row:
    given = _pictures(model, batch)
    found = await measure_runs(lambda: gpu.run(model, given), tasks, seconds)
    return _row(f"batch {batch}, {tasks} in flight", found, batch)


async def _clients(gpu: CudnnRef, model: Model, given: argparse.Namespace) -> Row:
    async with gpu.batched(
        model, max_batch=given.max_batch, max_delay_us=given.max_delay_us, in_flight=given.in_flight
    ) as endpoint:
        picture = _pictures(model, 1)
        found = await measure_runs(lambda: endpoint(picture), given.clients, given.seconds)
        mean = round(endpoint.statistics().mean_batch, 2)
    return _row(f"{given.clients} clients", found, 1, mean_batch=mean)


async def _found(given: argparse.Namespace, isolation: Isolation) -> list[Row]:
    """A row for each fixed batch, and one for the clients, with its ratios."""
    source = given.model or _AnyBatch(_SMALL if given.small else Size())
    sizes = [1 << step for step in range(given.max_batch.bit_length())]
    async with (
        spawn(
            device=given.device, isolation=isolation, hang_after_s=600.0, plan_store=given.plan_store
        ) as gpu,
        await gpu.load(source) as model,
    ):
        await model.warm({model.inputs[0].dims[0]: sizes})  # type: ignore[index, dict-item]
        rows = [await _fixed(gpu, model, batch, tasks, given.seconds) for batch in sizes for tasks in (1, 2)]
        clients = await _clients(gpu, model, given)
    best = max(row["pictures_per_s"] for row in rows)
    clients["of_the_best"] = round(clients["pictures_per_s"] / best, 3)
    clients["p99_by_p50"] = round(clients["p99_ms"] / clients["p50_ms"], 2)
    return [{"isolation": isolation, **row} for row in (*rows, clients)]


def _measured_once(given: argparse.Namespace, isolation: Isolation) -> list[Row]:
    return asyncio.run(_found(given, isolation))


def rows(given: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of each isolation."""
    for isolation in given.isolations:
        yield from attempted(isolation, functools.partial(_measured_once, given, isolation))


def sheet(found: list[Row]) -> Table:
    """The table for a terminal."""
    table = Table(title="one picture each, batched, and fixed batches")
    names = ("isolation", "what", "pictures a second", "p50, ms", "p90, ms", "p99, ms", "samples a batch")
    for name in (*names, "of the best fixed", "p99 / p50"):
        table.add_column(name, justify="right")
    for row in found:
        times = (f"{row[name]:,.2f}" for name in ("p50_ms", "p90_ms", "p99_ms"))
        more = (str(row.get(name, "")) for name in ("mean_batch", "of_the_best", "p99_by_p50"))
        table.add_row(row["isolation"], row["what"], f"{row['pictures_per_s']:,.1f}", *times, *more)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batching", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", type=Path, help="an ONNX file; ViT-B/16 unless given")
    parser.add_argument("--small", action="store_true", help="a network of one layer, to try the program")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--max-delay-us", type=float, default=2000)
    parser.add_argument("--in-flight", type=int, default=2, help="batches that are sent at a time")
    parser.add_argument("--seconds", type=float, default=5.0, help="for how long, each row")
    isolations: tuple[Isolation, ...] = ("process", "thread")
    parser.add_argument("--isolations", nargs="+", choices=isolations, default=isolations)
    parser.add_argument("--plan-store", type=Path, help="a directory for plans, which the next run finds")
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = parser.parse_args()
    versions = {} if given.device == "cpu" else gpu_versions()
    asked = {name: str(value) for name, value in vars(given).items()}
    keep(rows(given), sheet, given.out, "batching", versions=versions, asked=asked)


if __name__ == "__main__":
    main()
