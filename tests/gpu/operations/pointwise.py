"""Elementwise functions of one to three operands.

The bounds are those of generated kernels, whose functions are CUDA's. Their errors are those of the tables in
the CUDA C++ Programming Guide, in units in the last place of a correctly rounded result; of float and double,
and of CUDA 12 and 13, the larger one. One such unit is up to 2 unit roundoffs.
https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#mathematical-functions-appendix

What is computed in float32 may be computed by cuDNN instead, where its frontend has the function. Its kernels
were seen to be off by up to 29 unit roundoffs, not of the value but of 1, and they may approximate the
exponential of x by a power of 2, with an error that grows with x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.engines.cuda.operations.pointwise import FRONTEND
from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import FUNCTIONS, Pointwise, PointwiseMode, Specs
from cudnn_actor.protocol.operations.base import Array

from .rows import Asked, Dims, Exact, Made, Row, Sizes

__all__ = ["EXACTNESS", "ROWS", "SUBNORMAL"]

EXACTNESS = """\
All that gives integers for integers is exact. So are comparisons, logic, select, minimum, maximum and
rounding to whole numbers. An exponential or a power below 2^-126, float32's least normal number, may be 0,
alone and as the factor that swish and mish multiply by x. With u the unit roundoff of the type that is
computed in, any other value y may be off before it is rounded by

| | bound |
| --- | --- |
| a + b, a - b, a · b, a / b, mod, square, sqrt, reciprocal | u · \\|y\\| |
| a function of CUDA's that is off by up to n units in the last place | (2 n + 1) u · \\|y\\| |
| activations | that of their parts, and of the rounding of x inside exponentials and erfc |
| the same in float32, if cuDNN has the function | 40 u · (\\|y\\| + 1) + 4 u · \\|x y\\|, if that is more |
"""
_M = PointwiseMode
_UNITS: Mapping[PointwiseMode, float] = {
    **dict.fromkeys((_M.EXPM1, _M.LOG1P), 1),
    **dict.fromkeys((_M.RSQRT, _M.EXP, _M.LOG, _M.SIN, _M.COS, _M.ATAN, _M.COSH, _M.TANH, _M.ERF), 2),
    **dict.fromkeys((_M.ACOS, _M.SINH, _M.ASINH, _M.ATANH), 3),
    **dict.fromkeys((_M.TAN, _M.ASIN, _M.ACOSH), 4),
    _M.POW: 9,
}
"""CUDA's functions: units in the last place. Its erfc, in GELU, has up to 6."""
_EXACT = {
    *(_M.IDENTITY, _M.ABS, _M.NEG, _M.SIGN, _M.FMOD, _M.MIN, _M.MAX, _M.CEIL, _M.FLOOR, _M.ROUND, _M.TRUNC),
    *(_M.CLIP, _M.SELECT),
}
_Bound = Callable[[Array, Array, float], Array]
"""From x, the value y and the parameter p: in terms of the unit roundoff."""
_COMPOSED: Mapping[PointwiseMode, _Bound] = {
    _M.RELU: lambda x, y, p: 4 * p * (np.abs(x) + 4),
    _M.LEAKY_RELU: lambda x, y, p: 2 * np.abs(y),
    _M.SIGMOID: lambda x, y, p: 8 * np.abs(y),
    _M.ELU: lambda x, y, p: 6 * np.abs(y),
    _M.SELU: lambda x, y, p: 8 * np.abs(y),
    _M.CELU: lambda x, y, p: 8 * np.abs(y),
    _M.GELU: lambda x, y, p: (2 * x * x + 16) * np.abs(y),
    _M.GELU_TANH: lambda x, y, p: (13 * np.abs(x) + 0.6 * np.abs(x) ** 3 + 16) * np.abs(y),
    _M.SOFTPLUS: lambda x, y, p: (2 * np.abs(p * x) + 14) * np.abs(y),
    _M.SOFTSIGN: lambda x, y, p: 3 * np.abs(y),
    _M.SWISH: lambda x, y, p: (2 * np.abs(p * x) + 12) * np.abs(y),
    _M.MISH: lambda x, y, p: 24 * np.abs(y),
    _M.HARD_SIGMOID: lambda x, y, p: 5 + 0 * y,
    _M.HARD_SWISH: lambda x, y, p: 6 * np.abs(x),
}

ARITHMETIC, EXPONENTIAL, TRIGONOMETRIC = "arithmetic", "exponentials", "trigonometry"
ROUNDING, ACTIVATION, COMPARISON = "rounding and bounds", "activations", "comparisons"
LOGIC, CHOICE, BROADCAST = "logic and bits", "select", "broadcast"
_FORMS: Mapping[str, tuple[PointwiseMode, ...]] = {
    ARITHMETIC: (
        *(_M.IDENTITY, _M.ABS, _M.NEG, _M.SIGN, _M.ADD, _M.SUB, _M.MUL, _M.DIV, _M.MOD, _M.FMOD, _M.POW),
        *(_M.MIN, _M.MAX, _M.SQUARE, _M.SQRT, _M.RSQRT, _M.RECIPROCAL),
    ),
    EXPONENTIAL: (
        *(_M.EXP, _M.EXPM1, _M.LOG, _M.LOG1P, _M.SINH, _M.COSH, _M.TANH, _M.ASINH, _M.ACOSH, _M.ATANH),
        _M.ERF,
    ),
    TRIGONOMETRIC: (_M.SIN, _M.COS, _M.TAN, _M.ASIN, _M.ACOS, _M.ATAN),
    ROUNDING: (_M.CEIL, _M.FLOOR, _M.ROUND, _M.TRUNC, _M.CLIP),
    ACTIVATION: (*_COMPOSED, _M.PRELU),
    COMPARISON: (_M.EQ, _M.NE, _M.LT, _M.LE, _M.GT, _M.GE, _M.IS_NAN, _M.IS_INF),
    LOGIC: (
        *(_M.LOGICAL_AND, _M.LOGICAL_OR, _M.LOGICAL_XOR, _M.LOGICAL_NOT),
        *(mode for mode, function in FUNCTIONS.items() if function.bits),
    ),
    CHOICE: (_M.SELECT,),
    BROADCAST: tuple(mode for mode, function in FUNCTIONS.items() if function.arity > 1),
}
_unlisted = set(PointwiseMode).difference(*_FORMS.values())
assert not _unlisted, f"in no form: {sorted(_unlisted)}; an activation has a bound in _COMPOSED"


def _make(asked: Asked) -> Made:
    choose = asked.choose
    modes = PointwiseMode if asked.form is None else _FORMS[asked.form]
    mode = choose.one(mode for mode in modes if not (FUNCTIONS[mode].bits and asked.dtype.is_floating))
    function, dims = FUNCTIONS[mode], _dims(asked)
    names = tuple(f"operands[{number}]" for number in range(function.arity))
    dtypes = {name: _other(asked, integers=function.bits) for name in names[1:] if choose.chance(0.3)}
    given = (asked.dtype, *(dtypes.get(name, asked.dtype) for name in names[1:]))
    of = {name: _broadcast(asked, dims) for name in names}
    if asked.form is None or asked.form == BROADCAST:
        of[choose.one(names)] = dims
    operation = Pointwise(mode=mode, operands=names, result="result", **_parameters(asked, mode))
    dtypes["result"] = _result(asked, operation, given)
    fields = ("mode", "operands", "parameter", "lower", "upper")
    return Made(of, {name: getattr(operation, name) for name in fields}, dtypes)


def _dims(asked: Asked) -> Dims:
    choose, rank = asked.choose, asked.rank
    match asked.sizes:
        case Sizes.ONE:
            return (1,) * rank
        case Sizes.TINY:
            return choose.each(rank, 1, 4)
        case Sizes.VECTOR:
            return (*choose.each(rank - 1, 1, 5), 8 * choose.size(400))
        case Sizes.LONG:
            return (*choose.each(rank - 1, 1, 3), choose.size(25_000))
        case _:
            return tuple(choose.size(4000 if rank == 1 else 60 // rank) for _ in range(rank))


def _broadcast(asked: Asked, dims: Dims) -> Dims:
    """Some of the dims, and 1 for the others."""
    share = 0.5 if asked.has(BROADCAST, 0.4) else 0.0
    return tuple(1 if asked.choose.chance(share) else size for size in dims)


def _other(asked: Asked, *, integers: bool) -> DType:
    found: DType = asked.choose.one(d for d in DType if not (integers and d.is_floating))
    return found


def _parameters(asked: Asked, mode: PointwiseMode) -> dict[str, Any]:
    """Quarters, which every float type holds."""
    choose, names = asked.choose, FUNCTIONS[mode].parameters
    if choose.chance(0.4):
        return {}
    found: dict[str, Any] = {name: choose.size(12) / 4 for name in names if choose.chance(0.7)}
    if "lower" in found:
        found["lower"] = -found["lower"]
    return found


def _result(asked: Asked, operation: Pointwise[str], given: tuple[DType, ...]) -> DType:
    """Of any dtype where the result is a whole number; else of none wider than what is computed in."""
    computed, function = operation.compute(given), FUNCTIONS[operation.mode]
    allowed: tuple[DType, ...] = tuple(DType)
    if computed.is_floating and not function.truth:
        narrow = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
        allowed = (*narrow, DType.FLOAT64) if computed is DType.FLOAT64 else narrow
    if asked.dtype in allowed and asked.choose.chance(0.6):
        return asked.dtype
    found: DType = asked.choose.one(allowed)
    return found


def _bound(operation: Pointwise[str], values: Exact, specs: Specs) -> Exact:
    mode, function = operation.mode, FUNCTIONS[operation.mode]
    floating = [value for value in values.values() if value.dtype.kind == "f"]
    if function.truth or mode in _EXACT or (function.whole and not floating):
        return {}
    with np.errstate(all="ignore"):
        y = np.abs(operation.evaluate(NumPy(), values, specs)["result"])
        x, p = next(iter(values.values())), operation.effective_parameters.get("parameter", 1.0)
        if mode in _UNITS:
            found = (2 * _UNITS[mode] + 1) * y
        else:
            found = _COMPOSED[mode](x, y, p) if mode in _COMPOSED else y
        if mode in FRONTEND and mode not in _ROUNDED_ONCE:
            found = np.maximum(found, 60 * (y + 1) + 4 * np.abs(x) * y)
    least: float | np.ndarray = SUBNORMAL if operation.mode in _EXPONENTIALS else _PARTS
    if operation.mode in _TIMES_X:
        least = least * np.where(np.isfinite(x), np.maximum(np.abs(x), 1.0), 1.0)
    return {"result": np.where(np.isfinite(found), found, 0.0) + least}


_ROUNDED_ONCE = {_M.ADD, _M.SUB, _M.MUL, _M.RELU}
_PARTS = 2.0**-116
"""A few of float32's least numbers, in terms of its unit roundoff: parts of a formula may be subnormal."""
_EXPONENTIALS = (_M.EXP, _M.POW, _M.SIGMOID, _M.SWISH, _M.SOFTPLUS, _M.MISH)
_TIMES_X = (_M.SWISH, _M.MISH)
SUBNORMAL = 2.0**-102
"""Float32's least normal number, in terms of its unit roundoff: below that, exponentials and powers may be 0.

CUDA 13's `powf` gave 0 for each of a million such powers on an H100.
"""


def _small_integers(operation: Pointwise[str], rng: np.random.Generator, values: Exact, specs: Specs) -> None:
    """Integers that float32 holds, where they are converted; all of them else."""
    del rng
    dtypes = tuple(specs[name].dtype for name in operation.operands)
    if operation.compute(dtypes).is_floating:
        for name, value in values.items():
            if not specs[name].dtype.is_floating:
                values[name] = np.fmod(value, 1000)


ROWS = (
    Row(
        Pointwise,
        tuple(DType),
        (1, 4),
        tuple(_FORMS),
        _make,
        _bound,
        arrange=_small_integers,
        specials=(math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-30),
        more_ranks=(2, 3, 5),
    ),
)
