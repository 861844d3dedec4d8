"""The correct results of any graph: its operations' definitions, in double.

Small graphs are computed on the host: on the device, CuPy compiles each of its
functions at the first use, which takes seconds on a new machine.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.evaluation import NumPy, exact, round_into
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.plans.kernels import Kernel, Leaf, elementwise
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.operations import GraphTensor, TensorRole
from cudnn_actor.protocol.operations.base import Array
from cudnn_actor.protocol.tensor import packed_strides

__all__ = ["EvaluatedReference", "OnDevice", "OnHost", "place_of", "sampling_step"]

_MOST_ELEMENTS, _COPIES = 1 << 30, 10
"""The most elements of all tensors together, and how often they may lie on the device as double at once."""
_MOST_COMPARED = 1 << 20
_FEW_ELEMENTS = 1 << 17
"""Of the tensors of a graph that is computed on the host, in some milliseconds."""


class CuPy:
    """CuPy, and the functions that it lacks and that operations are defined with."""

    @staticmethod
    def erfc(x: Array) -> Array:
        """1 - erf(x)."""
        return importlib.import_module("cupyx.scipy.special").erfc(x)  # late: few graphs need it

    def __getattr__(self, name: str) -> Any:
        return getattr(libraries().cupy, name)


class OnDevice:
    """Values in CuPy's arrays: packed, as float64 or int64."""

    xp = CuPy()

    @staticmethod
    def place(drawn: np.ndarray) -> Array:
        """Whole numbers as float64. Given as bytes, they take an eighth of the time to copy."""
        return libraries().cupy.asarray(drawn).astype(np.float64)

    @staticmethod
    def store(values: Array, tensor: GraphTensor, address: int) -> None:
        """Enqueue a rounding of values into a tensor's memory."""
        values = libraries().cupy.ascontiguousarray(values)
        kind = DType.FLOAT64 if values.dtype.kind == "f" else DType.INT64
        strides = [tensor.strides, packed_strides(tensor.dims)]
        kernel = Kernel(elementwise(Leaf(0, kind), tensor.dtype, True, tensor.dims, strides))
        kernel.launch((address, int(values.data.ptr)), ())

    @staticmethod
    def load(tensor: GraphTensor, address: int) -> Array:
        """A tensor's values."""
        kind = DType.FLOAT64 if tensor.dtype.is_floating else DType.INT64
        values = libraries().cupy.empty(tensor.dims, kind.numpy)
        strides = [packed_strides(tensor.dims), tensor.strides]
        kernel = Kernel(elementwise(Leaf(0, tensor.dtype), kind, True, tensor.dims, strides))
        kernel.launch((int(values.data.ptr), address), ())
        return values

    @classmethod
    def rounded(cls, values: Array, tensor: GraphTensor) -> Array:
        """The values as they are where a tensor has passed them on."""
        cupy = libraries().cupy
        if tensor.dtype is DType.FLOAT64 or not tensor.dtype.is_floating:
            return cupy.rint(values) if values.dtype.kind == "f" and not tensor.dtype.is_floating else values
        place = cupy.empty(tensor.spec.nbytes, np.uint8)
        cls.store(values.astype(np.float64), tensor, int(place.data.ptr))
        return cls.load(tensor, int(place.data.ptr))


class OnHost:
    """Values in NumPy's arrays. Each copy waits for the stream."""

    xp = NumPy()

    @staticmethod
    def place(drawn: np.ndarray) -> Array:
        """Whole numbers as float64."""
        return drawn.astype(np.float64)

    @classmethod
    def store(cls, values: Array, tensor: GraphTensor, address: int) -> None:
        """Round values into a tensor's memory. What lies between its elements stays."""
        data = cls._copied(tensor, address)
        round_into(values, tensor.dtype, _elements(data, tensor))
        stream = libraries().cupy.cuda.get_current_stream()
        kind = libraries().runtime.memcpyHostToDevice
        libraries().runtime.memcpyAsync(address, data.ctypes.data, data.nbytes, kind, stream.ptr)
        stream.synchronize()

    @classmethod
    def load(cls, tensor: GraphTensor, address: int) -> Array:
        """A tensor's values."""
        return exact(_elements(cls._copied(tensor, address), tensor))

    @staticmethod
    def _copied(tensor: GraphTensor, address: int) -> np.ndarray:
        data = np.empty(tensor.spec.nbytes, np.uint8)
        stream = libraries().cupy.cuda.get_current_stream()
        kind = libraries().runtime.memcpyDeviceToHost
        libraries().runtime.memcpyAsync(data.ctypes.data, address, data.nbytes, kind, stream.ptr)
        stream.synchronize()
        return data

    @staticmethod
    def rounded(values: Array, tensor: GraphTensor) -> Array:
        """The values as they are where a tensor has passed them on."""
        place = np.empty(tensor.dims, tensor.dtype.numpy)
        round_into(values, tensor.dtype, place)
        return exact(place)


def _elements(data: np.ndarray, tensor: GraphTensor) -> np.ndarray:
    """A tensor's elements in its bytes."""
    steps = [stride * tensor.dtype.itemsize for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(data.view(tensor.dtype.numpy), tensor.dims, steps)


Place = type[OnDevice] | type[OnHost]
"""Where values are computed."""


def place_of(graph: OperationGraph) -> Place:
    """Where a graph's values are computed: on the host if they are few."""
    return OnHost if _elements_of(graph) <= _FEW_ELEMENTS else OnDevice


def _elements_of(graph: OperationGraph) -> int:
    return sum(math.prod(tensor.dims) for tensor in graph.tensors)


class EvaluatedReference:
    """A graph's results by `Operation.evaluate`.

    Parameters
    ----------
    graph
        See `covers`.
    """

    def __init__(self, graph: OperationGraph) -> None:
        self._graph = graph
        self._place = place_of(graph)

    @staticmethod
    def covers(graph: OperationGraph) -> bool:
        """Whether a graph's tensors are small enough for the device's free memory."""
        free, _ = libraries().runtime.memGetInfo()
        return _elements_of(graph) <= min(_MOST_ELEMENTS, int(free) // (_COPIES * DType.FLOAT64.itemsize))

    def compare(
        self, address: Callable[[int], int], scalars: Sequence[float]
    ) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """(wanted, got) of each result, as float64, at evenly spaced elements. Blocks.

        `address` locates each bound tensor. Raises CuPy's `OutOfMemoryError`.
        """
        graph, place = self._graph, self._place
        values: dict[int, Array] = {
            uid: place.xp.full(graph.tensor(uid).dims, scalar)
            for uid, scalar in zip(graph.scalars, scalars, strict=True)
        }
        compared = {}
        with np.errstate(all="ignore"):
            for operation in graph.operations:
                for uid in operation.reads:
                    if uid not in values:
                        values[uid] = place.load(graph.tensor(uid), address(uid))
                for uid, result in graph.evaluate(place.xp, operation, values).items():
                    tensor = graph.tensor(uid)
                    if tensor.role is TensorRole.BOUND:
                        compared[uid] = _both(result, place.load(tensor, address(uid)))
                    values[uid] = place.rounded(result, tensor)
        return compared


def _both(wanted: Array, got: Array) -> tuple[np.ndarray, np.ndarray]:
    step = sampling_step(got.size)
    first, second = (_on_host(array.ravel()[::step]).astype(np.float64) for array in (wanted, got))
    return first, second


def _on_host(array: Array) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else np.asarray(libraries().cupy.asnumpy(array))


def sampling_step(count: int) -> int:
    """The distance of the elements compared. It has no common divisor with a dim: places in rows vary."""
    least = max(1, count // _MOST_COMPARED)
    return next(step for step in itertools.count(least) if math.gcd(step, count) == 1)
