"""The nodes from which values come, for functions that models spell out in several nodes."""

from __future__ import annotations

from cudnn_actor.onnx.nodes import Node
from cudnn_actor.onnx.values import Value

__all__ = ["MOST_STEPS", "is_half_product", "made_by", "number_of", "softmax_of"]

MOST_STEPS = 16
"""How many scales or conversions in a row are skipped: many nodes may follow the same ones."""


def made_by(value: Value, op: str) -> Node | None:
    """The node that makes a value, if it is that operator's, but for conversions between floats."""
    made: Node | None = value.made_by
    for _ in range(MOST_STEPS):
        if made is None or op == made.op or made.op not in ("Cast", "CastLike"):
            break
        if not made.dtype(0).is_floating:
            break
        made = made.value(0).made_by
    return made if made is not None and made.op == op else None


def number_of(value: Value) -> float | None:
    """The element of a constant that has one element; None for any other value."""
    return float(value.array.reshape(())) if value.fixed and value.size == 1 else None


def softmax_of(weights: Value) -> Node | None:
    """The softmax that gives these weights, perhaps with 0 instead of NaN: in rows that see nothing."""
    guard = made_by(weights, "Where")
    if guard is None:
        return made_by(weights, "Softmax")
    softmax, nothing = made_by(guard.value(2), "Softmax"), made_by(guard.value(0), "IsNaN")
    if softmax is None or nothing is None or made_by(nothing.value(0), "Softmax") is not softmax:
        return None
    return softmax if number_of(guard.value(1)) == 0 else None


def is_half_product(value: Value) -> bool:
    """Whether a value of a half type is a product of matrices, perhaps plus a bias, and not attention."""
    added = made_by(value, "Add")
    values = [value] if added is None else [added.value(0), added.value(1)]
    return value.is_half and any(map(_is_product, values))


def _is_product(value: Value) -> bool:
    made = made_by(value, "MatMul")
    if made is None:
        return made_by(value, "Gemm") is not None
    return made.value(0).rank != 4 or softmax_of(made.value(0)) is None
