"""Kernels that cuDNN compiled for one graph, kept for graphs that differ from it in sizes alone.

cuDNN compiles the kernel of a fused convolution or matrix product when a plan is built, in up to a second.
Kernels for dynamic shapes take dims and strides as arguments, so cuDNN's kernel cache can give one to a graph
of other dims. The cache itself does not distinguish enough: it also gives a kernel to a graph whose operands
are transposed, for which the kernel is wrong (cuDNN 9.19), and the kernel of a product of few rows to a
product of many (9.28). So there is one cache for each class of graphs, and what differs within a class does
not change the kernel.

https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/utilities/dynamic-kernel-cache.html
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from itertools import starmap
from typing import Any

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    Convolution,
    ConvolutionForward,
    GraphTensor,
    MatMul,
    Pointwise,
    PointwiseMode,
    TensorRole,
)

__all__ = ["KernelCaches", "class_of", "compiles"]

_VECTOR = 16
"""Elements of the longest access: a kernel depends on which of its divisors divide dims and strides."""
_SMALL = 1 << 31
"""Offsets below this fit into 32 bits."""
_NARROW = 64
"""The most rows or columns of products that get another kernel from cuDNN 9.28 than larger products."""
_MOST = 256
"""The most caches that are kept. A kernel takes about 100 kB."""


class KernelCaches:
    """cuDNN's kernel caches of one builder, by the class of the graphs. Not thread-safe."""

    def __init__(self) -> None:
        self._caches: dict[Hashable, Any] = {}

    def cache(self, graph: OperationGraph) -> Any:
        """The cache for a graph; None if other graphs cannot use its kernels, or if it needs no compilation.

        cuDNN updates the arguments of its kernels for fused convolutions and matrix products. Its
        documentation does not say so of attention, and it has no candidates for attention's gradient (9.19).
        """
        if not compiles(graph):
            return None
        key = class_of(graph)
        if key not in self._caches:
            if len(self._caches) >= _MOST:
                del self._caches[next(iter(self._caches))]
            self._caches[key] = libraries().cudnn.create_kernel_cache()
        return self._caches[key]


def compiles(graph: OperationGraph) -> bool:
    """Whether a graph is of convolutions or matrix products whose kernels cuDNN compiles.

    For a single convolution, and for a forward one with relu, or a bias and relu, cuDNN has compiled kernels;
    with a bias alone, only for some dims.
    """
    others = [operation for operation in graph.operations if not isinstance(operation, Pointwise)]
    if not others or not all(isinstance(operation, Convolution | MatMul) for operation in others):
        return False
    behind = [_name(graph, operation) for operation in graph.operations if isinstance(operation, Pointwise)]
    if [type(operation) for operation in others] == [ConvolutionForward]:
        return behind not in ([], ["relu"], ["bias", "relu"])
    return bool(behind) or len(others) > 1 or isinstance(others[0], MatMul)


def _name(graph: OperationGraph, operation: Pointwise[int]) -> str:
    """The function's name, like "relu", or "bias" for a sum with one number for each channel."""
    given = [graph.tensor(uid) for uid in operation.operands]
    biases = (tensor for tensor in given if tensor.role is TensorRole.BOUND and len(tensor.dims) > 1)
    if operation.mode is PointwiseMode.ADD and any(
        math.prod(tensor.dims) == tensor.dims[1] == given[0].dims[1] for tensor in biases
    ):
        return "bias"
    plain = (operation.parameter, operation.lower, operation.upper) == (None, None, None)
    return operation.mode.value if plain else f"{operation.mode.value} with parameters"


def class_of(graph: OperationGraph) -> Hashable:
    """The key of a graph's class: the graph without its sizes, and what a kernel depends on of the sizes."""
    uids = graph.canonical_uids
    operations = tuple(
        (op.attributes(), tuple(uids[u] for u in op.reads), tuple(uids[u] for u in op.writes))
        for op in graph.operations
    )
    products = (op for op in graph.operations if isinstance(op, MatMul))
    narrow = tuple(min(graph.tensor(op.y).dims[-2:]) <= _NARROW for op in products)
    return operations, tuple(_tensor(graph.tensor(uid)) for uid in uids), narrow, graph.numerics


def _tensor(tensor: GraphTensor) -> Hashable:
    """The properties of a tensor that a kernel may depend on."""
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
    """How accesses along an axis are aligned: by its size if the axis is contiguous, else by its stride."""
    return size == 1, stride == 1, math.gcd(size if stride == 1 else stride, _VECTOR)
