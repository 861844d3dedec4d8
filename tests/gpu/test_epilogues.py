"""What stands behind a convolution in cuDNN's graph, on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cudnn_actor import spawn
from cudnn_actor.cli.graph_bench import graph_bench, made_up_values, open_engine
from cudnn_actor.engines.cuda import CudaEngine
from cudnn_actor.engines.cuda.running.barriers import waits
from cudnn_actor.protocol import DType, Graph, GraphBuilder, OperationGraph, Tensor

from ..engines.differences import computed
from ..engines.references import relative_error
from ..service.example_graphs import downloaded, uploaded
from .bounds import UNIT

BOUNDS: dict[str, Callable[[GraphBuilder, Tensor], Tensor]] = {
    "clip": lambda g, y: g.clip(y, -1.5, 2.5),
    "only an upper bound": lambda g, y: g.clip(y, None, 2.5),
    "between 0 and 6": lambda g, y: g.minimum(g.maximum(y, 0.0), 6.0),
}
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 3.0, 7.0, -2.0]


def behind(name: str) -> Graph:
    """Each pixel of one channel as it is, and then between bounds."""
    g = GraphBuilder()
    x = g.input("x", (1, 16, 3, 3), "bfloat16", layout="NHWC")
    w = g.input("w", (16, 16, 1, 1), "bfloat16", layout="NHWC")
    return g.build(y=BOUNDS[name](g, g.conv(x, w)))


async def run(graph: Graph, values: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Its results on the GPU, and the steps that give them."""
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        buffers = await uploaded(gpu, graph, values)
        found = await downloaded(gpu, graph, buffers, await gpu.apply(graph, buffers))
        explained = await gpu.explain(graph)
    return found, [step for piece in explained.pieces for step in piece.steps]


@pytest.mark.parametrize("name", BOUNDS)
async def test_bounds_keep_what_is_no_number(name: str) -> None:
    graph, kind = behind(name), DType.BFLOAT16.numpy
    x = np.zeros((1, 16, 3, 3), kind)
    x[0, 0] = np.reshape(SPECIAL, (3, 3))
    w = np.zeros((16, 16, 1, 1), kind)
    w[0, 0] = 1  # of the others, nothing reaches: 0 * inf would be NaN
    values = {"x": x, "w": w}
    found, steps = await run(graph, values)
    got, wanted = (each["y"][0, 0].astype(np.float32) for each in (found, computed(graph, values)))
    np.testing.assert_array_equal(got, wanted)
    assert [step.split()[0] for step in steps] == ["cuDNN"]


def first_layer(dtype: DType) -> Graph:
    """Of a network for images, with its gradients."""
    g = GraphBuilder()
    x = g.input("x", (4, 3, 150, 150), dtype, layout="NHWC")
    w = g.input("w", (32, 3, 5, 5), dtype, layout="NHWC")
    y = g.relu(g.conv(x, w, pad=2, stride=2, bias=g.input("b", (32,), dtype)))
    dx, dw = g.grad(y, (x, w))
    return g.build(y=y, dx=dx, dw=dw)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
async def test_a_first_layer_has_channels_of_zeros(dtype: DType) -> None:
    rng, graph = np.random.default_rng(5), first_layer(dtype)
    values = {port.name: rng.uniform(-1, 1, port.spec.dims).astype(dtype.numpy) for port in graph.inputs}
    found, steps = await run(graph, values)
    assert steps.count("kernel of pad") == 4
    wanted = computed(graph, values)
    for name, value in wanted.items():
        assert relative_error(found[name], value.astype(np.float64)) < 4 * UNIT[dtype], name


async def test_each_sample_adds_its_own_values_to_channels() -> None:
    """As the embedding of a time step does. cuDNN's graphs with a convolution took those of other samples."""
    g = GraphBuilder()
    x = g.input("x", (3, 128, 32, 32), "bfloat16", layout="NHWC")
    w = g.input("w", (128, 128, 3, 3), "bfloat16", layout="NHWC")
    y = g.conv(x, w, pad=1, bias=g.input("b", (128,), "bfloat16")) + g.input("t", (3, 128, 1, 1))
    a, b = g.input("a", (3, 128, 64), "bfloat16"), g.input("c", (3, 64, 128), "bfloat16")
    graph = g.build(y=y.astype("bfloat16"), z=a @ b + g.input("d", (3, 1, 128), "bfloat16"))
    rng = np.random.default_rng(6)
    values = {p.name: rng.uniform(-1, 1, p.spec.dims).astype(p.spec.dtype.numpy) for p in graph.inputs}
    found, _ = await run(graph, values)
    for name, value in computed(graph, values).items():
        assert relative_error(found[name], value.astype(np.float64)) < 4 * UNIT[DType.BFLOAT16], name


def downsampled() -> OperationGraph:
    """The end of a bottleneck: two convolutions, of which the second adds what the first has just written."""
    g = GraphBuilder()

    def convolved(x: Tensor, name: str, stride: int) -> Tensor:
        channels = x.dims[1]
        w = g.input(f"w{name}", (256, channels, 1, 1), "bfloat16", layout="NHWC")
        return g.conv(x, w, stride=stride, bias=g.input(f"b{name}", (256,), "bfloat16"))

    narrow = g.input("narrow", (1, 64, 56, 56), "bfloat16", layout="NHWC")
    wide = g.input("wide", (1, 64, 56, 56), "bfloat16", layout="NHWC")
    return g.build(y=g.relu(convolved(narrow, "1", 1) + convolved(wide, "2", 1))).body


def test_a_residual_is_there_before_it_is_read() -> None:
    """Without a barrier, cuDNN's kernel read a part of it before the one in front had written that."""
    graph = downsampled()
    with open_engine("cuda:0") as engine, graph_bench(engine, graph) as bench:
        assert isinstance(engine, CudaEngine)
        bench.fill(made_up_values(graph, 1))
        plan = engine.build(graph, workspace_limit=None)
        assert any(waits(plan.recipe.steps))
        (first,) = bench.run(plan).values()
        for number in range(200):
            if number < 100:
                engine.forget_replays()
            engine.poison_workspace()
            (again,) = bench.run(plan).values()
            np.testing.assert_array_equal(again.view(np.uint16), first.view(np.uint16))
