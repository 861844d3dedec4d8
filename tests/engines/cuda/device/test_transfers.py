"""How the CUDA engine moves values, on a device that is the host's own memory and can be full or late."""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.base import EngineFailure, StickyError
from cudnn_actor.engines.cuda.device import fences, pinning, transfer
from cudnn_actor.engines.cuda.device import pinned_ring as staging
from cudnn_actor.engines.cuda.device.fences import Fences
from cudnn_actor.engines.cuda.device.transfer import Transfer
from cudnn_actor.protocol import InvalidRequest, TensorSpec
from cudnn_actor.protocol.types.dtypes import DTypeName
from cudnn_actor.protocol.types.tensor import LayoutName

from ....log_lines import capture_logs

_NOT_READY = 600
SPEC = TensorSpec.packed((2, 3, 64, 64), "float32", "NHWC")
"""Of an array that the device permutes: for that it needs scratch memory."""
LARGE = TensorSpec.packed((10, 4, 256, 256), "float32", "NHWC")
"""That goes through the ring in several pieces."""
HUGE = TensorSpec.packed((20, 4, 256, 256))
"""Too large for a fetch through the ring."""
TINY = TensorSpec.packed((1, 2, 4, 4), "float32", "NHWC")
"""That the host permutes faster than a kernel is launched."""


class Array(np.ndarray):
    """An array on the device, with its address where CuPy has it."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


class HostDevice:
    """CUDA's calls, as far as transfers make them. Copies run at once; events pass unless it is late."""

    def __init__(self) -> None:
        self.full = False
        self.rooms = 1 << 30
        """How often it has room before it is full."""
        self.late = False
        self.synchronized = 0
        self.copies: list[tuple[int, int]] = []
        """To and from where, of each copy."""
        self.took_pinned = False
        self.registered: dict[int, int] = {}
        self.refusal: tuple[type[EngineFailure], str] | None = None
        self.cupy = SimpleNamespace(cuda=self, ndarray=self._array, get_default_pinned_memory_pool=self.pool)
        self.runtime = self
        self.ptr = 0

    # What is both `cupy.cuda` and `cupy.cuda.runtime`.

    def MemoryPool(self) -> Any:  # noqa: N802 - CuPy's name
        return self.pool()

    def pool(self) -> Any:
        return SimpleNamespace(malloc=self._malloc, free_all_blocks=lambda: None)

    def Event(self, **_: Any) -> Any:  # noqa: N802 - CuPy's name
        return SimpleNamespace(ptr=0, record=lambda _: None, synchronize=lambda: None)

    def alloc_pinned_memory(self, nbytes: int) -> Any:
        self.took_pinned = True
        memory: Any = type("Pinned", (ctypes.c_char * nbytes,), {})()
        memory.ptr = ctypes.addressof(memory)
        return memory

    def eventQuery(self, _: int) -> int:  # noqa: N802 - CUDA's name
        return _NOT_READY if self.late else 0

    def memcpyAsync(self, dst: int, src: int, nbytes: int, *_: Any) -> None:  # noqa: N802 - CUDA's name
        self.copies.append((dst, src))
        ctypes.memmove(dst, src, nbytes)

    def hostRegister(self, address: int, nbytes: int, _: int) -> None:  # noqa: N802 - CUDA's name
        if self.refusal is not None:
            kind, status = self.refusal
            raise kind(status, "as the test says")
        self.registered[address] = nbytes

    def hostUnregister(self, address: int) -> None:  # noqa: N802 - CUDA's name
        del self.registered[address]

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
        self.rooms -= 1
        if self.full or self.rooms < 0:
            raise MemoryError("the device has no room")
        return (ctypes.c_char * nbytes)()

    @staticmethod
    def _array(dims: tuple[int, ...], dtype: Any, memory: Any) -> Array:
        return np.frombuffer(memory, dtype).reshape(dims).view(Array)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    device = HostDevice()
    for module in (fences, pinning, staging, transfer):
        monkeypatch.setattr(module, "libraries", lambda: device)
    return device


@pytest.fixture
def transfers(device: HostDevice) -> Transfer:
    return Transfer(device, Fences(device))


def place(spec: TensorSpec) -> Any:
    """A buffer on the device."""
    size = spec.dtype.itemsize
    memory = np.zeros(spec.nbytes // size, f"u{size}").view(Array)
    strides = [size * stride for stride in spec.strides]
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


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_row_that_lies_as_its_place_is_one_copy(
    transfers: Transfer, device: HostDevice, layout: LayoutName
) -> None:
    spec = TensorSpec.packed((2, 3, 4, 1), "float32", layout)
    rows = place(TensorSpec.strided((5, *spec.dims), (spec.size + 8, *spec.strides)))
    wanted = np.arange(5 * spec.size, dtype=np.float32).reshape(rows.spec.dims)
    transfers.write(rows, wanted)
    there, other = place(spec), place(TensorSpec.packed(spec.dims, "float32", "NCHW"))
    device.copies.clear()
    for row in (3, 0):
        transfers.row_copy(rows, there, store=False)(row)
        np.testing.assert_array_equal(transfers.read(there), wanted[row])
    transfers.row_copy(rows, there, store=True)(4)
    wanted[4] = wanted[0]
    np.testing.assert_array_equal(transfers.read(rows), wanted)
    transfers.row_copy(rows, other, store=False)(2)
    np.testing.assert_array_equal(transfers.read(other), wanted[2])
    assert [to for to, _ in device.copies].count(there.pointer) == 2


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "uint64"])
@pytest.mark.parametrize("dims", [(), (0,), (2, 0, 3), (0, 3, 4, 4), (1,) * 8])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_tensors_without_dims_or_elements_are_moved(
    transfers: Transfer, device: HostDevice, dims: tuple[int, ...], dtype: DTypeName, layout: LayoutName
) -> None:
    spec = TensorSpec.packed(dims, dtype, layout if 3 <= len(dims) <= 5 else "NCHW")
    array = np.ones(dims, spec.dtype.numpy)
    for given in (array, array.astype(np.int64), np.ones(dims, bool)):
        src, dst = place(spec), place(TensorSpec.packed(dims, dtype))
        transfers.write(src, given)
        transfers.copy(src, dst)
        for receive in (transfers.read, transfers.fetch):
            for into in (None, np.zeros(dims, spec.dtype.numpy)):
                answer = receive(dst, into)
                assert answer is not None
                got = answer() if callable(answer) else answer
                assert (got.shape, got.dtype) == (dims, spec.dtype.numpy)
                np.testing.assert_array_equal(got, array)
    assert device.took_pinned is (array.size > 0), "an empty piece would fill the ring"
    transfers.fill(dst, 0)
    np.testing.assert_array_equal(transfers.read(dst), np.zeros(dims, spec.dtype.numpy))
    with pytest.raises(InvalidRequest, match="other dims"):
        transfers.write(dst, np.ones((*dims, 0), spec.dtype.numpy))
    with pytest.raises(EngineFailure, match="BAD_TARGET"):
        transfers.read(dst, np.zeros((*dims, 0), spec.dtype.numpy))


def test_a_number_without_dims_is_rounded_once(transfers: Transfer) -> None:
    buffer = place(TensorSpec.packed((), "bfloat16"))
    transfers.write(buffer, np.array(1 + 2**-8 + 2**-40))
    assert float(transfers.read(buffer)) == 1 + 2**-7


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


# Memory that the caller has pinned.


@pytest.fixture
def mapping() -> Iterator[mmap.mmap]:
    """64 MiB, which nobody may hold a view of at the end."""
    mapping = mmap.mmap(-1, 64 << 20)
    yield mapping
    gc.collect()
    mapping.close()


@pytest.fixture
def pinned(transfers: Transfer, mapping: mmap.mmap) -> Iterator[mmap.mmap]:
    with memoryview(mapping) as view:
        transfers.pinned.add(view)
    yield mapping
    transfers.close()


def array_in(mapping: mmap.mmap, spec: TensorSpec, offset: int = 512) -> np.ndarray:
    return np.frombuffer(mapping, spec.dtype.numpy, spec.size, offset).reshape(spec.dims)


def inside(address: int, array: np.ndarray) -> bool:
    return array.ctypes.data <= address < array.ctypes.data + array.nbytes


@pytest.mark.parametrize("spec", [TensorSpec.packed(SPEC.dims), SPEC, LARGE, HUGE], ids=str)
def test_the_device_reads_and_writes_pinned_memory_itself(
    transfers: Transfer, device: HostDevice, pinned: mmap.mmap, spec: TensorSpec
) -> None:
    buffer, array = place(spec), array_in(pinned, spec)
    array[...] = values(spec)
    transfers.write(buffer, array)
    assert all(inside(src, array) for _, src in device.copies)
    wanted = array.copy()
    for receive in (transfers.read, transfers.fetch):
        array[...] = 0
        device.copies.clear()
        answer = receive(buffer, array)
        assert answer is not None
        assert (answer() if callable(answer) else answer) is array
        assert device.copies
        assert all(inside(dst, array) for dst, _ in device.copies)
        np.testing.assert_array_equal(array, wanted)
    assert not device.took_pinned, "values went through the ring"


def test_what_lies_in_order_is_one_copy_however_large(
    transfers: Transfer, device: HostDevice, pinned: mmap.mmap
) -> None:
    buffer, array = place(HUGE), array_in(pinned, HUGE)
    transfers.write(buffer, array)
    transfers.read(buffer, array)
    address = array.ctypes.data
    assert device.copies == [(buffer.pointer, address), (address, buffer.pointer)]


def test_what_is_tiny_and_not_in_order_is_permuted_by_the_host(
    transfers: Transfer, device: HostDevice, pinned: mmap.mmap
) -> None:
    device.full = True  # no scratch memory is asked for
    buffer, array = place(TINY), array_in(pinned, TINY)
    array[...] = wanted = values(TINY)
    transfers.write(buffer, array)
    for receive in (transfers.read, transfers.fetch):
        array[...] = 0
        if receive == transfers.read:
            device.full = False
        answer = receive(buffer, array)
        np.testing.assert_array_equal(answer() if callable(answer) else answer, wanted)
    assert not any(inside(address, array) for copy in device.copies for address in copy)


def test_an_array_that_is_not_wholly_pinned_goes_through_the_ring(
    transfers: Transfer, device: HostDevice, mapping: mmap.mmap
) -> None:
    with memoryview(mapping) as view, view[: 1 << 20] as part:
        transfers.pinned.add(part)
        array = array_in(mapping, TensorSpec.packed((2, 1 << 10)), offset=(1 << 20) - 4096)
        buffer = place(TensorSpec.packed((2, 1 << 10)))
        array[...] = 7
        transfers.write(buffer, array)
        transfers.read(buffer, array)
        transfers.unpin(part)
    assert not any(inside(address, array) for copy in device.copies for address in copy)


@pytest.mark.parametrize("how", ["write", "fetch"])
def test_an_array_is_held_until_the_device_has_copied_it(
    transfers: Transfer, device: HostDevice, pinned: mmap.mmap, how: str
) -> None:
    array = array_in(pinned, SPEC)
    held = weakref.ref(array)
    device.late = True
    transfers.write(place(SPEC), array) if how == "write" else transfers.fetch(place(SPEC), array)
    del array
    transfers.release()
    gc.collect()
    assert held() is not None
    device.late = False
    transfers.release()
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("how", ["write", "read", "fetch"])
def test_a_copy_that_fails_half_way_is_waited_for(
    transfers: Transfer, device: HostDevice, pinned: mmap.mmap, how: str
) -> None:
    buffer, array = place(LARGE), array_in(pinned, LARGE)
    device.rooms = 1
    with pytest.raises(MemoryError):
        getattr(transfers, how)(buffer, array)
    assert len(device.copies) == 1
    assert device.synchronized == 1


def test_memory_that_cannot_be_pinned_is_copied_as_any_other(
    transfers: Transfer, device: HostDevice, mapping: mmap.mmap
) -> None:
    device.refusal = (EngineFailure, "CUDA_ERROR_NOT_PERMITTED")
    with memoryview(mapping) as view, capture_logs() as logs:
        transfers.pinned.add(view)
        transfers.unpin(view)
    (line,) = logs
    assert (line["event"], line["log_level"], line["nbytes"]) == ("memory.not_pinned", "warning", 64 << 20)
    array, buffer = array_in(mapping, SPEC), place(SPEC)
    array[...] = wanted = values(SPEC)
    transfers.write(buffer, array)
    array[...] = 0
    transfers.read(buffer, array)
    np.testing.assert_array_equal(array, wanted)
    assert device.took_pinned


def test_pinning_in_a_dead_context_says_so(
    transfers: Transfer, device: HostDevice, mapping: mmap.mmap
) -> None:
    device.refusal = (StickyError, "CUDA_ERROR_ILLEGAL_ADDRESS")
    with memoryview(mapping) as view, pytest.raises(StickyError):
        transfers.pinned.add(view)


def test_unpinning_waits_for_the_device(transfers: Transfer, device: HostDevice, mapping: mmap.mmap) -> None:
    with memoryview(mapping) as view:
        transfers.pinned.add(view)
        assert list(device.registered.values()) == [64 << 20]
        device.late = True
        transfers.write(place(SPEC), array_in(mapping, SPEC))
        transfers.unpin(view)
        assert not device.late
        assert device.registered == {}
        transfers.unpin(view)


def test_pinned_memory_cannot_be_unmapped(transfers: Transfer, mapping: mmap.mmap) -> None:
    with memoryview(mapping) as view:
        transfers.pinned.add(view)
    with pytest.raises(BufferError):
        mapping.close()
    transfers.close()


def test_closing_unpins_all(transfers: Transfer, device: HostDevice, mapping: mmap.mmap) -> None:
    with memoryview(mapping) as view:
        transfers.pinned.add(view)
    transfers.close()
    assert device.registered == {}
