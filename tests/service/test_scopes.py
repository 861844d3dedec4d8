"""What is allocated in a scope is freed with it, however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import assert_type

import msgspec
import numpy as np
import pytest

from cudnn_actor import (
    BufferRef,
    CudnnRef,
    GraphBuilder,
    InvalidRequest,
    Loop,
    Model,
    Scope,
    StaleBufferError,
    TensorSpec,
)
from cudnn_actor.messages import Allocate, Free
from cudnn_actor.operations import MaxPool, Window
from cudnn_actor.supervision import Restarted

from ..onnx.small_models import image_model
from .rigs import Gate, child_spec, in_thread, seen, spawn, spawn_gated

pytestmark = pytest.mark.usefixtures("isolation")

X = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4)
WINDOW = Window.symmetric(2, size=2)
IMAGE = np.ones((1, 3, 8, 8), np.float32)


async def live(gpu: CudnnRef) -> int:
    await gpu.drain()
    return (await gpu.statistics()).live_buffers


async def test_what_its_methods_give_is_freed_with_it_and_what_is_kept_is_not() -> None:
    async with spawn(device="cpu") as gpu:
        mine = await gpu.upload(X)
        async with gpu.scope() as scope:
            x = assert_type(await scope.upload(X), BufferRef)
            pooled, _ = await scope.apply(MaxPool(x=x, window=WINDOW), also=("index",))
            w = await scope.empty((4, 3, 1, 1))
            await scope.fill(w, 1)
            y = scope.keep(await scope.conv_fwd(x, w))
            asked = await scope.ask(Allocate(spec=TensorSpec.packed((5,))))
            sent = await scope.submit(Allocate(spec=TensorSpec.packed((5,))))
            assert await live(gpu) == 8
        for freed in (x, pooled, w, asked, sent):
            with pytest.raises(StaleBufferError):
                await gpu.download(freed)
        assert (await gpu.download(y)).shape == (2, 4, 4, 4)
        await gpu.free(y)
        await gpu.free(mine)
        assert await live(gpu) == 0


async def test_the_outputs_of_a_loop_belong_to_it_and_its_scratch_to_nobody() -> None:
    g = GraphBuilder()
    y = g.input("x", (3,)) * 2.0
    loop = Loop(body=g.build(y=y, row=y * 1.0), carried={"x": "y"})
    async with spawn(device="cpu") as gpu:
        async with gpu.scope() as scope:
            outputs = await scope.loop(loop, turns=4, x=await scope.upload(np.ones(3, np.float32)))
            assert await live(gpu) == 3
            np.testing.assert_array_equal((await gpu.download(outputs.row))[:, 0], [2, 4, 8, 16])
        assert await live(gpu) == 0


async def test_models_and_the_results_that_a_run_leaves_on_the_device_belong_to_it() -> None:
    async with spawn(device="cpu") as gpu:
        async with gpu.scope() as scope:
            model = assert_type(await scope.load(image_model(), dims={"N": 1}), Model)
            results = await scope.run(model, image=IMAGE, keep=("scores",))
            assert isinstance(results["scores"], BufferRef)
            kept = scope.keep(await scope.load(image_model()))
        with pytest.raises(InvalidRequest, match="closed"):
            await gpu.run(model, image=IMAGE)
        with pytest.raises(StaleBufferError):
            await gpu.download(results["scores"])
        await gpu.run(kept, image=IMAGE)
        await kept.close()
        assert await live(gpu) == 0


async def test_it_frees_all_when_its_body_raises() -> None:
    async with spawn(device="cpu") as gpu:

        async def body() -> None:
            async with gpu.scope() as scope:
                await scope.upload(X)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await body()
        assert await live(gpu) == 0


async def test_it_frees_all_when_its_body_is_cancelled_while_a_request_runs() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:

        async def body() -> None:
            async with gpu.scope() as scope:
                await scope.apply(MaxPool(x=await scope.upload(X), window=WINDOW))

        gate.shut()
        task = asyncio.create_task(body())
        await in_thread(gate.wait_for_arrival)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        assert await live(gpu) == 0


async def test_a_restart_in_the_middle_changes_nothing() -> None:
    async with spawn(device="cpu", isolation="process") as gpu:
        async with gpu.scope() as scope:
            x = await scope.upload(X)
            assert gpu.worker_pid is not None
            os.kill(gpu.worker_pid, signal.SIGKILL)
            await seen(gpu, Restarted)
            pooled = await scope.apply(MaxPool(x=x, window=WINDOW))
            np.testing.assert_array_equal(await scope.download(pooled), X[:, :, 1::2, 1::2])
        assert await live(gpu) == 0


async def test_what_is_freed_in_it_is_not_freed_again() -> None:
    async with spawn(device="cpu") as gpu:
        async with gpu.scope() as scope:
            first = await scope.upload(X)
            await scope.free(first)
            await scope.submit(Free(buffer=await scope.upload(X)))
            await gpu.free(await scope.upload(X))
            mine = await gpu.upload(X)  # in the place of one of them
            await asyncio.sleep(0)
            assert "owns 1" in repr(scope)  # the one that the scope was not told of
            with pytest.raises(InvalidRequest, match="is not owned by this scope"):
                scope.keep(first)
        np.testing.assert_array_equal(await gpu.download(mine), X)


async def test_a_copy_of_a_reference_names_what_the_scope_owns() -> None:
    async with spawn(device="cpu") as gpu:
        async with gpu.scope() as scope:
            x = await scope.upload(X)
            copied = msgspec.msgpack.decode(msgspec.msgpack.encode(x), type=BufferRef)
            assert scope.keep(copied) is copied
        await gpu.free(x)


async def test_what_it_cannot_own_is_not_kept() -> None:
    async with spawn(device="cpu") as gpu, gpu.scope() as scope:
        x = await scope.upload(X)
        for what in ({"x": x}, (x,), X, None):
            with pytest.raises(InvalidRequest, match="is not owned by this scope"):
                scope.keep(what)  # type: ignore[type-var]


async def test_an_operation_that_fails_leaves_nothing_owned() -> None:
    async with spawn(device="cpu", memory_limit=4 << 20) as gpu, gpu.scope() as scope:
        with pytest.raises(InvalidRequest):
            await scope.conv_fwd(await scope.upload(X), await scope.upload(X), pad=-9)
        x, w = await scope.upload(X), await scope.upload(X[:1])
        before = repr(scope)
        with pytest.raises(InvalidRequest):
            await scope.conv_fwd(x, w, bias=w)
        assert repr(scope) == before


async def test_it_refuses_requests_after_its_end_and_frees_late_answers() -> None:
    async with spawn(device="cpu") as gpu:
        scope = gpu.scope()
        future = scope.submit(Allocate(spec=TensorSpec.packed((5,))))
        uploading = asyncio.create_task(scope.upload(X))
        await asyncio.sleep(0)
        scope.end()
        scope.end()
        await future
        await uploading
        for refused in (scope.upload(X), scope.load(image_model())):
            with pytest.raises(InvalidRequest, match="has ended"):
                await refused
        with pytest.raises(InvalidRequest, match="has ended"):
            scope.submit(Allocate(spec=TensorSpec.packed((5,))))
        mine = await gpu.upload(X)
        with pytest.raises(InvalidRequest, match="has ended"):
            scope.tell(Free(buffer=mine))
        assert await live(gpu) == 1


async def test_what_an_earlier_life_of_the_service_had_is_left_alone() -> None:
    spec, service = child_spec(device="cpu")
    gpu = CudnnRef(service)
    scope = Scope(gpu)
    for life in range(2):
        supervisor = spec.make(None)  # type: ignore[arg-type]
        supervisor.launch()
        await asyncio.wrap_future(service.started)
        if life == 0:
            for _ in range(3):
                await scope.upload(X)
        else:
            scope.end()
            assert await live(gpu) == 0
        await asyncio.wrap_future(service.end())
