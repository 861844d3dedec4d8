"""Weights that a deployed model has in another form: prepared once, and again after a write to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor import BufferRef, CudnnRef, Graph, GraphBuilder, spawn
from cudnn_actor.messages import Allocate, DeployModel, ModelGraph, ModelRef, RunModel, WarmModel
from cudnn_actor.operations import Recurrent, RecurrentMode
from cudnn_actor.protocol import DType

from ..engines.references import relative_error

COUNTS = (2, 5)
FEATURES, HIDDEN, STEPS = 12, 16, 9


Dims = dict[str, tuple[int, ...]]


def layer(count: int) -> tuple[Graph, Dims]:
    """An LSTM layer on sequences."""
    g = GraphBuilder()
    dims: Dims = {
        "w_ih": (1, 4 * HIDDEN, FEATURES),
        "w_hh": (1, 4 * HIDDEN, HIDDEN),
        "bias": (1, 2, 4 * HIDDEN),
    }
    given: Any = {name: g.input(name, each, DType.FLOAT16) for name, each in dims.items()}
    x: Any = g.input("x", (STEPS, count, FEATURES), DType.FLOAT16)
    return g.build(y=g.apply(Recurrent(x=x, **given, mode=RecurrentMode.LSTM))), dims


def first_layer(count: int) -> tuple[Graph, Dims]:
    """A convolution of images, whose 3 channels become 8 on CUDA."""
    g = GraphBuilder()
    x = g.input("x", (count, 3, 32, 32), DType.FLOAT16, layout="NHWC")
    w = g.input("w", (16, 3, 3, 3), DType.FLOAT16, layout="NHWC")
    return g.build(y=g.relu(g.conv(x, w, pad=1))), {"w": (16, 3, 3, 3)}


def strided_layer(count: int) -> tuple[Graph, Dims]:
    """ResNet's first convolution, which runs on blocks of pixels."""
    g = GraphBuilder()
    x = g.input("x", (count, 3, 64, 64), DType.FLOAT16, layout="NHWC")
    w = g.input("w", (64, 3, 7, 7), DType.FLOAT16, layout="NHWC")
    return g.build(y=g.relu(g.conv(x, w, pad=3, stride=2))), {"w": (64, 3, 7, 7)}


def adapted(count: int) -> tuple[Graph, Dims]:
    """A product with a weight to which a product of others is added."""
    g = GraphBuilder()
    dims: Dims = {"w": (FEATURES, HIDDEN), "down": (FEATURES, 2), "up": (2, HIDDEN)}
    w, down, up = (g.input(name, each, DType.FLOAT16) for name, each in dims.items())
    x = g.input("x", (count, FEATURES), DType.FLOAT16)
    return g.build(y=g.matmul(x, w + 0.5 * g.matmul(down, up))), dims


def scaled(count: int) -> tuple[Graph, Dims]:
    """A product with a weight that is scaled by row before."""
    g = GraphBuilder()
    dims: Dims = {"w": (FEATURES, HIDDEN), "scale": (FEATURES, 1)}
    w, scale = (g.input(name, each, DType.FLOAT16) for name, each in dims.items())
    return g.build(y=g.matmul(g.input("x", (count, FEATURES), DType.FLOAT16), w * scale)), dims


MODELS = {
    "layer": layer,
    "first_layer": first_layer,
    "strided_layer": strided_layer,
    "adapted": adapted,
    "scaled": scaled,
}


def drawn(seed: int, dims: tuple[int, ...]) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(dims) / 4).astype(np.float16)


class Deployed:
    """A model of several batch sizes, and its weights."""

    def __init__(self, gpu: CudnnRef, make: Any) -> None:
        self.gpu, self.make = gpu, make
        self.weights: dict[str, BufferRef] = {}
        self.model: ModelRef | None = None

    async def deploy(self) -> None:
        """Deploy it."""
        graphs = []
        for count in COUNTS:
            graph, dims = self.make(count)
            for name, each in dims.items():
                if name not in self.weights:
                    spec = graph.ports[graph.places[name]].spec
                    self.weights[name] = await self.gpu.ask(Allocate(spec=spec))
                    await self.gpu.write(self.weights[name], drawn(0, each))
            specs = {name: graph.ports[graph.places[name]].spec for name in ("x", "y")}
            places = {name: await self.gpu.ask(Allocate(spec=spec)) for name, spec in specs.items()}
            graphs.append(
                ModelGraph(
                    name=str(count),
                    graph=graph,
                    buffers=tuple((places | self.weights)[name] for name in graph.places),
                    specs={"x": specs["x"]},
                    inputs={"x": "x"},
                    outputs={"y": "y"},
                )
            )
        self.model = await self.gpu.ask(DeployModel())
        # The plans that it keeps: runs alone would begin with others, if cuDNN compiles kernels for these.
        await self.gpu.ask(WarmModel(model=self.model, graphs=tuple(graphs)))

    async def run(self, count: int, seed: int) -> np.ndarray:
        """What a run gives."""
        graph, _ = self.make(count)
        x = drawn(seed, graph.ports[graph.places["x"]].spec.dims)
        assert self.model is not None
        results = await self.gpu.ask(RunModel.of(self.model, {"x": x}))
        return results["y"]


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("name", MODELS)
async def test_runs_read_the_weights_of_the_last_write(isolation: Any, name: str) -> None:
    async with spawn(device="cuda", isolation=isolation) as gpu, spawn(device="cpu", exact=True) as cpu:
        on_gpu, on_cpu = (Deployed(each, MODELS[name]) for each in (gpu, cpu))
        for each in (on_gpu, on_cpu):
            await each.deploy()
        for turn in range(3):
            for seed in range(6):
                count = COUNTS[seed % 2]
                found, wanted = [await each.run(count, 10 * turn + seed) for each in (on_gpu, on_cpu)]
                assert relative_error(found, wanted.astype(np.float64)) < 1e-2, (turn, seed)
            assert (await gpu.statistics()).converted_bytes > 0, [
                str(await gpu.explain(on_gpu.make(count)[0])) for count in COUNTS
            ]
            for each in (on_gpu, on_cpu):
                for number, ref in enumerate(each.weights.values()):
                    await each.gpu.write(ref, drawn(100 * turn + number + 1, ref.spec.dims))
