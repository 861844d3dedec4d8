"""Pointwise operations on CUDA: their formulas in C, and their names in cuDNN's frontend.

https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Pointwise.html
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from cudnn_actor.engines.cuda.cudnn.frontend_graph import FrontendGraph, Refused
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.protocol.operations import FUNCTIONS, Pointwise, PointwiseMode, TensorRole

__all__ = ["IN_C", "PREAMBLE", "InC", "lower_pointwise"]


class InC(NamedTuple):
    """How CUDA computes a function.

    Parameters
    ----------
    formula
        Of float or double: C, with the operands {a}, {b} and {c}, the parameters by name, and the type {T}.
    whole
        The same of long long and unsigned long long, if it is another one.
    frontend
        The method of cuDNN's frontend that computes the same; empty if there is none, or if it may compute
        something else: for mod, pow and NaN in min and max, or near zeros of log, sin, cos and tan.
    options
        Its options that are parameters of ours. A function with others than these must have their defaults.
    """

    formula: str
    whole: str = ""
    frontend: str = ""
    options: Mapping[str, str] = MappingProxyType({})


_M = PointwiseMode
IN_C: Mapping[PointwiseMode, InC] = {
    _M.IDENTITY: InC("{a}", frontend="identity"),
    _M.ABS: InC("fabs({a})", "{a} < 0 ? minus(0, {a}) : {a}", "abs"),
    _M.NEG: InC("-{a}", "minus(0, {a})", "neg"),
    _M.SIGN: InC("{a} != {a} ? {a} : ({T})(({a} > 0) - ({a} < 0))"),
    _M.ADD: InC("{a} + {b}", "plus({a}, {b})", "add"),
    _M.SUB: InC("{a} - {b}", "minus({a}, {b})", "sub"),
    _M.MUL: InC("{a} * {b}", "times({a}, {b})", "mul"),
    _M.DIV: InC("{a} / {b}", frontend="div"),
    _M.MOD: InC("floor_mod({a}, {b})"),
    _M.FMOD: InC("fmod({a}, {b})", "remainder_of({a}, {b})"),
    _M.POW: InC("pow({a}, {b})", "power({a}, {b})"),
    _M.MIN: InC("{a} < {b} || {a} != {a} ? {a} : {b}"),
    _M.MAX: InC("{a} > {b} || {a} != {a} ? {a} : {b}"),
    _M.SQUARE: InC("{a} * {a}", "times({a}, {a})"),
    _M.SQRT: InC("sqrt({a})", frontend="sqrt"),
    _M.RSQRT: InC("rsqrt({a})", frontend="rsqrt"),
    _M.RECIPROCAL: InC("1 / {a}", frontend="reciprocal"),
    _M.EXP: InC("exp({a})", frontend="exp"),
    _M.EXPM1: InC("expm1({a})"),
    _M.LOG: InC("log({a})"),
    _M.LOG1P: InC("log1p({a})"),
    _M.SIN: InC("sin({a})"),
    _M.COS: InC("cos({a})"),
    _M.TAN: InC("tan({a})"),
    _M.ASIN: InC("asin({a})"),
    _M.ACOS: InC("acos({a})"),
    _M.ATAN: InC("atan({a})"),
    _M.SINH: InC("sinh({a})"),
    _M.COSH: InC("cosh({a})"),
    _M.TANH: InC("tanh({a})", frontend="tanh"),
    _M.ASINH: InC("asinh({a})"),
    _M.ACOSH: InC("acosh({a})"),
    _M.ATANH: InC("atanh({a})"),
    _M.ERF: InC("erf({a})", frontend="erf"),
    _M.CEIL: InC("ceil({a})", "{a}", "ceil"),
    _M.FLOOR: InC("floor({a})", "{a}", "floor"),
    _M.ROUND: InC("rint({a})", "{a}"),
    _M.TRUNC: InC("trunc({a})", "{a}"),
    _M.RELU: InC("relu<{T}>({a}, {parameter}, {lower}, {upper})", frontend="relu"),
    _M.LEAKY_RELU: InC(
        "{a} > 0 ? {a} : {parameter} * {a}", frontend="leaky_relu", options={"parameter": "negative_slope"}
    ),
    _M.PRELU: InC("{a} >= 0 ? {a} : {b} * {a}", "{a} >= 0 ? {a} : times({b}, {a})"),
    _M.SIGMOID: InC("sigmoid({a})", frontend="sigmoid"),
    _M.ELU: InC("elu({a}, {parameter})", frontend="elu"),
    _M.SELU: InC("({T})1.0507009873554804935 * elu({a}, ({T})1.6732632423543772848)"),
    _M.CELU: InC("{a} > 0 ? {a} : {parameter} * expm1({a} / {parameter})"),
    _M.GELU: InC("{a} * (erfc({a} * ({T})-0.70710678118654752) / 2)", frontend="gelu"),
    _M.GELU_TANH: InC(
        "{a} * sigmoid(({T})1.5957691216057308 * ({a} + ({T})0.044715 * {a} * {a} * {a}))",
        frontend="gelu_approx_tanh",
    ),
    _M.SOFTPLUS: InC("softplus({a}, {parameter})", frontend="softplus"),
    _M.SOFTSIGN: InC("{a} / (1 + fabs({a}))"),
    _M.SWISH: InC("{a} * sigmoid({parameter} * {a})", frontend="swish", options={"parameter": "swish_beta"}),
    _M.MISH: InC("{a} * tanh(softplus({a}, ({T})1))"),
    _M.HARD_SIGMOID: InC("clip({parameter} * {a} + ({T})0.5, ({T})0, ({T})1)"),
    _M.HARD_SWISH: InC("{a} * clip({a} / 6 + ({T})0.5, ({T})0, ({T})1)"),
    _M.CLIP: InC("clip<{T}>({a}, {lower}, {upper})"),
    _M.EQ: InC("{a} == {b}", frontend="cmp_eq"),
    _M.NE: InC("{a} != {b}", frontend="cmp_neq"),
    _M.LT: InC("{a} < {b}", frontend="cmp_lt"),
    _M.LE: InC("{a} <= {b}", frontend="cmp_le"),
    _M.GT: InC("{a} > {b}", frontend="cmp_gt"),
    _M.GE: InC("{a} >= {b}", frontend="cmp_ge"),
    _M.LOGICAL_AND: InC("{a} != 0 && {b} != 0"),
    _M.LOGICAL_OR: InC("{a} != 0 || {b} != 0"),
    _M.LOGICAL_XOR: InC("({a} != 0) != ({b} != 0)"),
    _M.LOGICAL_NOT: InC("{a} == 0"),
    _M.BITWISE_AND: InC("", "{a} & {b}"),
    _M.BITWISE_OR: InC("", "{a} | {b}"),
    _M.BITWISE_XOR: InC("", "{a} ^ {b}"),
    _M.BITWISE_NOT: InC("", "~{a}"),
    _M.SHIFT_LEFT: InC("", "{b} < 0 || {b} > 63 ? 0 : ({T})((U){a} << {b})"),
    _M.SHIFT_RIGHT: InC("", "shifted({a}, {b})"),
    _M.SELECT: InC("{a} != 0 ? {b} : {c}", frontend="binary_select"),
    _M.IS_NAN: InC("{a} != {a}"),
    _M.IS_INF: InC("isinf({a})", "0"),
}
"""Formulas are as accurate as CUDA's mathematical functions. Arithmetic of integers is modulo 2**64."""

PREAMBLE = r"""
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


def _bounds(graph: FrontendGraph, operation: Pointwise[int]) -> list[tuple[str, float]]:
    """The numbers that an operation keeps its operand between, and what cuDNN compares it with them by.

    None of another operation, and of one that is not behind a convolution: cuDNN has conditions only there.
    """
    replaced = {PointwiseMode.MAX: "cmp_lt", PointwiseMode.MIN: "cmp_gt"}
    given = operation.effective_parameters
    if not graph.convolves:
        return []
    if operation.mode is PointwiseMode.CLIP:
        found = [("cmp_lt", given["lower"]), ("cmp_gt", given["upper"])]
        return [(compare, number) for compare, number in found if math.isfinite(number)]
    number = graph.spec(operation.operands[1]).value if operation.mode in replaced else None
    return [] if number is None or math.isnan(number) else [(replaced[operation.mode], number)]


def _lower_bounds(
    graph: FrontendGraph, operation: Pointwise[int], bounds: Sequence[tuple[str, float]]
) -> None:
    """Add what compares and selects: NaN stays NaN, which cuDNN's min and max may replace."""
    options = {"compute_data_type": graph.compute(operation)}
    value = graph.tensor(operation.operands[0])
    for compare, number in bounds:
        condition = getattr(graph.pygraph, compare)(value, graph.number(number), **options)
        condition.set_data_type(libraries().cudnn.data_type.BOOLEAN)
        value = graph.pygraph.binary_select(graph.number(number), value, condition, **options)
    graph.write(operation.result, value)


def lower_pointwise(graph: FrontendGraph, operation: Pointwise[int]) -> None:
    """Add a pointwise operation. Raises `Refused` if the frontend does not have it."""
    mode, function, parameters = operation.mode, IN_C[operation.mode], operation.effective_parameters
    tensors = [graph.spec(uid) for uid in operation.reads]
    if not operation.compute(tuple(tensor.dtype for tensor in tensors)).is_floating:
        # It may where a convolution's sums are all that it reads, and where it only converts bytes.
        converts = mode is PointwiseMode.IDENTITY and graph.spec(operation.result).dtype.is_floating
        given = [tensor.dtype.itemsize for tensor in tensors if tensor.role is TensorRole.BOUND]
        if given and not (converts and max(given) == 1):
            raise Refused("cuDNN computes with integers in float32")
    bounds = _bounds(graph, operation)
    if bounds:
        _lower_bounds(graph, operation, bounds)
        return
    if not function.frontend:
        raise Refused(f"{mode} is not one of cuDNN's pointwise modes")
    for name, default in FUNCTIONS[mode].parameters.items():
        if name not in function.options and parameters[name] != default:
            raise Refused(f"{mode} with {name}={parameters[name]} is not one of cuDNN's pointwise modes")
    options = {option: parameters[name] for name, option in function.options.items()}
    inputs = [graph.tensor(uid) for uid in operation.reads]
    if mode is PointwiseMode.SELECT:  # cuDNN's has the condition last
        inputs = [*inputs[1:], inputs[0]]
    call = getattr(graph.pygraph, function.frontend)
    graph.write(operation.result, call(*inputs, compute_data_type=graph.compute(operation), **options))
