"""Scratch memory: arrays carved out of one workspace buffer."""

from __future__ import annotations

import math
from typing import Any, overload

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Bytes", "Dims", "Scratch", "aligned_bytes", "footprint"]

Dims = tuple[int, ...]
Array = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

_LINE = 64
"""Arrays start on cache lines, because matrix products of unaligned arrays are slower."""

_MOST = 1 << 62
"""NumPy raises `ValueError`, not `MemoryError`, from 2**63 bytes on."""


def footprint(*shapes: Dims, itemsize: int = 8) -> int:
    """Bytes that `Scratch.take` uses up for arrays of these dims, whose elements have `itemsize` bytes."""
    return sum(-(-math.prod(dims) * itemsize // _LINE) * _LINE for dims in shapes)


def aligned_bytes(nbytes: int) -> Bytes:
    """New, uninitialised memory that starts on a cache line. Raises `MemoryError`."""
    if nbytes > _MOST:
        raise MemoryError(f"{nbytes:,} bytes")
    memory = np.empty(nbytes + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + nbytes]


class Scratch:
    """Allocates arrays from a buffer, one after the other."""

    def __init__(self, memory: Bytes, start: int = 0) -> None:
        self._memory = memory
        self._next = start

    @overload
    def take(self, dims: Dims) -> Array: ...

    @overload
    def take(self, dims: Dims, dtype: npt.DTypeLike) -> npt.NDArray[Any]: ...

    def take(self, dims: Dims, dtype: npt.DTypeLike = np.float64) -> npt.NDArray[Any]:
        """A C-contiguous array of undefined values. Raises `TypeError` if the buffer is too small."""
        array: npt.NDArray[Any] = np.ndarray(dims, dtype, buffer=self._memory, offset=self._next)
        self._next += -(-array.nbytes // _LINE) * _LINE
        return array

    def fork(self) -> Scratch:
        """A new allocator for the rest of the buffer, for arrays that are needed for a shorter time."""
        return Scratch(self._memory, self._next)
