"""Memory that another process could share: a mapping of a descriptor, whose arrays all go before it does."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator

import numpy as np

from cudnn_actor.engines.base import Engine
from cudnn_actor.protocol import TensorSpec

SHARED_BYTES = 16 << 20


class SharedMemory:
    """Arrays one behind the other in a mapping; `room` makes those that are written, whose old bytes show."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.view = memoryview(mapping)
        self._next = 0

    def begin_case(self) -> None:
        """Forget all arrays: the next case of a test has the whole mapping. See `tests.in_one_test`."""
        self._next = 0

    def room(self, spec: TensorSpec, offset: int = 0) -> np.ndarray:
        """An array of a buffer's dims and dtype, `offset` bytes past a good place for it."""
        dtype = spec.dtype.numpy
        nbytes = spec.size * dtype.itemsize
        start = self._next + offset
        self._next = -(-(start + nbytes) // 256) * 256
        assert self._next <= SHARED_BYTES
        raw = np.frombuffer(self.view, np.uint8, nbytes, start)
        raw[:] = 0x5A
        return raw.view(dtype).reshape(spec.dims)

    def holding(self, values: np.ndarray, spec: TensorSpec) -> np.ndarray:
        """An array of a buffer's dims and dtype with these values in it."""
        array = self.room(spec)
        array[...] = values
        return array


@contextlib.contextmanager
def shared_memory(engine: Engine, *, pinned: bool) -> Iterator[SharedMemory]:
    """A mapping, pinned or not; at the end it must be closed without an array in it that anybody holds."""
    fd = os.memfd_create("cudnn-actor-test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, SHARED_BYTES)
        mapping = mmap.mmap(fd, SHARED_BYTES)
    finally:
        os.close(fd)
    shared = SharedMemory(mapping)
    if pinned:
        engine.pin(shared.view)
    try:
        yield shared
    finally:
        engine.unpin(shared.view)
        shared.view.release()
        mapping.close()
