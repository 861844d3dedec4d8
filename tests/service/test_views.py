"""Views: the buffer itself as an array, and who may use its bytes for how long."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

from cudnn_actor import Fault, FaultPlan, InvalidRequest, StaleBufferError, spawn
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.messages import Download, Fill, Free, View
from cudnn_actor.protocol.types.dtypes import DTypeName
from cudnn_actor.protocol.types.tensor import LayoutName
from cudnn_actor.supervision import Restarted

from .full_memory import FULL, LIMIT, fill_memory, has_room
from .rigs import (
    AsynchronousEngine,
    Device,
    Gate,
    Trio,
    in_thread,
    mapped_arenas,
    seen,
    single,
    spawn_on,
)
from .worker_rigs import GatedEngine

X = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint64"])
async def test_a_view_has_the_buffers_dims_strides_and_values(layout: LayoutName, dtype: DTypeName) -> None:
    async with spawn(device="cpu") as gpu:
        ref = await gpu.upload(X.astype("int32"), layout=layout, dtype=dtype)
        view = await gpu.view(ref)
        assert isinstance(view, np.ndarray)
        assert (view.shape, view.dtype) == (X.shape, ref.spec.dtype.numpy)
        assert view.strides == tuple(stride * view.itemsize for stride in ref.spec.strides)
        np.testing.assert_array_equal(view, X)
        del view


async def test_a_view_may_have_no_dims_or_no_elements() -> None:
    async with spawn(device="cpu") as gpu:
        for array in (np.True_, np.int16(7), np.zeros((2, 0, 3), np.uint32), np.zeros(0)):
            view = await gpu.view(await gpu.upload(array))
            assert (view.shape, view.dtype) == (array.shape, array.dtype)
            np.testing.assert_array_equal(view, array)
            del view


async def test_a_view_is_the_memory_itself() -> None:
    async with spawn(device="cpu") as gpu:
        ref = await gpu.upload(X)
        view = await gpu.view(ref)
        await gpu.fill(ref, 7)
        assert view.min() == view.max() == 7
        view[:] = X
        np.testing.assert_array_equal(await gpu.download(ref), X)
        assert np.shares_memory(view, await gpu.view(ref))
        del view


async def test_a_view_shows_what_was_sent_before_it() -> None:
    async with spawn(device="cpu") as gpu:
        trio = await Trio.on(gpu)
        gpu.tell(trio.product())
        assert (await gpu.view(trio.y)).item() == 6


async def test_bytes_that_a_view_shows_are_given_to_no_other_buffer_after_free() -> None:
    async with spawn(device="cpu", memory_limit=LIMIT) as gpu:
        view = await fill_memory(gpu)
        assert not await has_room(gpu)
        assert view.min() == view.max() == 5
        del view
        assert await has_room(gpu)


@pytest.mark.parametrize(
    "derive", [lambda view: view[0, 0, 3:5], np.from_dlpack, lambda view: view.__dlpack__()]
)
async def test_whatever_is_made_of_a_view_keeps_the_bytes(derive: Any) -> None:
    async with spawn(device="cpu", memory_limit=LIMIT) as gpu:
        derived = derive(await fill_memory(gpu))
        assert not await has_room(gpu)
        del derived
        assert await has_room(gpu)


async def test_two_views_keep_the_bytes_until_both_have_gone() -> None:
    async with spawn(device="cpu", memory_limit=LIMIT) as gpu:
        ref = await gpu.empty(FULL)
        views = [await gpu.view(ref), await gpu.view(ref)]
        await gpu.free(ref)
        views.pop()
        assert not await has_room(gpu)
        views.pop()
        assert await has_room(gpu)


async def test_a_view_that_has_gone_leaves_a_live_buffer_as_it_was() -> None:
    async with spawn(device="cpu") as gpu:
        ref = await gpu.upload(X)
        await gpu.view(ref)
        other = await gpu.upload(X * 2)
        np.testing.assert_array_equal(await gpu.download(ref), X)
        np.testing.assert_array_equal(await gpu.download(other), X * 2)


async def test_a_view_may_die_on_any_thread() -> None:
    async with spawn(device="cpu", memory_limit=LIMIT) as gpu:
        views = [await fill_memory(gpu)]
        await in_thread(views.clear)
        assert await has_room(gpu)


class CollectingEngine(CpuEngine):
    """Runs the cyclic collector on the actor's own thread, in the midst of a request."""

    def fill(self, dst: np.ndarray, value: float) -> None:
        super().fill(dst, value)
        gc.collect()


async def test_a_view_may_die_in_the_collector_on_the_actors_thread() -> None:
    async with spawn_on(CollectingEngine, memory_limit=2 * LIMIT) as gpu:
        other = await gpu.upload(single(1))
        gc.disable()
        try:
            cycle: list[Any] = [await fill_memory(gpu)]
            cycle.append(cycle)
            del cycle
            assert not await has_room(gpu)
            await gpu.fill(other, 2)
        finally:
            gc.enable()
        assert await has_room(gpu)


async def test_views_survive_a_crash_with_their_hold_on_the_bytes() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, of=Free)
    async with spawn(device="cpu", memory_limit=2 * LIMIT, faults=faults) as gpu:
        ref = await gpu.empty(FULL)
        view = await gpu.view(ref)
        await gpu.fill(ref, 5)
        await gpu.free(await gpu.upload(single(1)))
        await seen(gpu, Restarted)
        assert gpu.generation == 2
        await gpu.fill(ref, 6)
        assert view.min() == view.max() == 6, "the new incarnation maps other memory"
        await gpu.free(ref)
        other = await gpu.empty(FULL)
        await gpu.fill(other, 7)
        assert view.max() == 6
        del view
        assert await has_room(gpu)


async def test_a_freed_buffer_stays_freed_after_a_crash_whoever_looks_at_it() -> None:
    faults = FaultPlan().at(2, Fault.STICKY, of=Free)
    async with spawn(device="cpu", faults=faults) as gpu:
        other = await gpu.upload(single(1))
        ref = await gpu.empty(FULL)
        view = await gpu.view(ref)
        await gpu.free(ref)
        late: list[asyncio.Future[Any]] = [gpu.submit(Free(buffer=other)), gpu.submit(Download(src=other))]
        assert await late[0] is None
        assert gpu.generation == 2
        with pytest.raises(StaleBufferError, match="freed"):
            await late[1]
        for stale in (ref, other):
            with pytest.raises(StaleBufferError, match="freed"):
                await gpu.download(stale)
        assert (await gpu.statistics()).live_buffers == 0
        del view


async def test_a_view_of_a_freed_buffer_outlives_the_service() -> None:
    before = mapped_arenas()
    async with spawn(device="cpu", memory_limit=LIMIT) as gpu:
        view = await fill_memory(gpu)
    assert view.min() == view.max() == 5
    assert mapped_arenas() - before
    view[:] = 6
    del view
    gc.collect()  # the service itself, which has the first mapping
    assert not mapped_arenas() - before


async def test_a_view_that_is_told_is_refused(logs: list[dict[str, Any]]) -> None:
    async with spawn(device="cpu") as gpu:
        ref = await gpu.upload(single(1))
        gpu.tell(View(buffer=ref))
        await gpu.drain()
    failed = [entry for entry in logs if entry["event"] == "actor.tell_failed"]
    assert "nobody would receive the array" in failed[0]["error"]


async def test_what_is_no_live_buffer_has_no_view() -> None:
    async with spawn(device="cpu") as gpu, spawn(device="cpu") as other:
        ref = await gpu.upload(single(1))
        with pytest.raises(StaleBufferError, match="another service created it"):
            await other.view(ref)
        with pytest.raises(InvalidRequest, match=r"upload\(array\)"):
            await gpu.view(X)  # type: ignore[arg-type]
        late = gpu.submit(Free(buffer=ref)), gpu.submit(View(buffer=ref))
        await late[0]
        with pytest.raises(StaleBufferError, match="freed"):
            await late[1]


async def test_plain_threads_get_views_too() -> None:
    async with spawn(device="cpu") as gpu:
        ref = await gpu.upload(X)
        view = await in_thread(lambda: gpu.actor_ref.ask(View(buffer=ref)))
        np.testing.assert_array_equal(view, X)
        del view


async def test_a_view_whose_caller_has_gone_is_dropped_and_its_hold_with_it() -> None:
    gate = Gate()
    async with spawn_on(lambda: GatedEngine(gate, at="view"), memory_limit=LIMIT) as gpu:
        ref = await gpu.empty(FULL)
        with gate.closed():
            asked = asyncio.ensure_future(gpu.view(ref))
            await in_thread(gate.wait_for_arrival)
            asked.cancel()
            freed = gpu.submit(Free(buffer=ref))
            with pytest.raises(asyncio.CancelledError):
                await asked
        await freed
        assert await has_room(gpu)


async def test_a_view_waits_for_the_device() -> None:
    device = Device()
    device.run_freely()
    async with spawn_on(lambda: AsynchronousEngine(device)) as gpu:
        trio = await Trio.on(gpu)
        device.pause()
        working = gpu.submit(trio.product())
        viewed = gpu.submit(View(buffer=trio.y))
        await in_thread(device.wait_for_fence)
        await gpu.ping()
        assert not viewed.done()
        device.run_freely()
        view = await viewed
        assert working.done()
        assert view.item() == 6
        del view, viewed


async def test_a_view_that_was_unfinished_at_a_crash_is_one_view_with_one_hold() -> None:
    device = Device()
    device.run_freely()
    async with spawn_on(lambda: AsynchronousEngine(device), memory_limit=LIMIT) as gpu:
        ref = await gpu.empty(FULL)
        device.pause()
        filled, viewed = gpu.submit(Fill(dst=ref, value=3)), gpu.submit(View(buffer=ref))
        await in_thread(device.wait_for_fence)
        device.die()
        device.run_freely()
        assert (await filled).generation == 2
        assert (await viewed).max() == 3
        await gpu.free(ref)
        assert not await has_room(gpu)
        del viewed
        assert await has_room(gpu)
