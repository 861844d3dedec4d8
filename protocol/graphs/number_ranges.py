"""Whole numbers beyond the range of the integer tensors that they meet.

Integers are computed in int64, or in uint64 if an operand is uint64. A number that this type does not hold is
compared by its value, as in NumPy. Any other function of it is refused, where NumPy raises `OverflowError`.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations import PointwiseMode
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["as_compared", "exact_bounds", "require_unsigned"]

_M = PointwiseMode
_LESS = {_M.EQ: _M.LT, _M.NE: _M.GE, _M.LT: _M.LT, _M.LE: _M.LT, _M.GT: _M.GE, _M.GE: _M.GE}
"""A comparison with a number below the range → the one with the least integer that has the same result."""
_MORE = {_M.EQ: _M.GT, _M.NE: _M.LE, _M.LT: _M.LE, _M.LE: _M.LE, _M.GT: _M.GT, _M.GE: _M.GT}
"""A comparison with a number above the range → the one with the largest that has the same result."""
_REVERSED = {_M.EQ: _M.EQ, _M.NE: _M.NE, _M.LT: _M.GT, _M.LE: _M.GE, _M.GT: _M.LT, _M.GE: _M.LE}
_TRUTHS = {_M.LOGICAL_AND: 2, _M.LOGICAL_OR: 2, _M.LOGICAL_XOR: 2, _M.SELECT: 1}
"""Functions → how many of their operands, from the first, are read as truth values."""


def as_compared(mode: str, operands: tuple[Any, ...], dtype: DType) -> tuple[str, tuple[Any, ...]]:
    """A function and its operands, in which numbers that are compared or read as truth values fit.

    `dtype`: what the integers among the operands promote to.
    """
    known = PointwiseMode(mode)
    range_ = np.iinfo(np.uint64 if dtype is DType.UINT64 else np.int64)
    outside = [
        isinstance(one, numbers.Integral) and not range_.min <= int(one) <= range_.max for one in operands
    ]
    if not any(outside):
        return mode, operands
    if known in _TRUTHS:
        truths = _TRUTHS[known]
        pairs = enumerate(zip(operands, outside, strict=True))
        return mode, tuple(1 if out and place < truths else one for place, (one, out) in pairs)
    if known not in _LESS:
        return mode, operands
    x, number = operands
    if outside[0]:
        known, x, number = _REVERSED[known], number, x
    if number < range_.min:
        return _LESS[known], (x, range_.min)
    return _MORE[known], (x, range_.max)


def exact_bounds(lower: object, upper: object, dtype: DType) -> tuple[int | None, int | None] | None:
    """Bounds of integers, clipped to their dtype, if the bounds are whole and float64 may not hold them.

    None for all other bounds: `Pointwise` takes or refuses those.
    """
    given = [bound for bound in (lower, upper) if bound is not None]
    whole = [int(bound) for bound in given if isinstance(bound, numbers.Integral)]
    if (
        dtype.numpy.kind not in "iu"
        or bool in map(type, given)
        or len(whole) < len(given)
        or whole != sorted(whole)
    ):
        return None
    if all(abs(bound) <= 1 << 53 for bound in whole):
        return None
    range_ = np.iinfo(str(dtype))
    held = iter([max(range_.min, min(bound, range_.max)) for bound in whole])
    return None if lower is None else next(held), None if upper is None else next(held)


def require_unsigned(name: str, number: float, dtype: DType) -> None:
    """Raise `InvalidRequest` for a negative number among integers of uint64."""
    if dtype is DType.UINT64 and number < 0:
        raise InvalidRequest(
            field=name,
            value=number,
            problem="is no number of uint64",
            fix='use one ≥ 0, or convert the tensor: x.astype("int64"), which saturates',
        )
