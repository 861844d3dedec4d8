"""Arenas of host memory: each is behind a file descriptor, and so can outlive the process that made it.

`keeping` gives a view of an array that keeps another object alive, such as the owner of the array's memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys

import numpy as np

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.memory.container import available
from cudnn_actor.memory.exhaustion import exhaustion
from cudnn_actor.protocol.errors import OutOfDescriptors, OutOfMemory
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["FIXED_SIZE", "Arenas", "is_whole", "keeping"]

FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals that stop an arena from being truncated, which would make accesses to its mappings raise SIGBUS."""


class Arenas:
    """The arenas that one engine has mapped, by number."""

    def __init__(self) -> None:
        self._mapped: dict[int, mmap.mmap] = {}

    def create(self, arena: int, nbytes: int) -> int:
        """Create and map an arena of `nbytes` zero bytes. The caller owns the descriptor returned.

        Raises `MemoryError` or `OutOfMemory` if the machine has no room for it now, `OutOfDescriptors` if no
        descriptor is left. Linux grants more than there is, and ends the process that writes to it.
        """
        machine = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        if nbytes > machine:
            raise OutOfMemory(requested=nbytes, in_use=0, limit=None, most=machine)
        left = available(swapping=True)
        if left is not None and nbytes > left:
            raise OutOfMemory(requested=nbytes, in_use=0, limit=None, largest=left)
        try:
            return self._create(arena, nbytes)
        except (OSError, OverflowError) as error:
            refusal = exhaustion(error, requested=nbytes, in_use=0)
            if refusal is None:
                raise
            if isinstance(refusal, OutOfDescriptors):
                raise refusal from error
            raise MemoryError(f"no room for an arena of {nbytes:,} bytes: {error}") from error

    def _create(self, arena: int, nbytes: int) -> int:
        fd = os.memfd_create(f"cudnn-actor-arena-{arena}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FIXED_SIZE)
            self.map(arena, fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def map(self, arena: int, fd: int, nbytes: int) -> None:
        """Map an arena by its descriptor, which the caller keeps."""
        self._mapped[arena] = _map(fd, nbytes)

    def map_for_reading(self, arena: int, fd: int, nbytes: int) -> None:
        """Map memory of which nothing is known, for reading. The caller keeps the descriptor.

        Raises `EngineFailure` unless it is memory that cannot be truncated: reading it cannot fail then.
        Raises `OutOfMemory`, `OutOfDescriptors` if this process has no room: a later try may succeed.
        """
        if not is_whole(fd, nbytes):
            raise EngineFailure("NOT_AN_ARENA", f"it is not sealed memory of {nbytes:,} bytes")
        try:
            self._mapped[arena] = _map(fd, nbytes, mmap.PROT_READ)
        except OSError as error:
            failure = EngineFailure("NOT_MAPPED", str(error))
            raise exhaustion(error, requested=nbytes, in_use=0) or failure from error

    def unmap(self, arena: int) -> None:
        """Drop an arena. Raises `KeyError` if there is none with that number.

        The memory is unmapped with the last array bound in it. Unmapping it at once would break arrays that
        are still held.
        """
        del self._mapped[arena]

    def bind(self, arena: int, offset: int, spec: TensorSpec) -> np.ndarray:
        """The array `offset` bytes into an arena. Raises `TypeError` if it does not fit."""
        dtype = spec.dtype.numpy
        strides = tuple(stride * dtype.itemsize for stride in spec.strides)
        return np.ndarray(spec.dims, dtype, buffer=self._mapped[arena], offset=offset, strides=strides)

    def clear(self) -> None:
        """Drop every arena."""
        self._mapped.clear()


def _map(fd: int, nbytes: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, nbytes, prot=protection, trackfd=False)
    # Before 3.13, mmap keeps a duplicate of the descriptor, and closes it with the mapping.
    return mmap.mmap(fd, nbytes, prot=protection)


def is_whole(fd: int, nbytes: int) -> bool:
    """Whether a descriptor is of anonymous memory of at least `nbytes` that cannot be truncated."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:  # of another kind of file
        return False
    return bool(sealed) and os.fstat(fd).st_size >= nbytes


def keeping(array: np.ndarray, owner: object) -> np.ndarray:
    """A new array on the same memory; `owner` stays alive as long as the array or any view of it does."""
    return np.asarray(_Kept(array, owner)).view(array.dtype)


class _Kept:
    """The base of another array: keeps an array and its owner alive."""

    def __init__(self, array: np.ndarray, owner: object) -> None:
        self.__array_interface__ = array.view(f"u{array.itemsize}").__array_interface__
        self.kept = array, owner
