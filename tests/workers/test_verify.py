"""`verify=True`: uploads are looked at again after a crash, whether the parent sees them or has to ask."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from cudnn_actor import BufferRef, ConvFwd, ConvSpec, CudnnRef, Fill, Spawning, StaleBufferError, Upload
from cudnn_actor.engines import choose_engine
from cudnn_actor.options import make_options
from cudnn_actor.protocol.errors import StaleReason
from cudnn_actor.service import CudnnService

ONE = ConvSpec.symmetric(2)


@asynccontextmanager
async def verified(*, host_arenas: bool, verify: bool = True) -> AsyncIterator[CudnnRef]:
    options = make_options({"device": "cpu", "isolation": "process", "verify": verify, "max_restarts": 50})
    engine = choose_engine("cpu")._replace(host_arenas=host_arenas)
    async with Spawning(CudnnService(options, engine=engine)) as gpu:
        yield gpu


def corrupt(gpu: CudnnRef, ref: BufferRef) -> None:
    """Change one byte of a buffer, as nobody should."""
    slot = gpu._state.memory.resolve(ref)
    arena = next(a for a in gpu._state.memory.arenas() if a.number == slot.arena.number)
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


async def test_without_verify_nobody_looks() -> None:
    async with verified(host_arenas=True, verify=False) as gpu:
        ref = await gpu.upload(np.ones((1, 1, 2, 2), np.float32))
        corrupt(gpu, ref)
        await crash(gpu)
        assert (await gpu.download(ref)).shape == (1, 1, 2, 2)
