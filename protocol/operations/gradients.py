"""The gradients of elementwise functions, in terms of such functions.

A gradient is one more expression of modes, so it needs no kernels of its own,
and what computes expressions computes it, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cudnn_actor.protocol.operations.functions import FUNCTIONS, SELU, SELU_ALPHA, PointwiseMode

if TYPE_CHECKING:
    from cudnn_actor.protocol.operations.pointwise import Pointwise

__all__ = ["GRADIENTS", "gradients", "require_all"]

Apply = Callable[..., Any]
"""Adds a function: from its mode, its operands (values or numbers) and its parameters by name, its value."""
_M = PointwiseMode


def _operator(mode: PointwiseMode) -> Callable[[_Value, _Value | float], _Value]:
    """A function of two operands as an operator."""

    def apply(self: _Value, other: _Value | float) -> _Value:
        return self.of(mode, other)

    return apply


@dataclass(frozen=True)
class _Value:
    """A value or a number, with operators that apply functions to it."""

    value: Any
    apply: Apply

    def of(self, mode: PointwiseMode, *others: _Value | float, **parameters: float) -> _Value:
        """A function of it, and of others."""
        operands = (other.value if isinstance(other, _Value) else other for other in (self, *others))
        return _Value(self.apply(mode, *operands, **parameters), self.apply)

    def select(self, a: _Value | float, b: _Value | float) -> _Value:
        """a where it is true, else b."""
        return self.of(_M.SELECT, a, b)

    def __rsub__(self, other: float) -> _Value:
        return _Value(other, self.apply) - self

    def __neg__(self) -> _Value:
        return self.of(_M.NEG)

    __add__, __sub__ = _operator(_M.ADD), _operator(_M.SUB)
    __mul__, __truediv__ = _operator(_M.MUL), _operator(_M.DIV)
    __gt__, __ge__ = _operator(_M.GT), _operator(_M.GE)
    __lt__, __le__ = _operator(_M.LT), _operator(_M.LE)
    __and__ = _operator(_M.LOGICAL_AND)


Gradient = Callable[..., Sequence[_Value | None]]
"""The operands' gradients, from the incoming gradient, the result, the operands and the parameters.

The result is rounded to its dtype where it is stored, and the operands may not be: a rule compares operands
with each other or with numbers, never with the result.
"""


def gradients(
    operation: Pointwise[Any], operands: Sequence[Any], result: Any, gradient: Any, apply: Apply
) -> tuple[Any | None, ...]:
    """The gradient of each operand of a function, of the dims of the result.

    Where an operand is broadcast, its gradient is the sum of this one over the dims that are. Where a
    function has no derivative, the gradient is one of those on both sides, or between them.

    Parameters
    ----------
    operation
        The function.
    operands, result, gradient
        Its operands, its result, and the gradient of that, as `apply` takes them.
    apply
        See `Apply`.

    Returns
    -------
    tuple
        What `apply` gave; None for a gradient that is 0 everywhere, and for operands that are no numbers.
    """
    of = GRADIENTS.get(operation.mode)
    if of is None:
        return (None,) * len(operands)
    d, y, *xs = (_Value(value, apply) for value in (gradient, result, *operands))
    found = of(d, y, *xs, *operation.effective_parameters.values())
    return tuple(None if each is None else each.value for each in found)


def _remainder(d: _Value, y: _Value, a: _Value, b: _Value) -> Sequence[_Value]:
    return d, -(d * ((a - y) / b).of(_M.ROUND))


def _power(d: _Value, y: _Value, a: _Value, b: _Value) -> Sequence[_Value]:
    """Where b is 0, b * a ** (b - 1) is written b / a: that is 0, and its derivative by b is 1 / a."""
    constant = b.of(_M.EQ, 0.0)
    quotient = b / (a.of(_M.ABS) > 0.0).select(a, math.inf)
    slope = constant.select(quotient, b * constant.select(1.0, a).of(_M.POW, b - 1.0))
    zero = a.of(_M.EQ, 0.0) & (b >= 0.0)
    return d * slope, d * zero.select(0.0, y * a.of(_M.LOG))


def _larger(d: _Value, a: _Value, b: _Value) -> Sequence[_Value]:
    """Equal operands get half each. Where one is NaN, both get all, as in PyTorch."""
    equal = a.of(_M.EQ, b)
    return d * equal.select(0.5, (a < b).select(0.0, 1.0)), d * equal.select(0.5, (a > b).select(0.0, 1.0))


def _relu(d: _Value, x: _Value, slope: float, lower: float, upper: float) -> _Value:
    """The gradient of relu. At NaN it is d, as in PyTorch."""
    found = (x <= lower).select(d * slope if slope else 0.0, d)
    if math.isinf(upper):
        return found
    unbounded = (x > lower).select(x, (x - lower) * slope + lower) if slope < 0 else x
    return (unbounded >= upper).select(0.0, found)


def _clip(d: _Value, x: _Value, lower: float, upper: float) -> _Value:
    """The gradient of clip. At a bound it is d, and at NaN 0, as in PyTorch."""
    if math.isinf(lower) and math.isinf(upper):
        return d
    above, below = x >= lower, x <= upper
    inside = below if math.isinf(lower) else above if math.isinf(upper) else above & below
    return inside.select(d, 0.0)


def _hard_sigmoid(d: _Value, x: _Value, p: float) -> _Value:
    inner = x * p + 0.5
    return ((inner > 0.0) & (inner < 1.0)).select(d * p, 0.0)


def _elu(d: _Value, x: _Value, alpha: float, scale: float, gain: float = 1.0) -> _Value:
    """The gradient of gain * (x where x > 0, else alpha * (exp(x / scale) - 1))."""
    decay = (x.of(_M.MIN, 0.0) / scale).of(_M.EXP)
    return d * (x > 0.0).select(gain, decay * (gain * alpha / scale))


def _gelu(d: _Value, x: _Value) -> _Value:
    below = ((x * math.sqrt(0.5)).of(_M.ERF) + 1.0) * 0.5
    density = (x.of(_M.SQUARE) * -0.5).of(_M.EXP) * (1 / math.sqrt(2 * math.pi))
    return d * (below + x * density)


def _gelu_tanh(d: _Value, x: _Value) -> _Value:
    scale, square = math.sqrt(8 / math.pi), x.of(_M.SQUARE)
    weight = (x * (square * (0.044715 * scale) + scale)).of(_M.SIGMOID)
    slope = square * (3 * 0.044715 * scale) + scale
    return d * (weight + x * weight * (1.0 - weight) * slope)


def _swish(d: _Value, y: _Value, x: _Value, p: float) -> _Value:
    weight = (x * p).of(_M.SIGMOID)
    return d * (weight + y * p * (1.0 - weight))


def _mish(d: _Value, x: _Value) -> _Value:
    weight = x.of(_M.SOFTPLUS).of(_M.TANH)
    return d * (weight + x * (1.0 - weight.of(_M.SQUARE)) * x.of(_M.SIGMOID))


def _hard_swish(d: _Value, x: _Value) -> _Value:
    inner = (x < 3.0).select(x / 3.0 + 0.5, 1.0)
    return d * (x > -3.0).select(inner, 0.0)


_CONSTANT = {
    *(_M.SIGN, _M.CEIL, _M.FLOOR, _M.ROUND, _M.TRUNC, _M.EQ, _M.NE, _M.LT, _M.LE, _M.GT, _M.GE),
    *(_M.LOGICAL_AND, _M.LOGICAL_OR, _M.LOGICAL_XOR, _M.LOGICAL_NOT, _M.IS_NAN, _M.IS_INF),
}
"""Functions that are constant between their jumps: their gradients are 0."""


GRADIENTS: Mapping[PointwiseMode, Gradient] = {
    _M.IDENTITY: lambda d, y, x: (d,),
    _M.ABS: lambda d, y, x: (d * x.of(_M.SIGN),),
    _M.NEG: lambda d, y, x: (-d,),
    _M.ADD: lambda d, y, a, b: (d, d),
    _M.SUB: lambda d, y, a, b: (d, -d),
    _M.MUL: lambda d, y, a, b: (d * b, d * a),
    _M.DIV: lambda d, y, a, b: (d / b, -(d * y / b)),
    _M.MOD: _remainder,
    _M.FMOD: _remainder,
    _M.POW: _power,
    _M.MIN: lambda d, y, a, b: tuple(reversed(_larger(d, a, b))),
    _M.MAX: lambda d, y, a, b: _larger(d, a, b),
    _M.SQUARE: lambda d, y, x: (d * x * 2.0,),
    _M.SQRT: lambda d, y, x: (d * 0.5 / y,),
    _M.RSQRT: lambda d, y, x: (d * -0.5 * y * y * y,),
    _M.RECIPROCAL: lambda d, y, x: (-(d * y * y),),
    _M.EXP: lambda d, y, x: (d * y,),
    _M.EXPM1: lambda d, y, x: (d * (y + 1.0),),
    _M.LOG: lambda d, y, x: (d / x,),
    _M.LOG1P: lambda d, y, x: (d / (x + 1.0),),
    _M.SIN: lambda d, y, x: (d * x.of(_M.COS),),
    _M.COS: lambda d, y, x: (-(d * x.of(_M.SIN)),),
    _M.TAN: lambda d, y, x: (d * (y * y + 1.0),),
    _M.ASIN: lambda d, y, x: (d * (1.0 - x * x).of(_M.RSQRT),),
    _M.ACOS: lambda d, y, x: (-(d * (1.0 - x * x).of(_M.RSQRT)),),
    _M.ATAN: lambda d, y, x: (d / (x * x + 1.0),),
    _M.SINH: lambda d, y, x: (d * x.of(_M.COSH),),
    _M.COSH: lambda d, y, x: (d * x.of(_M.SINH),),
    _M.TANH: lambda d, y, x: (d * (1.0 - y * y),),
    _M.ASINH: lambda d, y, x: (d * (x * x + 1.0).of(_M.RSQRT),),
    _M.ACOSH: lambda d, y, x: (d * (x * x - 1.0).of(_M.RSQRT),),
    _M.ATANH: lambda d, y, x: (d / (1.0 - x * x),),
    _M.ERF: lambda d, y, x: (d * (-x * x).of(_M.EXP) * (2 / math.sqrt(math.pi)),),
    _M.RELU: lambda d, y, x, p, lower, upper: (_relu(d, x, p, lower, upper),),
    _M.LEAKY_RELU: lambda d, y, x, p: ((x > 0.0).select(d, d * p),),
    _M.PRELU: lambda d, y, a, b: ((a > 0.0).select(d, d * b), (a > 0.0).select(0.0, d * a)),
    _M.SIGMOID: lambda d, y, x: (d * y * (1.0 - y),),
    _M.ELU: lambda d, y, x, p: (_elu(d, x, p, 1.0),),
    _M.SELU: lambda d, y, x: (_elu(d, x, SELU_ALPHA, 1.0, SELU),),
    _M.CELU: lambda d, y, x, p: (_elu(d, x, p, p),),
    _M.GELU: lambda d, y, x: (_gelu(d, x),),
    _M.GELU_TANH: lambda d, y, x: (_gelu_tanh(d, x),),
    _M.SOFTPLUS: lambda d, y, x, p: (d * (x * p).of(_M.SIGMOID),),
    _M.SOFTSIGN: lambda d, y, x: (d * (x.of(_M.ABS) + 1.0).of(_M.RECIPROCAL).of(_M.SQUARE),),
    _M.SWISH: lambda d, y, x, p: (_swish(d, y, x, p),),
    _M.MISH: lambda d, y, x: (_mish(d, x),),
    _M.HARD_SIGMOID: lambda d, y, x, p: (_hard_sigmoid(d, x, p),),
    _M.HARD_SWISH: lambda d, y, x: (_hard_swish(d, x),),
    _M.CLIP: lambda d, y, x, lower, upper: (_clip(d, x, lower, upper),),
    _M.SELECT: lambda d, y, a, b, c: (None, a.select(d, 0.0), a.select(0.0, d)),
}
"""Functions without a row are constant between their jumps, or of integers."""


def require_all(rows: Mapping[PointwiseMode, Gradient]) -> None:
    """Raise `NotImplementedError` if a function has no row, though it is of numbers, and not constant."""
    without = [mode for mode in _M if mode not in rows and mode not in _CONSTANT and not FUNCTIONS[mode].bits]
    if without:
        raise NotImplementedError(f"GRADIENTS has no row for {', '.join(without)}")


require_all(GRADIENTS)
