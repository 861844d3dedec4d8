"""Uploads of other libraries' arrays: on the host, on the service's device, and on none that it can read."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cudnn_actor import CudnnRef, DType, InvalidRequest, Layout, TensorSpec, spawn
from cudnn_actor.engines import EngineChoice
from cudnn_actor.messages import Allocate, Upload
from cudnn_actor.options import make_options
from cudnn_actor.protocol import DeviceArray
from cudnn_actor.service import Spawning
from cudnn_actor.service.service import CudnnService

from ..inside import service_behind
from .rigs import AsynchronousEngine, Device, in_thread

X = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
CPU, CUDA, CUDA_HOST, METAL = 1, 2, 3, 8
"""DLPack's numbers of devices."""


class Foreign:
    """An array of a library that NumPy knows nothing of but DLPack."""

    def __init__(self, values: np.ndarray, kind: int = CPU, ordinal: int = 0) -> None:
        self.values = values
        self.dtype = values.dtype
        self._device = kind, ordinal

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__()


class Training(Foreign):
    """One whose gradient is asked for: its library hands it out to nobody."""

    requires_grad = True

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("it requires a gradient")

    def __array__(self, *_: Any, **options: Any) -> Any:
        raise RuntimeError("it requires a gradient")


class Halves(Foreign):
    """bfloat16, which NumPy takes by DLPack from nobody."""

    def __init__(self) -> None:
        super().__init__(X)
        self.dtype = "torch.bfloat16"  # type: ignore[assignment]

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("bfloat16 is not supported")

    def __array__(self, *_: Any, **options: Any) -> Any:
        raise TypeError("got unsupported type bfloat16")


class HalvesForNumpy(Halves):
    """The same of a library that knows of ml-dtypes."""

    def __array__(self, *_: Any, **options: Any) -> Any:
        return self.values.astype(ml_dtypes.bfloat16)


class Spread(Foreign):
    """One that lies on several devices."""

    def __dlpack_device__(self) -> tuple[int, int]:
        raise BufferError("it lies on two devices")


class OldStyle:
    """One that only speaks the CUDA array interface."""

    __cuda_array_interface__ = {"shape": (2,), "typestr": "<f4", "data": (0, False), "version": 3}  # noqa: RUF012


@pytest.mark.parametrize("kind", [CPU, CUDA_HOST])
async def test_other_libraries_arrays_on_the_host_are_taken_by_dlpack(kind: int) -> None:
    async with spawn(device="cpu") as gpu:
        ref = await gpu.upload(Foreign(X[:, :, ::2], kind), layout="NHWC")
        assert (ref.spec.dims, ref.spec.dtype, ref.spec.layout) == ((2, 3, 2, 5), DType.FLOAT32, Layout.NHWC)
        np.testing.assert_array_equal(await gpu.download(ref), X[:, :, ::2])
        await gpu.write(ref, Foreign(X[:, :, 1::2], kind))
        np.testing.assert_array_equal(await gpu.download(ref), X[:, :, 1::2])


async def test_what_dlpack_does_not_give_numpy_may_come_as_an_array() -> None:
    async with spawn(device="cpu") as gpu:
        ref = await gpu.upload(HalvesForNumpy())
        assert ref.spec.dtype is DType.BFLOAT16
        np.testing.assert_array_equal(await gpu.download(ref), X)


async def test_values_on_the_host_are_cast_as_numpys_are() -> None:
    async with spawn(device="cpu") as gpu:
        ref = await gpu.upload(Foreign(X), dtype="float16")
        np.testing.assert_array_equal(await gpu.download(ref), X.astype(np.float16))


REFUSED = {
    "a gradient": (Training(X), "requires a gradient", "detach"),
    "bfloat16": (Halves(), "unsupported type", "torch.int16"),
    "several devices": (Spread(X), "two devices", "on the host"),
    "a GPU": (Foreign(X, CUDA, 1), "is on cuda:1, but this service runs on cpu", "x.cpu()"),
    "a GPU, old style": (OldStyle(), "is on cuda, but this service runs on cpu", "cupy.asnumpy"),
    "another device": (Foreign(X, METAL), "device of another kind", "to the host first"),
    "complex": (Foreign(X.astype(np.complex64)), "not hold real numbers", ".real and .imag"),
}


@pytest.mark.parametrize(("array", "problem", "fix"), REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_read_is_refused_with_the_reason_and_a_fix(
    array: Any, problem: str, fix: str
) -> None:
    async with spawn(device="cpu") as gpu:
        dst = await gpu.upload(X)
        for call in (gpu.upload(array), gpu.write(dst, array)):
            with pytest.raises(InvalidRequest, match=problem) as caught:
                await call
            assert fix in caught.value.fix
        np.testing.assert_array_equal(await gpu.download(dst), X)
        assert (await gpu.statistics()).live_buffers == 1


class DeviceEngine(AsynchronousEngine):
    """One that reads arrays of its own device only when the work before a fence is done."""

    device = "cuda:0"

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._copies: list[tuple[np.ndarray, DeviceArray]] = []

    def write(self, dst: np.ndarray, array: Any) -> None:
        if isinstance(array, DeviceArray):
            self._copies.append((dst, array))
        else:
            super().write(dst, array)

    def has_passed(self, fence: Any) -> bool:
        done = super().has_passed(fence)
        while done and self._copies:
            dst, array = self._copies.pop(0)
            dst[...] = array.array
        return done

    def read(self, src: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
        assert not self._copies
        return super().read(src, into)


@asynccontextmanager
async def on_a_device(**refusal: Any) -> AsyncIterator[tuple[CudnnRef, Device, list[int]]]:
    """A service on "cuda:0", its device, and the threads on which arrays were adopted."""
    device, threads = Device(), list[int]()
    device.run_freely()

    def adopt(array: Any) -> DeviceArray:
        threads.append(threading.get_ident())
        if refusal:
            raise InvalidRequest(**refusal)
        dtype = DType.of(array.values.dtype)
        assert dtype is not None
        place = f"cuda:{array.__dlpack_device__()[1]}"
        dims = tuple(array.values.shape)
        return DeviceArray(dims=dims, dtype=dtype, device=place, array=array.values, source=array)

    choice = EngineChoice("cuda:0", lambda: DeviceEngine(device), outlives_context=True, adopt=adopt)
    async with Spawning(CudnnService(make_options({"device": "cpu"}), engine=choice)) as gpu:
        yield gpu, device, threads


async def test_an_array_on_the_device_is_adopted_on_its_callers_thread() -> None:
    async with on_a_device() as (gpu, _, threads):
        ref = await gpu.upload(Foreign(X[:, ::2], CUDA), layout="NHWC")
        assert (ref.spec.dims, ref.spec.layout, ref.device) == ((2, 2, 4, 5), Layout.NHWC, "cuda:0")
        np.testing.assert_array_equal(await gpu.download(ref), X[:, ::2])
        await gpu.write(ref, Foreign(X[:, 1:], CUDA))
        np.testing.assert_array_equal(await gpu.download(ref), X[:, 1:])
        await gpu.upload(X)
        await gpu.upload(Foreign(X))
        assert threads == [threading.get_ident()] * 2, "arrays on the host are none of the device's"


async def test_an_array_on_the_device_lives_until_it_has_been_copied() -> None:
    async with on_a_device() as (gpu, device, _):
        array = Foreign(X.copy(), CUDA)
        living = weakref.ref(array)
        device.pause()
        uploading = asyncio.ensure_future(gpu.upload(array))
        del array
        await in_thread(device.wait_for_fence)
        assert living() is not None
        device.run_freely()
        ref = await uploading
        np.testing.assert_array_equal(await gpu.download(ref), X)
        await gpu.ping()
        assert living() is None


UNFIT = {
    "dtype": (Foreign(X.astype(np.float64), CUDA), "does not hold float32", "cast it on the device"),
    "dims": (Foreign(X[:1], CUDA), "other dims than the buffer", "reshape"),
    "device": (Foreign(X, CUDA, 1), "is on cuda:1, but this service runs on cuda:0", "move it"),
}


@pytest.mark.parametrize(("array", "problem", "fix"), UNFIT.values(), ids=UNFIT)
async def test_an_array_on_the_device_must_be_just_what_the_buffer_holds(
    array: Any, problem: str, fix: str
) -> None:
    async with on_a_device() as (gpu, _, _):
        dst = await gpu.upload(X)
        with pytest.raises(InvalidRequest, match=problem) as caught:
            await gpu.write(dst, array)
        assert fix in caught.value.fix
        # A sender without a check on its side gets the same from the actor.
        data = service_behind(gpu).values(array)
        for message in (Upload(dst=dst, data=data), Allocate(spec=TensorSpec.packed(X.shape), data=data)):
            with pytest.raises(InvalidRequest, match=problem):
                await in_thread(partial(gpu.actor_ref.ask, message))
            with pytest.raises(InvalidRequest, match=problem):
                gpu.submit(message)  # which raises at once what is seen before it is sent
        np.testing.assert_array_equal(await gpu.download(dst), X)
        assert (await gpu.statistics()).live_buffers == 1


async def test_an_upload_from_the_device_is_not_cast() -> None:
    async with on_a_device() as (gpu, _, _):
        array = Foreign(X, CUDA)
        assert (await gpu.upload(array, dtype="float32")).spec.dtype is DType.FLOAT32
        with pytest.raises(InvalidRequest, match="cast it on the device first"):
            await gpu.upload(array, dtype="float16")


async def test_what_the_engine_cannot_adopt_is_refused_before_it_is_sent() -> None:
    async with on_a_device(field="array", value="x", problem="is sparse", fix="densify it") as (gpu, _, _):
        with pytest.raises(InvalidRequest, match="is sparse; densify it"):
            await gpu.upload(Foreign(X, CUDA))
        assert (await gpu.statistics()).live_buffers == 0


async def test_plain_threads_send_what_values_makes_of_an_array() -> None:
    async with on_a_device() as (gpu, _, _):
        array = Foreign(X, CUDA)
        spec = TensorSpec.packed(X.shape)
        with pytest.raises(InvalidRequest, match=r"service\.values"):
            await gpu.ask(Allocate(spec=spec, data=array))  # type: ignore[arg-type]
        message = Allocate(spec=spec, data=service_behind(gpu).values(array))
        ref = await in_thread(lambda: gpu.actor_ref.ask(message))
        np.testing.assert_array_equal(await gpu.download(ref), X)
