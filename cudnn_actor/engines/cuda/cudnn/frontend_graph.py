"""A graph of cuDNN's frontend, while the operations of an operation graph are added to it.

A tensor's uid in cuDNN's graph is its canonical number plus 1, so that a plan
does not depend on the graph's own uids. In a graph with a convolution, one
spatial dim becomes two, the first of size 1, because cuDNN's convolutions have
at least two. In a graph with a product of matrices, tensors have three dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Convolution, GraphTensor, Node, TensorRole
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.numerics import Numerics

__all__ = ["FrontendGraph", "Inapplicable", "Refused", "data_type", "frontend_uids", "spatial"]

_DATA_TYPES = {
    DType.FLOAT64: "DOUBLE",
    DType.FLOAT32: "FLOAT",
    DType.FLOAT16: "HALF",
    DType.BFLOAT16: "BFLOAT16",
    DType.INT8: "INT8",
    DType.INT32: "INT32",
    DType.INT64: "INT64",
    DType.UINT8: "UINT8",
}
_FIRST_NUMBER = 1 << 20
"""Numbers that are part of plans have uids above this. The uids of all tensors are below it."""


class Refused(Exception):
    """Raised when cuDNN does not accept a graph; there may be another way to run it. The text says why."""


class Inapplicable(Refused):
    """Raised by a way to run graphs that is for graphs of another kind, so its reason says little."""


def frontend_uids(graph: OperationGraph) -> dict[int, int]:
    """The uid in cuDNN's graph of each tensor, by its own uid: its canonical number plus 1."""
    return {uid: number + 1 for uid, number in graph.canonical_uids.items()}


def data_type(dtype: DType) -> Any:
    """The frontend's name for an element type. Raises `Refused` if it has none."""
    if dtype not in _DATA_TYPES:
        raise Refused(f"cuDNN has no tensors of {dtype}")
    return getattr(libraries().cudnn.data_type, _DATA_TYPES[dtype])


class FrontendGraph:
    """cuDNN's graph of an operation graph.

    Parameters
    ----------
    graph
        The operation graph.
    pygraph
        The frontend's graph, empty.
    """

    def __init__(self, graph: OperationGraph, pygraph: Any) -> None:
        self._graph = graph
        self.pygraph = pygraph
        self._uids = frontend_uids(graph)
        self._tensors: dict[int, Any] = {}
        self._shapes: dict[int, tuple[list[int], list[int]]] = {}
        self._numbers = 0
        self.convolves = any(isinstance(operation, Convolution) for operation in graph.operations)
        """Whether the graph has a convolution. Then tensors have at least two spatial dims, and may be
        booleans."""
        self.fold: Callable[[GraphTensor], tuple[list[int], list[int]]] | None = None
        """Returns a tensor's dims and strides in cuDNN's graph, for the operations behind a product of
        matrices: they have fewer dims there. None before there is such a product."""

    @property
    def numerics(self) -> Numerics:
        """The numerics of the operation graph."""
        return self._graph.numerics

    def spec(self, uid: int) -> GraphTensor:
        """A tensor of the operation graph."""
        return self._graph.tensor(uid)

    def compute(self, operation: Node) -> Any:
        """The frontend's name for the type that an operation computes in; float32 for int64."""
        compute = self._graph.compute(operation)
        return data_type(DType.FLOAT32 if compute is DType.INT64 else compute)

    def tensor(self, uid: int, dims: Sequence[int] = (), strides: Sequence[int] = ()) -> Any:
        """A tensor that an operation reads, with these dims and strides if they are given.

        Raises `Refused` if another operation has the tensor with other dims or strides.
        """
        shape = self._shape(uid, dims, strides)
        if uid not in self._tensors:
            tensor = self._graph.tensor(uid)
            if tensor.value is not None:
                if tensor.dtype is not DType.FLOAT32:
                    raise Refused("numbers that are part of cuDNN's plans are float32")
                self._tensors[uid] = self.number(tensor.value)
                return self._tensors[uid]
            self._tensors[uid] = self.pygraph.tensor(
                dim=shape[0],
                stride=shape[1],
                data_type=data_type(tensor.dtype),
                is_pass_by_value=tensor.role is TensorRole.SCALAR,
                uid=self._uids[uid],
            )
        return self._tensors[uid]

    def number(self, value: float) -> Any:
        """A number that is part of the plan.

        Its uid is set here, because the frontend (1.32) confuses two numbers whose uids it has chosen itself.
        """
        self._numbers += 1
        constant = libraries().cudnn.scalar_type.RUNTIME_PARAM
        return self.pygraph.tensor_scalar(float(value), constant).set_uid(_FIRST_NUMBER + self._numbers)

    def write(self, uid: int, output: Any, dims: Sequence[int] = (), strides: Sequence[int] = ()) -> None:
        """Make an output of cuDNN's graph the tensor `uid`. Raises as `tensor`."""
        tensor = self._graph.tensor(uid)
        shape = self._shape(uid, dims, strides)
        bound = tensor.role is TensorRole.BOUND
        # Sums of int8 products are exact as int32. Between operations they are float32, like what follows.
        dtype = tensor.dtype if bound or tensor.dtype is not DType.INT32 else DType.FLOAT32
        # The result of a comparison after a convolution. Other comparisons run as kernels of our own.
        condition = dtype is DType.BOOL and self.convolves and not bound
        kind = libraries().cudnn.data_type.BOOLEAN if condition else data_type(dtype)
        output.set_uid(self._uids[uid])
        output.set_output(bound).set_data_type(kind)
        output.set_dim(shape[0])
        output.set_stride(shape[1])
        self._tensors[uid] = output

    def write_all(self, operation: Node, found: Sequence[Any], shape: Any = lambda _: ()) -> None:
        """`write` each of an operation's outputs, in order; `shape` returns dims and strides by name."""
        outputs = dict(zip(operation.outputs, found, strict=False))
        for name, uid in operation.named(operation.outputs):
            self.write(uid, outputs[name], *shape(name))

    def _shape(self, uid: int, dims: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
        """A tensor's dims and strides in cuDNN's graph. Raises `Refused` if two operations need others."""
        tensor = self._graph.tensor(uid)
        if not tensor.dims or 0 in tensor.dims:
            raise Refused("cuDNN has no tensors without dims or without elements")
        if dims:
            shape = list(dims), list(strides)
        elif self.convolves:
            shape = spatial(tensor)
        elif self.fold is not None:
            shape = self.fold(tensor)
        else:
            shape = list(tensor.dims), list(tensor.strides)
        if self._shapes.setdefault(uid, shape) != shape:
            raise Refused("two operations need a tensor in different shapes")
        return shape


def spatial(tensor: GraphTensor) -> tuple[list[int], list[int]]:
    """Dims and strides with at least two spatial dims."""
    dims, strides = list(tensor.dims), list(tensor.strides)
    if len(dims) == 3:
        dims.insert(2, 1)
        strides.insert(2, strides[2] * tensor.dims[2])
    return dims, strides
