"""The formulas of elementwise functions of floats, as few NumPy calls as possible.

They are those of `cudnn_actor.protocol.operations.functions`, rearranged for speed where that costs no more
accuracy than a few units in the last place: of the result, or of 1 where that says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.fast.instructions import Code, Constant, Value
from cudnn_actor.engines.cpu.fast.special import erf, gelu
from cudnn_actor.protocol.operations import FUNCTIONS, PointwiseMode
from cudnn_actor.protocol.operations.functions import SELU, SELU_ALPHA

__all__ = ["FLOAT32_ONLY", "FORMULAS"]

Formula = Callable[..., Value]
"""From the code, the operands, all float32 or all float64, and the parameters: the result."""


def _ufunc(function: np.ufunc) -> Formula:
    return lambda code, *operands: code(function, *operands)


def _truth(function: np.ufunc) -> Formula:
    return lambda code, *operands: code(function, *operands, dtype=bool)


def _is_nan(code: Code, x: Value) -> Value:
    """Whether x is NaN, as x != x: NumPy 2.4.6's `isnan` and `isinf` write over gaps in `out`."""
    return code(np.not_equal, x, x, dtype=bool)


def _is_inf(code: Code, x: Value) -> Value:
    if x.dtype.kind != "f":
        return _is_nan(code, x)  # neither is an integer
    return code(np.equal, code(np.absolute, x), math.inf, dtype=bool)


def _sigmoid(code: Code, x: Value) -> Value:
    return code(np.divide, 1.0, _one_plus_exp(code, code(np.negative, x)))


def _swish(code: Code, x: Value, p: float) -> Value:
    return code(np.divide, x, _one_plus_exp(code, code(np.multiply, x, -p)))


def _one_plus_exp(code: Code, x: Value) -> Value:
    return code(np.add, code(np.exp, x), 1.0)


def _gelu_tanh(code: Code, x: Value) -> Value:
    scale = -math.sqrt(8 / math.pi)
    slope = code(np.add, code(np.multiply, code(np.square, x), 0.044715 * scale), scale)
    return code(np.divide, x, _one_plus_exp(code, code(np.multiply, slope, x)))


def _power(code: Code, x: Value, exponent: Value) -> Value:
    """x ** exponent. NumPy's function takes twenty times as long as a product."""
    match exponent.base:
        case Constant(number=1):
            return x
        case Constant(number=2):
            return code(np.square, x)
        case Constant(number=3):
            return code(np.multiply, code(np.square, x), x)
        case Constant(number=-1):
            return code(np.divide, 1.0, x)
    return code(np.power, x, exponent)


def _clip(code: Code, x: Value, lower: float, upper: float) -> Value:
    if -math.inf < lower and upper < math.inf:
        return code(np.ndarray.clip, x, lower, upper)
    if lower > -math.inf:
        x = code(np.maximum, x, lower)
    return code(np.minimum, x, upper) if upper < math.inf else x


def _relu(code: Code, x: Value, slope: float, lower: float, upper: float) -> Value:
    if not slope:
        return _clip(code, x, lower, upper)
    apart = code(np.subtract, x, lower) if lower else x
    below = code(np.multiply, apart, slope)
    below = code(np.add, below, lower) if lower else below
    return _clip(code, _with_line_below(code, x, below, slope), -math.inf, upper)


def _leaky_relu(code: Code, x: Value, p: float) -> Value:
    scaled = code(np.multiply, x, p)
    return _with_line_below(code, x, scaled, p) if p else code.choose(_positive(code, x), x, scaled, like=x)


def _with_line_below(code: Code, x: Value, below: Value, slope: float) -> Value:
    """x where it is above the point where both are equal; below it, a line of this slope."""
    return code(np.maximum if slope <= 1 else np.minimum, x, below)


def _prelu(code: Code, x: Value, slope: Value) -> Value:
    at_least_0 = code(np.greater_equal, x, 0.0, dtype=bool)  # -0.0 too: times an infinite slope it is NaN
    return code.choose(at_least_0, x, code(np.multiply, x, slope), like=x)


def _positive(code: Code, x: Value) -> Value:
    return code(np.greater, x, 0.0, dtype=bool)


def _negative_expm1(code: Code, x: Value) -> Value:
    """exp(x) - 1 where x <= 0, as 2 t / (1 - t), t = tanh(x / 2): NumPy's expm1 is several times slower."""
    t = code(np.tanh, code(np.multiply, x, 0.5))
    return code(np.divide, code(np.add, t, t), code(np.subtract, 1.0, t))


def _celu(code: Code, x: Value, p: float, alpha: float | None = None) -> Value:
    """x where x > 0, else alpha * (exp(x / p) - 1); alpha is p unless it is given."""
    below = _negative_expm1(code, code(np.multiply, x, 1 / p) if p != 1 else x)
    factor = p if alpha is None else alpha
    return code.chosen_by_sign(x, x, code(np.multiply, below, factor) if factor != 1 else below)


def _elu(code: Code, x: Value, p: float) -> Value:
    return _celu(code, x, 1.0, p)


def _selu(code: Code, x: Value) -> Value:
    below = code(np.multiply, _negative_expm1(code, x), SELU * SELU_ALPHA)
    return code.chosen_by_sign(x, code(np.multiply, x, SELU), below)


def _softplus(code: Code, x: Value, p: float) -> Value:
    scaled = code(np.multiply, x, p) if p != 1 else x
    decay = code(np.exp, code(np.negative, code(np.absolute, scaled)))
    total = code(np.add, code(np.maximum, scaled, 0.0), _log1p(code, decay))
    return code(np.multiply, total, 1 / p) if p != 1 else total


def _log1p(code: Code, x: Value) -> Value:
    """log(1 + x) where 0 <= x <= 1: of the rounded sum, and to first order of what was rounded away."""
    total = code(np.add, x, 1.0)
    lost = code(np.subtract, x, code(np.subtract, total, 1.0))
    return code(np.add, code(np.log, total), code(np.divide, lost, total))


def _mish(code: Code, x: Value) -> Value:
    """tanh(log(1 + e)) is n / (n + 2), with n = e (e + 2). From x = 20 on, it is 1."""
    e = code(np.exp, code(np.minimum, x, 20.0))
    n = code(np.multiply, e, code(np.add, e, 2.0))
    return code(np.multiply, x, code(np.divide, n, code(np.add, n, 2.0)))


def _hard_sigmoid(code: Code, x: Value, p: float) -> Value:
    return _clip(code, code(np.add, code(np.multiply, x, p), 0.5), 0.0, 1.0)


def _select(code: Code, condition: Value, a: Value, b: Value) -> Value:
    return code.choose(condition, a, b, like=a)


_M = PointwiseMode
FORMULAS: Mapping[PointwiseMode, Any] = {
    **{
        mode: (_truth if function.truth else _ufunc)(getattr(np, function.formula))
        for mode, function in FUNCTIONS.items()
        if isinstance(function.formula, str) and hasattr(np, function.formula)
    },
    _M.IDENTITY: lambda _, x: x,
    _M.MOD: _ufunc(np.remainder),
    _M.FMOD: _ufunc(np.fmod),
    _M.POW: _power,
    _M.RSQRT: lambda code, x: code(np.divide, 1.0, code(np.sqrt, x)),
    _M.RECIPROCAL: lambda code, x: code(np.divide, 1.0, x),
    _M.ERF: erf,
    _M.CEIL: _ufunc(np.ceil),
    _M.FLOOR: _ufunc(np.floor),
    _M.ROUND: _ufunc(np.rint),
    _M.TRUNC: _ufunc(np.trunc),
    _M.RELU: _relu,
    _M.LEAKY_RELU: _leaky_relu,
    _M.PRELU: _prelu,
    _M.SIGMOID: _sigmoid,
    _M.ELU: _elu,
    _M.SELU: _selu,
    _M.CELU: _celu,
    _M.GELU: gelu,
    _M.GELU_TANH: _gelu_tanh,
    _M.SOFTPLUS: _softplus,
    _M.SOFTSIGN: lambda code, x: code(np.divide, x, code(np.add, code(np.absolute, x), 1.0)),
    _M.SWISH: _swish,
    _M.MISH: _mish,
    _M.HARD_SIGMOID: _hard_sigmoid,
    _M.HARD_SWISH: lambda code, x: code(np.multiply, x, _hard_sigmoid(code, x, 1 / 6)),
    _M.CLIP: _clip,
    _M.SELECT: _select,
    _M.IS_NAN: _is_nan,
    _M.IS_INF: _is_inf,
}
"""The formula of each mode: NumPy's own function where the definition is one.

The formulas of whole numbers hold for integers, too: in 64 bits, modulo 2**64.
"""

FLOAT32_ONLY = {_M.ERF, _M.GELU}
"""Modes whose formulas are for float32 only."""
