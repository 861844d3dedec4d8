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


class _Count:
    """Bytes."""

    nbytes = 0


class Scratch:
    """Allocates arrays from a buffer, one after the other, and counts those that it allocates beside it."""

    def __init__(self, memory: Bytes, start: int = 0) -> None:
        self._memory = memory
        self._next = start
        self._kept = _Count()

    @property
    def kept_bytes(self) -> int:
        """Bytes of all arrays that `keep` of this allocator, and of its forks, has made."""
        return self._kept.nbytes

    @overload
    def take(self, dims: Dims) -> Array: ...

    @overload
    def take(self, dims: Dims, dtype: npt.DTypeLike) -> npt.NDArray[Any]: ...

    def take(self, dims: Dims, dtype: npt.DTypeLike = np.float64) -> npt.NDArray[Any]:
        """A C-contiguous array of undefined values. Raises `TypeError` if the buffer is too small."""
        array: npt.NDArray[Any] = np.ndarray(dims, dtype, buffer=self._memory, offset=self._next)
        self._next += -(-array.nbytes // _LINE) * _LINE
        return array

    def keep(self, dims: Dims, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A C-contiguous array of undefined values in memory of its own. Raises `MemoryError`.

        It lives as long as what refers to it. So a kernel is to keep it, and no caller is to make many.
        """
        array: npt.NDArray[Any] = np.empty(dims, dtype)
        self._kept.nbytes += array.nbytes
        return array

    def fork(self) -> Scratch:
        """A new allocator for the rest of the buffer, for arrays that are needed for a shorter time."""
        forked = Scratch(self._memory, self._next)
        forked._kept = self._kept
        return forked
