"""ViT-B/16 in bfloat16 as a graph: device time of a run and of its slowest pieces, and time of a request.

    python -m benchmarks.vit --batches 1 32 --out benchmarks/results

The weights are random. A request is timed alone, with its inputs on the device and its output left there.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from rich.table import Table

from cudnn_actor import CudnnRef, Graph, GraphBuilder, spawn
from cudnn_actor.protocol import PieceOfPlan, Tensor

from .gpu.setting import gpu_versions
from .recording import Row, attempted, keep

__all__ = ["Size", "main", "vit"]

_RUNS, _SLOWEST = 30, 10


class Size(NamedTuple):
    """A vision transformer's sizes."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    image: int = 224
    patch: int = 16
    classes: int = 1000


_USUAL, _SMALL = Size(), Size(layers=1, width=32, heads=2, image=32, classes=10)


def vit(batch: int, size: Size = _USUAL) -> Graph:
    """The network: images (N, 3, H, W), channels last, to scores (N, classes)."""
    g, heads = GraphBuilder(), size.heads
    tokens = (size.image // size.patch) ** 2

    def weight(name: str, *dims: int) -> Tensor:
        return g.input(name, dims, "bfloat16")

    def linear(x: Tensor, name: str, inputs: int, outputs: int) -> Tensor:
        product = x @ weight(f"{name}.weight", inputs, outputs) + weight(f"{name}.bias", outputs)
        return product.astype("bfloat16")

    def norm(x: Tensor, name: str) -> Tensor:
        scale, bias = weight(f"{name}.scale", size.width), weight(f"{name}.bias", size.width)
        return g.layer_norm(x, scale, bias).astype("bfloat16")

    def by_head(x: Tensor) -> Tensor:
        apart = g.reshape(x, (batch, tokens + 1, heads, size.width // heads))
        return g.transpose(apart, (0, 2, 1, 3))

    images = g.input("images", (batch, 3, size.image, size.image), "bfloat16", layout="NHWC")
    filters = g.input("patch.weight", (size.width, 3, size.patch, size.patch), "bfloat16", layout="NHWC")
    patches = g.conv(images, filters, stride=size.patch) + weight("patch.bias", size.width, 1, 1)
    rows = g.reshape(patches.astype("bfloat16"), (batch, size.width, tokens))
    first = g.broadcast_to(weight("class", 1, 1, size.width), (batch, 1, size.width))
    x = g.concatenate([first, g.transpose(rows, (0, 2, 1))], axis=1)
    x = (x + weight("position", 1, tokens + 1, size.width)).astype("bfloat16")
    for layer in range(size.layers):
        y = norm(x, f"{layer}.first")
        q, k, v = (by_head(linear(y, f"{layer}.{name}", size.width, size.width)) for name in "qkv")
        seen = g.reshape(g.transpose(g.attention(q, k, v), (0, 2, 1, 3)), (batch, tokens + 1, size.width))
        x = (x + linear(seen, f"{layer}.attended", size.width, size.width)).astype("bfloat16")
        y = linear(norm(x, f"{layer}.second"), f"{layer}.wide", size.width, 4 * size.width)
        y = g.gelu(y).astype("bfloat16")
        x = (x + linear(y, f"{layer}.narrow", 4 * size.width, size.width)).astype("bfloat16")
    return g.build(y=linear(norm(x, "last")[:, 0], "head", size.width, size.classes))


async def measured(gpu: CudnnRef, batch: int, size: Size) -> Row:
    """What is measured of a batch size."""
    graph, rng = vit(batch, size), np.random.default_rng(0)
    given: dict[str, Any] = {}
    for port in graph.inputs:
        scale = 1.0 if port.name == "images" or port.name.endswith("scale") else 0.02
        values = (scale * rng.standard_normal(port.spec.dims)).astype(ml_dtypes.bfloat16)
        given[port.name] = await gpu.upload(values, layout=port.spec.layout)
    took_ms = []
    for _ in range(3 + _RUNS):
        await gpu.drain()
        begin = time.perf_counter()
        result = await gpu.apply(graph, **given)
        await gpu.drain()
        took_ms.append((time.perf_counter() - begin) * 1e3)
        await gpu.free(result)
    explanation = await gpu.explain(graph, measure=True)
    return {
        "batch": batch,
        "run_us": explanation.run_us,
        "request_ms": statistics.median(took_ms[3:]),
        "pieces": len(explanation.pieces),
        "slowest": sorted(map(_told, explanation.pieces), key=lambda told: -told["us"])[:_SLOWEST],
    }


def _told(piece: PieceOfPlan) -> Row:
    assert piece.time is not None
    time_of = {"us": piece.time.us, "of_device": piece.time.of_device}
    return {"operations": piece.labels, "steps": piece.steps, **time_of}


def _measured_once(device: str, batch: int, size: Size) -> Iterator[Row]:
    async def one() -> Row:
        async with spawn(device=device, isolation="thread", hang_after_s=600.0) as gpu:
            return await measured(gpu, batch, size)

    yield asyncio.run(one())


def rows(batches: list[int], device: str, size: Size) -> Iterator[Row]:
    """Yields a row for each batch size."""

    for batch in batches:
        yield from attempted(f"batch {batch}", functools.partial(_measured_once, device, batch, size))


def sheet(found: list[Row]) -> Table:
    """The table for a terminal."""
    table = Table(title="ViT in bfloat16")
    for name in ("batch", "device, µs", "request, ms", "pieces", "the slowest, µs"):
        table.add_column(name, justify="right")
    for row in found:
        worst = row["slowest"][0]
        text = f"{worst['us']:,.1f} {worst['operations'][0].partition(' at ')[0]}"
        table.add_row(
            str(row["batch"]), f"{row['run_us']:,.1f}", f"{row['request_ms']:.3f}", str(row["pieces"]), text
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vit", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="a network of one layer, to try the program")
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = parser.parse_args()
    versions = {} if given.device == "cpu" else gpu_versions()
    size = _SMALL if given.small else _USUAL
    keep(rows(given.batches, given.device, size), sheet, given.out, "vit", versions=versions)


if __name__ == "__main__":
    main()
