"""The correct results of any graph: its operations' definitions, in double, on the device."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.plans.kernels import Kernel, Leaf, elementwise
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.operations import GraphTensor, TensorRole
from cudnn_actor.protocol.operations.base import Array
from cudnn_actor.protocol.tensor import packed_strides

__all__ = ["CuPy", "EvaluatedReference", "sampling_step", "store_values"]

_MOST_ELEMENTS, _COPIES = 1 << 30, 10
"""The most elements of all tensors together, and how often they may lie on the device as double at once."""
_MOST_COMPARED = 1 << 20


class CuPy:
    """CuPy, and the functions that it lacks and that operations are defined with."""

    @staticmethod
    def erfc(x: Array) -> Array:
        """1 - erf(x)."""
        return importlib.import_module("cupyx.scipy.special").erfc(x)  # late: few graphs need it

    def __getattr__(self, name: str) -> Any:
        return getattr(libraries().cupy, name)


class EvaluatedReference:
    """A graph's results by `Operation.evaluate`.

    Parameters
    ----------
    graph
        See `covers`.
    """

    def __init__(self, graph: OperationGraph) -> None:
        self._graph = graph

    @staticmethod
    def covers(graph: OperationGraph) -> bool:
        """Whether a graph's tensors are small enough for the device's free memory."""
        elements = sum(math.prod(tensor.dims) for tensor in graph.tensors)
        free, _ = libraries().runtime.memGetInfo()
        return elements <= min(_MOST_ELEMENTS, int(free) // (_COPIES * DType.FLOAT64.itemsize))

    def compare(
        self, address: Callable[[int], int], scalars: Sequence[float]
    ) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """(wanted, got) of each result, as float64, at evenly spaced elements. Blocks.

        `address` locates each bound tensor. Raises CuPy's `OutOfMemoryError`.
        """
        graph, xp = self._graph, CuPy()
        values: dict[int, Array] = {
            uid: xp.full(graph.tensor(uid).dims, scalar)
            for uid, scalar in zip(graph.scalars, scalars, strict=True)
        }
        compared = {}
        for operation in graph.operations:
            for uid in operation.reads:
                if uid not in values:
                    values[uid] = _load(graph.tensor(uid), address(uid))
            for uid, result in graph.evaluate(xp, operation, values).items():
                tensor = graph.tensor(uid)
                if tensor.role is TensorRole.BOUND:
                    compared[uid] = _both(result, _load(tensor, address(uid)))
                values[uid] = _rounded(result, tensor)
        return compared


def store_values(values: Array, tensor: GraphTensor, address: int) -> None:
    """Enqueue a rounding of float64 or int64 values into a tensor's memory."""
    values = libraries().cupy.ascontiguousarray(values)
    kind = DType.FLOAT64 if values.dtype.kind == "f" else DType.INT64
    strides = [tensor.strides, packed_strides(tensor.dims)]
    kernel = Kernel(elementwise(Leaf(0, kind), tensor.dtype, True, tensor.dims, strides))
    kernel.launch((address, int(values.data.ptr)), ())


def _load(tensor: GraphTensor, address: int) -> Array:
    """A tensor's values as float64 or int64."""
    kind = DType.FLOAT64 if tensor.dtype.is_floating else DType.INT64
    values = libraries().cupy.empty(tensor.dims, kind.numpy)
    strides = [packed_strides(tensor.dims), tensor.strides]
    kernel = Kernel(elementwise(Leaf(0, tensor.dtype), kind, True, tensor.dims, strides))
    kernel.launch((int(values.data.ptr), address), ())
    return values


def _rounded(values: Array, tensor: GraphTensor) -> Array:
    cupy = libraries().cupy
    if tensor.dtype is DType.FLOAT64 or not tensor.dtype.is_floating:
        return cupy.rint(values) if values.dtype.kind == "f" and not tensor.dtype.is_floating else values
    place = cupy.empty(tensor.spec.nbytes, np.uint8)
    store_values(values.astype(np.float64), tensor, int(place.data.ptr))
    return _load(tensor, int(place.data.ptr))


def _both(wanted: Array, got: Array) -> tuple[np.ndarray, np.ndarray]:
    cupy = libraries().cupy
    step = sampling_step(wanted.size)
    first, second = (
        cupy.asnumpy(array.ravel()[::step]).astype(np.float64) for array in (cupy.asarray(wanted), got)
    )
    return first, second


def sampling_step(count: int) -> int:
    """The distance of the elements compared. It has no common divisor with a dim: places in rows vary."""
    least = max(1, count // _MOST_COMPARED)
    return next(step for step in itertools.count(least) if math.gcd(step, count) == 1)
