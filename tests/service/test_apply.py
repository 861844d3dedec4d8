"""`gpu.apply`: operations whose outputs the service allocates."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from cudnn_actor import (
    BufferRef,
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    ConvSpec,
    CudnnRef,
    ExecutionFailed,
    Fault,
    FaultPlan,
    Graph,
    GraphBuilder,
    InvalidRequest,
    OutOfMemory,
    QuarantinedRequest,
)
from cudnn_actor.engines.base import StickyError
from cudnn_actor.messages import Ping
from cudnn_actor.operations import (
    AvgPoolBackward,
    LayerNorm,
    MaxPool,
    Operation,
    Pointwise,
    PointwiseMode,
    Window,
)

from ..log_lines import capture_logs
from .rigs import THREAD_ONLY, Gate, in_thread, spawn, spawn_gated, spawn_on
from .worker_rigs import GatedEngine

pytestmark = pytest.mark.usefixtures("isolation")

X = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4)
WINDOW = Window.symmetric(2, size=2)
LARGEST = X[:, :, 1::2, 1::2]


async def live(gpu: CudnnRef) -> int:
    await gpu.drain()
    return (await gpu.statistics()).live_buffers


async def test_the_output_of_an_operation_is_allocated() -> None:
    async with spawn(device="cpu") as gpu:
        y = await gpu.apply(MaxPool(x=await gpu.upload(X), window=WINDOW))
        assert isinstance(y, BufferRef)
        np.testing.assert_array_equal(await gpu.download(y), LARGEST)


async def test_optional_outputs_are_allocated_if_they_are_named() -> None:
    async with spawn(device="cpu") as gpu:
        x = await gpu.upload(X, layout="NHWC")
        y, index = found = await gpu.apply(MaxPool(x=x, window=WINDOW), also=("index",))
        assert (found.y, found.index) == (y, index)
        assert (y.spec.layout, index.spec.layout) == ("NHWC", "NHWC")
        np.testing.assert_array_equal(await gpu.download(y), LARGEST)
        np.testing.assert_array_equal(await gpu.download(index), LARGEST)  # each element is its own number


async def test_outputs_that_are_given_are_used() -> None:
    async with spawn(device="cpu") as gpu:
        x = await gpu.upload(X)
        y = await gpu.empty(LARGEST.shape)
        before = await live(gpu)
        assert await gpu.apply(MaxPool(x=x, y=y, window=WINDOW)) is y
        assert await live(gpu) == before


async def test_what_was_allocated_is_freed_when_the_operation_fails() -> None:
    faults = FaultPlan().at(1, Fault.FAIL_EXECUTION, of=MaxPool)
    async with spawn(device="cpu", faults=faults) as gpu:
        x = await gpu.upload(X)
        before = await live(gpu)
        with pytest.raises(ExecutionFailed):
            await gpu.apply(MaxPool(x=x, window=WINDOW), also=("index",))
        assert await live(gpu) == before


async def test_what_was_allocated_is_freed_when_the_next_does_not_fit() -> None:
    async with spawn(device="cpu", memory_limit=96 << 20) as gpu:
        x = await gpu.empty((1, 1, 1, 8 << 20))  # 32 MiB; y takes as much, and the index twice that
        before = await live(gpu)
        with pytest.raises(OutOfMemory):
            await gpu.apply(MaxPool(x=x, window=Window.symmetric(2, size=1)), also=("index",))
        assert await live(gpu) == before


async def test_what_was_allocated_is_freed_when_the_caller_is_cancelled() -> None:
    async with spawn(device="cpu") as gpu:
        x = await gpu.upload(X)
        before = await live(gpu)
        task = asyncio.ensure_future(gpu.apply(MaxPool(x=x, window=WINDOW)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await live(gpu) == before


@pytest.mark.parametrize("of_graph", [False, True], ids=["operation", "graph"])
async def test_what_a_cancelled_request_writes_is_freed_when_it_has_ended(of_graph: bool) -> None:
    gate = Gate()
    with capture_logs() as logs:
        async with spawn_gated(gate) as gpu:
            x = await gpu.upload(X)
            before = await gpu.statistics()
            with gate.closed():
                applied = gpu.apply(pooled(), x=x) if of_graph else gpu.apply(MaxPool(x=x, window=WINDOW))
                task = asyncio.ensure_future(applied)
                await in_thread(gate.wait_for_arrival)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert await live(gpu) == before.live_buffers
            assert (await gpu.statistics()).failed == before.failed
            np.testing.assert_array_equal(await gpu.download(x), X)
    assert "actor.tell_failed" not in [entry["event"] for entry in logs]


def pooled() -> Graph:
    g = GraphBuilder()
    return g.build(y=g.max_pool(g.input("x", X.shape), 2))


class Dying(GatedEngine):
    """Its context dies of so many runs of a plan."""

    def __init__(self, gate: Gate, deaths: Iterator[int]) -> None:
        super().__init__(gate)
        self._deaths = deaths

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        self._pause("execute")
        if next(self._deaths, None) is not None:
            raise StickyError("DEAD", "the test killed the context")


@THREAD_ONLY
@pytest.mark.parametrize("deaths", [1, 2], ids=["run again", "quarantined"])
async def test_what_crashes_do_to_a_cancelled_request_is_no_error_of_its_free(deaths: int) -> None:
    gate, left = Gate(), iter(range(deaths))
    with capture_logs() as logs:
        async with spawn_on(lambda: Dying(gate, left)) as gpu:
            x = await gpu.upload(X)
            before = await gpu.statistics()
            with gate.closed():
                task = asyncio.ensure_future(gpu.apply(MaxPool(x=x, window=WINDOW), also=("index",)))
                await in_thread(gate.wait_for_arrival)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert await live(gpu) == before.live_buffers
            after = await gpu.statistics()
            assert (after.restarts, after.failed) == (deaths, deaths - 1)
    assert "actor.tell_failed" not in [entry["event"] for entry in logs]


async def test_several_outputs_are_pickled_and_copied() -> None:
    g = GraphBuilder()
    x = g.input("x", X.shape)
    graph = g.build({"y": x + 1.0, "no name": x * 2.0})
    async with spawn(device="cpu") as gpu:
        ref = await gpu.upload(X)
        for found in (
            await gpu.apply(MaxPool(x=ref, window=WINDOW), also=("index",)),
            await gpu.apply(graph, x=ref),
        ):
            for again in (pickle.loads(pickle.dumps(found)), copy.copy(found), copy.deepcopy(found)):
                assert again == found
                assert type(again) is type(found)
                assert (again.y, again._fields) == (found.y, found._fields)
            assert found._replace(y=ref).y == ref


async def test_what_a_crash_has_torn_is_not_freed_again() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, of=MaxPool).at(2, Fault.STICKY, of=MaxPool)
    with capture_logs() as logs:
        async with spawn(device="cpu", faults=faults) as gpu:
            x = await gpu.upload(X)
            before = await gpu.statistics()
            with pytest.raises(QuarantinedRequest):
                await gpu.apply(MaxPool(x=x, window=WINDOW), also=("index",))
            assert await live(gpu) == before.live_buffers
            assert (await gpu.statistics()).failed == before.failed + 1
    assert "actor.tell_failed" not in [entry["event"] for entry in logs]


async def test_numbers_of_numpy_are_numbers() -> None:
    async with spawn(device="cpu") as gpu:
        x = await gpu.upload(X)
        numbers: list[Any] = [(1, 0.5), (np.int64(1), np.float32(0.5)), (1, np.float64(0.5))]
        results = [
            await gpu.download(await gpu.apply(LayerNorm(x=x, axis=axis, epsilon=epsilon)))
            for axis, epsilon in numbers
        ]
        for result in results:
            np.testing.assert_array_equal(result, results[0])
        for wrong in (np.float64(1.0), np.bool_(True)):
            with pytest.raises(InvalidRequest, match="axis="):
                await gpu.apply(LayerNorm(x=x, axis=wrong))  # type: ignore[arg-type]


async def test_mistakes_name_the_field_and_allocate_nothing() -> None:
    async with spawn(device="cpu") as gpu:
        x = await gpu.upload(X)
        before = await live(gpu)
        for operation, also, field in (
            (MaxPool(x=3, window=WINDOW), (), "x"),
            (MaxPool(x=x, window=3), (), "window"),  # type: ignore[arg-type]
            (MaxPool(x=x, window=Window.symmetric(1, size=2)), (), "x"),
            (MaxPool(x=x, window=WINDOW), ("indices",), "also"),
            (MaxPool(x=x, window=WINDOW), "index", "also"),
            (MaxPool(x=x, window=WINDOW), None, "also"),
            (MaxPool(x=x, window=WINDOW), iter(["index"]), "also"),
            (MaxPool(x=x, index=x, window=WINDOW), (), "index"),
            (AvgPoolBackward(dy=x, window=WINDOW), (), "dx"),
            (Pointwise(mode=PointwiseMode.ADD, operands=(x,)), (), "operands"),
            (Ping(), (), "operation"),
            (Operation(), (), "operation"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await gpu.apply(operation, also=also)  # type: ignore[arg-type]
            assert caught.value.field == field
        assert await live(gpu) == before


async def test_a_convolution_is_told_the_method_that_allocates() -> None:
    async with spawn(device="cpu") as gpu:
        x, conv = await gpu.upload(X), ConvSpec.symmetric(2)
        missing: Any = None
        for message, method in (
            (ConvFwd(x=x, w=x, y=missing, conv=conv), r"conv_fwd\(x, w, conv="),
            (ConvBwdData(dy=x, w=x, dx=missing, conv=conv), r"conv_bwd_data\(dy, w, conv="),
            (ConvBwdFilter(x=x, dy=x, dw=missing, conv=conv), r"conv_bwd_filter\(x, dy, conv="),
        ):
            with pytest.raises(InvalidRequest, match=f"use `await gpu.{method}") as caught:
                await gpu.apply(message)  # type: ignore[arg-type]
            assert caught.value.field == "operation"


async def test_ask_says_that_apply_allocates() -> None:
    async with spawn(device="cpu") as gpu:
        with pytest.raises(InvalidRequest, match=r"y=None: is left out; .* await gpu\.apply"):
            await gpu.ask(MaxPool(x=await gpu.upload(X), window=WINDOW))
