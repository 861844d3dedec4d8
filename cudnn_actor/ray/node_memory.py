"""Memory of the pool's process that replicas on the same node map: large arrays need not go by Ray's store.

The pool's process writes an array to a piece of this memory, and the request says where it lies. A replica
copies large results to a piece that came with the request, and the caller's arrays lie there. Only the pool's
process allocates pieces. A piece is free again once no object refers to it: neither the request, nor the
caller's arrays, nor a call of a replica that has not ended. So a replica that was given up writes to nothing
that another request has.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudnn_actor.actors import forks
from cudnn_actor.engines.cpu.arenas import FIXED_SIZE, is_whole, keeping
from cudnn_actor.isolation.staging import map_segment
from cudnn_actor.memory import BufferOwner
from cudnn_actor.memory.container import room_here
from cudnn_actor.memory.free_list import FreeList, round_up
from cudnn_actor.processes.process_state import ProcessName

__all__ = ["ArrayPlace", "MappedMemory", "MemoryName", "NodeMemory", "Piece", "Room"]

_BYTES = 64 << 20
"""The size of the memory. Linux takes it page by page, as pieces are written to."""
_ALIGNMENT = 64
"""Results begin at multiples of this many bytes within a piece."""


@dataclass(frozen=True)
class MemoryName:
    """The facts by which a process of the same node maps a `NodeMemory`.

    Parameters
    ----------
    pid, descriptor
        The id of the process that has the memory, and its descriptor of the memory's file.
    file
        The file's name, which no other file has.
    nbytes
        The memory's size.
    """

    pid: int
    descriptor: int
    file: str
    nbytes: int


@dataclass(frozen=True)
class ArrayPlace:
    """The place of an array in the memory, in place of the array as a request's argument."""

    offset: int
    dims: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Room:
    """The place of a piece for a request's results."""

    offset: int
    nbytes: int

    @staticmethod
    def nbytes_for(sizes: Iterable[int]) -> int:
        """The size of a piece for results of these sizes."""
        return sum(round_up(each, _ALIGNMENT) for each in sizes)


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of the memory, which is free again once this object and all arrays on it are gone.

    Parameters
    ----------
    offset
        Where it begins.
    memory
        The piece, as bytes.
    """

    offset: int
    memory: np.ndarray

    @property
    def room(self) -> Room:
        """The piece as a request names it."""
        return Room(self.offset, self.memory.nbytes)

    def write(self, array: np.ndarray) -> None:
        """Copy an array of the piece's size to it, in C order."""
        np.copyto(self.memory.view(array.dtype).reshape(array.shape), array)

    def read(self, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The parts of the piece at these offsets, of these sizes, for reading alone."""
        return [self.memory[at : at + nbytes].data.toreadonly() for at, nbytes in spans]


class NodeMemory:
    """The memory, in the pool's process. Used on the pool's event loop; pieces may be collected on any
    thread. To make it reads some small files.

    Raises `OSError` if the system has no file for it, and `MemoryError` if the machine or the container has
    no room.
    """

    def __init__(self, nbytes: int = _BYTES) -> None:
        left = room_here()
        if left is not None and left < 2 * nbytes:  # Linux would grant it, and kill a process later
            raise MemoryError(f"{left} bytes are left")
        file = f"cudnn-actor-ray-{uuid.uuid4().hex}"
        descriptor = os.memfd_create(file, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        forks.finalize(self, os.close, descriptor).atexit = False
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, FIXED_SIZE)  # else another process might truncate it
        self._mapped = map_segment(descriptor, nbytes)
        self._free = FreeList(nbytes)
        self._ended: deque[int] = deque()
        """Offsets of pieces that are gone. They are given back when the next piece is taken."""
        self.name = MemoryName(os.getpid(), descriptor, file, nbytes)

    def take(self, nbytes: int) -> Piece | None:
        """A piece of `nbytes` bytes; None if there is no room."""
        while self._ended:
            self._free.release(self._ended.popleft())
        if (offset := self._free.allocate(nbytes)) is None:
            return None
        owner = BufferOwner(offset, self._ended)
        return Piece(offset, keeping(np.ndarray(nbytes, np.uint8, buffer=self._mapped, offset=offset), owner))

    @property
    def pieces(self) -> int:
        """How many pieces are not free."""
        return self._free.places - len(self._ended)


class MappedMemory:
    """A `NodeMemory` of another process of this node.

    Parameters
    ----------
    mapped
        The mapping.
    process
        The name of this process.
    """

    def __init__(self, mapped: mmap.mmap, process: ProcessName) -> None:
        self._mapped = mapped
        self.process = process

    @classmethod
    def open(cls, name: MemoryName) -> MappedMemory | None:
        """Map the memory of this name. Returns None if the process is on another node, or cannot be reached,
        as from a container of its own."""
        path = f"/proc/{name.pid}/fd/{name.descriptor}"
        with contextlib.suppress(OSError, ValueError):
            if os.readlink(path).startswith(f"/memfd:{name.file}"):  # else it is another node's process
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if not is_whole(descriptor, name.nbytes):
                        return None
                    return cls(map_segment(descriptor, name.nbytes), ProcessName.own())
                finally:
                    os.close(descriptor)
        return None

    def array(self, place: ArrayPlace) -> np.ndarray:
        """The array at a place, for reading alone."""
        found = np.ndarray(place.dims, place.dtype, buffer=self._mapped, offset=place.offset)
        found.flags.writeable = False
        return found

    def write(self, parts: Sequence[memoryview], room: Room) -> list[tuple[int, int]] | None:
        """Copy bytes to a piece. Returns the offset of each part within the piece, and its size; None if the
        piece is too small for all."""
        spans, end = list[tuple[int, int]](), 0
        for each in parts:
            spans.append((end, each.nbytes))
            end += round_up(each.nbytes, _ALIGNMENT)
        if end > room.nbytes:
            return None
        for (at, nbytes), each in zip(spans, parts, strict=True):
            begin = room.offset + at
            self._mapped[begin : begin + nbytes] = each
        return spans
