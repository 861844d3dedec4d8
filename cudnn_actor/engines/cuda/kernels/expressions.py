"""The language of kernels' bodies: expressions of tensors and numbers that a kernel reads, as data."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from cudnn_actor.protocol.operations import FUNCTIONS, Pointwise, PointwiseMode
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Constant", "Earlier", "Expression", "Leaf", "Result", "Scalar", "Selection", "Table", "Tabled"]
__all__ += ["Value", "expression", "nodes_of", "renumber", "scalars_of", "takes_scalars"]

K = TypeVar("K")


class Leaf(msgspec.Struct, frozen=True, tag="leaf"):
    """A tensor that the kernel reads.

    Parameters
    ----------
    number
        Its index among the operands.
    dtype
        The element type.
    offset
        The distance of the first element that is read from the tensor's first one, in elements.
    selects
        Further axes of the tensor, and the indices that select along them.
    filling
        The value where an index of a table is below 0; None if no index is.
    """

    number: int
    dtype: DType
    offset: int = 0
    selects: tuple[Selection, ...] = ()
    filling: float | int | None = None


class Tabled(msgspec.Struct, frozen=True, tag="tabled"):
    """An index that the kernel reads from a table, by the table's number."""

    number: int


class Selection(msgspec.Struct, frozen=True):
    """An axis along which indices select: the indices, the axis' size, and its stride in elements."""

    indices: Leaf | Tabled
    size: int
    step: int


class Table(msgspec.Struct, frozen=True):
    """Indices that are known when the kernel is described, and their strides over all dims.

    An index is in range or below 0.
    """

    indices: tuple[int, ...]
    steps: tuple[int, ...]


class Scalar(msgspec.Struct, frozen=True, tag="scalar"):
    """A number passed with each run, by its index among the plan's scalars."""

    number: int


class Constant(msgspec.Struct, frozen=True, tag="constant"):
    """A number."""

    value: int | float


class Earlier(msgspec.Struct, frozen=True, tag="earlier"):
    """The value of an earlier node, by its index in the body."""

    number: int


class Expression(msgspec.Struct, frozen=True, tag="expression"):
    """A pointwise mode applied to operands.

    Parameters
    ----------
    mode, operands
        As in `Pointwise`.
    parameters
        The mode's parameters, in the order of `FUNCTIONS[mode].parameters`.
    compute
        The type that the value is computed in: float32, float64, int64 or uint64.
    dtype
        The type that the value is rounded to before it is used; None if it is not rounded.
    """

    mode: PointwiseMode
    operands: tuple[Expression | Leaf | Scalar | Constant | Earlier, ...]
    parameters: tuple[float, ...] = ()
    compute: DType = DType.FLOAT32
    dtype: DType | None = None


Value = Expression | Leaf | Scalar | Constant | Earlier


class Result(msgspec.Struct, frozen=True):
    """A result of a kernel: the value of each element, and the element type."""

    value: Expression | Leaf | Scalar | Constant | Earlier
    dtype: DType


def expression(
    operation: Pointwise[int], operands: tuple[Value, ...], compute: DType, dtype: DType, *, used: bool
) -> Expression:
    """An operation as an expression computed in `compute`. `dtype`: the dtype of the operation's result.

    `used`: whether an expression reads the value. If not, it is only stored, and the store rounds it.
    """
    rounded = FUNCTIONS[operation.mode].bits or (used and dtype is not compute)
    parameters = tuple(operation.effective_parameters.values())
    return Expression(operation.mode, operands, parameters, compute, dtype if rounded else None)


def nodes_of(roots: Iterable[Any]) -> Iterator[Any]:
    """Yields the nodes of a body or of results, and all nodes that they consist of, in no order."""
    waiting = [root.value if isinstance(root, Result) else root for root in roots]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, Leaf):
            waiting += (select.indices for select in node.selects if isinstance(select.indices, Leaf))
        else:
            waiting += getattr(node, "operands", ())


def scalars_of(roots: Iterable[Any]) -> tuple[Scalar, ...]:
    """The plan's scalars that nodes and results read, each once, in the order in which kernels take them."""
    numbers = {node.number for node in nodes_of(roots) if isinstance(node, Scalar)}
    return tuple(map(Scalar, sorted(numbers)))


def renumber(kernel: K, numbers: Sequence[int]) -> K:
    """A kernel, single or joined, with `numbers[n]` in the place of the plan's scalar `n`."""

    def of(node: Any) -> Any:
        if isinstance(node, Scalar):
            return Scalar(numbers[node.number])
        if isinstance(node, Result):
            return msgspec.structs.replace(node, value=of(node.value))
        fields = _PARTS.intersection(getattr(node, "__struct_fields__", ()))
        if not fields:
            return node
        return msgspec.structs.replace(node, **{name: tuple(map(of, getattr(node, name))) for name in fields})

    return of(kernel)  # type: ignore[no-any-return]


def takes_scalars(kernel: Any) -> bool:
    """Whether a kernel, single or joined, takes any of the plan's scalars."""
    fields = _PARTS.intersection(getattr(kernel, "__struct_fields__", ()))
    value = (kernel.value,) if isinstance(kernel, Result) else ()
    parts = itertools.chain(value, *(getattr(kernel, name) for name in fields))
    return isinstance(kernel, Scalar) or any(map(takes_scalars, parts))


_PARTS = frozenset(("kernels", "body", "results", "operands"))
"""The fields of kernels and nodes in which there may be scalars."""
