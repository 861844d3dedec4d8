"""Accumulators of reductions in CUDA C++: what each keeps while it goes over elements, and its result."""

from __future__ import annotations

from cudnn_actor.protocol.operations import ReductionMode
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["POWERS", "RESULTS", "scalar_reducer", "state_of"]

_Mode = ReductionMode


def scalar_reducer(expression: str, none: str, taken: str = "x") -> str:
    """C++ struct of a reduction with one accumulator: combine expression, identity, per-element map."""
    return _STATE.format(expression=expression, none=none, taken=taken)


_STATE = """
struct State {{
    T value;
    static __device__ State none() {{ return {{{none}}}; }}
    __device__ State with(const State& other) const {{
        const T a = value, b = other.value;
        return {{{expression}}};
    }}
    __device__ State from(int apart) const {{ return {{__shfl_xor_sync(~0u, value, apart)}}; }}
    __device__ void take(T x, long long) {{ *this = with({{{taken}}}); }}
}};
"""


def state_of(mode: ReductionMode, dtype: DType) -> str:
    """C++ struct of the accumulator of a reduction of elements of a dtype."""
    if mode is _Mode.LOG_SUM_EXP:
        return POWERS
    if dtype.is_floating:
        lowest, highest = "-INFINITE", "INFINITE"
    elif dtype is DType.UINT64:
        lowest, highest = "0", "~0ull"
    else:
        lowest, highest = "-0x7fffffffffffffffll - 1", "0x7fffffffffffffffll"
    total = scalar_reducer("sum(a, b)", "0")
    return {
        _Mode.PRODUCT: scalar_reducer("product(a, b)", "1"),
        _Mode.MIN: scalar_reducer("b < a || b != b ? b : a", highest),
        _Mode.MAX: scalar_reducer("b > a || b != b ? b : a", lowest),
        _Mode.ABSOLUTE_MAX: scalar_reducer("b > a || b != b ? b : a", "0", "magnitude(x)"),
        _Mode.L1: scalar_reducer("sum(a, b)", "0", "magnitude(x)"),
        _Mode.SUM_OF_SQUARES: scalar_reducer("sum(a, b)", "0", "product(x, x)"),
        _Mode.L2: scalar_reducer("sum(a, b)", "0", "product(x, x)"),
    }.get(mode, total)


RESULTS = {
    _Mode.MEAN: "state.value / (T)length",
    _Mode.L2: "sqrt(state.value)",
    _Mode.LOG_SUM: "log(state.value)",
    _Mode.LOG_SUM_EXP: "state.top + log(state.total)",
}
"""The result of a state, where it is not `state.value`, in C++."""


POWERS = """
struct State {  // the sum of exponentials is exp(top) * total; what equals top counts as 1, infinity too
    T top, total;
    static __device__ State none() { return {-INFINITE, 0}; }
    __device__ State with(const State& other) const {
        if (top == other.top) return {top, total + other.total};
        const bool larger = other.top > top;
        const State &a = larger ? other : *this, &b = larger ? *this : other;
        return {a.top, a.total + b.total * exp(b.top - a.top)};
    }
    __device__ State from(int apart) const {
        return {__shfl_xor_sync(~0u, top, apart), __shfl_xor_sync(~0u, total, apart)};
    }
    __device__ void take(T x, long long) {
        if (x <= top) total += x == top ? (T)1 : exp(x - top);
        else { total = total * exp(top - x) + 1; top = x; }
    }
};
"""
