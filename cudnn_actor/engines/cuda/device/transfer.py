"""Copies values between host and device, and between buffers: asynchronous, on one stream, in pieces.

The device can read or write only pinned host memory directly, and there is
little of it. So arrays pass through a ring of pinned pieces (the staging
memory), except arrays in mappings that the caller has pinned
(`Transfer.pinned`), which the device reads and writes in place. If a buffer's
layout differs from the array's, the device permutes the elements, in scratch
memory of its own, because it is a hundred times faster at that.

Arrays that the device reads or writes directly are kept alive (`_kept`) until
their copy has passed a fence, so their memory is not freed during the copy.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.transfer import check_target, check_values, element, store
from cudnn_actor.engines.cuda.device.fences import Fences
from cudnn_actor.engines.cuda.device.pinned_ring import Piece, StagingRing
from cudnn_actor.engines.cuda.device.pinning import PinnedMemory
from cudnn_actor.engines.cuda.device.place import Place, memory_order
from cudnn_actor.engines.cuda.library.libraries import ON_DEVICE, TO_DEVICE, TO_HOST, libraries
from cudnn_actor.memory.array_addresses import address_of
from cudnn_actor.protocol.types.tensor import TensorSpec, packed_nbytes

__all__ = ["PIECE_BYTES", "Transfer", "blocks"]

PIECE_BYTES = 8 << 20
"""The most bytes that one staged copy moves; a ring holds four such pieces."""
_RING_BYTES = 4 * PIECE_BYTES
_SMALL_BYTES = 16 << 10
"""Up to this size, permuting on the host is faster than launching a kernel."""


Block = tuple[slice | EllipsisType, ...]
_ALL: Block = (...,)
"""`()` would make a scalar of an array without dims, which cannot be written."""


class Transfer:
    """Copies on one stream. Used by one thread only.

    Parameters
    ----------
    stream
        The CuPy stream that orders the copies, on the current device of the calling thread.
    fences
        The stream's fences.
    """

    def __init__(self, stream: Any, fences: Fences) -> None:
        self._stream = stream
        self._fences = fences
        self._ring = StagingRing(_RING_BYTES, fences)
        """Staging for uploads and blocking downloads. Between calls, the host uses no piece of it."""
        self._fetched = StagingRing(_RING_BYTES, fences)
        """Staging for asynchronous downloads (`fetch`), which the host reads later."""
        self.pinned = PinnedMemory()
        """The caller's memory that needs no staging."""
        self._kept: deque[tuple[Any, object]] = deque()
        """Arrays that the device reads or writes directly, each with the fence after its copy."""
        self._pool = libraries().cupy.cuda.MemoryPool()

    def close(self) -> None:
        """Free pinned and scratch memory. The stream must have finished."""
        self._kept.clear()
        self.pinned.clear()
        self._ring = StagingRing(0, self._fences)
        self._fetched = StagingRing(0, self._fences)
        self._pool.free_all_blocks()
        libraries().cupy.get_default_pinned_memory_pool().free_all_blocks()

    def write(self, dst: Place, array: Any) -> None:
        """Enqueue a copy of a host array, or of a `DeviceArray`, into a buffer.

        Raises `InvalidRequest` for values that do not fit. A host array has been read when this returns,
        unless the device reads it directly; see `Engine.write`.
        """
        if not isinstance(array, np.ndarray):
            self._write_from_device(dst, array)
            return
        check_values(dst.spec.dims, dst.spec.dtype.numpy, array)
        if not array.size:
            return
        order = memory_order(dst.spec)
        try:
            if self._can_read(dst, array):
                self._write_pinned(dst, array)
            elif order is not None and (
                array.nbytes <= _SMALL_BYTES or array.transpose(order).flags.c_contiguous
            ):
                self._write_in_order(dst, array.transpose(order))
            else:
                self._write_permuted(dst, array)
        except BaseException:  # for example, no room for scratch memory: the ring must remain usable
            self._ring.give_up()
            raise

    def _can_read(self, dst: Place, array: np.ndarray) -> bool:
        """Whether the device can read an array directly: it is pinned, and no element needs converting."""
        spec = dst.spec
        if array.dtype != spec.dtype.numpy or not array.flags.c_contiguous or not self.pinned.holds(array):
            return False
        small = array.nbytes <= _SMALL_BYTES and memory_order(spec) is not None
        return not small or _in_c_order(spec)

    def _write_pinned(self, dst: Place, array: np.ndarray) -> None:
        """Enqueue copies directly from pinned memory. If that raises, nothing reads the array any more."""
        source = address_of(array)
        with self._all_or_none():
            if _in_c_order(dst.spec):
                self._copy(dst.pointer, source, array.nbytes, TO_DEVICE)
            else:
                for block in blocks(array.shape, dst.spec.dtype.itemsize):
                    scratch = self._scratch(array[block].shape, dst.raw.dtype)
                    self._copy(scratch.data.ptr, source, scratch.nbytes, TO_DEVICE)
                    self._assign(dst.raw, block, scratch)
                    source += scratch.nbytes
            self._kept.append((self._fences.record(), array))

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Around several copies from or to the caller's memory: if one fails, wait for the earlier ones.

        Scratch memory may run out half-way. The caller may reuse its memory as soon as it sees the error.
        """
        try:
            yield
        except BaseException:
            self._stream.synchronize()
            raise

    def _write_in_order(self, dst: Place, array: np.ndarray) -> None:
        address = dst.pointer
        for block in blocks(array.shape, dst.spec.dtype.itemsize):
            piece = self._stage(array[block], dst)
            self._copy(address, piece.pointer, piece.bytes.nbytes, TO_DEVICE)
            self._hand_over(piece)
            address += piece.bytes.nbytes

    def _write_permuted(self, dst: Place, array: np.ndarray) -> None:
        for block in blocks(array.shape, dst.spec.dtype.itemsize):
            piece = self._stage(array[block], dst)
            scratch = self._scratch(array[block].shape, dst.raw.dtype)
            self._copy(scratch.data.ptr, piece.pointer, piece.bytes.nbytes, TO_DEVICE)
            self._hand_over(piece)
            self._assign(dst.raw, block, scratch)

    def _scratch(self, dims: tuple[int, ...], dtype: Any) -> Any:
        """A CuPy array for this stream only. It may be dropped at once: memory is reused in stream order."""
        with self._stream:
            memory = self._pool.malloc(math.prod(dims) * dtype.itemsize)
            return libraries().cupy.ndarray(dims, dtype, memory)

    def _assign(self, dst: Any, block: Block, values: Any) -> None:
        with self._stream:
            dst[block] = values

    def _stage(self, values: np.ndarray, dst: Place) -> Piece:
        dtype = dst.spec.dtype.numpy
        piece = self._ring.take_soon(values.size * dtype.itemsize)
        store(piece.bytes.view(dtype).reshape(values.shape), values)
        return piece

    def _hand_over(self, piece: Piece) -> None:
        piece.in_use = False
        self._ring.fence(piece)

    def _write_from_device(self, dst: Place, array: Any) -> None:
        source = array.array
        if not source.size:
            return
        self._stream.wait_event(array.ready)
        same = source.dtype == dst.raw.dtype
        with self._stream:
            dst.raw[...] = source if same else source.view(dst.raw.dtype)
        # The owner may reuse the memory as soon as the array is dropped.
        self._kept.append((self._fences.record(), array))

    def release(self) -> None:
        """Drop arrays whose copies are finished. Never blocks."""
        while self._kept and self._fences.has_passed(self._kept[0][0]):
            self._kept.popleft()

    def unpin(self, memory: memoryview) -> None:
        """Wait until the device no longer uses a pinned mapping, drop arrays in it, and unpin it. Blocks."""
        self._stream.synchronize()
        self.release()
        self.pinned.remove(memory)

    def read(self, src: Place, into: np.ndarray | None = None) -> np.ndarray:
        """A buffer's values as a C-contiguous array, a new one or `into`. Blocks until they are there.

        Raises `EngineFailure` as `check_target` does.
        """
        if into is None:
            into = np.empty(src.spec.dims, src.spec.dtype.numpy)
        elif not src.spec.size:
            check_target(src.spec.dims, src.spec.dtype.numpy, into)
        elif self._can_write(src, into):
            self._send_to(into, src)
            self._stream.synchronize()
            self.release()
            return into
        if not into.size:
            return into
        try:
            self._read_into(into, src)
        except BaseException:  # as in `write`
            self._ring.give_up()
            raise
        return into

    def _can_write(self, src: Place, into: np.ndarray) -> bool:
        """Whether the device can write `into` directly. Raises `EngineFailure` as `check_target` does."""
        spec = src.spec
        check_target(spec.dims, spec.dtype.numpy, into)
        small = into.nbytes <= _SMALL_BYTES and memory_order(spec) is not None
        return self.pinned.holds(into) and (not small or _in_c_order(spec))

    def _send_to(self, into: np.ndarray, src: Place) -> None:
        """Enqueue copies of a buffer into pinned memory. If that raises, nothing writes there any more."""
        target = address_of(into)
        with self._all_or_none():
            if _in_c_order(src.spec):
                self._copy(target, src.pointer, into.nbytes, TO_HOST)
            else:
                for block in blocks(src.spec.dims, src.spec.dtype.itemsize):
                    target += self._send(src, block, target)
            self._kept.append((self._fences.record(), into))

    def _read_into(self, result: np.ndarray, src: Place) -> None:
        under_way: deque[tuple[Piece, np.ndarray]] = deque()
        for block in blocks(src.spec.dims, src.spec.dtype.itemsize):
            target = result[block]
            while (piece := self._ring.take(target.nbytes)) is None:
                if under_way:
                    self._finish(*under_way.popleft())
                else:
                    self._stream.synchronize()  # uploads occupy the ring
            self._send(src, block, piece.pointer)
            self._ring.fence(piece)
            under_way.append((piece, target))
        while under_way:
            self._finish(*under_way.popleft())

    def _finish(self, piece: Piece, target: np.ndarray) -> None:
        piece.fence.synchronize()
        target[...] = piece.bytes.view(target.dtype).reshape(target.shape)
        piece.in_use = False

    def _send(self, src: Place, block: Block, target: int) -> int:
        """Enqueue a copy of a buffer's block to a host address, C-contiguous; returns its size in bytes."""
        part = src.raw[block]
        if not part.flags.c_contiguous:
            packed = self._scratch(part.shape, part.dtype)
            self._assign(packed, _ALL, part)
            part = packed
        self._copy(target, part.data.ptr, part.nbytes, TO_HOST)
        return int(part.nbytes)

    def fetch(self, src: Place, into: np.ndarray | None = None) -> Callable[[], np.ndarray] | None:
        """Enqueue a download; the returned function gives the array once a later fence has passed.

        Never blocks. None if the free part of the ring is too small. Raises as `read`.
        """
        if not src.spec.size:
            nothing = self.read(src, into)
            return lambda: nothing
        if into is not None and self._can_write(src, into):
            self._send_to(into, src)
            return lambda: into
        spec = src.spec
        nbytes = packed_nbytes(spec)
        piece = self._fetched.take(nbytes) if nbytes <= _RING_BYTES // 2 else None
        if piece is None:
            return None
        order = memory_order(src.spec)
        try:
            if order is None or nbytes > _SMALL_BYTES:
                order = tuple(range(spec.rank))
                self._send(src, _ALL, piece.pointer)
            else:
                self._copy(piece.pointer, src.pointer, nbytes, TO_HOST)
        except BaseException:  # no one will collect the result
            piece.in_use = False
            raise
        finally:
            self._fetched.fence(piece)
        dims = tuple(spec.dims[axis] for axis in order)

        def collect() -> np.ndarray:
            staged = piece.bytes.view(spec.dtype.numpy).reshape(dims)
            try:
                values = staged.transpose(np.argsort(order))
                if into is None:
                    return np.array(values, order="C")
                np.copyto(into, values)
                return into
            finally:  # also if the host is out of memory
                piece.in_use = False

        return collect

    def copy(self, src: Place, dst: Place) -> None:
        """Enqueue a copy between buffers of the same dims and dtype."""
        if not src.spec.size:
            return
        if memory_order(src.spec) is not None and src.spec.strides == dst.spec.strides:
            self._copy(dst.pointer, src.pointer, src.spec.nbytes, ON_DEVICE)
        else:
            self._assign(dst.raw, _ALL, src.raw)

    def direct_copy(self, src: Place | np.ndarray, dst: Place | np.ndarray) -> Callable[[], None] | None:
        """A function that enqueues this copy; None if it takes more than moving the bytes in their order."""
        if isinstance(src, np.ndarray):
            assert isinstance(dst, Place)
            fits = self._can_read(dst, src) and _in_c_order(dst.spec)
            source, target, kind = address_of(src), dst.pointer, TO_DEVICE
        elif isinstance(dst, np.ndarray):
            fits = self._can_write(src, dst) and _in_c_order(src.spec)
            source, target, kind = src.pointer, address_of(dst), TO_HOST
        else:
            fits = memory_order(src.spec) is not None and src.spec.strides == dst.spec.strides
            source, target, kind = src.pointer, dst.pointer, ON_DEVICE
        nbytes = src.nbytes if isinstance(src, np.ndarray) else src.spec.nbytes
        if not fits or not nbytes:
            return None
        copy, stream = libraries().runtime.memcpyAsync, self._stream.ptr
        return functools.partial(copy, target, source, nbytes, kind, stream)

    def part_copy(self, src: np.ndarray, dst: Place) -> Callable[[int, int], None] | None:
        """A function that enqueues copies of bytes of an array; None where `direct_copy` gives None."""
        if not self._can_read(dst, src) or not _in_c_order(dst.spec):
            return None
        copy, stream = libraries().runtime.memcpyAsync, self._stream.ptr
        source, target = address_of(src), dst.pointer
        return lambda begin, end: copy(target + begin, source + begin, end - begin, TO_DEVICE, stream)

    def row_copy(self, rows: Place, place: Place, *, store: bool) -> Callable[[int], None]:
        """A function that enqueues the copy of a row to a place, or with `store` of the place to a row."""
        spec, nbytes = place.spec, place.spec.nbytes
        if not spec.size:
            return lambda _: None
        if memory_order(spec) is None or not _lie_alike(rows.spec.strides[1:], spec):
            if store:
                return lambda row: self._assign(rows.raw[row], _ALL, place.raw)
            return lambda row: self._assign(place.raw, _ALL, rows.raw[row])
        copy, stream = libraries().runtime.memcpyAsync, self._stream.ptr
        first, fixed = rows.pointer, place.pointer
        step = rows.spec.strides[0] * spec.dtype.itemsize
        if store:
            return lambda row: copy(first + row * step, fixed, nbytes, ON_DEVICE, stream)
        return lambda row: copy(fixed, first + row * step, nbytes, ON_DEVICE, stream)

    def fill(self, dst: Place, value: float) -> None:
        """Enqueue setting every element. Raises `InvalidRequest` for a value that the dtype cannot hold."""
        bits = element(dst.spec.dtype.numpy, value).view(dst.raw.dtype)
        if dst.spec.size:
            self._assign(dst.raw, _ALL, bits[0])

    def _copy(self, dst: int, src: int, nbytes: int, kind: int) -> None:
        libraries().runtime.memcpyAsync(dst, src, nbytes, kind, self._stream.ptr)


def _lie_alike(strides: Sequence[int], spec: TensorSpec) -> bool:
    """Whether elements with these strides lie as those of a tensor do."""
    return all(
        dim == 1 or one == other for dim, one, other in zip(spec.dims, strides, spec.strides, strict=True)
    )


def _in_c_order(spec: TensorSpec) -> bool:
    """Whether a buffer's elements are in the same order as in a C-contiguous array, without gaps."""
    order = memory_order(spec)
    if order is None:
        return False
    axes = [axis for axis in order if spec.dims[axis] != 1]
    return axes == sorted(axes)


def blocks(dims: tuple[int, ...], itemsize: int, limit: int = PIECE_BYTES) -> Iterator[Block]:
    """Slices of the leading axes that split an array, in C order, into parts of at most `limit` bytes.

    In a C-contiguous array, the parts follow each other without gaps.
    """
    axis, inner = len(dims), itemsize
    while axis and inner * dims[axis - 1] <= limit:
        axis -= 1
        inner *= dims[axis]
    if not axis:
        yield _ALL
        return
    step = limit // inner
    for outer in itertools.product(*map(range, dims[: axis - 1])):
        fixed = tuple(slice(i, i + 1) for i in outer)
        for start in range(0, dims[axis - 1], step):
            yield (*fixed, slice(start, min(start + step, dims[axis - 1])))
