"""Services whose CPU engine has ONNX Runtime run graphs: what they say, and that no run has old weights."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from cudnn_actor import BufferRef, CudnnRef, Fault, FaultPlan, Graph, GraphBuilder, InvalidRequest, RunGraph
from cudnn_actor.messages import DeployModel, ModelGraph, ModelRef, RunModel, UnloadModel, WriteWeights

from .rigs import in_process, spawn

pytestmark = pytest.mark.usefixtures("isolation")

X = np.random.default_rng(3).standard_normal((2, 3)).astype(np.float32)
OLD, NEW = (np.full((3, 2), value, np.float32) for value in (1.0, 2.0))


def dense() -> Graph:
    g = GraphBuilder()
    return g.build(y=g.matmul(g.input("x", X.shape), g.input("w", OLD.shape)))


class Place(NamedTuple):
    """A model of one weight."""

    gpu: CudnnRef
    model: ModelRef
    graph: ModelGraph
    weight: BufferRef


async def deployed(gpu: CudnnRef, weight: BufferRef | None = None) -> Place:
    w = await gpu.upload(OLD) if weight is None else weight
    x, y = await gpu.empty(X.shape), await gpu.empty((2, 2))
    graph = ModelGraph(
        name="dense",
        graph=dense(),
        buffers=(x, w, y),
        specs={"image": x.spec},
        inputs={"image": "x"},
        outputs={"scores": "y"},
    )
    return Place(gpu, await gpu.ask(DeployModel(graphs=(graph,))), graph, w)


async def check(at: Place, weight: np.ndarray) -> None:
    for factor in (1, 2):
        found = await at.gpu.ask(RunModel.of(at.model, {"image": X * factor}))
        np.testing.assert_allclose(found["scores"], factor * (X @ weight), rtol=1e-6, atol=1e-6)


# How weights can be written. Each sets all elements to 2.


async def by_write(at: Place) -> None:
    await at.gpu.write(at.weight, NEW)


async def by_fill(at: Place) -> None:
    await at.gpu.fill(at.weight, 2.0)


async def by_copy(at: Place) -> None:
    await at.gpu.copy(await at.gpu.upload(NEW), at.weight)


async def by_weights(at: Place) -> None:
    await at.gpu.ask(WriteWeights(model=at.model, buffers=(at.weight,), values=(NEW,)))


async def by_a_graph(at: Place) -> None:
    g = GraphBuilder()
    double = g.build(y=g.input("x", OLD.shape) * 2.0)
    await at.gpu.ask(RunGraph.bind(double, x=await at.gpu.upload(OLD), y=at.weight))


async def by_an_update(at: Place) -> None:
    g = GraphBuilder()
    w = g.input("w", OLD.shape)
    await at.gpu.ask(RunGraph.bind(g.build(updates={"w": w + w}), w=at.weight))


async def by_another_model(at: Place) -> None:
    g, gpu = GraphBuilder(), at.gpu
    x, y = await gpu.empty(OLD.shape), await gpu.empty(OLD.shape)
    graph = ModelGraph(
        name="double",
        graph=g.build(y=g.input("x", OLD.shape) * 2.0),
        buffers=(x, y),
        specs={"of": x.spec},
        inputs={"of": "x"},
        outputs={"doubled": "y"},
    )
    model = await gpu.ask(DeployModel(graphs=(graph,)))
    await gpu.ask(RunModel.of(model, {"of": OLD}, {"doubled": at.weight}))


async def by_a_view(at: Place) -> None:
    if in_process():
        pytest.skip("the memory of another process cannot be handed out")
    view = await at.gpu.view(at.weight)
    view[...] = 3  # what is constant is read by the next run, before the view is written again
    await check(at, NEW + 1)
    view[...] = 2


WAYS: list[Callable[[Place], Awaitable[None]]] = [
    by_write,
    by_fill,
    by_copy,
    by_weights,
    by_a_graph,
    by_an_update,
    by_another_model,
    by_a_view,
]


@pytest.mark.parametrize("write", WAYS)
async def test_no_run_has_the_weights_from_before_a_write(write: Callable[[Place], Awaitable[None]]) -> None:
    async with spawn(onnx_runtime=True) as gpu:
        at = await deployed(gpu)
        assert (await gpu.explain(at.graph.graph)).plan.endswith("/ort")
        await check(at, OLD)
        await gpu.free(await gpu.upload(X))  # what is known of buffers is looked up again
        await check(at, OLD)
        await write(at)
        await check(at, NEW)
        await gpu.write(at.weight, OLD)
        await check(at, OLD)


async def test_a_model_that_is_deployed_again_has_the_weights_of_then() -> None:
    async with spawn(onnx_runtime=True) as gpu:
        at = await deployed(gpu)
        await check(at, OLD)
        await gpu.ask(UnloadModel(model=at.model))
        await gpu.write(at.weight, NEW)  # nothing uses it now
        await check(await deployed(gpu, at.weight), NEW)


async def test_a_worker_that_takes_over_has_the_present_weights() -> None:
    if not in_process():
        pytest.skip("a thread does not crash alone")
    faults = FaultPlan().at(3, Fault.KILL, of=RunModel)
    async with spawn(onnx_runtime=True, faults=faults) as gpu:
        at = await deployed(gpu)
        await check(at, OLD)
        await gpu.write(at.weight, NEW)
        await check(at, NEW)
        assert gpu.generation == 2


@pytest.mark.parametrize("onnx_runtime", [True, False])
async def test_results_are_right_wherever_inputs_and_outputs_lie(onnx_runtime: bool) -> None:
    """Large arrays and buffers of a run are read and written where they lie, if that can be."""
    x, w = (np.random.default_rng(n).standard_normal((256, 256)).astype(np.float32) for n in (1, 2))
    g = GraphBuilder()
    graph = g.build(y=g.matmul(g.input("x", x.shape), g.input("w", w.shape)))
    async with spawn(onnx_runtime=onnx_runtime) as gpu:
        buffers = await gpu.empty(x.shape), await gpu.upload(w), await gpu.empty(x.shape)
        deployed = ModelGraph(
            name="dense",
            graph=graph,
            buffers=buffers,
            specs={"x": buffers[0].spec},
            inputs={"x": "x"},
            outputs={"y": "y"},
        )
        model = await gpu.ask(DeployModel(graphs=(deployed,)))
        given, other = await gpu.upload(x), await gpu.empty(x.shape)
        results: list[tuple[np.ndarray, np.ndarray]] = []
        sources: list[tuple[np.ndarray | BufferRef, np.ndarray]]
        sources = [(x, x), (given, x), (x.T, x.T), (x.T.copy(), x.T)]
        for source, values in sources * 3:
            found = await gpu.ask(RunModel.of(model, {"x": source}))
            results.append((found["y"], values @ w))
        for _ in range(3):
            await gpu.fill(other, np.nan)
            await gpu.ask(RunModel.of(model, {"x": given}, {"y": other}))
            results.append((await gpu.download(other), x @ w))
        if not in_process():  # the input lies in the buffer that is written
            for _ in range(3):
                await gpu.write(given, x)
                await gpu.ask(RunModel.of(model, {"x": await gpu.view(given)}, {"y": given}))
                results.append((await gpu.download(given), x @ w))
                own = await gpu.view(buffers[2])  # so does this
                own[...] = x
                found = await gpu.ask(RunModel.of(model, {"x": own}))
                results.append((found["y"], x @ w))
        for result, wanted in results:  # a later run writes to none of an earlier one
            np.testing.assert_allclose(result, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("onnx_runtime", [True, False])
@pytest.mark.parametrize("crash", [False, True])
async def test_what_a_run_reads_and_writes_where_it_lies_is_not_copied(
    onnx_runtime: bool, crash: bool
) -> None:
    """The graph's own buffers, to which inputs and from which outputs would be copied, stay as they are. A
    worker runs on the staging memory that its parent fills, here behind the request."""
    if crash and not in_process():
        pytest.skip("a thread does not crash alone")
    x, w = (np.random.default_rng(n).standard_normal((512, 512)).astype(np.float32) for n in (1, 2))
    g = GraphBuilder()
    graph = g.build(y=g.matmul(g.input("x", x.shape), g.input("w", w.shape)))
    faults = FaultPlan().at(3, Fault.KILL, of=RunModel) if crash else None
    async with spawn(onnx_runtime=onnx_runtime, faults=faults) as gpu:
        own = await gpu.empty(x.shape), await gpu.upload(w), await gpu.empty(x.shape)
        specs = {"x": own[0].spec}
        deployed = ModelGraph(
            name="dense", graph=graph, buffers=own, specs=specs, inputs={"x": "x"}, outputs={"y": "y"}
        )
        model = await gpu.ask(DeployModel(graphs=(deployed,)))
        given, into = await gpu.upload(x), await gpu.empty(x.shape)
        message = RunModel.of(model, {"x": given}, {"y": into})

        async def run_both() -> None:
            await gpu.fill(into, np.nan)
            await gpu.ask(message)
            np.testing.assert_allclose(await gpu.download(into), x @ w, rtol=1e-3, atol=1e-3)
            if onnx_runtime or in_process():  # else a new array may lie anywhere
                found = await gpu.ask(RunModel.of(model, {"x": -x}))
                np.testing.assert_allclose(found["y"], -x @ w, rtol=1e-3, atol=1e-3)

        for _ in range(4):  # NumPy's plans run on arrays that lie where those of an earlier run lay
            await run_both()
        for buffer in (own[0], own[2]):
            await gpu.fill(buffer, np.nan)
        await run_both()
        for buffer in (own[0], own[2]):
            assert np.isnan(await gpu.download(buffer)).all()
        if onnx_runtime and in_process():  # nor is it where a session has to be made anew for other places
            await gpu.write(own[1], -w)
            other = await gpu.empty(x.shape)
            await gpu.ask(RunModel.of(model, {"x": given}, {"y": other}))
            np.testing.assert_allclose(await gpu.download(other), -x @ w, rtol=1e-3, atol=1e-3)
            assert np.isnan(await gpu.download(own[2])).all()
        assert gpu.generation == (2 if crash else 1)


# What a service says.


def large() -> Graph:
    g = GraphBuilder()
    return g.build(y=g.matmul(g.input("x", (128, 128)), g.input("w", (128, 128))))


def without_counterpart() -> Graph:
    g = GraphBuilder()
    return g.build(y=g.log1p(g.matmul(g.input("x", (128, 128)), g.input("w", (128, 128)))))


async def steps(graph: Graph, **options: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What runs a graph, and why nothing else does."""
    async with spawn(**options) as gpu:
        explained = await gpu.explain(graph)
        first, *_ = explained.pieces
        return tuple(step for piece in explained.pieces for step in piece.steps), first.why


async def test_it_is_chosen_where_it_is_installed_and_pays() -> None:
    assert await steps(large()) == (("ONNX Runtime",), ())
    for graph, options in ((dense(), {}), (large(), {"onnx_runtime": False}), (large(), {"exact": True})):
        found, why = await steps(graph, **options)
        assert "ONNX Runtime" not in found
        assert why == ()
    assert await steps(dense(), onnx_runtime=True) == (("ONNX Runtime",), ())


async def test_gradients_of_filters_are_left_to_numpy_which_takes_less_time() -> None:
    g = GraphBuilder()
    x, w = g.input("x", (1, 32, 16, 16)), g.input("w", (32, 32, 3, 3))
    y = g.conv(x, w, pad=1)
    assert await steps(g.build(y=y)) == (("ONNX Runtime",), ())
    graph = g.build(dw=g.grad(y, w))
    found, why = await steps(graph)
    assert "ONNX Runtime" not in found
    assert why == ()
    assert await steps(graph, onnx_runtime=True) == (("ONNX Runtime",), ())


async def test_an_explanation_says_why_it_does_not_run_a_graph() -> None:
    found, (why,) = await steps(without_counterpart())
    assert "ONNX Runtime" not in found
    assert why.startswith("ONNX Runtime does not run log1p at ")


async def test_without_the_package_numpy_runs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a thread: a worker looks for it itself."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # as Python finds none
    found, why = await steps(large(), isolation="thread")
    assert "ONNX Runtime" not in found
    assert why == ()
    with pytest.raises(InvalidRequest, match=r"needs the package onnxruntime.*pip install"):
        await steps(large(), onnx_runtime=True)


async def test_the_option_is_refused_where_it_cannot_be_meant() -> None:
    with pytest.raises(InvalidRequest, match="onnx_runtime=1: is not a bool"):
        await steps(large(), onnx_runtime=1)
    with pytest.raises(InvalidRequest, match="onnx_runtime=True: is not exact"):
        await steps(large(), onnx_runtime=True, exact=True)


async def test_the_number_of_threads_does_not_matter() -> None:
    x, w = (np.random.default_rng(n).standard_normal((128, 128)).astype(np.float32) for n in (1, 2))
    found: list[np.ndarray] = []
    for threads in (1, 2):
        async with spawn(onnx_runtime=True, threads=threads) as gpu:
            y = await gpu.apply(large(), x=await gpu.upload(x), w=await gpu.upload(w))
            found.append(await gpu.download(y))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[0], x @ w, rtol=1e-4, atol=1e-4)
