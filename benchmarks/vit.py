"""ViT-B/16 in bfloat16 as a model: device time of a run and of its slowest pieces, and times of a request.

    python -m benchmarks.vit --batches 1 32 --out benchmarks/results

The weights are random. Requests are timed one after the other, in both isolations: with images on the device
and scores left there, and from NumPy to NumPy.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np
from rich.table import Table

from cudnn_actor import CudnnRef, Graph, GraphBuilder, spawn
from cudnn_actor.messages import RunModel
from cudnn_actor.models import Feature
from cudnn_actor.models.source import Specialised
from cudnn_actor.protocol import DType, PieceOfPlan, Port, Tensor
from cudnn_actor.trials.bench.crashes import FOR_EVER, standby_ready

from .gpu.setting import gpu_versions
from .recording import Row, attempted, keep

__all__ = ["Size", "main", "vit"]

_FIRST, _RUNS, _SLOWEST = 5, 50, 10


Isolation = Literal["thread", "process"]


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


class Network:
    """The network with random weights, as a source of a model."""

    defaults = ()
    outputs = (Feature(name="scores", dtype=DType.BFLOAT16, dims=None),)

    def __init__(self, batch: int, size: Size) -> None:
        self.graph = vit(batch, size)
        self.inputs = (Feature(name="images", dtype=DType.BFLOAT16, dims=self.graph.inputs[0].spec.dims),)
        rng = np.random.default_rng(0)
        self.values = {port.name: _values(port, rng) for port in self.graph.inputs}

    def specialise(self, *_: object) -> Specialised:
        """The graph, which is for one set of dims."""
        weights = {name: (name, values) for name, values in self.values.items() if name != "images"}
        return Specialised(
            graph=self.graph,
            inputs={"images": "images"},
            outputs={"scores": "y"},
            weights=weights,
            constants={},
        )


def _values(port: Port, rng: np.random.Generator) -> np.ndarray:
    scale = 1.0 if port.name == "images" or port.name.endswith("scale") else 0.02
    return (scale * rng.standard_normal(port.spec.dims)).astype(ml_dtypes.bfloat16)


async def _times_us(run: Callable[[], Awaitable[object]]) -> dict[str, float]:
    took = []
    for _ in range(_FIRST + _RUNS):
        begin = time.perf_counter()
        await run()
        took.append((time.perf_counter() - begin) * 1e6)
    took = sorted(took[_FIRST:])
    return {"p50": took[len(took) // 2], "p90": took[len(took) * 9 // 10], "least": took[0]}


async def measured(gpu: CudnnRef, batch: int, size: Size) -> Row:
    """What is measured of a batch size."""
    network = Network(batch, size)
    images = network.values["images"]
    async with await gpu.load(network) as model:
        on_device = await gpu.upload(images, layout="NHWC")
        scores = await gpu.empty(network.graph.outputs[0].spec.dims, dtype="bfloat16")
        await model.warm()
        message = RunModel.of(model.ref, {"images": on_device}, {"scores": scores})
        on_device_us = await _times_us(lambda: gpu.ask(message))
        numpy_us = await _times_us(lambda: gpu.run(model, images=images))
        explanation = await model.explain(measure=True)
    return {
        "batch": batch,
        "run_us": explanation.run_us,
        "on_device_us": on_device_us,
        "numpy_us": numpy_us,
        "pieces": len(explanation.pieces),
        "slowest": sorted(map(_told, explanation.pieces), key=lambda told: -told["us"])[:_SLOWEST],
    }


async def after_kills(network: Network, device: str, standby: int, kills: int) -> Row:
    """Milliseconds from SIGKILL of the worker to the next answer of a run that was not begun before it."""
    images, took = network.values["images"], []
    async with spawn(
        device=device, isolation="process", standby=standby, hang_after_s=600.0, max_restarts=FOR_EVER
    ) as gpu:
        model = await gpu.load(network)
        await model.warm()
        for _ in range(kills):
            await gpu.run(model, images=images)
            await standby_ready(gpu)
            pid, generation = gpu.worker_pid, gpu.generation
            assert pid is not None, "a request has just been answered"
            begin = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            await gpu.run(model, images=images)
            while gpu.generation == generation:  # the old worker had answered before it died
                await gpu.run(model, images=images)
            took.append(1e3 * (time.perf_counter() - begin))
        await model.close()
    return {"standby": standby, "after_kill_ms": sorted(took)}


def _told(piece: PieceOfPlan) -> Row:
    assert piece.time is not None
    time_of = {"us": piece.time.us, "of_device": piece.time.of_device}
    return {"operations": piece.labels, "steps": piece.steps, **time_of}


def _measured_once(device: str, batch: int, size: Size, isolation: Isolation) -> Iterator[Row]:
    async def one() -> Row:
        async with spawn(
            device=device,
            isolation=isolation,
            hang_after_s=600.0,
            onnx_runtime=False,  # so that there are pieces on the CPU, too
        ) as gpu:
            return {"isolation": isolation, **await measured(gpu, batch, size)}

    yield asyncio.run(one())


def _killed_once(device: str, batch: int, size: Size, standby: int, kills: int) -> Iterator[Row]:
    network = Network(batch, size)
    yield {"batch": batch, **asyncio.run(after_kills(network, device, standby, kills))}


def rows(batches: list[int], device: str, size: Size, kills: int) -> Iterator[Row]:
    """Yields a row for each batch size and isolation, and one for kills with a standby and without."""
    for standby in (1, 0) if kills else ():
        part = functools.partial(_killed_once, device, batches[0], size, standby, kills)
        yield from attempted(f"kills, standby {standby}", part)
    isolations: tuple[Isolation, ...] = ("thread", "process")
    for batch in batches:
        for isolation in isolations:
            part = functools.partial(_measured_once, device, batch, size, isolation)
            yield from attempted(f"batch {batch}, {isolation}", part)


def sheet(found: list[Row]) -> Table:
    """The table for a terminal."""
    table = Table(title="ViT in bfloat16")
    names = ("batch", "isolation", "device, µs", "request on the device, µs", "NumPy to NumPy, µs", "pieces")
    for name in (*names, "the slowest, µs"):
        table.add_column(name, justify="right")
    for row in found:
        if "after_kill_ms" in row:
            told = ", ".join(f"{ms:,.0f}" for ms in row["after_kill_ms"])
            table.add_row(str(row["batch"]), f"standby {row['standby']}", "ms after a kill:", told)
            continue
        worst = row["slowest"][0]
        text = f"{worst['us']:,.1f} {worst['operations'][0].partition(' at ')[0]}"
        table.add_row(
            str(row["batch"]),
            row["isolation"],
            f"{row['run_us']:,.1f}",
            f"{row['on_device_us']['p50']:,.0f}",
            f"{row['numpy_us']['p50']:,.0f}",
            str(row["pieces"]),
            text,
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vit", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="a network of one layer, to try the program")
    parser.add_argument(
        "--kills", type=int, default=0, help="how often a worker is killed, with each standby"
    )
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = parser.parse_args()
    versions = {} if given.device == "cpu" else gpu_versions()
    size = _SMALL if given.small else _USUAL
    keep(rows(given.batches, given.device, size, given.kills), sheet, given.out, "vit", versions=versions)


if __name__ == "__main__":
    main()
