"""Generates and compiles elementwise kernels for pointwise operations that cuDNN does not fuse.

A kernel's source depends only on the operations, the element types and the rank;
dims and strides are arguments, so few kernels serve many shapes. Values are
computed in float, or in double where the graph says float64, and rounded once:
to nearest, ties to even; integers saturate and NaN becomes 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.operations import PointwiseMode

__all__ = ["C_TYPES", "PREAMBLE", "Computed", "Constant", "Elementwise", "Expression", "Kernel", "Leaf"]
__all__ += ["Scalar", "Value", "elementwise", "formula", "load", "source", "store"]

_THREADS, _MOST_BLOCKS = 256, 1 << 16

C_TYPES = {
    DType.FLOAT64: "double",
    DType.FLOAT32: "float",
    DType.FLOAT16: "unsigned short",
    DType.BFLOAT16: "unsigned short",
    DType.INT8: "signed char",
    DType.INT32: "int",
    DType.INT64: "long long",
    DType.UINT8: "unsigned char",
}
_LOADS = {
    DType.FLOAT16: "from_half({})",
    DType.BFLOAT16: "__int_as_float((int)({}) << 16)",
}
_STORES = {
    DType.FLOAT16: "to_half({})",
    DType.BFLOAT16: "to_bfloat16({})",
    DType.INT8: "(signed char)whole({}, -128.0, 127.0)",
    DType.INT32: "(int)whole({}, -2147483648.0, 2147483647.0)",
    DType.INT64: "(long long)whole({}, -9223372036854775808.0, 9223372036854774784.0)",
    DType.UINT8: "(unsigned char)whole({}, 0.0, 255.0)",
}
_FORMULAS: dict[PointwiseMode, str] = {
    PointwiseMode.ADD: "{a} + {b}",
    PointwiseMode.MUL: "{a} * {b}",
    PointwiseMode.RELU: "{a} < 0 ? (T)0 : {a}",
    PointwiseMode.LEAKY_RELU: "{a} > 0 ? {a} : {p} * {a}",
    PointwiseMode.SIGMOID: "1 / (1 + exp(-{a}))",
    PointwiseMode.TANH: "tanh({a})",
    PointwiseMode.GELU: "{a} * (1 + erf({a} * (T)0.70710678118654752)) / 2",
    PointwiseMode.GELU_TANH: (
        "{a} * (1 + tanh((T)0.79788456080286536 * ({a} + (T)0.044715 * {a} * {a} * {a}))) / 2"
    ),
    PointwiseMode.SWISH: "{a} / (1 + exp(-{p} * {a}))",
    PointwiseMode.ELU: "{a} > 0 ? {a} : {p} * expm1({a})",
    PointwiseMode.SOFTPLUS: "softplus({a}, {p})",
}
PREAMBLE = r"""
__device__ __forceinline__ float from_half(unsigned short bits) {
    float value; asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits)); return value;
}
__device__ __forceinline__ unsigned short to_half(float value) {
    unsigned short bits; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); return bits;
}
__device__ __forceinline__ unsigned short to_half(double value) {
    unsigned short bits; asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(value)); return bits;
}
__device__ __forceinline__ unsigned short to_bfloat16(float value) {
    if (value != value) return 0x7fff;
    unsigned int bits = __float_as_uint(value);
    return (unsigned short)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
__device__ __forceinline__ unsigned short to_bfloat16(double value) {
    float towards_zero = __double2float_rz(value);  // round to odd: the second rounding then rounds correctly
    unsigned int bits = __float_as_uint(towards_zero);
    if ((double)towards_zero != value) bits |= 1;
    return to_bfloat16(value != value ? (float)value : __uint_as_float(bits));
}
__device__ __forceinline__ double whole(double value, double least, double largest) {
    return value != value ? 0.0 : fmin(fmax(rint(value), least), largest);
}
template <class T> __device__ __forceinline__ T softplus(T value, T p) {
    T scaled = p * value;
    return scaled != scaled ? scaled : (fmax(scaled, (T)0) + log1p(exp(-fabs(scaled)))) / p;
}
"""


class Leaf(msgspec.Struct, frozen=True, tag="leaf"):
    """A tensor that the kernel reads: its index among the operands, and its element type."""

    number: int
    dtype: DType


class Scalar(msgspec.Struct, frozen=True, tag="scalar"):
    """A number passed with each run: its index among the plan's scalars."""

    number: int


class Constant(msgspec.Struct, frozen=True, tag="constant"):
    """A number."""

    value: float


class Expression(msgspec.Struct, frozen=True, tag="expression"):
    """A pointwise mode applied to operands, with its parameter if it has one.

    `dtype`: the type that the value is rounded to before it is used; None for the type that is computed in.
    """

    mode: PointwiseMode
    operands: tuple[Expression | Leaf | Scalar | Constant, ...]
    parameter: float | None = None
    dtype: DType | None = None


class Elementwise(msgspec.Struct, frozen=True):
    """A kernel as data: what it computes, and over which elements.

    Parameters
    ----------
    value
        The expression stored in each element.
    dtype
        The result's element type.
    double
        Whether to compute in double.
    dims
        Dims to iterate over, slowest axis first.
    strides
        The result's, then each operand's, in elements; 0 where an operand is broadcast.
    """

    value: Expression | Leaf | Scalar | Constant
    dtype: DType
    double: bool
    dims: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    def operands(self) -> tuple[DType, ...]:
        """The element types of the operands, by number."""
        found: dict[int, DType] = {}
        _visit(self.value, lambda leaf: found.setdefault(leaf.number, leaf.dtype), lambda _: None)
        return tuple(found[number] for number in sorted(found))

    def scalars(self) -> tuple[int, ...]:
        """The indices of the plan's scalars that the kernel takes, in the kernel's own order."""
        found: set[int] = set()
        _visit(self.value, lambda _: None, lambda scalar: found.add(scalar.number))
        return tuple(sorted(found))


Value = Expression | Leaf | Scalar | Constant


class Computed(NamedTuple):
    """A packed tensor that a kernel computes from an operation's operands before the operation runs.

    `operands`: the names of what the value's leaves read, in the order of their numbers.
    """

    value: Value
    operands: tuple[str, ...]
    dims: tuple[int, ...]
    dtype: DType


def _visit(node: Value, leaf: Callable[[Leaf], object], scalar: Callable[[Scalar], object]) -> None:
    match node:
        case Leaf():
            leaf(node)
        case Scalar():
            scalar(node)
        case Expression():
            for operand in node.operands:
                _visit(operand, leaf, scalar)


def elementwise(
    value: Value,
    dtype: DType,
    double: bool,
    dims: Sequence[int],
    strides: Sequence[Sequence[int]],
) -> Elementwise:
    """A kernel over `dims`: axes sorted by the result's strides, adjacent axes merged where possible.

    `strides` are the result's, then each operand's.
    """
    order = sorted(range(len(dims)), key=lambda axis: -strides[0][axis])
    axes = [(dims[axis], tuple(of[axis] for of in strides)) for axis in order if dims[axis] != 1]
    merged: list[tuple[int, tuple[int, ...]]] = []
    for size, steps in axes:
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, steps)
        else:
            merged.append((size, steps))
    merged = merged or [(1, tuple(0 for _ in strides))]
    return Elementwise(
        value=value,
        dtype=dtype,
        double=double,
        dims=tuple(size for size, _ in merged),
        strides=tuple(tuple(steps[i] for _, steps in merged) for i in range(len(strides))),
    )


class Kernel:
    """A compiled kernel with its dims and strides. `launch` enqueues it on the current stream."""

    def __init__(self, description: Elementwise) -> None:
        cupy = libraries().cupy
        self._function = cupy.RawKernel(source(description), "elementwise", options=("--std=c++17",))
        self._function.compile()
        count = math.prod(description.dims)
        self._grid = (min(-(-count // _THREADS), _MOST_BLOCKS),)
        self._number = cupy.float64 if description.double else cupy.float32
        geometry = [description.dims[1:], *description.strides]
        self._geometry = (count, *(number for numbers in geometry for number in numbers))
        self._scalars = description.scalars()

    def launch(self, pointers: Sequence[int], scalars: Sequence[float]) -> None:
        """Enqueue a run. `pointers`: the result's, then each operand's; `scalars`: all of the plan's."""
        numbers = [self._number(scalars[place]) for place in self._scalars]
        self._function(self._grid, (_THREADS,), (*pointers, *self._geometry, *numbers))


def source(description: Elementwise) -> str:
    """The kernel in CUDA C++."""
    types = [C_TYPES[dtype] for dtype in description.operands()]
    rank = len(description.dims)
    arguments = [f"{C_TYPES[description.dtype]}* out"]
    arguments += [f"const {c}* in{i}" for i, c in enumerate(types)]
    arguments += ["long long count", *(f"long long d{axis}" for axis in range(1, rank))]
    arguments += [f"long long s{i}_{axis}" for i in range(1 + len(types)) for axis in range(rank)]
    arguments += [f"T scalar{number}" for number in description.scalars()]
    steps = [f"long long i{axis} = rest % d{axis}; rest /= d{axis};" for axis in range(rank - 1, 0, -1)]
    loads = [
        f"T v{i} = (T){load(dtype, f'in{i}[{_place(i + 1, rank)}]')};"
        for i, dtype in enumerate(description.operands())
    ]
    values: list[str] = []
    stored = store(description.dtype, formula(description.value, values))
    result = f"out[{_place(0, rank)}] = {stored};"
    body = "\n        ".join([*steps, "long long i0 = rest;", *loads, *values, result])
    return f"""typedef {"double" if description.double else "float"} T;
{PREAMBLE}
extern "C" __global__ void elementwise({", ".join(arguments)}) {{
    long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += stride) {{
        long long rest = i;
        {body}
    }}
}}
"""


def _place(tensor: int, rank: int) -> str:
    return " + ".join(f"i{axis} * s{tensor}_{axis}" for axis in range(rank))


def load(dtype: DType, element: str) -> str:
    """The C expression that converts a stored element, itself a C expression, to its value."""
    return _LOADS.get(dtype, "{}").format(element)


def store(dtype: DType, value: str) -> str:
    """The C expression that rounds a value, itself a C expression, to the stored element type."""
    return _STORES.get(dtype, "{}").format(value)


def formula(node: Value, steps: list[str]) -> str:
    """The C name of a node's value; appends the statements that compute it to `steps`."""
    match node:
        case Leaf(number=number):
            return f"v{number}"
        case Scalar(number=number):
            return f"scalar{number}"
        case Constant(value=number):
            return f"((T){float(number)!r})"
        case Expression(mode=mode, operands=operands, parameter=parameter, dtype=dtype):
            names = dict(zip("ab", [formula(operand, steps) for operand in operands], strict=False))
            name = f"t{len(steps)}"
            value = _FORMULAS[mode].format(**names, p=f"((T){parameter!r})")
            if dtype is not None:
                steps.append(f"T {name}_ = {value};")
                value = f"(T){load(dtype, store(dtype, f'{name}_'))}"
            steps.append(f"T {name} = {value};")
            return name
