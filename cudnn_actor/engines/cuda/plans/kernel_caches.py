"""Kernels that cuDNN compiled for one graph, kept for graphs that differ from it in sizes alone.

cuDNN compiles the kernel of a fused convolution or matrix product when a plan is built, in half a second.
The kernel takes dims and strides as arguments, so cuDNN's kernel cache can give it to a graph of other dims.
The cache itself does not distinguish enough: it also gives a kernel to a graph whose operands are transposed,
for which it is wrong (cuDNN 9.19). So there is one cache for each class of graphs, and what differs within a
class does not change the kernel.
"""

from __future__ import annotations

import math
import os
from collections.abc import Hashable
from itertools import starmap
from typing import Any

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.operations import Convolution, GraphTensor, MatMul, Pointwise

__all__ = ["KernelCaches", "class_of", "kernel_caches"]

_SWITCH = "CUDNN_ACTOR_KERNEL_CACHE"

_VECTOR = 16
"""Elements of the longest access: a kernel depends on which of its divisors divide dims and strides."""
_SMALL = 1 << 31
"""Offsets below this fit into 32 bits."""
_MOST = 256
"""Caches kept at most. A kernel takes about 100 kB."""


def kernel_caches() -> KernelCaches | None:
    """Those of a new builder: None unless the environment variable CUDNN_ACTOR_KERNEL_CACHE is 1.

    They are off because no plan built with them has run on a GPU yet.
    """
    return KernelCaches() if os.environ.get(_SWITCH) == "1" else None


class KernelCaches:
    """cuDNN's kernel caches of one builder, by the class of the graphs. Not thread-safe."""

    def __init__(self) -> None:
        self._caches: dict[Hashable, Any] = {}

    def cache(self, graph: OperationGraph) -> Any:
        """The cache for a graph; None if its kernels must not be given to others.

        cuDNN updates the arguments of its kernels for fused convolutions and matrix products. It does not say
        so of attention, and has no candidates for attention's gradient (9.19).
        """
        others = [operation for operation in graph.operations if not isinstance(operation, Pointwise)]
        if not others or not all(isinstance(operation, Convolution | MatMul) for operation in others):
            return None
        key = class_of(graph)
        if key not in self._caches:
            if len(self._caches) >= _MOST:
                del self._caches[next(iter(self._caches))]
            self._caches[key] = libraries().cudnn.create_kernel_cache()
        return self._caches[key]

    def exclude(self, graph: OperationGraph) -> None:
        """Have no cache for graphs of a graph's class."""
        self._caches[class_of(graph)] = None


def class_of(graph: OperationGraph) -> Hashable:
    """What a graph's kernel may depend on: all of the graph but sizes, and these as far as they matter."""
    uids = graph.canonical_uids
    operations = tuple(
        (op.attributes(), tuple(uids[u] for u in op.reads), tuple(uids[u] for u in op.writes))
        for op in graph.operations
    )
    return operations, tuple(_tensor(graph.tensor(uid)) for uid in uids), graph.numerics


def _tensor(tensor: GraphTensor) -> Hashable:
    axes = [axis for axis, size in enumerate(tensor.dims) if size != 1]
    return (
        tensor.role,
        tensor.dtype,
        tensor.value,
        tensor.alignment,
        tensor.spec.nbytes < _SMALL,
        tuple(starmap(_axis, zip(tensor.dims, tensor.strides, strict=True))),
        tuple(sorted(axes, key=lambda axis: tensor.strides[axis])),
    )


def _axis(size: int, stride: int) -> Hashable:
    """How accesses along an axis are aligned: its size says so if it is contiguous, else its stride."""
    return size == 1, stride == 1, math.gcd(size if stride == 1 else stride, _VECTOR)
