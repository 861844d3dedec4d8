"""What a service says about how it runs a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor import (
    Explanation,
    Fault,
    FaultPlan,
    Graph,
    GraphBuilder,
    InvalidRequest,
    QuarantinedRequest,
    ServiceStopped,
    UnsupportedGraph,
    spawn,
)
from cudnn_actor.messages import Explain, Free
from cudnn_actor.operations import MaxPool, Window

from ..engines.devices import why_not
from .example_graphs import GRAPHS
from .rigs import Trio, in_thread, spawn_on
from .workshops import BuildingEngine, Workshop

isolations = pytest.mark.parametrize("isolation", ["thread", "process"])


def small() -> Graph:
    g = GraphBuilder()
    x = g.input("x", (4, 8))
    y = g.softmax(x * 2.0)
    return g.build(y=y)


def unsupported() -> Graph:
    """No engine adds up so many products of int8."""
    g = GraphBuilder()
    x, w = g.input("x", (1, 131_072, 1, 1), "int8"), g.input("w", (4, 131_072, 1, 1), "int8")
    y = g.conv(x, w)
    return g.build(y=y + 1)


@isolations
async def test_on_the_cpu_each_piece_has_the_one_plan_that_runs_it(isolation: Any) -> None:
    graph = small()
    async with spawn(device="cpu", isolation=isolation) as gpu:
        explanation = await gpu.explain(graph)
        listed = await gpu.plans(graph)
        assert listed == await gpu.plans(await _bound(gpu, graph), measure=True)
        with pytest.raises(InvalidRequest, match="measure"):
            await gpu.plans(graph, measure="yes")  # type: ignore[arg-type]
    for piece, plain in zip(listed.pieces, explanation.pieces, strict=True):
        (candidate,) = piece.candidates
        assert not plain.candidates
        assert (candidate.name, candidate.workspace) == (piece.plan, piece.workspace)
        assert candidate.chosen
        assert candidate.deterministic
        assert f"candidate {piece.plan}, runs" in str(listed)


@isolations
async def test_on_the_cpu_each_operation_is_a_piece_with_its_line(isolation: Any) -> None:
    graph = small()
    async with spawn(device="cpu", isolation=isolation) as gpu:
        explanation = await gpu.explain(graph)
        assert explanation == await graph.explain(gpu)
        receipt = await gpu.ask(await _bound(gpu, graph))
    assert explanation.plan == receipt.plan
    assert explanation.digest == graph.body.digest()
    assert [piece.operations for piece in explanation.pieces] == [(0,), (1,)]
    labels = [label for piece in explanation.pieces for label in piece.labels]
    assert [label.rpartition(":")[0] for label in labels] == [
        "mul at test_explain.py",
        "softmax at test_explain.py",
    ]
    assert (explanation.engine, explanation.steps, explanation.checked) == ("cpu", 2, True)
    assert "checked" not in str(explanation).lower(), "the CPU engine has no self-check"
    for words in (explanation.plan, "2 operations in 2 pieces", *labels):
        assert words in str(explanation)


async def _bound(gpu: Any, graph: Graph) -> Any:
    from cudnn_actor import RunGraph

    buffers = {port.name: await gpu.empty(port.spec.dims) for port in graph.ports}
    return RunGraph.bind(graph, buffers)


async def test_a_plan_that_is_explained_is_not_built_again() -> None:
    graph = small()
    async with spawn(device="cpu") as gpu:
        await gpu.explain(graph)
        await gpu.apply(graph, x=await gpu.upload(np.ones((4, 8), np.float32)))
        assert (await gpu.statistics()).plans.misses == 1


@isolations
async def test_messages_are_explained_too(isolation: Any) -> None:
    async with spawn(device="cpu", isolation=isolation) as gpu:
        trio = await Trio.on(gpu)
        (piece,) = (await gpu.explain(trio.product())).pieces
        assert (piece.labels, piece.steps) == (("conv_fwd",), ("NumPy, block by block",))
        x, y = await gpu.empty((1, 1, 4, 4)), await gpu.empty((1, 1, 2, 2))
        pooled = await gpu.explain(MaxPool(x=x, y=y, window=Window.symmetric(2, 2, stride=2)))
        assert [piece.labels for piece in pooled.pieces] == [("max_pool",)]


@isolations
async def test_what_has_no_plan_is_refused(isolation: Any) -> None:
    async with spawn(device="cpu", isolation=isolation) as gpu:
        x = await gpu.empty((1, 1, 4, 4))
        with pytest.raises(InvalidRequest, match="has no plan"):
            await gpu.explain(Free(buffer=x))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="y"):
            await gpu.explain(MaxPool(x=x, window=Window.symmetric(2, 2)))
        with pytest.raises(InvalidRequest, match="graph"):
            await gpu.ask(Explain(graph=small()))  # type: ignore[arg-type]
        with pytest.raises(UnsupportedGraph, match=r"conv_fwd at test_explain\.py:\d+"):
            await gpu.explain(unsupported())


async def test_an_explanation_waits_for_the_plan_and_for_nothing_else() -> None:
    workshop, graph = Workshop(), small()
    async with spawn_on(lambda: BuildingEngine(workshop)) as gpu:
        with workshop.building.closed():
            waits = gpu.submit(Explain(graph=graph.body))
            await in_thread(workshop.building.wait_for_arrival)
            await gpu.free(await gpu.upload(np.ones(3)))
            assert not waits.done()
        assert isinstance(await waits, Explanation)
        assert await gpu.explain(graph) == await waits


async def test_a_quarantined_graph_is_not_explained() -> None:
    faults = FaultPlan().at(2, Fault.KILL, of=Explain).at(3, Fault.KILL, of=Explain)
    async with spawn(device="cpu", isolation="process", faults=faults) as gpu:
        assert isinstance(await gpu.explain(small()), Explanation)
        with pytest.raises(QuarantinedRequest):
            await gpu.explain(small())
    with pytest.raises(ServiceStopped):
        await gpu.explain(small())


async def test_it_is_answered_only_to_who_asks() -> None:
    async with spawn(device="cpu") as gpu:
        gpu.tell(Explain(graph=small().body))
        await gpu.drain()
        assert (await gpu.statistics()).failed == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", GRAPHS)
async def test_on_a_gpu_every_operation_is_in_a_piece_or_a_view_also_from_the_store(
    name: str, tmp_path: Any
) -> None:
    if (why := why_not("cuda")) is not None:
        pytest.skip(why)
    graph = GRAPHS[name]("bfloat16")
    found = []
    for _ in range(2):
        async with spawn(device="cuda:0", plan_store=tmp_path) as gpu:
            found.append(await gpu.explain(graph))
    built, stored = found
    assert built == stored
    inside = [number for piece in built.pieces for number in piece.operations]
    assert len(inside) == len(set(inside)) == len(graph.body.operations) - len(built.views)
    assert all(piece.steps and piece.labels for piece in built.pieces)
    assert built.scratch_bytes <= built.workspace
    assert str(built)
    assert graph.to_svg(built)
