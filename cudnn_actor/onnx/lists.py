"""Lists of tensors, which ONNX calls sequences: they are there only while a model is imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import onnx

from cudnn_actor.onnx.nodes import Node
from cudnn_actor.onnx.values import Declined, Refused, Value

__all__ = ["LISTS", "Computing", "Listed"]

_MOST = 1024
"""The most parts that a tensor is split into."""


class Computing(Protocol):
    """The part of an import that operators need which are decided at the import."""

    def compute(self, op_type: str, *inputs: Value, **attributes: Any) -> Value:
        """Apply an operator of version 21 of the standard domain, and return its result."""

    def constant(self, array: np.ndarray) -> Value:
        """A constant."""


class Listed(Value):
    """A list of values. It cannot be a tensor of a graph, nor a constant.

    Parameters
    ----------
    values
        The elements of the list.
    """

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Value]) -> None:
        super().__init__((), np.dtype(object), _refuse, _refuse)
        self.values = list(values)

    @property
    def type(self) -> onnx.TypeProto:
        """The type of the list: a sequence of its elements' type, or of float32 if it is empty."""
        kind = self.values[0].dtype if self.values else np.dtype(np.float32)
        element = onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(kind), None)
        return onnx.helper.make_sequence_type_proto(element)


def _refuse() -> NoReturn:
    raise Refused("has a list where it needs a tensor")


def _values(node: Node) -> list[Value]:
    found = node.value(0)
    if not isinstance(found, Listed):
        raise Declined("has a tensor where it needs a list")
    return found.values


def _place(node: Node, number: int, last: int) -> int:
    """The index in an input, from 0 to `last`. An input below 0 counts from the end of the list."""
    size, place = len(_values(node)), int(node.constant(number).reshape(()))
    if not -size <= place <= last:
        raise Declined(f"has the place {place} in a list of {size}")
    return place + size if place < 0 else place


def _construct(node: Node, _: Computing) -> list[Value]:
    return [Listed([node.value(number) for number in range(len(node.inputs))])]


def _insert(node: Node, _: Computing) -> list[Value]:
    node.reserve(len(_values(node)) + 1, passing=0)
    values = list(_values(node))
    values.insert(_place(node, 2, len(values)) if node.has(2) else len(values), node.value(1))
    return [Listed(values)]


def _erase(node: Node, _: Computing) -> list[Value]:
    node.reserve(len(_values(node)), passing=0)
    values = list(_values(node))
    if not values:
        raise Declined("has an empty list")
    del values[_place(node, 1, len(values) - 1) if node.has(1) else -1]
    return [Listed(values)]


def _at(node: Node, _: Computing) -> list[Value]:
    values = _values(node)
    return [values[_place(node, 1, len(values) - 1)]]


def _length(node: Node, computing: Computing) -> list[Value]:
    return [computing.constant(np.array(len(_values(node)), np.int64))]


def _concat(node: Node, computing: Computing) -> list[Value]:
    values, axis = _values(node), node.attribute("axis")  # which each operator below checks
    if not values:
        raise Declined("has an empty list")
    if node.attribute("new_axis"):
        place = computing.constant(np.array([axis], np.int64))
        values = [computing.compute("Unsqueeze", value, place) for value in values]
    return [computing.compute("Concat", *values, axis=axis)]


def _split(node: Node, computing: Computing) -> list[Value]:
    x, axis = node.value(0), node.axis()
    given, size = node.constant_or_none(1), x.dims[axis]
    if given is None or given.ndim == 0:
        each = 1 if given is None else int(given)
        if each < 1:
            raise Declined(f"splits into parts of {each}")
        sizes = [min(each, size - start) for start in range(0, size, each)[: _MOST + 1]]
    else:
        sizes = list(node.ints(1))
        if sum(sizes) != size or min(sizes, default=0) < 0:
            raise Declined(f"splits {size} elements into parts that do not add up to them")
    if len(sizes) > _MOST:
        raise Declined(f"splits into more than {_MOST} parts, each of which would be a part of the graph")
    found = []
    for end, count in zip(np.cumsum(sizes), sizes, strict=True):
        bounds = [computing.constant(np.array([n], np.int64)) for n in (end - count, end, axis)]
        part = computing.compute("Slice", x, *bounds)
        squeezed = given is None and not node.attribute("keepdims")
        found.append(computing.compute("Squeeze", part, bounds[2]) if squeezed else part)
    return [Listed(found)]


LISTS: dict[tuple[str, str], Callable[[Node, Computing], list[Value]]] = {
    ("", "ConcatFromSequence"): _concat,
    ("", "SequenceAt"): _at,
    ("", "SequenceConstruct"): _construct,
    ("", "SequenceEmpty"): _construct,
    ("", "SequenceErase"): _erase,
    ("", "SequenceInsert"): _insert,
    ("", "SequenceLength"): _length,
    ("", "SplitToSequence"): _split,
}
"""Operators of lists."""
