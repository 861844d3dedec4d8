"""What a kernel computes of each element, as data: expressions of what it reads."""

from __future__ import annotations

import msgspec

from cudnn_actor.protocol.operations import FUNCTIONS, Pointwise, PointwiseMode
from cudnn_actor.protocol.types.dtypes import DType

__all__ = [
    "Constant",
    "Earlier",
    "Expression",
    "Leaf",
    "Result",
    "Scalar",
    "Selection",
    "Table",
    "Tabled",
    "Value",
    "expression",
]


class Leaf(msgspec.Struct, frozen=True, tag="leaf"):
    """A tensor that the kernel reads.

    Parameters
    ----------
    number
        Its index among the operands.
    dtype
        The element type.
    offset
        How many elements further its first one lies.
    selects
        Indices that select along further axes of it.
    filling
        The value where an index of a table is below 0; None if none is.
    """

    number: int
    dtype: DType
    offset: int = 0
    selects: tuple[Selection, ...] = ()
    filling: float | int | None = None


class Tabled(msgspec.Struct, frozen=True, tag="tabled"):
    """What the kernel reads of a table: its index among the tables."""

    number: int


class Selection(msgspec.Struct, frozen=True):
    """Indices that select along an axis: what is read of them, the axis' size, and its stride in elements."""

    indices: Leaf | Tabled
    size: int
    step: int


class Table(msgspec.Struct, frozen=True):
    """Indices that are known beforehand, in range or below 0, and their strides over all dims."""

    indices: tuple[int, ...]
    steps: tuple[int, ...]


class Scalar(msgspec.Struct, frozen=True, tag="scalar"):
    """A number passed with each run: its index among the plan's scalars."""

    number: int


class Constant(msgspec.Struct, frozen=True, tag="constant"):
    """A number."""

    value: int | float


class Earlier(msgspec.Struct, frozen=True, tag="earlier"):
    """The value of an expression before, by its index in `Elementwise.body`."""

    number: int


class Expression(msgspec.Struct, frozen=True, tag="expression"):
    """A pointwise mode applied to operands.

    Parameters
    ----------
    mode, operands
        As in `Pointwise`.
    parameters
        Its parameters, in the order of its row of the table.
    compute
        The type that it is computed in: float32, float64, int64 or uint64.
    dtype
        The type that the value is rounded to before it is used; None for the type that is computed in.
    """

    mode: PointwiseMode
    operands: tuple[Expression | Leaf | Scalar | Constant | Earlier, ...]
    parameters: tuple[float, ...] = ()
    compute: DType = DType.FLOAT32
    dtype: DType | None = None


Value = Expression | Leaf | Scalar | Constant | Earlier


class Result(msgspec.Struct, frozen=True):
    """What a kernel stores in each element of one of its results, and the element type."""

    value: Expression | Leaf | Scalar | Constant | Earlier
    dtype: DType


def expression(
    operation: Pointwise[int], operands: tuple[Value, ...], compute: DType, dtype: DType, *, used: bool
) -> Expression:
    """An operation, computed in `compute`. `dtype`: its result's; `used`: whether something reads the value.

    If nothing does, it is only stored, which rounds it.
    """
    rounded = FUNCTIONS[operation.mode].bits or (used and dtype is not compute)
    parameters = tuple(operation.effective_parameters.values())
    return Expression(operation.mode, operands, parameters, compute, dtype if rounded else None)
