"""Values on their way to a device and back, in process isolation: arenas are not mapped in this process."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cudnn_actor.isolation.process.wire import Requests
from cudnn_actor.isolation.staging import PIECE_BYTES, PIECES
from cudnn_actor.messages import Download, Message, Ping, Upload
from cudnn_actor.models import Feature
from cudnn_actor.processes.channel import Channel
from cudnn_actor.protocol import DType
from tests.service.rigs import in_thread

from ..inside import service_behind
from .crash_rigs import workers

pytestmark = pytest.mark.usefixtures("a_forkserver")
LARGE = (1 << 20,)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """The garbage collector does not run: only what nothing refers to any more is collected."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_what_was_downloaded_is_collected_when_its_caller_drops_it() -> None:
    async with workers(host_arenas=False) as (gpu, _):
        ref = await gpu.upload(np.ones(LARGE, np.float32))
        array = await gpu.download(ref)
        assert (array == 1).all()
        there = weakref.ref(array)
        del array
        await gpu.ping()
        assert there() is None


@pytest.mark.usefixtures("no_collector")
async def test_a_request_is_collected_when_its_caller_drops_the_reply() -> None:
    async with workers(host_arenas=False) as (gpu, _):
        future = gpu.submit(Ping())
        await future
        there = weakref.ref(future)
        del future
        await gpu.ping()
        assert there() is None


@pytest.mark.parametrize("lent", [False, True], ids=["arrays", "lent memory"])
async def test_many_uploads_at_once_write_each_its_own_values(lent: bool) -> None:
    """More than there are pieces of staging memory for, and of all sizes: none, and more than one, too."""
    async with workers(host_arenas=False) as (gpu, _):
        chance = np.random.default_rng(0)
        sizes = [*chance.integers(0, 1000, 60), 1 << 18, (1 << 18) + 1, (5 << 20) + 3]
        arrays = [chance.standard_normal(int(size), dtype=np.float32) for size in sizes]
        if lent:
            for number, array in enumerate(arrays):
                arrays[number] = await gpu.staging(
                    Feature(name="x", dtype=DType.FLOAT32, dims=("N",)), N=array.size
                )
                arrays[number][...] = array
        refs = [await gpu.empty(array.shape) for array in arrays]
        for _ in range(3):
            given = zip(refs, arrays, strict=True)
            await asyncio.gather(*(gpu.submit(Upload(dst=ref, data=array)) for ref, array in given))
            for ref, array in zip(refs, arrays, strict=True):
                np.testing.assert_array_equal(await gpu.download(ref), array)
                np.negative(array, out=array)


async def test_many_downloads_at_once_give_each_its_own_values_and_keep_no_piece() -> None:
    """Small ones by pieces of staging memory while there are some, and larger ones."""
    async with workers(host_arenas=False) as (gpu, _):
        chance = np.random.default_rng(0)
        sizes = [*chance.integers(0, 1000, 60), 1 << 16, 1 << 18, (1 << 18) + 1, 5 << 20]
        arrays = [chance.standard_normal(int(size), dtype=np.float32) for size in sizes]
        refs = [await gpu.upload(array) for array in arrays]
        mailbox: Any = service_behind(gpu).state.mailbox
        staging = mailbox.host.staging
        for _ in range(2):
            found = await asyncio.gather(*(gpu.submit(Download(src=ref)) for ref in refs))
            for got, array in zip(found, arrays, strict=True):
                np.testing.assert_array_equal(got, array)
            assert len(set(staging.pieces)) == len(staging.pieces) == PIECES  # though the arrays are kept


async def test_values_for_a_new_small_buffer_go_by_a_piece_which_comes_back_with_the_answer() -> None:
    async with workers(host_arenas=False) as (gpu, _):
        mailbox: Any = service_behind(gpu).state.mailbox
        staging = mailbox.host.staging
        values = np.random.default_rng(0).integers(0, 256, PIECE_BYTES, np.uint8)
        for _ in range(PIECES + 1):
            ref = await gpu.upload(values)
            assert len(staging.pieces) == PIECES
            assert not staging.has_ended
            np.testing.assert_array_equal(await gpu.download(ref), values)
            np.invert(values, out=values)


@pytest.mark.parametrize("direction", ["upload", "download"])
@pytest.mark.parametrize("more", [0, 1])
async def test_up_to_a_mebibyte_is_copied_without_another_thread(
    monkeypatch: pytest.MonkeyPatch, direction: str, more: int
) -> None:
    senders: list[int] = []
    sending, flushing = Channel.send, Channel.flush_only

    def send(channel: Channel, frame: Any, *rest: Any) -> None:
        if isinstance(frame, Requests):
            senders.append(threading.get_ident())
        sending(channel, frame, *rest)

    def flush(channel: Channel) -> bool:
        senders.append(threading.get_ident())
        return flushing(channel)

    async with workers(host_arenas=False) as (gpu, _):
        values = np.random.default_rng(0).integers(0, 256, PIECE_BYTES + more, np.uint8)
        ref = await gpu.upload(values)
        message: Message = Upload(dst=ref, data=values) if direction == "upload" else Download(src=ref)
        await gpu.ask(message)  # from now on there are pieces of staging memory for it
        with monkeypatch.context() as patch:
            patch.setattr(Channel, "send", send)
            patch.setattr(Channel, "flush_only", flush)
            await gpu.ask(message)
        assert (set(senders) == {threading.get_ident()}) == (not more)
        np.testing.assert_array_equal(await gpu.download(ref), values)


@pytest.mark.parametrize(
    ("nbytes", "dtype", "alone"),
    [
        (PIECE_BYTES, DType.UINT8, True),
        (PIECE_BYTES + 1, DType.UINT8, False),
        (PIECE_BYTES, DType.BFLOAT16, False),
    ],
)
async def test_a_loop_on_a_thread_uploads_up_to_a_mebibyte_to_a_new_buffer_by_itself(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, dtype: DType, alone: bool
) -> None:
    """On the main thread, where a signal handler may raise, another thread makes new buffers. Values that
    are converted take longer than 50 us."""
    senders: list[int] = []
    sending = Channel.send

    def send(channel: Channel, frame: Any, *rest: Any) -> None:
        if isinstance(frame, Requests):
            senders.append(threading.get_ident())
        sending(channel, frame, *rest)

    async def upload() -> None:
        async with workers(host_arenas=False) as (gpu, _):
            await gpu.upload(values, dtype=dtype)  # from now on there are arenas and staging memory for it
            with monkeypatch.context() as patch:
                patch.setattr(Channel, "send", send)
                ref = await gpu.upload(values, dtype=dtype)
            assert (set(senders) == {threading.get_ident()}) == alone
            np.testing.assert_array_equal((await gpu.download(ref)).astype(np.uint8), values)

    values = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    await in_thread(lambda: asyncio.run(upload()))


@pytest.mark.parametrize("cores", [2, 4, 64])
@pytest.mark.parametrize("nbytes", [(4 << 20) - 1, 4 << 20, (9 << 20) + 5])
async def test_a_large_array_is_uploaded_whole_on_any_number_of_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, nbytes: int
) -> None:
    async with workers(host_arenas=False) as (gpu, _):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        values = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        ref = await gpu.upload(values)
        np.testing.assert_array_equal(await gpu.download(ref), values)


async def test_an_array_that_was_downloaded_may_be_written_and_outlives_the_service() -> None:
    async with workers(host_arenas=False) as (gpu, _):
        x = await gpu.upload(np.ones(LARGE, np.float32))
        first, second = await gpu.download(x), await gpu.download(x)
        first[:] = 2.0
        assert (await gpu.download(x) == 1.0).all()
    assert (first == 2.0).all()
    assert (second == 1.0).all()
