"""A client's memory, mapped in the service's process.

The client owns the memory and may write to it at any time. So no decision, here or later, depends on the
memory's contents: the values of an array are only copied to a buffer. Decisions depend on sizes, places and
seals, which are in the frames or in the kernel. The seals keep the client from making the memory smaller, so
that reading it cannot fail.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np

from cudnn_actor.attached.wire import Place, WireArray
from cudnn_actor.engines.cpu.arenas import FIXED_SIZE
from cudnn_actor.isolation.staging import map_segment
from cudnn_actor.processes.frames import BadFrame

__all__ = ["Segments", "room_needed"]

_MOST_SEGMENTS = 256
_MOST_BYTES = 1 << 40
_STEP = 64
"""Arrays of an answer begin at multiples of this many bytes."""


class Segments:
    """The segments of one client, by number."""

    def __init__(self) -> None:
        self._mapped: dict[int, mmap.mmap] = {}

    def map(self, number: int, nbytes: int, descriptor: int) -> None:
        """Map a segment, and close its descriptor.

        Raises `BadFrame` unless the descriptor is memory of that size with a sealed size, and `OSError` if
        there is no room to map it.
        """
        try:
            if number in self._mapped or len(self._mapped) >= _MOST_SEGMENTS:
                raise BadFrame(f"segment {number} is one too many, or there already")
            if not 0 < nbytes <= _MOST_BYTES:
                raise BadFrame(f"a segment of {nbytes} bytes")
            try:
                seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            except OSError as error:
                raise BadFrame("a segment that is no memory which can be sealed") from error
            if seals & FIXED_SIZE != FIXED_SIZE:  # first: the size is fixed from here on
                raise BadFrame("a segment whose size is not sealed")
            if os.fstat(descriptor).st_size != nbytes:
                raise BadFrame(f"a segment of another size than {nbytes:,} bytes")
            sealed = bool(seals & fcntl.F_SEAL_WRITE)
            self._mapped[number] = map_segment(descriptor, nbytes, sealed=sealed)
        finally:
            os.close(descriptor)

    def drop(self, number: int) -> None:
        """Forget a segment. It stays mapped as long as an array shows its bytes. Raises `BadFrame`."""
        if self._mapped.pop(number, None) is None:
            raise BadFrame(f"there is no segment {number} to drop")

    def clear(self) -> None:
        """Forget all segments."""
        self._mapped.clear()

    def array(self, wire: WireArray) -> np.ndarray:
        """The array that a record describes: read-only, and in the client's memory if the record names a
        place there.

        Raises `ValueError` if the place is not within a segment, or is not aligned for the array's elements.
        """
        if not isinstance(wire.data, Place):
            return wire.inline()
        dtype = wire.dtype.numpy
        if wire.data.offset % dtype.itemsize:
            raise ValueError(f"an array at byte {wire.data.offset}, which its elements do not begin at")
        memory = self._check_bounds(wire.data, wire.nbytes)
        array: np.ndarray = np.frombuffer(memory.toreadonly(), dtype).reshape(wire.dims)
        return array

    def write(self, place: Place, nbytes: int, arrays: Sequence[np.ndarray]) -> list[WireArray]:
        """Copy arrays to the client's memory, one after the other, and return their records.

        Raises `ValueError` if they do not fit, or if the memory is sealed against writing.

        Takes some 0.2 ms for each MB. Any thread.
        """
        memory = self._check_bounds(place, nbytes)
        if memory.readonly:
            raise ValueError(f"segment {place.segment} is sealed, and cannot be written to")
        if room_needed(arrays) > nbytes or place.offset % _STEP:
            raise ValueError(f"an answer of {room_needed(arrays)} bytes does not fit into {nbytes}")
        written, offset = [], 0
        for array in arrays:
            if array.size:
                to = np.frombuffer(memory[offset : offset + array.nbytes], array.dtype).reshape(array.shape)
                np.copyto(to, array)
            written.append(WireArray.of(array, Place(place.segment, place.offset + offset)))
            offset += _round_up(array.nbytes)
        return written

    def _check_bounds(self, place: Place, nbytes: int) -> memoryview:
        mapped = self._mapped.get(place.segment)
        if mapped is None or place.offset < 0 or nbytes < 0 or place.offset + nbytes > len(mapped):
            raise ValueError(f"{nbytes} bytes at {place.offset} of segment {place.segment} are not there")
        return memoryview(mapped)[place.offset : place.offset + nbytes]


def room_needed(arrays: Sequence[np.ndarray]) -> int:
    """How many bytes of the client's memory an answer of these arrays needs."""
    return sum(_round_up(array.nbytes) for array in arrays)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _STEP) * _STEP
