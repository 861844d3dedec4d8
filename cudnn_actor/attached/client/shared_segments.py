"""Arrays of this process that services of any number of other processes read where they lie.

Each array lies in a segment, an anonymous file, which every `Link` that sends the array announces to its
service once. So values that many services are given are copied once, and not into each link's own memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.engines.cpu.arenas import FIXED_SIZE
from cudnn_actor.memory.container import available
from cudnn_actor.memory.exhaustion import exhaustion
from cudnn_actor.protocol.errors import OutOfMemory
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["SharedSegment", "ToShare", "place_in_shared", "shared_arrays", "shared_copies"]

_STEP = 64
"""Bytes: arrays begin at multiples of this."""


class SharedSegment(mmap.mmap):
    """A mapped segment. It lives as long as an array that lies in it."""

    descriptor: int
    """The descriptor of its file. It is closed with the segment."""


class ToShare(NamedTuple):
    """An array that is to be copied: its spec, and what computes its values when they are needed."""

    spec: TensorSpec
    values: Callable[[], np.ndarray]


def shared_copies(arrays: Sequence[ToShare]) -> list[np.ndarray]:
    """Copies of arrays that nobody can change any more, this process included, in one new segment.

    Parameters
    ----------
    arrays
        What is copied. One after the other is computed, so that no two of them are there twice.

    Returns
    -------
    list of numpy.ndarray
        C-contiguous and read-only, of the given dims and dtypes.

    Raises
    ------
    OutOfMemory
        There is no room.

    Notes
    -----
    It blocks for the copies. Any thread.
    """
    offsets, nbytes = _places([each.spec for each in arrays])
    descriptor = _file(nbytes)
    try:
        mapped = _map(descriptor, nbytes, mmap.ACCESS_WRITE)
        for offset, each in zip(offsets, arrays, strict=True):
            np.copyto(_array(mapped, offset, each.spec), each.values())
        mapped.close()  # the kernel refuses the next seal while anybody can write
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | FIXED_SIZE)
        segment = _map(descriptor, nbytes, mmap.ACCESS_READ)
    except BaseException:
        os.close(descriptor)
        raise
    return _arrays(segment, descriptor, offsets, [each.spec for each in arrays])


def shared_arrays(specs: Sequence[TensorSpec]) -> list[np.ndarray]:
    """C-contiguous arrays of zeros, of these dims and dtypes, in one new segment. Raises `OutOfMemory`.

    Whoever writes to one while a service reads it gets an answer of mixed values. Any thread.
    """
    offsets, nbytes = _places(specs)
    descriptor = _file(nbytes)
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, FIXED_SIZE)
        segment = _map(descriptor, nbytes, mmap.ACCESS_WRITE)
    except BaseException:
        os.close(descriptor)
        raise
    return _arrays(segment, descriptor, offsets, specs)


def place_in_shared(array: np.ndarray) -> tuple[SharedSegment, int] | None:
    """The segment of a C-contiguous array that lies in one, and the offset in bytes; None for any other."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        root, owner = owner, owner.base
    if isinstance(owner, memoryview):  # by which NumPy holds the memory of something else
        owner = owner.obj
    if not isinstance(owner, SharedSegment) or not array.flags.c_contiguous:
        return None
    begin = root.__array_interface__["data"][0]
    at: int = array.__array_interface__["data"][0] - begin
    return owner, at


def _places(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Where arrays lie, in bytes, and how many they take together."""
    offsets, end = list[int](), 0
    for spec in specs:
        offsets.append(end)
        end += -(-_nbytes(spec) // _STEP) * _STEP
    return offsets, max(end, 1)


def _nbytes(spec: TensorSpec) -> int:
    return int(np.prod(spec.dims, dtype=np.int64)) * spec.dtype.numpy.itemsize


def _file(nbytes: int) -> int:
    """The descriptor of a new anonymous file of `nbytes` bytes. Raises `OutOfMemory`."""
    left = available()
    if left is not None and nbytes > left:  # Linux would grant it, and kill a process once it is written
        raise OutOfMemory(requested=nbytes, in_use=0, limit=None, largest=left)
    try:
        descriptor = os.memfd_create("cudnn-actor-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
    except (OSError, OverflowError) as error:
        refusal = exhaustion(error, requested=nbytes, in_use=0)
        if refusal is None:
            raise
        raise refusal from error
    return descriptor


def _map(descriptor: int, nbytes: int, access: int) -> SharedSegment:
    if sys.version_info >= (3, 13):
        return SharedSegment(descriptor, nbytes, access=access, trackfd=False)
    return SharedSegment(descriptor, nbytes, access=access)


def _array(segment: SharedSegment, offset: int, spec: TensorSpec) -> np.ndarray:
    return np.ndarray(spec.dims, spec.dtype.numpy, buffer=segment, offset=offset)


def _arrays(
    segment: SharedSegment, descriptor: int, offsets: Sequence[int], specs: Sequence[TensorSpec]
) -> list[np.ndarray]:
    segment.descriptor = descriptor
    weakref.finalize(segment, os.close, descriptor).atexit = False
    whole = np.frombuffer(segment, np.uint8)
    return [
        whole[offset : offset + _nbytes(spec)].view(spec.dtype.numpy).reshape(spec.dims)
        for offset, spec in zip(offsets, specs, strict=True)
    ]
