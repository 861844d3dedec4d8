"""The values on which plans are timed, and the speed at which this machine copies."""

from __future__ import annotations

import functools
import time

import numpy as np

from cudnn_actor.engines.cpu.rounding import rounding_to
from cudnn_actor.engines.cpu.scratch import aligned_bytes
from cudnn_actor.engines.timing import medians
from cudnn_actor.protocol.errors import OutOfMemory
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.timing import DeviceSpeed
from cudnn_actor.protocol.operations import GraphTensor

__all__ = ["operands", "speed"]

_COPIED_BYTES = 64 << 20


def operands(graph: OperationGraph) -> list[np.ndarray]:
    """New memory for a graph's buffers: floats normally distributed, integers 0. Raises `OutOfMemory`."""
    rng = np.random.default_rng(0)
    found: dict[int, np.ndarray] = {}
    for uid in graph.bound:
        tensor = graph.tensor(uid)
        same = found.get(-1 if tensor.overwrites is None else tensor.overwrites)
        found[uid] = _draw(tensor, rng) if same is None else same
    return [found[uid] for uid in graph.bound]


def _draw(tensor: GraphTensor, rng: np.random.Generator) -> np.ndarray:
    dtype = tensor.dtype.numpy
    strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
    try:
        array = np.ndarray(tensor.dims, dtype, aligned_bytes(tensor.spec.nbytes), 0, strides)
        if tensor.dtype.is_floating:
            rounding_to(dtype)(array, rng.standard_normal(tensor.dims))
        else:
            array[...] = 0
    except MemoryError:
        raise OutOfMemory(requested=tensor.spec.nbytes, in_use=0, limit=None) from None
    return array


@functools.cache
def speed() -> DeviceSpeed:
    """How fast this machine copies: measured at the first call, which takes a tenth of a second."""
    here, there = np.ones(_COPIED_BYTES, np.uint8), np.zeros(_COPIED_BYTES, np.uint8)

    def copy() -> tuple[float]:
        began = time.perf_counter()
        np.copyto(there, here)
        return (time.perf_counter() - began,)

    (took_s,) = medians(copy)
    return DeviceSpeed(copy_bytes_per_s=2 * _COPIED_BYTES / took_s)
