"""Arrays in, arrays out, and nothing is left."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cudnn_actor import (
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    CudnnRef,
    DeadlineExceeded,
    Fault,
    FaultPlan,
    GraphBuilder,
    InvalidRequest,
    OutOfMemory,
    RunGraph,
    StaleBufferError,
)
from cudnn_actor.blocking import spawn as blocking_spawn
from cudnn_actor.operations import MaxPool, Pointwise, PointwiseMode, Window

from .rigs import Gate, in_thread, spawn, spawn_gated

pytestmark = pytest.mark.usefixtures("isolation")

X = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4)
W = np.ones((5, 3, 1, 1), np.float32)
WINDOW = Window.symmetric(2, size=2)
LARGEST = X[:, :, 1::2, 1::2]


async def live(gpu: CudnnRef) -> int:
    await gpu.drain()
    return (await gpu.statistics()).live_buffers


async def test_graphs_operations_and_convolutions() -> None:
    g = GraphBuilder()
    x = g.input("x", X.shape, "float16", layout="NHWC")
    graph = g.build(y=g.relu(x - 5.0), total=g.sum(x, (0, 1, 2, 3)))
    async with spawn(device="cpu") as gpu:
        y, total = found = await gpu.compute(graph, x=X)
        np.testing.assert_array_equal(y, np.maximum(X - 5, 0))
        assert (y.dtype, found.total.item()) == (np.float16, total.item())
        np.testing.assert_array_equal(await gpu.compute(MaxPool, x=X, window=WINDOW), LARGEST)
        both = await gpu.compute(MaxPool, {"x": X}, window=WINDOW, also=("index",))
        np.testing.assert_array_equal(both.index, LARGEST)
        added = await gpu.compute(Pointwise, mode=PointwiseMode.ADD, operands=(X, X))
        np.testing.assert_array_equal(added, 2 * X)
        conv = await gpu.compute(ConvFwd, x=X, w=W, bias=np.ones((1, 5, 1, 1), np.float32))
        np.testing.assert_array_equal(conv, X.sum(1, keepdims=True).repeat(5, 1) + 1)
        assert (await gpu.compute(ConvBwdData, dy=conv, w=W)).shape == X.shape
        assert (await gpu.compute(ConvBwdFilter, x=X, dy=conv, dims=W.shape)).shape == W.shape
        assert await live(gpu) == 0


async def test_a_buffer_that_a_graph_updates_is_a_copy() -> None:
    g = GraphBuilder()
    x = g.input("x", X.shape)
    graph = g.build(updates={"x": x + 1.0})
    given = X.copy()
    async with spawn(device="cpu") as gpu:
        np.testing.assert_array_equal(await gpu.compute(graph, x=given), X + 1)
        np.testing.assert_array_equal(given, X)
        one, other = g.build(one=g.input("z", X.shape) * 1.0, updates={"x": x + 1.0}), {"x": given, "z": X}
        assert (await gpu.compute(one, other))._fields == ("one", "x")


async def test_references_stay_and_are_updated_in_place() -> None:
    g = GraphBuilder()
    x, w = g.input("x", X.shape), g.input("w", X.shape)
    step = g.build(y=x + w, updates={"w": w + 1.0})
    h = GraphBuilder()
    count = h.build(updates={"w": h.input("w", X.shape) + 1.0})
    async with spawn(device="cpu") as gpu:
        weights = await gpu.upload(X)
        for number in range(2):
            np.testing.assert_array_equal(await gpu.compute(step, x=X, w=weights), 2 * X + number)
        assert await gpu.compute(count, w=weights) == ()
        np.testing.assert_array_equal(await gpu.download(weights), X + 3)
        image, filters = await gpu.upload(X), await gpu.upload(W)
        np.testing.assert_array_equal(await gpu.compute(MaxPool, x=image, window=WINDOW), LARGEST)
        total = X.sum(1, keepdims=True).repeat(5, 1)
        np.testing.assert_array_equal(await gpu.compute(ConvFwd, x=X, w=filters), total)
        pair = await gpu.compute(Pointwise, mode=PointwiseMode.ADD, operands=(image, X))
        np.testing.assert_array_equal(pair, 2 * X)
        assert await live(gpu) == 3
        await gpu.free(image)
        with pytest.raises(StaleBufferError):
            await gpu.compute(MaxPool, x=image, window=WINDOW)
        assert await live(gpu) == 2


async def test_mistakes_name_the_argument_and_leave_nothing() -> None:
    g = GraphBuilder()
    x = g.input("x", X.shape)
    graph = g.build(y=x + g.input("z", X.shape))
    async with spawn(device="cpu") as gpu:
        for call, said in (
            (gpu.compute(graph, x=X), r"^z=None: is an input of the graph"),
            (gpu.compute(graph, x=X, z=X[:1]), r"^z="),
            (gpu.compute(graph, x=X, z=object()), r"^z="),
            (gpu.compute(graph, x=X, zz=X), r"^zz="),
            (gpu.compute(MaxPool, x=[[1], [1, 2]], window=WINDOW), r"^x="),
            (gpu.compute(MaxPool, x=X, window=WINDOW, also=("indices",)), r"^also="),
            (gpu.compute(ConvFwd, x=X, w=W, also=("index",)), r"^also="),
            (gpu.compute(ConvFwd, {"x": X}, x=X), r"^x="),
            (gpu.compute(RunGraph, x=X), r"^what=RunGraph: is neither a graph nor"),  # type: ignore[arg-type]
            (gpu.compute([X]), r"^what=list: is neither a graph nor"),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidRequest, match=said):
                await call
        with pytest.raises(TypeError, match="MaxPool has no field 'windows'"):
            await gpu.compute(MaxPool, x=X, windows=WINDOW)
        assert await live(gpu) == 0


async def test_what_was_allocated_is_freed_after_an_error_and_a_cancellation() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        gate.shut()
        task = asyncio.create_task(gpu.compute(MaxPool, x=X, window=WINDOW))
        await in_thread(gate.wait_for_arrival)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(DeadlineExceeded):
            await gpu.compute(MaxPool, x=X, window=WINDOW, timeout=0.01)
        gate.open()
        assert await live(gpu) == 0
    faults = FaultPlan().at(1, Fault.FAIL_EXECUTION, of=MaxPool)
    async with spawn(device="cpu", faults=faults, memory_limit=64 << 20) as gpu:
        with pytest.raises(Exception, match="fail"):
            await gpu.compute(MaxPool, x=X, window=WINDOW)
        assert await live(gpu) == 0
        with pytest.raises(OutOfMemory):
            await gpu.compute(ConvFwd, x=np.zeros((1, 1, 4096, 2048), "f4"), w=np.zeros((64, 1, 1, 1), "f4"))
        assert await live(gpu) == 0


def test_without_asyncio() -> None:
    with blocking_spawn(device="cpu") as gpu:
        np.testing.assert_array_equal(gpu.compute(MaxPool, x=X, window=WINDOW), LARGEST)
        gpu.drain()
        assert gpu.statistics().live_buffers == 0
