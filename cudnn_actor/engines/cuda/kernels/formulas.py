"""Pointwise functions in CUDA C++, and the statements that compute an expression.

The formulas are written for C. They are no traces of the definitions in `protocol.operations.functions`:
NumPy's `minimum` and `maximum` pass NaN on, which C's do not, and C computes only one side of a choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from cudnn_actor.engines.cuda.kernels.element_types import (
    C_TYPES,
    CONVERSIONS,
    literal,
    load,
    store,
    value_type,
)
from cudnn_actor.engines.cuda.kernels.expressions import Constant, Earlier, Expression, Leaf, Scalar, Value
from cudnn_actor.engines.cuda.kernels.reduction_code import ELEMENT_MAX, ELEMENT_MIN
from cudnn_actor.protocol.operations import FUNCTIONS, PointwiseMode
from cudnn_actor.protocol.operations.functions import Function, saturate_parameters
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["FORMULA_FUNCTIONS", "PREAMBLE", "Known", "formula", "value_of_expression"]


class Formula(NamedTuple):
    """A pointwise function in C: of the operands {a}, {b} and {c}, parameters by name, and the type {T}.

    Parameters
    ----------
    floating
        The formula of float and double; empty if the function takes integers only.
    whole
        The formula of long long and unsigned long long; empty if it is the same.
    """

    floating: str
    whole: str = ""


_M = PointwiseMode


def _is_of_c(function: Function) -> bool:
    """Whether C has a function of the mode's name, as for NumPy's functions of one float."""
    return isinstance(function.formula, str) and function.arity == 1 and not function.whole


FORMULAS: Mapping[PointwiseMode, Formula] = {
    **{mode: Formula(f"{mode}({{a}})") for mode, function in FUNCTIONS.items() if _is_of_c(function)},
    _M.RSQRT: Formula("rsqrt({a})"),
    _M.IDENTITY: Formula("{a}"),
    _M.ABS: Formula("fabs({a})", "{a} < 0 ? minus(0, {a}) : {a}"),
    _M.NEG: Formula("-{a}", "minus(0, {a})"),
    _M.SIGN: Formula("{a} != {a} ? {a} : ({T})(({a} > 0) - ({a} < 0))"),
    _M.ADD: Formula("{a} + {b}", "plus({a}, {b})"),
    _M.SUB: Formula("{a} - {b}", "minus({a}, {b})"),
    _M.MUL: Formula("{a} * {b}", "times({a}, {b})"),
    _M.DIV: Formula("{a} / {b}"),
    _M.MOD: Formula("floor_mod({a}, {b})"),
    _M.FMOD: Formula("fmod({a}, {b})", "remainder_of({a}, {b})"),
    _M.POW: Formula("pow({a}, {b})", "power({a}, {b})"),
    _M.MIN: Formula(ELEMENT_MIN.of("{b}", "{a}")),  # of equal ones, {b}
    _M.MAX: Formula(ELEMENT_MAX.of("{b}", "{a}")),
    _M.SQUARE: Formula("{a} * {a}", "times({a}, {a})"),
    _M.RECIPROCAL: Formula("1 / {a}"),
    _M.CEIL: Formula("ceil({a})", "{a}"),
    _M.FLOOR: Formula("floor({a})", "{a}"),
    _M.ROUND: Formula("rint({a})", "{a}"),
    _M.TRUNC: Formula("trunc({a})", "{a}"),
    _M.RELU: Formula("relu<{T}>({a}, {parameter}, {lower}, {upper})"),
    _M.LEAKY_RELU: Formula("{a} > 0 ? {a} : {parameter} * {a}"),
    _M.PRELU: Formula("{a} >= 0 ? {a} : {b} * {a}", "{a} >= 0 ? {a} : times({b}, {a})"),
    _M.SIGMOID: Formula("sigmoid({a})"),
    _M.ELU: Formula("elu({a}, {parameter})"),
    _M.SELU: Formula("({T})1.0507009873554804935 * elu({a}, ({T})1.6732632423543772848)"),
    _M.CELU: Formula("{a} > 0 ? {a} : {parameter} * expm1({a} / {parameter})"),
    _M.GELU: Formula("{a} * (erfc({a} * ({T})-0.70710678118654752) / 2)"),
    _M.GELU_TANH: Formula("{a} * sigmoid(({T})1.5957691216057308 * ({a} + ({T})0.044715 * {a} * {a} * {a}))"),
    _M.SOFTPLUS: Formula("softplus({a}, {parameter})"),
    _M.SOFTSIGN: Formula("{a} / (1 + fabs({a}))"),
    _M.SWISH: Formula("{a} * sigmoid({parameter} * {a})"),
    _M.MISH: Formula("{a} * tanh(softplus({a}, ({T})1))"),
    _M.HARD_SIGMOID: Formula("clip({parameter} * {a} + ({T})0.5, ({T})0, ({T})1)"),
    _M.HARD_SWISH: Formula("{a} * clip({a} / 6 + ({T})0.5, ({T})0, ({T})1)"),
    _M.CLIP: Formula("clip<{T}>({a}, {lower}, {upper})"),
    _M.EQ: Formula("{a} == {b}"),
    _M.NE: Formula("{a} != {b}"),
    _M.LT: Formula("{a} < {b}"),
    _M.LE: Formula("{a} <= {b}"),
    _M.GT: Formula("{a} > {b}"),
    _M.GE: Formula("{a} >= {b}"),
    _M.LOGICAL_AND: Formula("{a} != 0 && {b} != 0"),
    _M.LOGICAL_OR: Formula("{a} != 0 || {b} != 0"),
    _M.LOGICAL_XOR: Formula("({a} != 0) != ({b} != 0)"),
    _M.LOGICAL_NOT: Formula("{a} == 0"),
    _M.BITWISE_AND: Formula("", "{a} & {b}"),
    _M.BITWISE_OR: Formula("", "{a} | {b}"),
    _M.BITWISE_XOR: Formula("", "{a} ^ {b}"),
    _M.BITWISE_NOT: Formula("", "~{a}"),
    _M.SHIFT_LEFT: Formula("", "{b} < 0 || {b} > 63 ? 0 : ({T})((U){a} << {b})"),
    _M.SHIFT_RIGHT: Formula("", "shifted({a}, {b})"),
    _M.SELECT: Formula("{a} != 0 ? {b} : {c}"),
    _M.IS_NAN: Formula("{a} != {a}"),
    _M.IS_INF: Formula("isinf({a})", "0"),
}
"""The formula of each mode, as accurate as CUDA's mathematical functions. Integers are modulo 2**64."""

FORMULA_FUNCTIONS = r"""
typedef unsigned long long U;
__device__ __forceinline__ long long plus(long long a, long long b) { return (long long)((U)a + (U)b); }
__device__ __forceinline__ long long minus(long long a, long long b) { return (long long)((U)a - (U)b); }
__device__ __forceinline__ long long times(long long a, long long b) { return (long long)((U)a * (U)b); }
__device__ __forceinline__ U plus(U a, U b) { return a + b; }
__device__ __forceinline__ U minus(U a, U b) { return a - b; }
__device__ __forceinline__ U times(U a, U b) { return a * b; }
__device__ __forceinline__ long long shifted(long long a, long long b) {
    return a >> (b < 0 || b > 63 ? 63 : b);
}
__device__ __forceinline__ U shifted(U a, U b) { return b > 63 ? 0 : a >> b; }
__device__ __forceinline__ long long remainder_of(long long a, long long b) {
    return b == 0 || b == -1 ? 0 : a % b;
}
__device__ __forceinline__ U remainder_of(U a, U b) { return b == 0 ? 0 : a % b; }
__device__ __forceinline__ long long floor_mod(long long a, long long b) {
    const long long rest = remainder_of(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
__device__ __forceinline__ U floor_mod(U a, U b) { return remainder_of(a, b); }
__device__ __forceinline__ U power(U a, U b) {
    U result = 1;
    for (; b; b >>= 1, a *= a) if (b & 1) result *= a;
    return result;
}
__device__ __forceinline__ long long power(long long a, long long b) {
    if (b < 0) return a == -1 ? (b & 1 ? -1 : 1) : a == 1;
    return (long long)power((U)a, (U)b);
}
template <class T> __device__ __forceinline__ T floor_mod(T a, T b) {
    const T rest = fmod(a, b);
    if (rest == 0) return copysign((T)0, b);
    return (rest < 0) != (b < 0) ? rest + b : rest;
}
template <class T> __device__ __forceinline__ T clip(T a, T lower, T upper) {
    return a < lower ? lower : a > upper ? upper : a;
}
template <class T> __device__ __forceinline__ T relu(T a, T slope, T lower, T upper) {
    const T value = a <= lower ? (slope == 0 ? lower : lower + slope * (a - lower)) : a;
    return value > upper ? upper : value;
}
template <class T> __device__ __forceinline__ T sigmoid(T a) {
    const T decay = exp(-fabs(a));
    return (a >= 0 ? (T)1 : decay) / (1 + decay);
}
template <class T> __device__ __forceinline__ T elu(T a, T p) { return a > 0 ? a : p * expm1(a); }
template <class T> __device__ __forceinline__ T softplus(T a, T p) {
    const T scaled = p * a;
    return scaled != scaled ? scaled : (fmax(scaled, (T)0) + log1p(exp(-fabs(scaled)))) / p;
}
"""
"""Functions that the formulas call."""
PREAMBLE = CONVERSIONS + FORMULA_FUNCTIONS
"""C++ before a kernel with formulas: the functions that they call."""
Known = Mapping[int, tuple[str, str]]
"""The C name and the C type of a value, by its index in a body."""


def formula(node: Value, steps: list[str], wanted: str = "", known: Known = MappingProxyType({})) -> str:
    """The C expression of a node's value, of the C type `wanted` if it is not empty.

    Appends the statements that compute it to `steps`. `known`: the values of earlier nodes.
    """
    match node:
        case Constant(value=number):
            return literal(number, wanted or "double")
        case Leaf(number=number, dtype=dtype):
            name, found = f"v{number}", value_type(dtype)
        case Scalar(number=number):
            name, found = f"scalar{number}", "double"
        case Earlier(number=number):
            name, found = known[number]
        case Expression():
            name, found = _step(node, steps, known), value_type(node.dtype or node.compute)
    return name if wanted in ("", found) else f"(({wanted}){name})"


def value_of_expression(node: Expression, steps: list[str], known: Known) -> tuple[str, str]:
    """The C name and the C type of an expression's value, as `known` has them; see `formula`."""
    return formula(node, steps, known=known), value_type(node.dtype or node.compute)


def _step(node: Expression, steps: list[str], known: Known) -> str:
    """The C name of an expression's value. Appends the statements that compute it to `steps`."""
    function, in_c = FUNCTIONS[node.mode], FORMULAS[node.mode]
    kind, parameters = value_type(node.compute), node.parameters
    if not node.compute.is_floating:
        parameters = tuple(saturate_parameters(parameters, unsigned=node.compute is DType.UINT64))
    given = {
        name: formula(value, steps, kind, known) for name, value in zip("abc", node.operands, strict=False)
    }
    given |= {name: literal(value, kind) for name, value in zip(function.parameters, parameters, strict=True)}
    text = in_c.floating if node.compute.is_floating else in_c.whole or in_c.floating
    name = f"t{len(steps)}"
    steps.append(f"const {kind} {name} = {text.format(**given, T=kind)};")
    if node.dtype is None:
        return name
    stored = store(node.dtype, name)
    if FUNCTIONS[node.mode].bits and not node.dtype.is_floating:  # it keeps the lowest bits
        stored = f"({name} & 1)" if node.dtype is DType.BOOL else f"({C_TYPES[node.dtype]}){name}"
    steps.append(f"const {value_type(node.dtype)} {name}r = {load(node.dtype, stored)};")
    return f"{name}r"
