"""How the CUDA engine moves values, on a device that is the host's own memory and can be full or late."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cuda import fences, staging, transfer
from cudnn_actor.engines.cuda.fences import Fences
from cudnn_actor.engines.cuda.transfer import Transfer
from cudnn_actor.protocol import TensorSpec

_NOT_READY = 600
SPEC = TensorSpec.packed((2, 3, 64, 64), "float32", "NHWC")
"""Of an array that the device permutes: for that it needs scratch memory."""
LARGE = TensorSpec.packed((10, 4, 256, 256), "float32", "NHWC")
"""That goes through the ring in several pieces."""


class Array(np.ndarray):
    """An array on the device, with its address where CuPy has it."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


class HostDevice:
    """CUDA's calls, as far as transfers make them. Copies run at once; events pass unless it is late."""

    def __init__(self) -> None:
        self.full = False
        self.late = False
        self.synchronized = 0
        self.cupy = SimpleNamespace(cuda=self, ndarray=self._array)
        self.runtime = self
        self.ptr = 0

    # What is both `cupy.cuda` and `cupy.cuda.runtime`.

    def MemoryPool(self) -> Any:  # noqa: N802 - CuPy's name
        return SimpleNamespace(malloc=self._malloc)

    def Event(self, **_: Any) -> Any:  # noqa: N802 - CuPy's name
        return SimpleNamespace(ptr=0, record=lambda _: None, synchronize=lambda: None)

    def alloc_pinned_memory(self, nbytes: int) -> Any:
        memory: Any = type("Pinned", (ctypes.c_char * nbytes,), {})()
        memory.ptr = ctypes.addressof(memory)
        return memory

    def eventQuery(self, _: int) -> int:  # noqa: N802 - CUDA's name
        return _NOT_READY if self.late else 0

    def memcpyAsync(self, dst: int, src: int, nbytes: int, *_: Any) -> None:  # noqa: N802 - CUDA's name
        ctypes.memmove(dst, src, nbytes)

    # The stream.

    def __enter__(self) -> HostDevice:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        self.synchronized += 1
        self.late = False
        assert self.synchronized < 100, "waits for what never comes"

    def _malloc(self, nbytes: int) -> Any:
        if self.full:
            raise MemoryError("the device has no room")
        return (ctypes.c_char * nbytes)()

    @staticmethod
    def _array(dims: tuple[int, ...], dtype: Any, memory: Any) -> Array:
        return np.frombuffer(memory, dtype).reshape(dims).view(Array)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    device = HostDevice()
    for module in (fences, staging, transfer):
        monkeypatch.setattr(module, "libraries", lambda: device)
    return device


@pytest.fixture
def transfers(device: HostDevice) -> Transfer:
    return Transfer(device, Fences(device))


def place(spec: TensorSpec) -> Any:
    """A buffer on the device."""
    memory = np.zeros(spec.nbytes // 4, np.uint32).view(Array)
    strides = [4 * stride for stride in spec.strides]
    raw = np.lib.stride_tricks.as_strided(memory, spec.dims, strides, subok=True)
    return SimpleNamespace(pointer=memory.ctypes.data, spec=spec, raw=raw)


def values(spec: TensorSpec) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(spec.dims, np.float32)


def in_vain(device: HostDevice, call: Callable[[], object], times: int = 200) -> None:
    """Try something that the device has no room for, far more often than the ring has pieces."""
    device.full = True
    for _ in range(times):
        with pytest.raises(MemoryError):
            call()
    device.full = False


def test_what_is_uploaded_is_downloaded(transfers: Transfer) -> None:
    for spec in (SPEC, LARGE):
        buffer, array = place(spec), values(spec)
        transfers.write(buffer, array)
        np.testing.assert_array_equal(transfers.read(buffer), array)


def test_uploads_that_found_no_room_leave_the_ring_to_the_next(
    transfers: Transfer, device: HostDevice
) -> None:
    buffer, array = place(LARGE), values(LARGE)
    in_vain(device, lambda: transfers.write(buffer, array))
    transfers.write(buffer, array)
    np.testing.assert_array_equal(transfers.read(buffer), array)


def test_downloads_that_found_no_room_leave_the_ring_to_the_next(
    transfers: Transfer, device: HostDevice
) -> None:
    buffer, array = place(LARGE), values(LARGE)
    transfers.write(buffer, array)
    in_vain(device, lambda: transfers.read(buffer))
    np.testing.assert_array_equal(transfers.read(buffer), array)


def test_fetches_that_found_no_room_leave_the_ring_to_the_next(
    transfers: Transfer, device: HostDevice
) -> None:
    buffer, array = place(SPEC), values(SPEC)
    transfers.write(buffer, array)
    in_vain(device, lambda: transfers.fetch(buffer), times=2000)
    fetched = transfers.fetch(buffer)
    assert fetched is not None, "its ring is full of what nobody will call for"
    np.testing.assert_array_equal(fetched(), array)


def test_a_fetch_finds_no_room_behind_those_that_are_not_called_for(transfers: Transfer) -> None:
    half = TensorSpec.packed((1, 1, 2048, 2048))  # 16 MiB, of a ring of 32
    first, second = (transfers.fetch(place(half)) for _ in range(2))
    assert first is not None
    assert second is not None
    assert transfers.fetch(place(half)) is None
    first()
    assert transfers.fetch(place(half)) is not None
