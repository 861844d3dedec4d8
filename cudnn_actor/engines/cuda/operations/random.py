"""Random numbers on CUDA: kernels of our own, which give the same bits as the definition.

A thread computes the block of random bits that four neighbours share, and writes
the four at once where they lie side by side. Numbers are computed from the bits in
double, in the definition's order, by operations that round to nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudnn_actor.engines.cuda.kernels.element_types import ACCESS_BYTES, C_TYPES, CONVERSIONS, PACK, store
from cudnn_actor.engines.cuda.kernels.index_code import indexing, thread_loop
from cudnn_actor.engines.cuda.kernels.kernel import ROUNDING, Launch, arguments_of, grid_over
from cudnn_actor.engines.cuda.kernels.walks import Walk
from cudnn_actor.engines.cuda.operations.implementation import implement, kernels
from cudnn_actor.protocol.operations import (
    GraphTensor,
    RandomBernoulli,
    RandomIntegers,
    Randomness,
    RandomNormal,
    RandomUniform,
)
from cudnn_actor.protocol.operations.random import (
    LN2,
    LOGARITHM,
    MULTIPLIERS,
    QUANTILE,
    ROUNDS,
    WEYL,
    keeping,
)
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["PHILOX", "random_launches"]

_SIGNED = 1 << 63
_Numbers = tuple[int | float, ...]


def random_launches(operation: Randomness[int], tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launch of random numbers; none if there are no elements."""
    state, y = tensors
    walk = Walk.in_order("t", y.dims, y=y.strides)
    if not walk.total:
        return []
    arguments = arguments_of(2, state.strides[0], *walk.numbers.values(), *_numbers(operation))
    blocks = -(-(walk.total + 3) // 4)  # one more than without an offset, if that is no multiple of 4
    text = _source(operation, y, walk)
    return [Launch("numbers", text, *grid_over(blocks), arguments, ROUNDING)]


def _source(operation: Randomness[int], y: GraphTensor, walk: Walk) -> str:
    """The kernel in CUDA C++. It depends on the distribution, the dtype and the result's axes in memory.

    `walk`: over the result, in the order of its elements' numbers.
    """
    parameters, formula = _FORMULAS[type(operation)]
    wide = isinstance(operation, RandomIntegers) or (
        operation.dtype is DType.FLOAT64 and not isinstance(operation, RandomBernoulli)
    )
    if type(operation) in _UNITS:
        formula = f"const double unit = {_UNITS[type(operation)][wide]}; {formula}"
    element = C_TYPES[operation.dtype]
    aligned = min(ACCESS_BYTES, 4 * operation.dtype.itemsize)
    packed = [steps for _, steps in walk.axes] == [(1,)] and y.alignment % aligned == 0
    body = _KERNEL.format(
        each_block=thread_loop("t", "blocks"),
        element=element,
        parameters=f"{walk.parameters}, {parameters}",
        more="const Words second = philox(block, 1, seed);" if wide else "",
        words="const Natural word = first.of[v]" + (", more = second.of[v];" if wide else ";"),
        formula=formula,
        stored=store(operation.dtype, "value") if operation.dtype.is_floating else f"({element})value",
        packed="true" if packed else "false",
        at=walk.at("number"),
    )
    quantile = _QUANTILE if isinstance(operation, RandomNormal) else ""
    return CONVERSIONS + PACK + indexing(wide=True) + PHILOX + quantile + body


def _numbers(operation: Randomness[int]) -> _Numbers:
    """The kernel's parameters."""
    match operation:
        case RandomUniform(low=low, high=high):
            return (float(high) - float(low), float(low), *operation.limits())
        case RandomNormal(mean=mean, deviation=deviation):
            return float(deviation), float(mean)
        case RandomBernoulli(probability=probability):
            return (keeping(probability),)
        case RandomIntegers(low=low, high=high):
            return _as_signed(high - low), _as_signed(low)
    raise AssertionError(operation)


def _as_signed(number: int) -> int:
    """The int64 with the same bits as an uint64: 0 for 2**64."""
    return (number + _SIGNED) % (2 * _SIGNED) - _SIGNED


def _horner(x: str, coefficients: Sequence[float]) -> str:
    """The C expression of a polynomial in `x`. `coefficients`: the lowest power's first."""
    text = repr(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        text = f"({text} * {x} + {coefficient!r})"
    return text


def _quotient(x: str, coefficients: Sequence[Sequence[float]]) -> str:
    return " / ".join(_horner(x, of) for of in coefficients)


PHILOX = f"""
typedef unsigned long long Natural;
struct Words {{ unsigned of[4]; }};
// Philox4x32-{ROUNDS}: the counter is the block and the draw, the key is the seed.
__device__ __forceinline__ Words philox(Natural block, unsigned draw, Natural seed) {{
    unsigned a = (unsigned)block, b = (unsigned)(block >> 32), c = draw, d = 0;
    unsigned first = (unsigned)seed, second = (unsigned)(seed >> 32);
    #pragma unroll
    for (int round = 0; round < {ROUNDS}; ++round) {{
        const Natural of_a = (Natural)a * {MULTIPLIERS[0]}u, of_c = (Natural)c * {MULTIPLIERS[1]}u;
        a = (unsigned)(of_c >> 32) ^ b ^ first;
        c = (unsigned)(of_a >> 32) ^ d ^ second;
        b = (unsigned)of_c;
        d = (unsigned)of_a;
        first += {WEYL[0]}u;
        second += {WEYL[1]}u;
    }}
    return {{{{a, b, c, d}}}};
}}
"""
_QUANTILE = f"""
__device__ __forceinline__ double logarithm(double x) {{
    const long long bits = __double_as_longlong(x) + ((0x3ff00000ll - 0x3fe6a09ell) << 32);
    const double power = (double)((bits >> 52) - 1023);
    const double f = __longlong_as_double((bits & 0xfffffffffffffll) + (0x3fe6a09ell << 32)) - 1.0;
    const double s = f / (f + 2.0), z = s * s, w = z * z;
    const double series = z * {_horner("w", LOGARITHM[::2])} + w * {_horner("w", LOGARITHM[1::2])};
    const double half = 0.5 * f * f;
    return power * {LN2[0]!r} - ((half - (s * (half + series) + power * {LN2[1]!r})) - f);
}}
__device__ __forceinline__ double quantile(double unit) {{
    const double centred = unit - 0.5;
    if (fabs(centred) <= 0.425) {{
        const double x = 0.425 * 0.425 - centred * centred;
        return centred * ({_quotient("x", QUANTILE[0])});
    }}
    const double tail = sqrt(-logarithm(fmin(unit, 1.0 - unit)));
    double found;
    if (tail <= 5.0) {{
        const double x = tail - 1.6;
        found = {_quotient("x", QUANTILE[1])};
    }} else {{
        const double x = tail - 5.0;
        found = {_quotient("x", QUANTILE[2])};
    }}
    return centred < 0 ? -found : found;
}}
"""
_UNITS: dict[type[Randomness[Any]], tuple[str, str]] = {
    RandomUniform: ("(double)word * 0x1p-32", "(double)(word << 21 | more >> 11) * 0x1p-53"),
    RandomNormal: (
        "((double)word + 0.5) * 0x1p-32",
        "((double)(word << 20 | more >> 12) + 0.5) * 0x1p-52",
    ),
}
"""The C expressions of a number from 0 to 1: from 32 random bits, and from more."""
_FORMULAS: dict[type[Randomness[Any]], tuple[str, str]] = {
    RandomUniform: (
        "double width, double low, double least, double largest",
        "const double value = fmin(fmax(unit * width + low, least), largest);",
    ),
    RandomNormal: (
        "double deviation, double mean",
        "const double value = quantile(unit) * deviation + mean;",
    ),
    RandomBernoulli: ("Natural threshold", "const long long value = word < threshold;"),
    RandomIntegers: (
        "Natural range, Natural low",
        "const Natural bits = word << 32 | more, value = low + (range ? __umul64hi(bits, range) : bits);",
    ),
}
"""The kernel's own parameters, and the C statement that computes a number from its random words."""
_KERNEL = """
typedef Pack<{element}, 4> Four;
extern "C" __global__ void numbers(
    const long long* state, {element}* y, long long state_step, {parameters}
) {{
    const Natural seed = (Natural)state[0], offset = (Natural)state[state_step];
    const int skipped = (int)(offset % 4);
    const long long blocks = (t_count + skipped + 3) / 4;
    {each_block} {{
        const Natural block = (offset / 4 + (Natural)t) % (1ull << 62);
        const Words first = philox(block, 0, seed);
        {more}
        Four pack;
        #pragma unroll
        for (int v = 0; v < 4; ++v) {{
            {words}
            {formula}
            pack.of[v] = {stored};
        }}
        const long long start = 4 * t - skipped;
        if ({packed} && !skipped && start + 4 <= t_count) {{
            *(Four*)(y + start) = pack;
            continue;
        }}
        #pragma unroll
        for (int v = 0; v < 4; ++v) {{
            const long long number = start + v;
            if (number < 0 || number >= t_count) continue;
            {at}
            y[y_at] = pack.of[v];
        }}
    }}
}}
"""


implement(RandomUniform, RandomNormal, RandomBernoulli, RandomIntegers, launchers=kernels(random_launches))
