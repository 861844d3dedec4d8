"""Elementwise functions of one element, with Python's numbers: written without a look at the table."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["FLOATS", "INTEGERS", "PARAMETERS"]

INF, NAN = math.inf, math.nan
Floats = Callable[..., float]


def guarded(function: Floats, **edges: float) -> Floats:
    """A function of `math` as IEEE 754 has it. `edges`: what it gives where it raises, as `at_1=...`."""

    def guard(x: float) -> float:
        for name, value in edges.items():
            if x == float(name.removeprefix("at_").replace("minus_", "-")):
                return value
        try:
            return float(function(x))
        except ValueError:
            return NAN
        except OverflowError:
            return math.copysign(INF, x) if function in (math.sinh,) else INF

    return guard


def divided(a: float, b: float) -> float:
    if b:
        return a / b
    return NAN if math.isnan(a) or a == 0 else math.copysign(INF, a) * math.copysign(1.0, b)


def fmod(a: float, b: float) -> float:
    try:
        return math.fmod(a, b)
    except ValueError:
        return NAN


def mod(a: float, b: float) -> float:
    rest = fmod(a, b)
    if rest and (rest < 0) is not (b < 0):
        return rest + b
    return math.copysign(rest, b) if rest == 0 else rest


def power(a: float, b: float) -> float:
    odd = math.isfinite(b) and b % 2 == 1
    try:
        return math.pow(a, b)
    except OverflowError:
        return -INF if a < 0 and odd else INF
    except ValueError:  # 0 to a negative power, or a negative number to a fraction
        return NAN if a else math.copysign(INF, a) if odd else INF


def least(a: float, b: float) -> float:
    return NAN if math.isnan(a) or math.isnan(b) else min(a, b)


def most(a: float, b: float) -> float:
    return NAN if math.isnan(a) or math.isnan(b) else max(a, b)


def clipped(x: float, lower: float, upper: float) -> float:
    return least(most(x, lower), upper)


def relu(x: float, slope: float, lower: float, upper: float) -> float:
    if math.isnan(x):
        return x
    if x <= lower:
        x = lower + slope * (x - lower) if slope else lower
    return min(x, upper)


def exp(x: float) -> float:
    return INF if x > 709.7 and x < INF and x > 709.782712893384 else math.exp(x)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else exp(x) / (1 + exp(x))


def softplus(x: float) -> float:
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(exp(x))


def elu(x: float, alpha: float, scale: float = 1.0) -> float:
    return x if x > 0 else alpha * math.expm1(x / scale)


def rounded(x: float) -> float:
    return x if not math.isfinite(x) else math.copysign(float(round(x)), x)


def whole(function: Callable[[float], int]) -> Floats:
    return lambda x: float(function(x)) if math.isfinite(x) else x


def sign(x: float) -> float:
    return x if math.isnan(x) else float((x > 0) - (x < 0))


PARAMETERS: dict[str, dict[str, float]] = {
    "leaky_relu": {"parameter": 0.01},
    "elu": {"parameter": 1.0},
    "celu": {"parameter": 1.0},
    "softplus": {"parameter": 1.0},
    "swish": {"parameter": 1.0},
    "hard_sigmoid": {"parameter": 1 / 6},
    "relu": {"parameter": 0.0, "lower": 0.0, "upper": INF},
    "clip": {"lower": -INF, "upper": INF},
}
"""Defaults."""
FLOATS: dict[str, Floats] = {
    "identity": lambda x: x,
    "abs": abs,
    "neg": lambda x: -x,
    "sign": sign,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": divided,
    "mod": mod,
    "fmod": fmod,
    "pow": power,
    "min": least,
    "max": most,
    "square": lambda x: x * x,
    "sqrt": guarded(math.sqrt),
    "rsqrt": lambda x: NAN if x < 0 else divided(1.0, math.sqrt(x)),
    "reciprocal": lambda x: divided(1.0, x),
    "exp": guarded(math.exp),
    "expm1": guarded(math.expm1),
    "log": guarded(math.log, at_0=-INF),
    "log1p": guarded(math.log1p, at_minus_1=-INF),
    "sin": guarded(math.sin),
    "cos": guarded(math.cos),
    "tan": guarded(math.tan),
    "asin": guarded(math.asin),
    "acos": guarded(math.acos),
    "atan": math.atan,
    "sinh": guarded(math.sinh),
    "cosh": guarded(math.cosh),
    "tanh": math.tanh,
    "asinh": math.asinh,
    "acosh": guarded(math.acosh),
    "atanh": guarded(math.atanh, at_1=INF, at_minus_1=-INF),
    "erf": math.erf,
    "ceil": whole(math.ceil),
    "floor": whole(math.floor),
    "round": rounded,
    "trunc": whole(math.trunc),
    "relu": relu,
    "leaky_relu": lambda x, p: x if x > 0 else p * x,
    "prelu": lambda a, b: a if a >= 0 else b * a,
    "sigmoid": sigmoid,
    "elu": elu,
    "selu": lambda x: 1.0507009873554805 * elu(x, 1.6732632423543772),
    "celu": lambda x, p: elu(x, p, p),
    "gelu": lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)),
    "softplus": lambda x, p: softplus(p * x) / p,
    "softsign": lambda x: x / (1 + abs(x)),
    "swish": lambda x, p: x * sigmoid(p * x),
    "mish": lambda x: x * math.tanh(softplus(x)),
    "hard_sigmoid": lambda x, p: clipped(p * x + 0.5, 0.0, 1.0),
    "hard_swish": lambda x: x * clipped(x / 6 + 0.5, 0.0, 1.0),
    "clip": clipped,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "logical_and": lambda a, b: bool(a) and bool(b),
    "logical_or": lambda a, b: bool(a) or bool(b),
    "logical_xor": lambda a, b: bool(a) is not bool(b),
    "logical_not": lambda x: not x,
    "select": lambda a, b, c: b if a else c,
    "is_nan": math.isnan,
    "is_inf": math.isinf,
}


def whole_power(a: int, b: int) -> int:
    if b >= 0:
        return pow(a, b, 1 << 64)
    return {1: 1, -1: 1 if b % 2 == 0 else -1}.get(a, 0)


_OPERATORS = """abs neg add sub mul square prelu select eq ne lt le gt ge
                logical_and logical_or logical_xor logical_not"""
"""Those that Python computes exactly with its integers, too."""
INTEGERS: dict[str, Callable[..., float]] = {
    **{name: FLOATS[name] for name in _OPERATORS.split()},
    **dict.fromkeys(("identity", "ceil", "floor", "round", "trunc"), lambda x: x),
    **dict.fromkeys(("is_nan", "is_inf"), lambda x: 0),
    "min": min,
    "max": max,
    "sign": lambda x: (x > 0) - (x < 0),
    "relu": lambda x, slope, lower, upper: max(x, 0),
    "clip": lambda x, lower, upper: x,
    "mod": lambda a, b: a % b if b else 0,
    "fmod": lambda a, b: a - b * (abs(a) // abs(b) * (1 if (a < 0) is (b < 0) else -1)) if b else 0,
    "pow": whole_power,
    "bitwise_and": lambda a, b: a & b,
    "bitwise_or": lambda a, b: a | b,
    "bitwise_xor": lambda a, b: a ^ b,
    "bitwise_not": lambda x: ~x,
    "shift_left": lambda a, b: a << b if 0 <= b < 64 else 0,
    "shift_right": lambda a, b: a >> b if 0 <= b < 64 else -(a < 0),
}
"""Not yet brought into the range of int64."""
