"""Functions of each element, as ONNX nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cudnn_actor.engines.cpu.sessions.draft import Draft, refuse
from cudnn_actor.protocol.operations import FUNCTIONS, Pointwise, PointwiseMode
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["emit_pointwise"]

_M = PointwiseMode
_Floats = Callable[..., str]
"""From a draft, the operands' values and the parameters: the value."""


def emit_pointwise(draft: Draft, operation: Pointwise[int]) -> None:
    """Write a function of each element."""
    function, mode = FUNCTIONS[operation.mode], operation.mode
    dtypes = tuple(draft.graph.tensor(uid).dtype for uid in operation.operands)
    computed = operation.compute(dtypes)
    if computed in (DType.FLOAT64, DType.UINT64) and mode is not _M.IDENTITY:
        refuse(f"{mode} in {computed}")
    if mode is _M.IDENTITY:
        _emit_identity(draft, operation)
    elif mode in _LOGIC:
        truths = [_truth(draft, draft.read(uid), draft.type_of(uid)) for uid in operation.operands]
        _write(draft, operation, draft.emit(_LOGIC[mode], *truths), DType.BOOL)
    elif mode is _M.SELECT:
        _emit_select(draft, operation, computed)
    elif mode in _BITS:
        _emit_bits(draft, operation)
    elif (bounds := _bounds_before(draft, operation)) is not None:
        uid, lower, upper = bounds
        ends = (draft.number(end) for end in (lower, upper))
        _write(draft, operation, draft.emit("Clip", draft.read(uid), *ends), computed)
    elif (readers := draft.readers_of(operation.result)) and _bounds_before(draft, readers[0]) is not None:
        pass  # its only reader has both bounds
    else:
        floating = computed is DType.FLOAT32
        table: Mapping[PointwiseMode, _Floats] = _OF_FLOATS if floating else _OF_INTEGERS
        if mode not in table:
            refuse(f"{mode}{'' if floating else ' of integers'}")
        operands = [_as(draft, uid, computed) for uid in operation.operands]
        value = table[mode](draft, *operands, *operation.effective_parameters.values())
        _write(draft, operation, value, DType.BOOL if function.truth else computed)


def _bounds_before(draft: Draft, operation: object) -> tuple[int, float, float] | None:
    """The values of which an operation is the minimum with a constant behind the maximum with another.

    ONNX Runtime computes one `Clip` together with the convolution before it, but not `Max` and `Min`. None of
    other operations, and where the maximum is read elsewhere, too.
    """
    outer = _limit_of(draft, operation, _M.MIN)
    if outer is None or len(draft.readers_of(outer[0])) != 1:
        return None
    inner = _limit_of(draft, draft.writer_of(outer[0]), _M.MAX)
    if inner is None or inner[1] > outer[1]:
        return None
    return (*inner, outer[1])


def _limit_of(draft: Draft, operation: object, mode: PointwiseMode) -> tuple[int, float] | None:
    """The other operand of a maximum or minimum with a constant, and the constant. None of others."""
    if not isinstance(operation, Pointwise) or operation.mode is not mode:
        return None
    uids = (*operation.operands, operation.result)
    if any(draft.graph.tensor(uid).dtype is not DType.FLOAT32 for uid in uids):
        return None
    for uid, other in (operation.operands, operation.operands[::-1]):
        value = draft.graph.tensor(uid).value
        same = draft.dims(other) == draft.dims(operation.result)
        if same and value is not None and math.isfinite(value) and not draft.is_number(other):
            return other, float(value)
    return None


def _write(draft: Draft, operation: Pointwise[int], value: str, dtype: DType) -> None:
    value = _broadcast(draft, operation, value)
    if dtype is DType.FLOAT32:
        draft.write_float(operation.result, value)
    else:
        draft.write_integers(operation.result, value, dtype)


def _broadcast(draft: Draft, operation: Pointwise[int], value: str) -> str:
    """A value of the result's dims: numbers have a size of 1 in each dim, whatever theirs are."""
    shapes = [_sizes(draft, uid) for uid in operation.operands]
    dims = draft.dims(operation.result)
    found = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    return value if found == dims else draft.emit("Expand", value, draft.list_of(dims))


def _sizes(draft: Draft, uid: int) -> tuple[int, ...]:
    tensor = draft.graph.tensor(uid)
    return (1,) * len(tensor.dims) if draft.is_number(uid) else tensor.dims


def _as(draft: Draft, uid: int, dtype: DType) -> str:
    """An operand in the type that is computed in."""
    value, given = draft.read(uid), draft.type_of(uid)
    if given in (DType.FLOAT64, DType.UINT64):
        refuse(f"{given} operands")
    return value if given is dtype else draft.cast(value, dtype)


def _truth(draft: Draft, value: str, dtype: DType) -> str:
    """Whether a value is not 0; NaN is not."""
    return value if dtype is DType.BOOL else draft.cast(value, DType.BOOL)


def _emit_identity(draft: Draft, operation: Pointwise[int]) -> None:
    (uid,) = operation.operands
    given, wanted = draft.graph.tensor(uid).dtype, draft.graph.tensor(operation.result).dtype
    value = _broadcast(draft, operation, draft.read(uid))
    if given is wanted:
        draft.write(operation.result, value, rounded=not draft.is_number(uid))
    elif draft.type_of(uid) is DType.FLOAT32:
        draft.write_float(operation.result, value)
    elif given.is_floating or given is DType.UINT64:
        refuse(f"{given} as {wanted}")
    else:
        draft.write_integers(operation.result, value, given)


def _emit_select(draft: Draft, operation: Pointwise[int], computed: DType) -> None:
    condition, *others = operation.operands
    truth = _truth(draft, draft.read(condition), draft.type_of(condition))
    operands = [_as(draft, uid, computed) for uid in others]
    _write(draft, operation, draft.emit("Where", truth, *operands), computed)


def _emit_bits(draft: Draft, operation: Pointwise[int]) -> None:
    """Write a function of bits, in int64. The result keeps the lowest bits that it has room for."""
    wanted = draft.graph.tensor(operation.result).dtype
    if wanted.is_floating or wanted is DType.UINT64:
        refuse(f"{operation.mode} with {wanted} results")
    operands = [_as(draft, uid, DType.INT64) for uid in operation.operands]
    value = _broadcast(draft, operation, draft.emit(_BITS[operation.mode], *operands))
    if wanted is DType.BOOL:
        value = draft.emit("BitwiseAnd", value, draft.number(1, DType.INT64))
    draft.write(operation.result, value if wanted is DType.INT64 else draft.cast(value, wanted))


# Formulas.


def _one(operator: str, **attributes: float | int | str) -> _Floats:
    return lambda draft, *operands: draft.emit(operator, *operands, **attributes)


def _expm1(draft: Draft, x: str) -> str:
    """exp(x) - 1 = tanh(x / 2) * (exp(x) + 1), which does not cancel."""
    half = draft.emit("Mul", x, draft.number(0.5))
    return draft.emit(
        "Mul", draft.emit("Tanh", half), draft.emit("Add", draft.emit("Exp", x), draft.number(1))
    )


def _log1p(draft: Draft, x: str) -> str:
    """log(1 + x) = 2 atanh(x / (x + 2)), which keeps the digits of a small x."""
    ratio = draft.emit("Div", x, draft.emit("Add", x, draft.number(2)))
    return draft.emit("Mul", draft.emit("Atanh", ratio), draft.number(2))


def _relu(draft: Draft, x: str, slope: float, lower: float, upper: float) -> str:
    if slope == 0:
        return draft.emit("Relu", x) if (lower, upper) == (0, math.inf) else _clip(draft, x, lower, upper)
    if (lower, upper) != (0, math.inf):
        refuse("relu with a slope and bounds")
    return draft.emit("LeakyRelu", x, alpha=slope)


def _clip(draft: Draft, x: str, lower: float, upper: float, dtype: DType = DType.FLOAT32) -> str:
    ends = ["" if math.isinf(end) else draft.number(end, dtype) for end in (lower, upper)]
    return draft.emit("Clip", x, *ends) if any(ends) else x


def _swish(draft: Draft, x: str, p: float) -> str:
    scaled = x if p == 1 else draft.emit("Mul", x, draft.number(p))
    return draft.emit("Mul", x, draft.emit("Sigmoid", scaled))


def _trunc(draft: Draft, x: str) -> str:
    negative = draft.emit("Less", x, draft.number(0))
    return draft.emit("Where", negative, draft.emit("Ceil", x), draft.emit("Floor", x))


def _sign(draft: Draft, x: str) -> str:
    """ONNX does not say what the sign of NaN is."""
    return draft.emit("Where", draft.emit("IsNaN", x), x, draft.emit("Sign", x))


def _not(operator: str) -> _Floats:
    return lambda draft, *operands: draft.emit("Not", draft.emit(operator, *operands))


# Definitions as nodes.


class _Trace:
    """NumPy's functions on traced values. The same node is not written twice."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._written: dict[tuple[str, ...], str] = {}

    def __getattr__(self, name: str) -> Callable[..., _Traced]:
        write = _OF_NUMPY[name]

        def emit(*operands: _Traced | float) -> _Traced:
            names = [
                each.name if isinstance(each, _Traced) else self._draft.number(each) for each in operands
            ]
            key = (name, *names)
            if key not in self._written:
                self._written[key] = write(self._draft, *names)
            return _Traced(self, self._written[key])

        return emit


def _operator(name: str) -> Callable[..., Any]:
    """A function of NumPy's as an operator of traced values."""

    def apply(self: _Traced, *others: _Traced | float) -> _Traced:
        return getattr(self.trace, name)(self, *others)  # type: ignore[no-any-return]

    return apply


def _operator_with_one(name: str) -> Callable[..., Any]:
    """The same as `_operator`, for a function that returns its first operand if the second is 1: that takes
    no node."""
    apply = _operator(name)
    return lambda self, other: self if other == 1 else apply(self, other)


@dataclass(frozen=True, eq=False)
class _Traced:
    """A value of a session, as the array that a definition computes with."""

    trace: _Trace
    name: str

    __add__, __neg__ = _operator("add"), _operator("negative")
    __mul__ = __rmul__ = _operator_with_one("multiply")
    __truediv__ = _operator_with_one("true_divide")
    __gt__, __ge__ = _operator("greater"), _operator("greater_equal")


_OF_NUMPY: Mapping[str, _Floats] = {
    "abs": _one("Abs"),
    "add": _one("Add"),
    "exp": _one("Exp"),
    "expm1": _expm1,
    "greater": _one("Greater"),
    "greater_equal": _one("GreaterOrEqual"),
    "log1p": _log1p,
    "maximum": _one("Max"),
    "multiply": _one("Mul"),
    "negative": _one("Neg"),
    "tanh": _one("Tanh"),
    "true_divide": _one("Div"),
    "where": _one("Where"),
}
"""The nodes of NumPy's functions that definitions call."""


def _from_definition(mode: PointwiseMode) -> _Floats:
    """The nodes of a mode that is no operator of ONNX: those of its definition."""
    formula: Any = FUNCTIONS[mode].formula

    def emit(draft: Draft, *given: str | float) -> str:
        trace = _Trace(draft)
        found = formula(trace, *(_Traced(trace, each) if isinstance(each, str) else each for each in given))
        name: str = found.name
        return name

    return emit


_LOGIC = {
    _M.LOGICAL_AND: "And",
    _M.LOGICAL_OR: "Or",
    _M.LOGICAL_XOR: "Xor",
    _M.LOGICAL_NOT: "Not",
}
_BITS = {
    _M.BITWISE_AND: "BitwiseAnd",
    _M.BITWISE_OR: "BitwiseOr",
    _M.BITWISE_XOR: "BitwiseXor",
    _M.BITWISE_NOT: "BitwiseNot",
}
_COMPARISONS: Mapping[PointwiseMode, _Floats] = {
    _M.EQ: _one("Equal"),
    _M.NE: _not("Equal"),
    _M.LT: _one("Less"),
    _M.LE: _one("LessOrEqual"),
    _M.GT: _one("Greater"),
    _M.GE: _one("GreaterOrEqual"),
}
_OF_BOTH: Mapping[PointwiseMode, _Floats] = {
    **_COMPARISONS,
    _M.ABS: _one("Abs"),
    _M.NEG: _one("Neg"),
    _M.ADD: _one("Add"),
    _M.SUB: _one("Sub"),
    _M.MUL: _one("Mul"),
    _M.MIN: _one("Min"),
    _M.MAX: _one("Max"),
    _M.SQUARE: lambda draft, x: draft.emit("Mul", x, x),
}
_OF_INTEGERS: Mapping[PointwiseMode, _Floats] = {
    **_OF_BOTH,
    _M.SIGN: _one("Sign"),
    **dict.fromkeys((_M.CEIL, _M.FLOOR, _M.ROUND, _M.TRUNC), _one("Identity")),
    _M.CLIP: lambda draft, x, lower, upper: _clip(draft, x, lower, upper, DType.INT64),
}
_OF_FLOATS: Mapping[PointwiseMode, _Floats] = {
    **_OF_BOTH,
    _M.SIGN: _sign,
    _M.DIV: _one("Div"),
    _M.FMOD: _one("Mod", fmod=1),
    _M.POW: _one("Pow"),
    _M.SQRT: _one("Sqrt"),
    _M.RSQRT: lambda draft, x: draft.emit("Reciprocal", draft.emit("Sqrt", x)),
    _M.RECIPROCAL: _one("Reciprocal"),
    _M.EXP: _one("Exp"),
    _M.EXPM1: _expm1,
    _M.LOG: _one("Log"),
    _M.SIN: _one("Sin"),
    _M.COS: _one("Cos"),
    _M.TAN: _one("Tan"),
    _M.ASIN: _one("Asin"),
    _M.ACOS: _one("Acos"),
    _M.ATAN: _one("Atan"),
    _M.SINH: _one("Sinh"),
    _M.COSH: _one("Cosh"),
    _M.TANH: _one("Tanh"),
    _M.ASINH: _one("Asinh"),
    _M.ACOSH: _one("Acosh"),
    _M.ATANH: _one("Atanh"),
    _M.ERF: _one("Erf"),
    _M.CEIL: _one("Ceil"),
    _M.FLOOR: _one("Floor"),
    _M.ROUND: _one("Round"),
    _M.TRUNC: _trunc,
    _M.RELU: _relu,
    _M.LEAKY_RELU: lambda draft, x, p: draft.emit("LeakyRelu", x, alpha=p),
    _M.PRELU: _from_definition(_M.PRELU),
    _M.SIGMOID: _one("Sigmoid"),
    _M.ELU: _from_definition(_M.ELU),
    _M.SELU: _from_definition(_M.SELU),
    _M.CELU: _from_definition(_M.CELU),
    _M.GELU: _one("Gelu"),
    _M.GELU_TANH: _one("Gelu", approximate="tanh"),
    _M.SOFTPLUS: _from_definition(_M.SOFTPLUS),
    _M.SOFTSIGN: _one("Softsign"),
    _M.SWISH: _swish,
    _M.MISH: _from_definition(_M.MISH),
    _M.HARD_SIGMOID: lambda draft, x, p: draft.emit("HardSigmoid", x, alpha=p, beta=0.5),
    _M.HARD_SWISH: _one("HardSwish"),
    _M.CLIP: _clip,
    _M.IS_NAN: _one("IsNaN"),
    _M.IS_INF: _one("IsInf"),
}
