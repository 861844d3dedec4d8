"""The table of elementwise functions: what each of them takes, computes and gives."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from cudnn_actor.protocol.operations.base import Array
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.epilogue import DEFAULTS, Activation

__all__ = [
    "FUNCTIONS",
    "SELU",
    "SELU_ALPHA",
    "TRUTH",
    "Function",
    "PointwiseMode",
    "saturate_parameters",
    "sigmoid",
]

TRUTH = DType.BOOL
"""The dtype of truth values."""
_INF = math.inf
_LIMITS = {"i": (-(1 << 63), (1 << 63) - 1), "u": (0, (1 << 64) - 1)}
"""The least and the largest number of the types that integers are computed in, by their kinds."""


class PointwiseMode(enum.StrEnum):
    """An elementwise function of one to three tensors, x or a, b and c; smaller operands are broadcast.

    In the formulas, p is the parameter; see `Pointwise`. Truth values are 0 and 1, and every number but 0 is
    true, NaN too. Without a comment, a function is NumPy's or PyTorch's of that name.
    """

    IDENTITY = "identity"
    """x, rounded to the result's dtype"""
    ABS = "abs"
    NEG = "neg"
    SIGN = "sign"
    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    """a / b, of integers too"""
    MOD = "mod"
    """a - b * floor(a / b), with the sign of b; 0 for integers where b is 0"""
    FMOD = "fmod"
    """a - b * trunc(a / b), with the sign of a; 0 for integers where b is 0"""
    POW = "pow"
    """a ** b; of integers where b < 0: 1 / a ** -b without its fraction, and 0 where a is 0"""
    MIN = "min"
    """the smaller one; NaN if one of them is NaN"""
    MAX = "max"
    """the larger one; NaN if one of them is NaN"""
    SQUARE = "square"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    """1 / sqrt(x)"""
    RECIPROCAL = "reciprocal"
    """1 / x, of integers too"""
    EXP = "exp"
    EXPM1 = "expm1"
    LOG = "log"
    LOG1P = "log1p"
    SIN = "sin"
    COS = "cos"
    TAN = "tan"
    ASIN = "asin"
    ACOS = "acos"
    ATAN = "atan"
    SINH = "sinh"
    COSH = "cosh"
    TANH = "tanh"
    ASINH = "asinh"
    ACOSH = "acosh"
    ATANH = "atanh"
    ERF = "erf"
    CEIL = "ceil"
    FLOOR = "floor"
    ROUND = "round"
    """the nearest whole number; of two, the even one"""
    TRUNC = "trunc"
    RELU = "relu"
    """min(x where x > lower, else lower + p * (x - lower), upper); p = 0, lower = 0 and upper = infinity
    unless given"""
    LEAKY_RELU = "leaky_relu"
    """x where x > 0, else p * x; p = 0.01 unless given"""
    PRELU = "prelu"
    """a where a > 0, else b * a"""
    SIGMOID = "sigmoid"
    """1 / (1 + exp(-x))"""
    ELU = "elu"
    """x where x > 0, else p * (exp(x) - 1); p = 1 unless given"""
    SELU = "selu"
    """1.0507... * (x where x > 0, else 1.6732... * (exp(x) - 1))"""
    CELU = "celu"
    """x where x > 0, else p * (exp(x / p) - 1); p = 1 unless given"""
    GELU = "gelu"
    """x * (1 + erf(x / sqrt(2))) / 2"""
    GELU_TANH = "gelu_tanh"
    """x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2"""
    SOFTPLUS = "softplus"
    """log(1 + exp(p * x)) / p; p = 1 unless given"""
    SOFTSIGN = "softsign"
    """x / (1 + abs(x))"""
    SWISH = "swish"
    """x / (1 + exp(-p * x)); p = 1 unless given"""
    MISH = "mish"
    """x * tanh(log(1 + exp(x)))"""
    HARD_SIGMOID = "hard_sigmoid"
    """min(max(p * x + 1 / 2, 0), 1); p = 1 / 6 unless given"""
    HARD_SWISH = "hard_swish"
    """x * min(max(x / 6 + 1 / 2, 0), 1)"""
    CLIP = "clip"
    """min(max(x, lower), upper); NaN where x is"""
    EQ = "eq"
    NE = "ne"
    LT = "lt"
    LE = "le"
    GT = "gt"
    GE = "ge"
    LOGICAL_AND = "logical_and"
    LOGICAL_OR = "logical_or"
    LOGICAL_XOR = "logical_xor"
    LOGICAL_NOT = "logical_not"
    BITWISE_AND = "bitwise_and"
    BITWISE_OR = "bitwise_or"
    BITWISE_XOR = "bitwise_xor"
    BITWISE_NOT = "bitwise_not"
    SHIFT_LEFT = "shift_left"
    """the bits of a, moved b places; 0 where b is not from 0 to 63"""
    SHIFT_RIGHT = "shift_right"
    """floor(a / 2**b); 0, or -1 where a < 0, where b is not from 0 to 63"""
    SELECT = "select"
    """b where a is true, else c"""
    IS_NAN = "is_nan"
    IS_INF = "is_inf"


_Operand = TypeVar("_Operand")
Sample = Callable[[Any, Array], Array] | None
"""The values of an operand, from a library and random whole numbers from -3 to 4; None for these numbers."""


class Function(NamedTuple):
    """One row of the table.

    Parameters
    ----------
    formula
        From a library, the operands and the parameters: the values. A name is that of a function of NumPy's.
    arity
        How many operands it takes.
    parameters
        The names of those that it has, and their defaults.
    whole
        It gives whole numbers for whole numbers. Of integers it is computed in int64 or uint64, modulo 2**64.
    truth
        It gives truth values.
    bits
        It takes integers only, and the result keeps as many of the lowest bits as its dtype has.
    samples
        Of each operand: see `Operation.samples`. They may be given any numbers.
    """

    formula: str | Callable[..., Array]
    arity: int = 1
    parameters: Mapping[str, float] = MappingProxyType({})
    whole: bool = False
    truth: bool = False
    bits: bool = False
    samples: tuple[Sample, ...] = ()

    def exact(self, parameters: Sequence[float], *, integers: bool) -> bool:
        """Whether it is computed in int64 or uint64. `integers`: whether its operands are integers."""
        whole = all(math.isinf(value) or value.is_integer() for value in parameters)
        return self.whole and integers and whole

    def deciding_operands(self, operands: Sequence[_Operand]) -> Sequence[_Operand]:
        """The operands that decide whether it is computed in uint64: a condition does not."""
        return operands[1:] if self.arity == 3 else operands

    def __call__(self, xp: Any, operands: Sequence[Array], parameters: Sequence[float]) -> Array:
        """The values as float64, int64 or uint64. `xp` and the operands are as in `Operation.evaluate`."""
        given: Sequence[float] = parameters
        if self.exact(parameters, integers=all(value.dtype.kind != "f" for value in operands)):
            unsigned = any(value.dtype.kind == "u" for value in self.deciding_operands(operands))
            given = saturate_parameters(parameters, unsigned=unsigned)
            operands = [x.astype(xp.uint64 if unsigned else xp.int64, copy=False) for x in operands]
        else:
            operands = [x if x.dtype.kind == "f" else x.astype(xp.float64) for x in operands]
        of = getattr(xp, self.formula) if isinstance(self.formula, str) else partial(self.formula, xp)
        result: Array = of(*operands, *given)
        return result.astype(xp.int64) if result.dtype.kind == "b" else result


def saturate_parameters(parameters: Sequence[float], *, unsigned: bool) -> list[int]:
    """Parameters as the integers that a function of integers is computed with: they saturate."""
    least, largest = _LIMITS["u" if unsigned else "i"]
    return [int(min(max(value, least), largest)) for value in parameters]


# Of floats.


def sigmoid(xp: Any, x: Array) -> Array:
    """1 / (1 + exp(-x)), which overflows for no x."""
    decay = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1, decay) / (1 + decay)


def _softplus(xp: Any, x: Array, p: float = 1.0) -> Array:
    scaled = p * x
    return (xp.maximum(scaled, 0) + xp.log1p(xp.exp(-xp.abs(scaled)))) / p


def _elu(xp: Any, x: Array, p: float) -> Array:
    return xp.where(x > 0, x, p * xp.expm1(_not_positive(xp, x)))


def _celu(xp: Any, x: Array, p: float) -> Array:
    return xp.where(x > 0, x, p * xp.expm1(_not_positive(xp, x) / p))


def _not_positive(xp: Any, x: Array) -> Array:
    """x or 0, whichever is less; -0 for -0, which `minimum` may take for 0."""
    return xp.where(x > 0, 0, x)


def _clip(xp: Any, x: Array, lower: float, upper: float) -> Array:
    return xp.minimum(xp.maximum(x, lower), upper)


def _relu(xp: Any, x: Array, slope: float, lower: float, upper: float) -> Array:
    below = lower + slope * (x - lower) if slope else lower
    return xp.minimum(xp.where(x <= lower, below, x), upper)


# Of integers too.


def _integers(*arrays: Array) -> bool:
    return all(array.dtype.kind != "f" for array in arrays)


def _rounding(name: str) -> Callable[..., Array]:
    return lambda xp, x: x if _integers(x) else getattr(xp, name)(x)


def _remainder(name: str) -> Callable[..., Array]:
    def remainder(xp: Any, a: Array, b: Array) -> Array:
        if not _integers(a, b):
            return getattr(xp, name)(a, b)
        usual = b != 0
        if b.dtype.kind == "i":
            usual &= b != -1  # the remainder of the least integer by -1 traps on some processors
        return xp.where(usual, getattr(xp, name)(a, xp.where(usual, b, 1)), 0)

    return remainder


def _power(xp: Any, a: Array, b: Array) -> Array:
    if not _integers(a, b) or b.dtype.kind == "u":
        return xp.power(a, b)
    unit = xp.where(a == -1, 1 - 2 * (b & 1), a == 1)
    return xp.where(b < 0, unit, xp.power(a, xp.maximum(b, 0)))


def _shift_left(xp: Any, a: Array, b: Array) -> Array:
    inside = (b >= 0) & (b < 64)
    return xp.where(inside, xp.left_shift(a, xp.where(inside, b, 0)), 0)


def _shift_right(xp: Any, a: Array, b: Array) -> Array:
    inside = (b >= 0) & (b < 64)
    if a.dtype.kind == "u":
        return xp.where(inside, xp.right_shift(a, xp.where(inside, b, 0)), 0)
    return xp.right_shift(a, xp.where(inside, b, 63))


def _truth(name: str, arity: int = 2) -> Function:
    return Function(name, arity, whole=True, truth=True)


def _bits(formula: str | Callable[..., Array], arity: int = 2, samples: tuple[Sample, ...] = ()) -> Function:
    return Function(formula, arity, whole=True, bits=True, samples=samples)


def _default(activation: Activation) -> dict[str, float]:
    return {"parameter": DEFAULTS[activation]}


# Samples. They must give what they are for also for other numbers than those from -3 to 4.


def _positive(xp: Any, x: Array) -> Array:
    return xp.abs(x) + 0.5


def _above_minus_one(xp: Any, x: Array) -> Array:
    return xp.abs(x) - 0.5


def _from_one(xp: Any, x: Array) -> Array:
    return 1 + xp.abs(x) / 2


def _inside_one(xp: Any, x: Array) -> Array:
    return x / (1.0 + xp.abs(x))


def _not_zero(xp: Any, x: Array) -> Array:
    return xp.where(x == 0, 5, x)


def _fractions(xp: Any, x: Array) -> Array:
    return x * 0.75


def _places(xp: Any, x: Array) -> Array:
    return xp.abs(x) % 9


def _positive_part(xp: Any, x: Array) -> Array:
    return xp.where(x > 0, x, 0)


def _special(value: float) -> Sample:
    return lambda xp, x: xp.where(x == 1, value, xp.where(x == 2, -value, x))


SELU, SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
"""G. Klambauer et al., "Self-normalizing neural networks", NIPS 2017."""
_M = PointwiseMode
FUNCTIONS: Mapping[PointwiseMode, Function] = {
    _M.IDENTITY: Function(lambda xp, x: x, whole=True, samples=(_fractions,)),
    _M.ABS: Function("absolute", whole=True),
    _M.NEG: Function("negative", whole=True),
    _M.SIGN: Function("sign", whole=True),
    _M.ADD: Function("add", 2, whole=True),
    _M.SUB: Function("subtract", 2, whole=True),
    _M.MUL: Function("multiply", 2, whole=True),
    _M.DIV: Function("true_divide", 2, samples=(_not_zero, _not_zero)),
    _M.MOD: Function(_remainder("mod"), 2, whole=True, samples=(_not_zero, _not_zero)),
    _M.FMOD: Function(_remainder("fmod"), 2, whole=True, samples=(_not_zero, _not_zero)),
    _M.POW: Function(_power, 2, whole=True, samples=(_positive, None)),
    _M.MIN: Function("minimum", 2, whole=True),
    _M.MAX: Function("maximum", 2, whole=True),
    _M.SQUARE: Function("square", whole=True),
    _M.SQRT: Function("sqrt", samples=(_positive,)),
    _M.RSQRT: Function(lambda xp, x: 1 / xp.sqrt(x), samples=(_positive,)),
    _M.RECIPROCAL: Function(lambda xp, x: 1 / x, samples=(_not_zero,)),
    _M.EXP: Function("exp"),
    _M.EXPM1: Function("expm1"),
    _M.LOG: Function("log", samples=(_positive,)),
    _M.LOG1P: Function("log1p", samples=(_above_minus_one,)),
    _M.SIN: Function("sin"),
    _M.COS: Function("cos"),
    _M.TAN: Function("tan"),
    _M.ASIN: Function("arcsin", samples=(_inside_one,)),
    _M.ACOS: Function("arccos", samples=(_inside_one,)),
    _M.ATAN: Function("arctan"),
    _M.SINH: Function("sinh"),
    _M.COSH: Function("cosh"),
    _M.TANH: Function("tanh"),
    _M.ASINH: Function("arcsinh"),
    _M.ACOSH: Function("arccosh", samples=(_from_one,)),
    _M.ATANH: Function("arctanh", samples=(_inside_one,)),
    _M.ERF: Function("erf", samples=(_inside_one,)),
    _M.CEIL: Function(_rounding("ceil"), whole=True, samples=(_fractions,)),
    _M.FLOOR: Function(_rounding("floor"), whole=True, samples=(_fractions,)),
    _M.ROUND: Function(_rounding("rint"), whole=True, samples=(_fractions,)),
    _M.TRUNC: Function(_rounding("trunc"), whole=True, samples=(_fractions,)),
    _M.RELU: Function(_relu, parameters={"parameter": 0.0, "lower": 0.0, "upper": _INF}, whole=True),
    _M.LEAKY_RELU: Function(
        lambda xp, x, p: xp.where(x > 0, x, p * x), parameters=_default(Activation.LEAKY_RELU)
    ),
    _M.PRELU: Function(lambda xp, x, slope: xp.where(x >= 0, x, slope * x), 2, whole=True),
    _M.SIGMOID: Function(sigmoid),
    _M.ELU: Function(_elu, parameters=_default(Activation.ELU)),
    _M.SELU: Function(lambda xp, x: SELU * _elu(xp, x, SELU_ALPHA)),
    _M.CELU: Function(_celu, parameters={"parameter": 1.0}),
    _M.GELU: Function(lambda xp, x: x * (xp.erfc(x * -math.sqrt(0.5)) / 2)),
    # (1 + tanh(z)) / 2 is sigmoid(2 z), which does not cancel for negative z.
    _M.GELU_TANH: Function(lambda xp, x: x * sigmoid(xp, math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))),
    _M.SOFTPLUS: Function(_softplus, parameters=_default(Activation.SOFTPLUS)),
    _M.SOFTSIGN: Function(lambda xp, x: x / (1 + xp.abs(x))),
    _M.SWISH: Function(lambda xp, x, p: x * sigmoid(xp, p * x), parameters=_default(Activation.SWISH)),
    _M.MISH: Function(lambda xp, x: x * xp.tanh(_softplus(xp, x))),
    _M.HARD_SIGMOID: Function(lambda xp, x, p: _clip(xp, p * x + 0.5, 0, 1), parameters={"parameter": 1 / 6}),
    _M.HARD_SWISH: Function(lambda xp, x: x * _clip(xp, x / 6 + 0.5, 0, 1)),
    _M.CLIP: Function(_clip, parameters={"lower": -_INF, "upper": _INF}, whole=True),
    _M.EQ: _truth("equal"),
    _M.NE: _truth("not_equal"),
    _M.LT: _truth("less"),
    _M.LE: _truth("less_equal"),
    _M.GT: _truth("greater"),
    _M.GE: _truth("greater_equal"),
    _M.LOGICAL_AND: _truth("logical_and")._replace(samples=(_positive_part, _positive_part)),
    _M.LOGICAL_OR: _truth("logical_or")._replace(samples=(_positive_part, _positive_part)),
    _M.LOGICAL_XOR: _truth("logical_xor")._replace(samples=(_positive_part, _positive_part)),
    _M.LOGICAL_NOT: _truth("logical_not", 1),
    _M.BITWISE_AND: _bits("bitwise_and"),
    _M.BITWISE_OR: _bits("bitwise_or"),
    _M.BITWISE_XOR: _bits("bitwise_xor"),
    _M.BITWISE_NOT: _bits("invert", 1),
    _M.SHIFT_LEFT: _bits(_shift_left, samples=(None, _places)),
    _M.SHIFT_RIGHT: _bits(_shift_right, samples=(None, _places)),
    _M.SELECT: Function(
        lambda xp, a, b, c: xp.where(a != 0, b, c), 3, whole=True, samples=(_positive_part, None, None)
    ),
    _M.IS_NAN: _truth("isnan", 1)._replace(samples=(_special(math.nan),)),
    _M.IS_INF: _truth("isinf", 1)._replace(samples=(_special(_INF),)),
}
"""Every function's row. Formulas are exact of int64 and uint64, and stable of floats of any size."""
