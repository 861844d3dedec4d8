"""A buffer's place on the device, and CuPy arrays on it."""

from __future__ import annotations

import functools
from typing import Any

from cudnn_actor.engines.cuda.device.arenas import Mapping
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Place", "memory_order"]


class Place:
    """The location of a buffer on the device; the CUDA engine's `Binding`.

    Parameters
    ----------
    mapping
        The arena's mapping.
    offset
        Bytes into the arena.
    spec
        The buffer's shape in memory.
    """

    __slots__ = ("__weakref__", "_raw", "mapping", "pointer", "spec")

    def __init__(self, mapping: Mapping, offset: int, spec: TensorSpec) -> None:
        if offset + spec.nbytes > mapping.nbytes:
            raise TypeError(f"{spec.nbytes} bytes at {offset} do not fit into an arena of {mapping.nbytes}")
        self.mapping = mapping
        self.pointer = mapping.pointer + offset
        self.spec = spec
        self._raw: Any = None

    @property
    def raw(self) -> Any:
        """A CuPy array of unsigned integers as wide as the elements, for bitwise copies."""
        if self._raw is None:
            self._raw = self.array(f"u{self.spec.dtype.itemsize}")
        return self._raw

    def array(self, dtype: Any, owner: object = None) -> Any:
        """A CuPy array on the buffer, dims in N, C, spatial order; it keeps `owner` alive."""
        cupy = libraries().cupy
        spec = self.spec
        memory = cupy.cuda.UnownedMemory(self.pointer, spec.nbytes, owner, cupy.cuda.runtime.getDevice())
        strides = tuple(stride * spec.dtype.itemsize for stride in spec.strides)
        return cupy.ndarray(spec.dims, dtype, cupy.cuda.MemoryPointer(memory, 0), strides=strides)


@functools.lru_cache(maxsize=4096)
def memory_order(spec: TensorSpec) -> tuple[int, ...] | None:
    """A tensor's axes from slowest to fastest if its elements have no gaps between them, else None."""
    order = sorted(range(spec.rank), key=lambda a: (-spec.strides[a], spec.dims[a] == 1, a))
    step = 1
    for axis in reversed(order):
        if spec.dims[axis] != 1 and spec.strides[axis] != step:
            return None
        step *= spec.dims[axis]
    return tuple(order)
