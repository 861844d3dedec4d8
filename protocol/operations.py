"""The elements of operation graphs: tensors, and the operations between them.

To add an operation, add a class here and its name to `Operation`: validation,
canonical order and digest use the fields that it declares.
"""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

from cudnn_actor.protocol.conv import ConvSpec
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.tensor import TensorSpec

__all__ = [
    "ConvolutionBackwardData",
    "ConvolutionBackwardFilter",
    "ConvolutionForward",
    "GraphTensor",
    "Operation",
    "Pointwise",
    "PointwiseMode",
    "TensorRole",
]


class TensorRole(enum.StrEnum):
    """Where a graph tensor's values come from: see `graph`."""

    BOUND = "bound"
    SCALAR = "scalar"
    VIRTUAL = "virtual"


class GraphTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor of a graph.

    Parameters
    ----------
    uid
        Its number within the graph.
    dims, strides
        As in `TensorSpec`, strides in elements.
    dtype
        The element type; for a virtual tensor, the type that is computed in.
    role
        Bound, scalar or virtual.
    alignment
        Bytes that a bound tensor's address is a multiple of.
    name
        For people; not part of the graph's meaning.
    """

    uid: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    role: TensorRole = TensorRole.BOUND
    alignment: int = 16
    name: str = ""

    @property
    def spec(self) -> TensorSpec:
        """The spec that a buffer must have to be bound to the tensor."""
        return TensorSpec(dims=self.dims, strides=self.strides, dtype=self.dtype, alignment=self.alignment)

    def meaning(self) -> tuple[object, ...]:
        """Everything that defines the tensor, except its name and its uid."""
        return (self.dims, self.strides, self.dtype, self.role, self.alignment)


class _Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    reads: ClassVar[tuple[str, ...]]
    """Names of the fields that hold the inputs' uids, or tuples of them."""
    writes: ClassVar[str]
    """Name of the field that holds the uid of the output."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """Uids of the tensors read, in the operation's own order."""
        uids: list[int] = []
        for name in self.reads:
            value = getattr(self, name)
            uids.extend(value if isinstance(value, tuple) else (value,))
        return tuple(uids)

    @property
    def output(self) -> int:
        """Uid of the tensor written."""
        return int(getattr(self, self.writes))

    def attributes(self) -> tuple[object, ...]:
        """Everything that defines the operation, except which tensors it reads and writes."""
        fields = [n for n in self.__struct_fields__ if n not in (*self.reads, self.writes)]
        return (type(self).__name__, *((n, getattr(self, n)) for n in sorted(fields)))


class ConvolutionForward(_Node, frozen=True, kw_only=True, tag=True):
    """y = x cross-correlated with w, accumulated in `compute`."""

    reads = ("x", "w")
    writes = "y"
    x: int
    w: int
    y: int
    conv: ConvSpec
    compute: DType


class ConvolutionBackwardData(_Node, frozen=True, kw_only=True, tag=True):
    """dx = gradient with respect to the input, accumulated in `compute`."""

    reads = ("dy", "w")
    writes = "dx"
    dy: int
    w: int
    dx: int
    conv: ConvSpec
    compute: DType


class ConvolutionBackwardFilter(_Node, frozen=True, kw_only=True, tag=True):
    """dw = gradient with respect to the filter, accumulated in `compute`."""

    reads = ("x", "dy")
    writes = "dw"
    x: int
    dy: int
    dw: int
    conv: ConvSpec
    compute: DType


class PointwiseMode(enum.StrEnum):
    """An elementwise function of one or two tensors; smaller operands are broadcast.

    The activations have the names and formulas of `Activation`.
    """

    ADD = "add"
    MUL = "mul"
    RELU = "relu"
    LEAKY_RELU = "leaky_relu"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SWISH = "swish"
    ELU = "elu"
    SOFTPLUS = "softplus"


class Pointwise(_Node, frozen=True, kw_only=True, tag=True):
    """result = mode(operands), with the activation's `parameter` if it has one."""

    reads = ("operands",)
    writes = "result"
    mode: PointwiseMode
    operands: tuple[int, ...]
    result: int
    compute: DType
    parameter: float | None = None


Operation = ConvolutionForward | ConvolutionBackwardData | ConvolutionBackwardFilter | Pointwise
"""Every operation that a graph can hold."""
