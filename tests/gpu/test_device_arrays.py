"""Uploads of arrays that lie on the GPU: of PyTorch and CuPy, strided, and full only when their stream is."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cudnn_actor import CudnnRef, DType, InvalidRequest, Layout, spawn
from cudnn_actor.protocol.types.tensor import LayoutName

from ..inside import service_behind

pytestmark = pytest.mark.gpu

X = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
DTYPES = ["float64", "float32", "float16", "bfloat16", "int8", "int32", "uint8"]
EVERY = list(DType)
HELD_S = 10.0
"""A stream that is held goes on by itself then: a test that waits for it fails in the end."""


class ByInterface:
    """An array that only speaks the CUDA array interface, and names the stream that fills it."""

    def __init__(self, array: Any, stream: int | None) -> None:
        interface = {**array.__cuda_array_interface__, "version": 3, "stream": stream}
        self.array, self.__cuda_array_interface__ = array, interface


def torch_or_skip() -> Any:
    return pytest.importorskip("torch")


@contextlib.contextmanager
def held(stream: int) -> Iterator[None]:
    """Have whatever comes behind this on a stream, given by its handle, wait for the end of the block.

    It waits for a word in a page that another process has, too, which sets it after `HELD_S`: no thread of
    this one could, while a call into CUDA holds the interpreter's lock. What runs in the block must have run
    before: the first use of a kernel waits for all streams.
    """
    import cupy
    from cuda.bindings import driver

    fd = os.memfd_create("word")
    os.ftruncate(fd, mmap.PAGESIZE)
    with mmap.mmap(fd, mmap.PAGESIZE) as page:
        address = np.frombuffer(page, np.uint8).ctypes.data
        cupy.cuda.runtime.hostRegister(address, mmap.PAGESIZE, 0)
        late = subprocess.Popen(
            [sys.executable, "-c", _SET_IT_LATE, str(fd), str(HELD_S)], stdin=subprocess.PIPE, pass_fds=(fd,)
        )
        os.close(fd)
        equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        (status,) = driver.cuStreamWaitValue32(stream, address, 1, equal)
        assert status == driver.CUresult.CUDA_SUCCESS
        try:
            yield
        finally:
            page[0] = 1
            late.communicate()
            cupy.cuda.Device().synchronize()  # the word is read until then
            cupy.cuda.runtime.hostUnregister(address)


_SET_IT_LATE = """
import os, select, sys
if not select.select([0], [], [], float(sys.argv[2]))[0]:
    os.pwrite(int(sys.argv[1]), b"\\1", 0)
"""
"""Of a process that ends when its input does."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
async def test_a_torch_tensor_is_copied_on_the_device(dtype: str, layout: LayoutName) -> None:
    torch = torch_or_skip()
    tensor = torch.arange(X.size, device="cuda:0").reshape(X.shape).to(getattr(torch, dtype))
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        ref = await gpu.upload(tensor, layout=layout)
        assert (ref.spec.dims, ref.spec.dtype, ref.spec.layout) == (X.shape, DType(dtype), Layout(layout))
        out = await gpu.download(ref)
        np.testing.assert_array_equal(out.astype(np.float64), X)
        await gpu.write(ref, -tensor)
        np.testing.assert_array_equal(
            (await gpu.download(ref)).astype(np.float64), (-tensor).cpu().to(torch.float64).numpy()
        )


@pytest.mark.parametrize("dtype", EVERY)
async def test_a_cupy_array_is_copied_on_the_device(dtype: DType) -> None:
    import cupy

    values = X.astype(dtype.numpy)
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        ref = await gpu.upload(cupy.asarray(values), layout="NHWC")
        np.testing.assert_array_equal(await gpu.download(ref), values)


SHAPES = [(), (0,), (2, 0, 3), (5,), (1,) * 8, (2, 1, 3, 1, 2, 1, 2, 2)]
INTEGERS = [dtype for dtype in EVERY if not dtype.is_floating]


def extremes(dtype: DType, dims: tuple[int, ...]) -> np.ndarray:
    """The numbers at both ends of an integer type, in turn."""
    if dtype is DType.BOOL:
        return np.resize(np.array([True, False]), dims)
    limits = np.iinfo(dtype.value)
    return np.resize(np.array([limits.min, limits.max, limits.max - 1], dtype.numpy), dims)


@pytest.mark.parametrize("dims", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", INTEGERS)
async def test_integers_and_bools_of_any_shape_come_from_torch_and_cupy(
    dtype: DType, dims: tuple[int, ...]
) -> None:
    import cupy

    values = extremes(dtype, dims)
    arrays: list[Any] = [cupy.asarray(values), ByInterface(cupy.asarray(values), None)]
    with contextlib.suppress(ImportError):
        arrays.append(importlib.import_module("torch").from_numpy(values).to("cuda:0"))
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        for array in arrays:
            ref = await gpu.upload(array)
            assert (ref.spec.dims, ref.spec.dtype) == (dims, dtype)
            np.testing.assert_array_equal(await gpu.download(ref), values)
            await gpu.fill(ref, 0)
            await gpu.write(ref, array)
            np.testing.assert_array_equal(await gpu.download(ref), values)
            view = await gpu.view(ref)
            assert (view.shape, view.dtype) == (dims, dtype.numpy)
            np.testing.assert_array_equal(view.get(), values)
            del view


STRIDED = {
    "a slice": lambda x: x[:, 1:, ::2, 1:4],
    "transposed": lambda x: x.transpose(2, 3),
    "channels last": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "broadcast": lambda x: x[:1].expand(4, -1, -1, -1),
    "an offset": lambda x: x.flatten()[7:].reshape(1, 1, 1, -1),
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_tensor_may_lie_in_memory_as_it_likes(make: Any, dtype: str) -> None:
    torch = torch_or_skip()
    tensor = make(torch.from_numpy(X).to("cuda:0", getattr(torch, dtype)))
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        for layout in ("NCHW", "NHWC"):
            out = await gpu.download(await gpu.upload(tensor, layout=layout))
            np.testing.assert_array_equal(out.astype(np.float32), tensor.float().cpu().numpy())


async def test_cupys_negative_strides_are_followed() -> None:
    import cupy

    array = cupy.asarray(X)[::-1, :, ::-2]
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        np.testing.assert_array_equal(await gpu.download(await gpu.upload(array)), X[::-1, :, ::-2])


async def test_a_tensor_is_read_when_its_stream_has_filled_it() -> None:
    torch = torch_or_skip()
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        tensor, stream = torch.zeros(1 << 20, device="cuda:0"), torch.cuda.Stream()
        tensor += 0
        await gpu.free(await gpu.upload(tensor))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            with held(stream.cuda_stream):
                tensor += 1
                data = service_behind(gpu).values(tensor)
                assert not stream.query(), "taking it in has waited for its stream"
                uploading = asyncio.ensure_future(gpu.upload(tensor))
                await asyncio.sleep(0)  # so that it has been sent
            ref = await uploading
        assert (await gpu.download(ref)).min() == 1
        del data


async def test_a_cupy_array_is_read_when_the_current_stream_has_filled_it() -> None:
    import cupy

    async with spawn(device="cuda:0", isolation="thread") as gpu:
        array, stream = cupy.zeros(1 << 20, "f4"), cupy.cuda.Stream(non_blocking=True)
        array += 0
        await gpu.free(await gpu.upload(array))
        cupy.cuda.Device().synchronize()
        with stream:
            with held(stream.ptr):
                array += 1
                uploading = asyncio.ensure_future(gpu.upload(array))
                await asyncio.sleep(0)  # so that it has been sent
                assert not stream.done
            ref = await uploading
        assert (await gpu.download(ref)).min() == 1


async def test_an_array_by_its_interface_is_read_when_the_stream_that_it_names_has_filled_it() -> None:
    import cupy

    async with spawn(device="cuda:0", isolation="thread") as gpu:
        array, stream = cupy.zeros(1 << 20, "f4"), cupy.cuda.Stream(non_blocking=True)
        array += 0
        await gpu.free(await gpu.upload(ByInterface(array, stream.ptr)))
        cupy.cuda.Device().synchronize()
        with held(stream.ptr):
            with stream:
                array += 1
            data = service_behind(gpu).values(ByInterface(array, stream.ptr))
            assert not stream.done, "taking it in has waited for its stream"
            uploading = asyncio.ensure_future(gpu.upload(ByInterface(array, stream.ptr)))
            await asyncio.sleep(0)  # so that it has been sent
        ref = await uploading
        assert (await gpu.download(ref)).min() == 1
        await gpu.write(ref, ByInterface(array, None))
        del data


async def test_what_fills_one_threads_array_does_not_hold_up_anothers() -> None:
    import cupy

    async with spawn(device="cuda:0", isolation="thread") as gpu:
        late = cupy.zeros(8, "f4")
        stream = cupy.cuda.Stream(non_blocking=True)

        def take(stream: int | None) -> None:
            data: Any = service_behind(gpu).values(ByInterface(late, stream))
            data.ready.synchronize()

        take(stream.ptr)
        with held(stream.ptr):
            service_behind(gpu).values(ByInterface(late, stream.ptr))
            thread = threading.Thread(target=take, args=(None,))
            thread.start()
            thread.join()
            assert not stream.done, "another thread's array waited for this one's stream"
        stream.synchronize()


async def test_a_tensor_that_is_dropped_at_once_is_copied_all_the_same() -> None:
    torch = torch_or_skip()
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        for _ in range(20):
            uploading = gpu.upload(torch.full((1 << 22,), 3.0, device="cuda:0"))
            ref = await uploading
            torch.full((1 << 22,), 4.0, device="cuda:0")  # takes the memory, if it is free
            assert set(np.unique(await gpu.download(ref))) == {3.0}
            await gpu.free(ref)


async def test_tensors_on_the_host_come_by_the_host() -> None:
    torch = torch_or_skip()
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        for tensor in (torch.from_numpy(X), torch.from_numpy(X).pin_memory()):
            np.testing.assert_array_equal(await gpu.download(await gpu.upload(tensor)), X)


async def refusal(gpu: CudnnRef, array: Any, **options: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await gpu.upload(array, **options)
    assert (await gpu.statistics()).live_buffers == 0
    return caught.value


async def test_what_cannot_be_taken_is_refused_with_a_fix() -> None:
    torch = torch_or_skip()
    tensor = torch.from_numpy(X).to("cuda:0")
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        assert "detach" in (await refusal(gpu, tensor.clone().requires_grad_())).fix
        assert "detach" in (await refusal(gpu, torch.from_numpy(X).requires_grad_())).fix
        assert "cast" in (await refusal(gpu, tensor.to(torch.complex64))).fix
        assert "cast" in (await refusal(gpu, tensor, dtype="float16")).fix
        assert "ml_dtypes" in (await refusal(gpu, torch.from_numpy(X).bfloat16())).fix
        assert (await refusal(gpu, tensor.to_sparse())).fix
    async with spawn(device="cpu") as cpu:
        assert "is on cuda:0, but this service runs on cpu" in str(await refusal(cpu, tensor))


async def test_a_tensor_of_another_gpu_is_refused() -> None:
    torch = torch_or_skip()
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        problem = str(await refusal(gpu, torch.zeros(3, device="cuda:1")))
        assert "is on cuda:1, but this service runs on cuda:0" in problem
    async with spawn(device="cuda:1", isolation="thread") as gpu:
        ref = await gpu.upload(torch.ones(3, device="cuda:1"))
        np.testing.assert_array_equal(await gpu.download(ref), np.ones(3))


async def test_bfloat16_keeps_every_bit() -> None:
    torch = torch_or_skip()
    bits = np.arange(1 << 16, dtype=np.uint16)
    tensor = torch.from_numpy(bits.view(np.int16)).to("cuda:0").view(torch.bfloat16)
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        out = await gpu.download(await gpu.upload(tensor))
        assert out.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(out.view(np.uint16), bits)
