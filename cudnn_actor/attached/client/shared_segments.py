"""Arrays of this process that services of other processes can read without a copy.

Each array lies in a segment, an anonymous file, which every `Link` that sends the array announces to its
service once. So values that are sent to many services are copied once, and not into each link's own memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.engines.cpu.arenas import FIXED_SIZE
from cudnn_actor.memory.container import available
from cudnn_actor.memory.exhaustion import exhaustion
from cudnn_actor.protocol.errors import OutOfMemory
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = [
    "SharedSegment",
    "ToShare",
    "gather_at_once",
    "place_in_shared",
    "shared_arrays",
    "shared_copies",
]

_STEP = 64
"""Arrays begin at multiples of this many bytes."""
_MOST_AT_ONCE = 1024
"""Linux writes no more arrays by one call."""
_OF_NUMPY = 1
"""`dtype.isbuiltin` of dtypes that NumPy itself has."""
_DTYPE, _NBYTES, _IS_CONTIGUOUS = map(attrgetter, ("dtype", "nbytes", "flags.c_contiguous"))
"""With `map`, these read all arrays of a batch, and Python runs no code for each of them: an event loop may
wait for the interpreter's lock meanwhile."""


class SharedSegment(mmap.mmap):
    """A mapped segment. It lives as long as an array that lies in it."""

    descriptor: int
    """The descriptor of its file. It is closed with the segment."""


class ToShare(NamedTuple):
    """An array to copy: its spec, and a function that computes its values when they are needed."""

    spec: TensorSpec
    values: Callable[[], np.ndarray]


def shared_copies(arrays: Sequence[ToShare]) -> list[np.ndarray]:
    """Copy arrays into one new segment, which nobody can change after that, not even this process.

    Parameters
    ----------
    arrays
        The arrays to copy. They are computed one after the other, so that at most one of them exists twice at
        a time.

    Returns
    -------
    list of numpy.ndarray
        C-contiguous and read-only, of the given dims and dtypes.

    Raises
    ------
    OutOfMemory
        There is no memory for the segment.

    Notes
    -----
    Blocks while it copies. Any thread may call it.
    """
    offsets, nbytes = _places([each.spec for each in arrays])
    descriptor = _file(nbytes)
    try:
        mapped = _map(descriptor, nbytes, mmap.ACCESS_WRITE)
        for offset, each in zip(offsets, arrays, strict=True):
            np.copyto(_array(mapped, offset, each.spec), each.values())
        mapped.close()  # the kernel refuses the next seal as long as a writable mapping exists
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | FIXED_SIZE)
        segment = _map(descriptor, nbytes, mmap.ACCESS_READ)
    except BaseException:
        os.close(descriptor)
        raise
    return _arrays(segment, descriptor, offsets, [each.spec for each in arrays])


def shared_arrays(specs: Sequence[TensorSpec]) -> list[np.ndarray]:
    """C-contiguous arrays of zeros, of these dims and dtypes, in one new segment. Raises `OutOfMemory`.

    If one is written to while a service reads it, the answer has a mixture of values. Any thread.
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


def gather_at_once(arrays: Sequence[np.ndarray], whole: np.ndarray) -> None:
    """Copy arrays, one after another along the leading dim, into an array of `shared_arrays`, which they
    fill.

    The system copies them, by one call for up to 1,024 arrays, so the interpreter's lock is released once.
    NumPy releases it for each array, and if another thread computes, getting it back takes longer than the
    copy. The system's copy takes about twice as much processor time. NumPy copies if an array is not
    C-contiguous or has another dtype, and where the system refuses. Blocks while it copies. Any thread may
    call it.
    """
    if not _written_at_once(arrays, whole):
        np.concatenate(arrays, out=whole)


def _written_at_once(arrays: Sequence[np.ndarray], whole: np.ndarray) -> bool:
    """Whether the system has written all of these arrays."""
    if {*map(_DTYPE, arrays)} != {whole.dtype} or not all(map(_IS_CONTIGUOUS, arrays)):
        return False
    if not whole.nbytes or sum(map(_NBYTES, arrays)) != whole.nbytes:
        return False
    if (place := place_in_shared(whole)) is None:
        return False
    segment, at = place
    for begin in range(0, len(arrays), _MOST_AT_ONCE):
        some: Sequence[Any] = arrays[begin : begin + _MOST_AT_ONCE]
        nbytes = sum(map(_NBYTES, some))
        try:
            if whole.dtype.isbuiltin != _OF_NUMPY:  # it may lack the buffer protocol
                some = [each.view(np.uint8) for each in some]
            if os.pwritev(segment.descriptor, some, at) != nbytes:
                return False
        except OSError:
            return False
        at += nbytes
    return True


def place_in_shared(array: np.ndarray) -> tuple[SharedSegment, int] | None:
    """The segment in which a C-contiguous array lies, and its offset in bytes; None for any other array."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        root, owner = owner, owner.base
    if isinstance(owner, memoryview):  # NumPy holds the memory of other objects by it
        owner = owner.obj
    if not isinstance(owner, SharedSegment) or not array.flags.c_contiguous:
        return None
    begin = root.__array_interface__["data"][0]
    at: int = array.__array_interface__["data"][0] - begin
    return owner, at


def _places(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """The offsets of arrays in bytes, and how many bytes they take together."""
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
    if left is not None and nbytes > left:  # Linux would grant it, and kill a process when it is written to
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
