"""The axes of operators: where an operator has them, and which numbers are valid. Any other number is an
error.

https://onnx.ai/onnx/repo-docs/IR.html
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from cudnn_actor.onnx.schemas import Schema
from cudnn_actor.onnx.values import Contradiction

__all__ = ["MAY_BE_FOR_ALL", "axes_from_front", "axes_of", "counted_input", "from_front"]

_NAMES = frozenset({"axes", "axis", "batch_axis", "time_axis"})
"""ONNX's names for axes that count the dims of the first input. `Scan` has other names."""
MAY_BE_FOR_ALL = frozenset({"DequantizeLinear", "QuantizeLinear"})
"""Operators that read their axis only if their second input has a number for each of its elements."""


_OF_RESULT = frozenset({"OneHot", "Unsqueeze"})
"""Operators whose axes are axes of the result. The result has as many more dims than the first input as there
are axes."""
_NOT_ALL: Mapping[str, Callable[[int, int], bool]] = {
    "DFT": lambda axis, rank: axis < rank - 1,  # the last axis has the parts of each number
    "ReverseSequence": lambda axis, _: axis in (0, 1),
    "TensorScatter": lambda axis, _: axis > 0,  # the first axis has the samples of a batch
}
"""Operators that do not take every axis → whether an axis, counted from the front, is valid for a rank."""


def from_front(axis: int, rank: int, *, end: bool = False) -> int:
    """An axis counted from the front, for a tensor of `rank` dims. Raises `Contradiction` if there is no such
    axis.

    `end`: whether it may also be one past the last axis.
    """
    last = rank if end else rank - 1
    if not -rank <= axis <= last:
        known = f"the axes are {-rank} to {last}" if last >= 0 else "there is none"
        raise Contradiction(f"has axis {axis}, where {known}")
    return axis + rank if axis < 0 else axis


def counted_input(op: str) -> int:
    """The number of the input whose axes an operator counts."""
    return 2 if op == "QLinearConcat" else 0


def axes_from_front(op: str, axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """The axes of an operator, counted from the front. `rank`: of its first input.

    Raises `Contradiction` for one that there is not, or that the operator does not take.
    """
    rank += len(axes) if op in _OF_RESULT else 0
    found = tuple(from_front(axis, rank, end=op == "Flatten") for axis in axes)
    takes = _NOT_ALL.get(op)
    for given, axis in zip(axes, found, strict=True):
        if takes is not None and not takes(axis, rank):
            raise Contradiction(f"has axis {given}, which it does not take of {rank}")
    return found


@functools.lru_cache(maxsize=4096)
def axes_of(schema: Schema) -> Mapping[str, int | None]:
    """An operator's parameters that are axes: name → the number of the input that has it, None for an
    attribute."""
    if not schema.inputs or not any(each.startswith("tensor(") for each in schema.inputs[0].types):
        return {}  # the input is a list, which has no dims
    inputs = {each.name: number for number, each in enumerate(schema.inputs) if each.name in _NAMES}
    return dict.fromkeys(_NAMES.intersection(schema.attributes)) | inputs
