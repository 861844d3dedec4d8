"""What an asynchronous engine has not finished: frees behind it, late answers, crashes in between."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pykka
import pytest

from cudnn_actor import CudnnRef, ExecutionFailed, OutcomeUnknown, Receipt, StaleBufferError
from cudnn_actor.actors import Envelope
from cudnn_actor.engines.base import EngineFailure, StickyError
from cudnn_actor.messages import Copy, Download, Drain, Fill, Free, Upload

from .rigs import AsynchronousEngine, Device, Trio, in_thread, outcome, service_on, single, spawn_on
from .test_asynchronous_engine import _note, paused, quiet

# Frees.


async def test_a_request_that_was_sent_before_a_free_has_its_result_after_a_crash() -> None:
    async with paused() as (gpu, device, trio):
        device.run_freely()
        kept = await gpu.upload(single(0))
        device.pause()
        product, copied = gpu.submit(trio.product()), gpu.submit(Copy(src=trio.y, dst=kept))
        for buffer in (trio.x, trio.w, trio.y):
            await gpu.free(buffer)
        device.die()
        device.run_freely()
        assert (await product).generation == 2
        assert (await copied).generation == 2
        assert (await gpu.download(kept)).item() == 6
        for buffer in (trio.x, trio.w, trio.y):
            with pytest.raises(StaleBufferError, match="freed"):
                await gpu.download(buffer)
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 1


async def test_after_such_a_crash_a_request_behind_the_free_is_stale_as_it_was() -> None:
    async with paused() as (gpu, device, trio):
        product = gpu.submit(trio.product())
        freed, late = gpu.submit(Free(buffer=trio.y)), gpu.submit(Fill(dst=trio.y, value=1))
        await freed
        assert isinstance(await outcome(late), StaleBufferError)
        device.die()
        device.run_freely()
        assert (await product).generation == 2
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 2


async def test_a_buffer_that_a_torn_request_wrote_and_that_was_freed_is_not_freed_twice() -> None:
    async with paused() as (gpu, device, trio):
        summed = gpu.submit(trio.sum())
        await gpu.free(trio.y)
        device.die()
        device.run_freely()
        assert isinstance(await outcome(summed), OutcomeUnknown)
        await gpu.drain()
        statistics = await gpu.statistics()
        assert (statistics.live_buffers, statistics.failed) == (2, 1)


async def test_bytes_whose_work_has_ended_are_not_brought_back_by_a_crash() -> None:
    async with paused() as (gpu, device, trio):
        product = gpu.submit(trio.product())
        await gpu.free(trio.y)
        device.run_freely()
        await product
        other = await gpu.upload(single(8))  # in y's place
        device.pause()
        filled = gpu.submit(Fill(dst=trio.x, value=1))
        await in_thread(device.wait_for_fence)
        device.die()
        device.run_freely()
        await filled
        assert (await gpu.download(other)).item() == 8
        with pytest.raises(StaleBufferError, match="freed"):
            await trio.result()


# Inputs that may be gone.


async def test_a_request_whose_input_a_later_one_may_have_overwritten_is_not_run_again() -> None:
    async with paused() as (gpu, device, trio):
        product = gpu.submit(trio.product())
        read = gpu.submit(Download(src=trio.w))
        uploaded = gpu.submit(Upload(dst=trio.x, data=single(-1)))
        await quiet(gpu)
        device.die()
        device.run_freely()
        error = await outcome(product)
        assert isinstance(error, OutcomeUnknown)
        assert "overwritten" in str(error)
        assert (await read).item() == 2
        assert isinstance(await uploaded, Receipt)
        with pytest.raises(StaleBufferError, match="torn"):
            await trio.result()


# Answers that come late.


async def test_a_download_does_not_hold_up_the_actor() -> None:
    async with paused() as (gpu, device, trio):
        working, read = gpu.submit(trio.product()), gpu.submit(Download(src=trio.y))
        await quiet(gpu)
        assert not read.done()
        assert not working.done()
        device.run_freely()
        assert (await read).item() == 6
        assert working.done()


async def test_a_download_for_which_there_is_no_staging_memory_is_read_on_the_spot() -> None:
    async with paused() as (gpu, device, trio):
        device.reads_block = True
        assert (await gpu.download(trio.y)).item() == 1


async def test_drain_waits_for_downloads() -> None:
    order: list[str] = []
    async with paused() as (gpu, device, trio):
        futures: dict[str, asyncio.Future[Any]] = {
            "read": gpu.submit(Download(src=trio.y)),
            "drained": gpu.submit(Drain()),
        }
        for name, future in futures.items():
            future.add_done_callback(partial(_note, order, name))
        await quiet(gpu)
        device.run_freely()
        await asyncio.gather(*futures.values())
        assert order == ["read", "drained"]


async def test_a_download_that_fails_at_its_end_is_an_error_of_its_own() -> None:
    async with paused() as (gpu, device, trio):
        working = gpu.submit(trio.product())
        failing, read = gpu.submit(Download(src=trio.y)), gpu.submit(Download(src=trio.x))
        await quiet(gpu)
        device.fetch_fails_with = EngineFailure("BAD_COPY", "the test says so")
        device.run_freely()
        error = await outcome(failing)
        assert isinstance(error, ExecutionFailed)
        assert "BAD_COPY" in str(error)
        assert (await read).item() == 3
        assert (await working).generation == 1


async def test_the_answer_of_a_cancelled_download_is_called_for_all_the_same() -> None:
    async with paused() as (gpu, device, trio):
        read = gpu.submit(Download(src=trio.y))
        await quiet(gpu)
        read.cancel()
        device.run_freely()
        await gpu.drain()
        assert device.fetched == 1, "its staging memory was never given back"


async def test_a_context_that_dies_between_two_answers_answers_each_request_once() -> None:
    async with paused() as (gpu, device, trio):
        futures: list[asyncio.Future[Any]] = [
            gpu.submit(trio.sum()),
            gpu.submit(Download(src=trio.y)),
            gpu.submit(Download(src=trio.y)),
            gpu.submit(Drain()),
        ]
        await quiet(gpu)
        device.fetch_fails_with = StickyError("DEAD", "in the midst of an answer")
        device.run_freely()
        receipt, first, second, drained = [await outcome(future) for future in futures]
        assert isinstance(receipt, Receipt), "its work had finished: there was nothing to judge"
        assert receipt.generation == 1
        assert isinstance(first, np.ndarray)
        assert (first.item(), second.item(), drained) == (7, 7, None)
        statistics = await gpu.statistics()
        assert (statistics.generation, statistics.failed) == (2, 0)


async def test_downloads_are_answered_when_the_service_closes() -> None:
    device = Device()
    device.run_freely()
    gpu = await spawn_on(lambda: AsynchronousEngine(device))
    trio = await Trio.on(gpu)
    device.pause()
    read = gpu.submit(Download(src=trio.x))
    await in_thread(device.wait_for_fence)
    closing = asyncio.ensure_future(gpu.aclose())
    device.run_freely()
    await closing
    assert read.result().item() == 3


class Unreachable(pykka.ThreadingFuture[Any]):
    """A reply address that fails."""

    def set(self, value: Any = None) -> None:
        raise RuntimeError(f"the test takes no {value}")


async def test_an_answer_that_cannot_be_given_costs_nobody_else_theirs() -> None:
    device = Device()
    device.run_freely()
    service = service_on(lambda: AsynchronousEngine(device))
    service.launch()
    await asyncio.wrap_future(service.started)
    gpu = CudnnRef(service)
    trio = await Trio.on(gpu)
    device.pause()
    first = gpu.submit(trio.sum())
    service.state.mailbox.admit(Envelope(trio.sum(), reply_to=Unreachable()))
    last = gpu.submit(trio.sum())
    await quiet(gpu)
    device.run_freely()
    receipts = [await outcome(future) for future in (first, last)]
    assert [receipt.generation for receipt in receipts] == [1, 1]
    assert await trio.result() == 19
    assert gpu.generation == 2
    await gpu.aclose()
