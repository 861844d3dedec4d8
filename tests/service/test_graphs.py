"""Graphs through the service: what they compute, what is refused, and what a crash does to them."""

from __future__ import annotations

import numpy as np
import pytest

from cudnn_actor import (
    ConvSpec,
    Fault,
    FaultPlan,
    Graph,
    GraphBuilder,
    InvalidRequest,
    Loop,
    OutcomeUnknown,
    RunGraph,
    RunLoop,
    StaleBufferError,
    spawn,
)
from cudnn_actor.operations import MatMul
from cudnn_actor.protocol.types.dtypes import DTypeName
from cudnn_actor.service import GraphLimits

from .example_graphs import (
    GRAPHS,
    assert_close,
    bottleneck,
    defined,
    downloaded,
    updated,
    uploaded,
    values_for,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", GRAPHS)
async def test_a_graph_computes_what_its_operations_define(device: str, name: str, dtype: DTypeName) -> None:
    graph = GRAPHS[name](dtype)
    values = values_for(graph)
    wanted = defined(graph, values)
    async with spawn(device=device, isolation="thread") as gpu:
        buffers = await uploaded(gpu, graph, values)
        got = await downloaded(gpu, graph, buffers, await gpu.apply(graph, buffers))
    assert_close(got, wanted, dtype)


@pytest.mark.parametrize("standby", [0, 1])
async def test_a_graph_is_run_again_after_a_crash(device: str, standby: int) -> None:
    graph = bottleneck("float32")
    values = values_for(graph)
    faults = FaultPlan().at(3, Fault.KILL, of=RunGraph)
    async with spawn(device=device, isolation="process", standby=standby, faults=faults) as gpu:
        buffers = await uploaded(gpu, graph, values)
        results = [await gpu.download(await gpu.apply(graph, buffers)) for _ in range(5)]
        assert gpu.generation == 2
    for result in results:
        np.testing.assert_array_equal(result, results[0])


async def test_a_graph_with_an_update_is_not_run_twice(device: str) -> None:
    graph = updated("float32")
    values = values_for(graph)
    faults = FaultPlan().at(2, Fault.KILL, of=RunGraph)
    async with spawn(device=device, isolation="process", faults=faults) as gpu:
        buffers = await uploaded(gpu, graph, values)
        await gpu.apply(graph, buffers)
        with pytest.raises(OutcomeUnknown):
            await gpu.apply(graph, buffers)
        with pytest.raises(StaleBufferError):
            await gpu.download(buffers["mean"])
        np.testing.assert_array_equal(await gpu.download(buffers["x"]), values["x"])


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_a_clip_whose_result_is_stored_passes_its_gradient_on(device: str, isolation: str) -> None:
    g = GraphBuilder()
    x = g.input("x", (4,), "float16")
    loss = g.clip(x * 1.1, -1.0, 2.0).sum()
    graph = g.build(loss=loss, dx=g.grad(loss, x))
    async with spawn(device=device, isolation=isolation) as gpu:  # type: ignore[arg-type]
        given = await gpu.upload(np.array([0.3, 0.7, -0.9, 1.9], np.float16))
        found = await gpu.apply(graph, x=given)
        wanted = np.array([1.1, 1.1, 1.1, 0.0], np.float16)
        np.testing.assert_array_equal(await gpu.download(found.dx), wanted)


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_requests_without_elements_give_what_their_definitions_say(device: str, isolation: str) -> None:
    g = GraphBuilder()
    image, w = g.input("image", (0, 3, 4, 4)), g.input("w", (5, 3, 3, 3))
    y = g.relu(g.conv(image, w))
    graph = g.build(y=y, dw=g.grad(y, w))
    async with spawn(device=device, isolation=isolation) as gpu:  # type: ignore[arg-type]
        all_dims = ((2, 0), (0, 3), (0, 3, 4, 4), (5, 3, 3, 3))
        a, b, x, weights = [await gpu.upload(np.ones(dims, np.float32)) for dims in all_dims]
        for _ in range(6):  # on CUDA, a run that is repeated is captured
            product = await gpu.download(await gpu.apply(MatMul(a=a, b=b)))
            np.testing.assert_array_equal(product, np.zeros((2, 3)))
            made = await gpu.conv_fwd(x, weights, conv=ConvSpec.symmetric(2))
            assert (await gpu.download(made)).shape == (0, 5, 2, 2)
            found = await gpu.apply(graph, image=x, w=weights)
            assert (await gpu.download(found.y)).shape == (0, 5, 2, 2)
            np.testing.assert_array_equal(await gpu.download(found.dw), np.zeros((5, 3, 3, 3)))
        assert (await gpu.explain(graph)).digest


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_more_graphs_than_a_worker_keeps(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cudnn_actor.isolation.known_graphs.MOST_GRAPHS", 2)
    async with spawn(device="cpu", isolation=isolation) as gpu:  # type: ignore[arg-type]
        x = await gpu.upload(np.arange(6, dtype=np.float32))
        graphs = []
        for number in range(5):
            g = GraphBuilder()
            graphs.append(g.build(y=g.input("x", (6,)) + float(number)))
        for number in (0, 1, 2, 3, 4, 0, 4, 1):
            y = await gpu.apply(graphs[number], x=x)
            np.testing.assert_array_equal(await gpu.download(y), np.arange(6) + number)


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_what_does_not_fit_a_graph_is_refused(isolation: str) -> None:
    g = GraphBuilder()
    graph = g.build(y=g.input("x", (2, 3)) * 2.0)
    async with spawn(device="cpu", isolation=isolation) as gpu:  # type: ignore[arg-type]
        x, other = (
            await gpu.upload(np.ones((2, 3), np.float32)),
            await gpu.upload(np.ones((3, 2), np.float32)),
        )
        cases = {
            "z": gpu.apply(graph, x=x, z=other),
            "x": gpu.apply(graph, x=other),
            "y": gpu.ask(RunGraph(graph=graph, buffers=(x, x))),
            "buffers": gpu.ask(RunGraph(graph=graph, buffers=(x,))),
        }
        for field, asked in cases.items():
            with pytest.raises(InvalidRequest) as caught:
                await asked
            assert caught.value.field == field
        await gpu.free(x)
        with pytest.raises(StaleBufferError, match="x="):
            await gpu.apply(graph, x=x)


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("limits", [GraphLimits(operations=2), GraphLimits(nbytes=700)])
async def test_a_graph_over_a_limit_of_the_service_is_refused_before_anything_is_taken(
    isolation: str, limits: GraphLimits
) -> None:
    def powers(count: int) -> Graph:
        g = GraphBuilder()
        x = g.input("x", (3,))
        for _ in range(count):
            x = x * x
        return g.build(y=x)

    async with spawn(device="cpu", isolation=isolation, graph_limits=limits) as gpu:  # type: ignore[arg-type]
        x = await gpu.upload(np.full(3, 2, np.float32))
        large, small = powers(3), powers(1)
        for refused in (
            gpu.apply(large, x=x),
            gpu.explain(large),
            gpu.warm(large),
            gpu.warm([small, large]),
            gpu.warm(RunGraph(graph=large, buffers=(x, x))),
            gpu.ask(RunGraph(graph=large, buffers=(x, x))),
            gpu.loop(Loop(body=large, carried={"x": "y"}), x=x, turns=2),
            gpu.ask(RunLoop(loop=Loop(body=large), buffers=(x, x), scratch=x, turns=2)),
        ):
            with pytest.raises(InvalidRequest, match=r"over the limit GraphLimits\."):
                await refused
        statistics = await gpu.statistics()
        assert (statistics.live_buffers, statistics.plans.misses) == (1, 0)
        np.testing.assert_array_equal(await gpu.download(await gpu.apply(small, x=x)), 4)
