"""An engine that works behind the actor's back: replies wait for fences, crashes judge the unfinished."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from cudnn_actor import (
    ConvSpec,
    CudnnRef,
    GraphBuilder,
    Loop,
    OutcomeUnknown,
    Receipt,
    RunGraph,
    RunLoop,
    StaleBufferError,
    TensorSpec,
)
from cudnn_actor.messages import Allocate, Copy, Drain, Fill, Free, Upload
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.messages import Message
from cudnn_actor.supervision import ExitKind, Restarting

from .noticed_hangs import notice_hang
from .rigs import AsynchronousEngine, Device, Trio, in_thread, outcome, seen, single, spawn_on

SPEC = TensorSpec.packed((1, 1, 1, 1))


@asynccontextmanager
async def paused(**options: Any) -> AsyncIterator[tuple[CudnnRef, Device, Trio]]:
    """A service whose device has done the uploads of a `Trio` and now finishes only what it is told to."""
    device = Device()
    device.run_freely()
    async with spawn_on(lambda: AsynchronousEngine(device), **options) as gpu:
        trio = await Trio.on(gpu)
        device.pause()
        try:
            yield gpu, device, trio
        finally:
            device.run_freely()


def _note(notes: list[Any], what: Any, _: object) -> None:
    notes.append(what)


async def quiet(gpu: CudnnRef) -> None:
    """Until the actor has taken up what was sent and is back at its mailbox, whatever its device does."""
    while (await gpu.statistics()).queued:
        pass
    await gpu.ping()


async def test_a_reply_comes_with_the_fence_and_not_before() -> None:
    async with paused() as (gpu, device, trio):
        future = gpu.submit(trio.product())
        fence = await in_thread(device.wait_for_fence)
        await quiet(gpu)
        assert not future.done()
        fence.set()
        assert isinstance(await future, Receipt)


async def test_replies_keep_the_order_of_the_requests() -> None:
    order: list[int] = []
    async with paused() as (gpu, device, trio):
        futures = [gpu.submit(trio.product()) for _ in range(300)]
        for number, future in enumerate(futures):
            future.add_done_callback(partial(_note, order, number))
        await quiet(gpu)
        for fence in reversed(device.fences):
            fence.set()
        await asyncio.gather(*futures)
        assert order == list(range(300))


async def test_a_batch_shares_one_fence() -> None:
    async with paused() as (gpu, device, trio):
        before = len(device.fences)
        with device.fencing.closed() as gate:
            first = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            futures = [first, *[gpu.submit(trio.product()) for _ in range(640)]]
        device.run_freely()
        await asyncio.gather(*futures)
        assert len(device.fences) - before == 1 + 640 / 64


async def test_an_upload_is_answered_behind_its_fence_too() -> None:
    async with paused() as (gpu, device, trio):
        messages: list[Message] = [
            Upload(dst=trio.x, data=single(1)),
            Fill(dst=trio.w, value=1),
            Copy(src=trio.x, dst=trio.y),
            Allocate(spec=SPEC, data=single(4)),
        ]
        futures: list[asyncio.Future[Any]] = [gpu.submit(message) for message in messages]
        await quiet(gpu)
        assert not any(future.done() for future in futures)
        device.run_freely()
        await asyncio.gather(*futures)
        assert (await gpu.download(futures[-1].result())).item() == 4


async def test_freeing_a_buffer_that_unfinished_work_uses_withholds_its_bytes() -> None:
    async with paused() as (gpu, device, trio):
        working = gpu.submit(trio.product())
        await gpu.free(trio.y)
        with pytest.raises(StaleBufferError, match="freed"):
            await trio.result()
        meanwhile = await gpu.empty((1, 1, 1, 1))
        assert meanwhile.slot != trio.y.slot, "the place of a buffer in use was given away"
        device.run_freely()
        assert isinstance(await working, Receipt)
        afterwards = await gpu.empty((1, 1, 1, 1))
        assert afterwards.slot == trio.y.slot


async def test_drain_waits_for_the_device() -> None:
    async with paused() as (gpu, device, trio):
        working, drained = gpu.submit(trio.product()), gpu.submit(Drain())
        await quiet(gpu)
        assert not drained.done()
        behind = gpu.submit(Free(buffer=trio.w))
        await behind
        assert not drained.done()
        device.run_freely()
        await drained
        assert working.done()


async def test_drain_of_an_idle_device_does_not_wait() -> None:
    async with paused() as (gpu, _, _):
        await gpu.drain()


async def test_closing_waits_for_the_device() -> None:
    device = Device()
    device.run_freely()
    gpu = await spawn_on(lambda: AsynchronousEngine(device))
    trio = await Trio.on(gpu)
    device.pause()
    working = gpu.submit(trio.product())
    await in_thread(device.wait_for_fence)
    closing = asyncio.ensure_future(gpu.aclose())
    device.run_freely()
    await closing
    assert isinstance(working.result(), Receipt)


async def test_a_crash_judges_each_unfinished_request() -> None:
    async with paused() as (gpu, device, trio):
        other, torn = await self_made(gpu, device), await self_made(gpu, device)
        device.pause()
        pure = gpu.submit(trio.product())
        sums = gpu.submit(torn.sum())
        pure_too = gpu.submit(other.product())
        drained = gpu.submit(Drain())
        await quiet(gpu)
        device.run_freely()
        device.die()
        assert (await pure).generation == 2
        assert isinstance(await outcome(sums), OutcomeUnknown)
        assert (await pure_too).generation == 2
        assert await outcome(drained) is None
        assert [await trio.result(), await other.result()] == [6, 6]
        with pytest.raises(StaleBufferError, match="torn"):
            await torn.result()
        statistics = await gpu.statistics()
        assert (statistics.replayed, statistics.live_buffers) == (2, 8)


async def self_made(gpu: CudnnRef, device: Device) -> Trio:
    device.run_freely()
    return await Trio.on(gpu)


async def test_after_a_crash_the_unfinished_run_first_and_then_what_waited() -> None:
    order: list[str] = []
    async with paused() as (gpu, device, trio):
        unfinished = [gpu.submit(Fill(dst=trio.x, value=n)) for n in range(1, 4)]
        await quiet(gpu)
        behind = [gpu.submit(trio.product()) for _ in range(3)]
        for kind, futures in (("unfinished", unfinished), ("behind", behind)):
            for future in futures:
                future.add_done_callback(partial(_note, order, kind))
        device.die()
        device.run_freely()
        await asyncio.gather(*unfinished, *behind)
        assert order == ["unfinished"] * 3 + ["behind"] * 3
        assert await trio.result() == 6


async def test_an_allocation_that_was_unfinished_at_a_crash_is_made_once() -> None:
    async with paused() as (gpu, device, _):
        asked = gpu.submit(Allocate(spec=SPEC, data=single(4)))
        await in_thread(device.wait_for_fence)
        device.die()
        device.run_freely()
        ref = await asked
        assert (await gpu.download(ref)).item() == 4
        assert (await gpu.statistics()).live_buffers == 4


async def test_a_device_that_does_not_get_on_is_a_hang() -> None:
    async with paused() as (gpu, device, trio):
        asked = gpu.submit(trio.product())
        notice_hang(gpu)
        restarting = await seen(gpu, Restarting)
        assert isinstance(restarting, Restarting)
        assert restarting.cause.kind is ExitKind.HUNG
        device.run_freely()
        assert (await asked).generation >= 2
        assert await trio.result() == 6


async def test_a_context_that_dies_while_the_service_closes_leaves_no_reply_open() -> None:
    device = Device()
    device.run_freely()
    gpu = await spawn_on(lambda: AsynchronousEngine(device))
    trio = await Trio.on(gpu)
    device.pause()
    asked = [gpu.submit(trio.product()), gpu.submit(trio.sum(), timeout=None)]
    await in_thread(device.wait_for_fence)
    gpu.actor_ref.stop(block=False)
    device.die()
    errors = [await outcome(future) for future in asked]
    assert all(isinstance(error, Exception) for error in errors), errors
    await gpu.aclose()


async def test_a_device_that_does_not_get_on_delays_the_end_but_not_for_ever() -> None:
    # The actor has 5 s to stop, and is then killed.
    device = Device()
    device.run_freely()
    gpu = await spawn_on(lambda: AsynchronousEngine(device))
    trio = await Trio.on(gpu)
    device.pause()
    asked = gpu.submit(trio.product())
    await in_thread(device.wait_for_fence)
    await gpu.aclose(drain_s=0.0)
    assert isinstance(await outcome(asked), Exception)


async def test_large_and_small_work_keep_their_order() -> None:
    async with paused() as (gpu, device, trio):
        device.run_freely()
        wide = await gpu.conv_fwd(trio.x, trio.w, conv=ConvSpec.symmetric(2, pad=3))
        assert (await gpu.download(wide)).sum() == 6


async def test_a_plan_that_is_dropped_from_the_cache_lives_until_its_runs_have_finished() -> None:
    """On CUDA, a run reads arrays that go with its plan, whose memory the next plan would get."""
    plans: list[weakref.ref[Any]] = []

    class Building(AsynchronousEngine):
        def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Any:
            plan = super().build(graph, workspace_limit=workspace_limit)
            plans.append(weakref.ref(plan))
            return plan

    g = GraphBuilder()
    x = g.input("x", (3,))
    graph = g.build(y=x * 2.0)
    loop, device = Loop(body=graph, carried={"x": "y"}), Device()
    device.run_freely()
    async with spawn_on(lambda: Building(device)) as gpu:
        x_ref, y = await gpu.upload([1.0, 2.0, 3.0], dtype="float32"), await gpu.empty((3,))
        scratch = await gpu.empty(loop.scratch.dims, dtype="uint8")
        for message in (
            RunGraph.bind(graph, x=x_ref, y=y),
            RunLoop.bind(loop, x=x_ref, y=y, turns=1, scratch=scratch),
        ):
            device.pause()
            run = gpu.submit(message)
            assert await gpu.clear_plans() == 1
            assert plans[-1]() is not None
            assert not run.done()
            device.run_freely()
            await run
            await gpu.drain()
            assert plans[-1]() is None
