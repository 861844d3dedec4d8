"""Host memory for values on their way to and from the device, which reads and writes it without another copy.

In process isolation, the parent and a worker share it. Segments are anonymous files, like the arenas of the
CPU engine, and blocks are places in them. The parent allocates and frees blocks; a worker only reads or
writes the block that a request names. So a block is free again when its request is complete, or when the
worker that used it has certainly ended.

A large result is given to the caller in its block, without a copy. The block is freed after the last array
that uses it is collected. As in `memory.lending`, the finalizer may run on any thread, so it only appends to
a deque.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.engines.cpu.arenas import FIXED_SIZE, keeping
from cudnn_actor.memory import ArenaPool, BufferOwner
from cudnn_actor.memory.array_addresses import address_of
from cudnn_actor.memory.container import available
from cudnn_actor.memory.exhaustion import exhaustion
from cudnn_actor.protocol.errors import OutOfMemory

__all__ = [
    "COPY_BYTES",
    "HEAVY_RUN_BYTES",
    "NOTE_BYTES",
    "PIECES",
    "PIECE_BYTES",
    "Block",
    "Staging",
    "map_segment",
]

SEGMENT_BYTES = (32 << 20) + (64 << 10)
"""32 MiB of values, and room for the notes behind them (`NOTE_BYTES`): two arrays of 16 MiB fit into one."""
_IDLE_BYTES = 512 << 20
"""This many bytes of empty segments, and at least one segment, are kept for the next transfers. Making a
segment takes as long as several copies: all its pages are cleared, and on CUDA pinned."""
COPY_BYTES = 64 << 10
"""A result of up to this size is copied out of its block, so that the block is free at once."""
HEAVY_RUN_BYTES = 1 << 20
"""An event loop's thread copies no more than this for a model's run. To copy this much takes some 100 us, as
long as a hop to another thread and back."""
PIECE_BYTES = HEAVY_RUN_BYTES
"""The size of a piece of staging memory for a copy: see `Staging.pieces`."""
NOTE_BYTES = 256
"""The bytes after values that arrive part by part, for the words that say which parts have arrived."""
PIECES = 16
"""How many pieces a service keeps once it has copied anything to a device or from it."""


def map_segment(descriptor: int, nbytes: int, *, sealed: bool = False) -> mmap.mmap:
    """Map a segment, for reading alone if it is sealed against writing.

    The caller keeps the descriptor. Raises `OSError`.
    """
    access = mmap.ACCESS_READ if sealed else mmap.ACCESS_WRITE
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, nbytes, access=access, trackfd=False)
    return mmap.mmap(descriptor, nbytes, access=access)


class Block(NamedTuple):
    """A place in a segment: `offset` and `nbytes` in bytes."""

    segment: int
    offset: int
    nbytes: int


class Staging:
    """The segments of one service. Used by one thread at a time; its arrays may be collected on any thread.

    Parameters
    ----------
    announce
        Called with the number, size in bytes and descriptor of a new segment, before a block of it is used.
        If it raises, no worker has the segment mapped.
    retire
        Called with the number of a segment that is no longer used.
    """

    def __init__(self, announce: Callable[[int, int, int], None], retire: Callable[[int], None]) -> None:
        self._announce = announce
        self._retire = retire
        self.pool = ArenaPool(arena_bytes=SEGMENT_BYTES, limit=None)
        self._mapped: dict[int, mmap.mmap] = {}
        self._begins: dict[int, tuple[int, int]] = {}
        """The address and the size in bytes of each mapped segment, by its number."""
        self.ended: deque[Block] = deque()
        """Blocks that nothing uses any more; `take_back` frees them. Any thread appends."""
        self.pieces: list[Block] = []
        """Unused blocks for copies of up to `PIECE_BYTES`. The fast path takes the last, and adds to them."""
        self.stocked_pieces: frozenset[Block] = frozenset()
        """All pieces, used or not."""
        self.notes: dict[Block, Any] = {}
        """What the user of this object keeps about pieces."""
        self._lent: set[Block] = set()

    def segments(self) -> list[tuple[int, int, int]]:
        """Number, size in bytes and descriptor of each segment, for a new worker to map."""
        return [(arena.number, arena.nbytes, arena.fd) for arena in self.pool.all()]

    def take(self, nbytes: int) -> Block:
        """Allocate a block. Raises `OutOfMemory`, `OutOfDescriptors`; then nothing has changed."""
        self.take_back()
        if not self.pool.room_for(nbytes):
            self._grow(nbytes)
        arena, offset = self.pool.place(nbytes)
        return Block(arena.number, offset, nbytes)

    def stock(self) -> None:
        """Make the pieces, once. Raises as `take`."""
        if not self.stocked_pieces:
            while len(self.pieces) < PIECES:
                self.pieces.append(self.take(PIECE_BYTES + NOTE_BYTES))
            self.stocked_pieces = frozenset(self.pieces)

    def is_piece(self, block: Block) -> bool:
        """Whether a block is one of those that `stock` has made."""
        return block in self.stocked_pieces

    def home_of(self, blocks: Sequence[Block]) -> MutableSequence[Block]:
        """The list to which unused blocks are added in one step, instead of by `give_back`. Either all of
        them are pieces, or none is."""
        return self.pieces if blocks and self.is_piece(blocks[0]) else self.ended

    @property
    def has_ended(self) -> bool:
        """Whether any caller's array has been collected, so that there is something to `take_back`."""
        return bool(self.ended)

    def take_back(self) -> None:
        """Free the blocks of callers' arrays that have been collected. `take` does this first."""
        while self.ended:
            self.give_back(self.ended.popleft())

    def give_back(self, block: Block) -> None:
        """Free a block. Nothing may read or write it any more."""
        if self.is_piece(block):
            self.pieces.append(block)
            return
        self._lent.discard(block)
        arena = next(arena for arena in self.pool.all() if arena.number == block.segment)
        arena.free.release(block.offset)
        kept = 0
        for number, idle in enumerate(sorted(self.pool.idle(), key=lambda each: each.nbytes)):
            kept += idle.nbytes
            if number and kept > _IDLE_BYTES:
                self._drop(idle.number)

    def array(self, block: Block, dims: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A block as a C-contiguous array, valid until the block is freed."""
        return self.array_at(block.segment, block.offset, dims, dtype)

    def array_at(self, segment: int, offset: int, dims: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A place in a segment as a C-contiguous array of these dims and this dtype."""
        return np.ndarray(dims, dtype, buffer=self._mapped[segment], offset=offset)

    def memory(self, segment: int) -> memoryview:
        """The whole of a segment."""
        return memoryview(self._mapped[segment])

    def lend(self, dims: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An array in a block of its own, which is freed after the last array that uses it is collected.

        Raises as `take`.
        """
        block = self.take(math.prod(dims) * dtype.itemsize)
        self._lent.add(block)
        owner = BufferOwner(block, self.ended)
        return keeping(self.array(block, dims, dtype), owner)

    @property
    def lent_bytes(self) -> int:
        """Bytes of the arrays that `lend` has made and that are in use."""
        self.take_back()
        return sum(block.nbytes for block in self._lent)

    def locate(self, array: object) -> tuple[int, int] | None:
        """The segment and the offset of an array that lies in staging memory; None if it does not, or is not
        C-contiguous. Of anything else than an array: None, because a message is looked at before its checks.
        """
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
            return None
        base = array.base
        if base is None or (type(base) is np.ndarray and base.base is None):
            return None  # nearly all arrays: with memory of its own, or a view of one that has
        address = address_of(array)
        for segment, (begin, nbytes) in self._begins.items():
            if begin <= address and address + array.nbytes <= begin + nbytes:
                return segment, address - begin
        return None

    def result(self, block: Block, dims: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array with a block's values, for the service's caller. The caller of this method no longer frees
        the block, even if `MemoryError` is raised.
        """
        return self.results(block, [(0, dims, dtype)])[0]

    def results(self, block: Block, places: Sequence[tuple[int, tuple[int, ...], Any]]) -> list[np.ndarray]:
        """Arrays over the values of a block: one at each offset, with these dims and this dtype."""
        shown = (self.array_at(block.segment, block.offset + at, dims, dtype) for at, dims, dtype in places)
        if block.nbytes > COPY_BYTES and not self.is_piece(block):
            owner = BufferOwner(block, self.ended)
            return [keeping(array, owner) for array in shown]
        try:
            return [array.copy() for array in shown]
        finally:
            self.give_back(block)

    def close(self) -> None:
        """Close every descriptor. A segment stays mapped while a caller's array uses it."""
        self.pool.close()
        self._mapped.clear()
        self._begins.clear()
        self.pieces.clear()
        self.notes.clear()

    def _grow(self, nbytes: int) -> None:
        number, size = self.pool.next(nbytes)
        left = available()
        if left is not None and size > left:  # Linux would grant it, and kill a process once it is written
            raise OutOfMemory(requested=nbytes, in_use=self.pool.taken_bytes, limit=None, largest=left)
        try:
            descriptor = self._make(number, size)
        except (OSError, OverflowError) as error:
            refusal = exhaustion(error, requested=size, in_use=self.pool.nbytes)
            if refusal is None:
                raise
            raise refusal from error
        self.pool.add(number, size, descriptor)

    def _make(self, number: int, size: int) -> int:
        """Make a segment, map it, and announce it to all workers. Returns its descriptor."""
        descriptor = os.memfd_create(f"cudnn-actor-stage-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, FIXED_SIZE)
            self._mapped[number] = mapped = map_segment(descriptor, size)
            self._begins[number] = address_of(np.frombuffer(mapped, np.uint8)), size
            self._announce(number, size, descriptor)
        except BaseException:
            self._mapped.pop(number, None)
            self._begins.pop(number, None)
            os.close(descriptor)
            raise
        return descriptor

    def _drop(self, number: int) -> None:
        self._retire(number)
        del self._mapped[number], self._begins[number]
        self.pool.drop(number)
