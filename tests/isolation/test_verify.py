"""`verify=True`: uploads are looked at again after a crash, whether the parent sees them or has to ask."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing

import numpy as np
import pytest

from cudnn_actor import BufferRef, ConvFwd, ConvSpec, CudnnRef, DType, StaleBufferError, TensorSpec
from cudnn_actor.engines import choose_engine
from cudnn_actor.isolation.process.parent.verification import compare, verification
from cudnn_actor.messages import Allocate, Fill, Upload
from cudnn_actor.options import make_options
from cudnn_actor.processes import channel
from cudnn_actor.protocol.errors import StaleReason
from cudnn_actor.service import Spawning
from cudnn_actor.service.service import CudnnService

from ..growth import takes_in_proportion
from ..inside import service_behind
from ..patience import PATIENCE_S
from .crash_rigs import kill, workers
from .simulated import Office

ONE = ConvSpec.symmetric(2)


@asynccontextmanager
async def verified(*, host_arenas: bool, verify: bool = True, standby: int = 0) -> AsyncIterator[CudnnRef]:
    given = {"device": "cpu", "isolation": "process", "verify": verify, "max_restarts": 50}
    options = make_options({**given, "standby": standby})
    engine = choose_engine("cpu")._replace(host_arenas=host_arenas)
    async with Spawning(CudnnService(options, engine=engine)) as gpu:
        yield gpu


def corrupt(gpu: CudnnRef, ref: BufferRef) -> None:
    """Change one byte of a buffer, as nobody should."""
    slot = service_behind(gpu).state.memory.resolve(ref)
    arena = next(a for a in service_behind(gpu).state.memory.arenas() if a.number == slot.arena.number)
    with mmap.mmap(arena.fd, arena.nbytes) as memory:
        memory[slot.offset] ^= 0xFF


async def crash(gpu: CudnnRef) -> None:
    pid = gpu.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while await gpu.ping() < 2:
        pass


@pytest.mark.parametrize("host_arenas", [True, False], ids=["host memory", "device memory"])
async def test_a_buffer_that_changed_is_torn_and_the_others_stay(host_arenas: bool) -> None:
    async with verified(host_arenas=host_arenas) as gpu:
        values = np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2)
        good, bad = await gpu.upload(values), await gpu.upload(values, layout="NHWC")
        corrupt(gpu, bad)
        await crash(gpu)
        with pytest.raises(StaleBufferError) as stale:
            await gpu.download(bad)
        assert stale.value.reason is StaleReason.TORN
        np.testing.assert_array_equal(await gpu.download(good), values)


@pytest.mark.parametrize("host_arenas", [True, False], ids=["host memory", "device memory"])
async def test_buffers_of_every_dtype_and_of_no_elements_are_there_after_a_crash(host_arenas: bool) -> None:
    async with verified(host_arenas=host_arenas) as gpu:
        arrays = [np.ones(dims, dtype.numpy) for dtype in DType for dims in ((), (0,), (2, 0, 3), (1, 5))]
        arrays.append(np.array([2**53 + 1, 2**64 - 1], np.uint64))
        refs = [await gpu.upload(array) for array in arrays]
        bad = await gpu.upload(np.True_)
        corrupt(gpu, bad)
        await crash(gpu)
        for array, ref in zip(arrays, refs, strict=True):
            out = await gpu.download(ref)
            assert (out.dtype, out.shape, out.tobytes()) == (array.dtype, array.shape, array.tobytes())
        with pytest.raises(StaleBufferError):
            await gpu.download(bad)


@pytest.mark.parametrize("host_arenas", [True, False], ids=["host memory", "device memory"])
@pytest.mark.parametrize("writer", ["upload", "fill", "convolution"])
async def test_a_buffer_that_was_written_again_is_compared_with_nothing_older(
    host_arenas: bool, writer: str
) -> None:
    async with verified(host_arenas=host_arenas) as gpu:
        ones = np.ones((1, 1, 2, 2), np.float32)
        x, w, y = [await gpu.upload(values) for values in (ones, 2 * ones[..., :1, :1], ones)]
        if writer == "upload":
            await gpu.ask(Upload(dst=y, data=3 * ones))
        elif writer == "fill":
            await gpu.ask(Fill(dst=y, value=3.0))
        else:
            await gpu.ask(ConvFwd(x=x, w=w, y=y, conv=ONE))
        await crash(gpu)
        assert (await gpu.download(y)).ravel()[0] == (2.0 if writer == "convolution" else 3.0)


@pytest.mark.parametrize("standby", [0, 1])
async def test_a_buffer_larger_than_any_segment_that_is_left_is_looked_at_and_kept(standby: int) -> None:
    async with verified(host_arenas=False, standby=standby) as gpu:
        values = np.arange(10 << 20, dtype=np.float32).reshape(1, 1, 1 << 10, 10 << 10)
        small, large = await gpu.upload(values[..., :1, :4]), await gpu.upload(values)
        bad = await gpu.upload(values[..., :1, :8])
        corrupt(gpu, bad)
        await crash(gpu)
        np.testing.assert_array_equal(await gpu.download(large), values)
        np.testing.assert_array_equal(await gpu.download(small), values[..., :1, :4])
        with pytest.raises(StaleBufferError):
            await gpu.download(bad)
        again = await gpu.upload(values)  # in the segment that was made while there was no worker
        np.testing.assert_array_equal(await gpu.download(again), values)
        assert (await gpu.statistics()).restarts == 1


async def test_a_buffer_that_a_worker_cannot_read_is_asked_of_the_next() -> None:
    async with workers(host_arenas=False, verify=True) as (gpu, points):
        ref = await gpu.upload(np.ones((1, 1, 2, 2), np.float32))
        points.order("read", "fail")
        kill(gpu)
        assert (await gpu.download(ref)).sum() == 4.0
        assert (await gpu.statistics()).restarts == 2


async def test_a_worker_that_is_told_more_than_its_socket_takes_is_asked_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each of many arenas it is told: what there is no room for goes on as it reads."""
    async with verified(host_arenas=False) as gpu:
        values = np.ones((1, 1, 2, 2), np.float32)
        ref = await gpu.upload(values)
        for _ in range(50):
            await gpu.empty((1, 1, 4096, 4096), dtype="float32")
        monkeypatch.setattr(channel, "_BUFFER", 1)  # the least that the kernel has
        async with asyncio.timeout(PATIENCE_S):
            await crash(gpu)
            np.testing.assert_array_equal(await gpu.download(ref), values)
        assert (await gpu.statistics()).restarts == 1


async def test_without_verify_nobody_looks() -> None:
    async with verified(host_arenas=True, verify=False) as gpu:
        ref = await gpu.upload(np.ones((1, 1, 2, 2), np.float32))
        corrupt(gpu, ref)
        await crash(gpu)
        assert (await gpu.download(ref)).shape == (1, 1, 2, 2)


def test_the_time_of_a_verification_grows_as_the_number_of_buffers() -> None:
    values = np.ones(1, np.float32)
    with ExitStack() as offices:

        def prepare(count: int) -> Callable[[], object]:
            office = offices.enter_context(closing(Office(host=True, verifies=True, slots=count)))
            office.attach()
            for _ in range(count):
                office.ask(Allocate(spec=TensorSpec.packed((1,), "float32"), data=values))

            def verify() -> None:
                for slot, _, block in verification(office.host):
                    compare(office.host, slot, block)

            return verify

        takes_in_proportion(prepare, 100)
