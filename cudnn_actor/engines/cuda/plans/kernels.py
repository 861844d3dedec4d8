"""Generates and compiles elementwise kernels for pointwise operations that cuDNN does not fuse.

A kernel's source depends only on the operations, the element types and the rank;
dims and strides are arguments, so few kernels serve many shapes. Each value is
computed in the type that its operation computes in, and rounded where the graph
says so, and nowhere else: to nearest, ties to even; integers saturate and NaN
becomes 0; of bool, all but 0 is true. A kernel that only copies, from and to one
type, copies the bits.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.operations import FUNCTIONS, Pointwise, PointwiseMode

__all__ = ["C_TYPES", "PREAMBLE", "Computed", "Constant", "Elementwise", "Expression", "Kernel", "Leaf"]
__all__ += [
    "Axis",
    "Scalar",
    "Value",
    "elementwise",
    "expression",
    "formula",
    "load",
    "merged",
    "merged_axes",
]
__all__ += ["preamble", "source", "store", "value_type"]

_THREADS, _MOST_BLOCKS = 256, 1 << 16

C_TYPES = {
    DType.FLOAT64: "double",
    DType.FLOAT32: "float",
    DType.FLOAT16: "unsigned short",
    DType.BFLOAT16: "unsigned short",
    DType.INT8: "signed char",
    DType.INT16: "short",
    DType.INT32: "int",
    DType.INT64: "long long",
    DType.UINT8: "unsigned char",
    DType.UINT16: "unsigned short",
    DType.UINT32: "unsigned int",
    DType.UINT64: "unsigned long long",
    DType.BOOL: "unsigned char",
}
_LOADS = {
    DType.FLOAT16: "from_half({})",
    DType.BFLOAT16: "__int_as_float((int)({}) << 16)",
    DType.BOOL: "(({}) != 0)",
}
_STORES = {
    DType.FLOAT16: "to_half({})",
    DType.BFLOAT16: "to_bfloat16({})",
    DType.INT8: "(signed char)whole({}, -128.0, 127.0)",
    DType.INT16: "(short)whole({}, -32768.0, 32767.0)",
    DType.INT32: "(int)whole({}, -2147483648.0, 2147483647.0)",
    DType.INT64: "(long long)whole({}, -9223372036854775808.0, 9223372036854774784.0)",
    DType.UINT8: "(unsigned char)whole({}, 0.0, 255.0)",
    DType.UINT16: "(unsigned short)whole({}, 0.0, 65535.0)",
    DType.UINT32: "(unsigned int)whole({}, 0.0, 4294967295.0)",
    DType.UINT64: "to_uint64({})",
    DType.BOOL: "(({}) != 0)",
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
__device__ __forceinline__ unsigned short to_half(long long value) { return to_half((double)value); }
__device__ __forceinline__ unsigned short to_bfloat16(long long value) { return to_bfloat16((double)value); }
__device__ __forceinline__ unsigned short to_half(unsigned long long value) { return to_half((double)value); }
__device__ __forceinline__ unsigned short to_bfloat16(unsigned long long value) {
    return to_bfloat16((double)value);
}
__device__ __forceinline__ double whole(double value, double least, double largest) {
    return value != value ? 0.0 : fmin(fmax(rint(value), least), largest);
}
__device__ __forceinline__ long long whole(long long value, double least, double largest) {
    if (largest > 9.2e18) return value;  // its own range, which double does not hold
    return min(max(value, (long long)least), (long long)largest);
}
__device__ __forceinline__ unsigned long long to_uint64(double value) {
    return value > 0 ? (unsigned long long)fmin(rint(value), 18446744073709549568.0) : 0;
}
__device__ __forceinline__ unsigned long long to_uint64(long long value) { return max(value, 0ll); }
__device__ __forceinline__ unsigned long long to_uint64(unsigned long long value) { return value; }
__device__ __forceinline__ unsigned long long whole(unsigned long long value, double, double largest) {
    return min(value, largest > 9.2e18 ? 9223372036854775807ull : (unsigned long long)largest);
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

    value: int | float


class Expression(msgspec.Struct, frozen=True, tag="expression"):
    """A pointwise mode applied to operands.

    Parameters
    ----------
    mode, operands
        As in `Pointwise`.
    parameters
        Its parameters, in the order of its row of the table.
    compute
        The type that it is computed in: float32, float64 or int64.
    dtype
        The type that the value is rounded to before it is used; None for the type that is computed in.
    """

    mode: PointwiseMode
    operands: tuple[Expression | Leaf | Scalar | Constant, ...]
    parameters: tuple[float, ...] = ()
    compute: DType = DType.FLOAT32
    dtype: DType | None = None


def expression(
    operation: Pointwise[int], operands: tuple[Value, ...], compute: DType, dtype: DType, *, used: bool
) -> Expression:
    """An operation, computed in `compute`. `dtype`: its result's; `used`: whether something reads the value.

    If nothing does, it is only stored, which rounds it.
    """
    rounded = FUNCTIONS[operation.mode].bits or (used and dtype is not compute)
    parameters = tuple(operation.effective_parameters.values())
    return Expression(operation.mode, operands, parameters, compute, dtype if rounded else None)


class Elementwise(msgspec.Struct, frozen=True):
    """A kernel as data: what it computes, and over which elements.

    Parameters
    ----------
    value
        The expression stored in each element.
    dtype
        The result's element type.
    dims
        Dims to iterate over, slowest axis first.
    strides
        The result's, then each operand's, in elements; 0 where an operand is broadcast.
    """

    value: Expression | Leaf | Scalar | Constant
    dtype: DType
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
Axis = tuple[int, tuple[int, ...]]
"""A dim's size, and the stride of each of several tensors in it."""


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
    dims: Sequence[int],
    strides: Sequence[Sequence[int]],
) -> Elementwise:
    """A kernel over `dims`. `strides` are the result's, then each operand's."""
    axes = merged(dims, strides) or [(1, (0,) * len(strides))]
    return Elementwise(
        value=value,
        dtype=dtype,
        dims=tuple(size for size, _ in axes),
        strides=tuple(tuple(steps[i] for _, steps in axes) for i in range(len(strides))),
    )


def merged(dims: Sequence[int], strides: Sequence[Sequence[int]]) -> list[Axis]:
    """Axes of more than one element, each with its size and its stride in every tensor.

    They are sorted by the first tensor's strides, the slowest first; adjacent ones become one where possible.
    """
    order = sorted(range(len(dims)), key=lambda axis: -strides[0][axis])
    return merged_axes((dims[axis], tuple(of[axis] for of in strides)) for axis in order)


def merged_axes(axes: Iterable[Axis]) -> list[Axis]:
    """The axes, slowest first, without those of size 1, and with neighbours that are one axis as one."""
    merged: list[Axis] = []
    for size, steps in axes:
        if size == 1:
            continue
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, steps)
        else:
            merged.append((size, steps))
    return merged


class Kernel:
    """A compiled kernel with its dims and strides. `launch` enqueues it on the current stream."""

    def __init__(self, description: Elementwise) -> None:
        cupy = libraries().cupy
        # A contracted multiplication and addition would not round in between.
        options = ("--std=c++17", "--fmad=false")
        self._function = cupy.RawKernel(source(description), "elementwise", options=options)
        self._function.compile()
        count = math.prod(description.dims)
        self._grid = (min(-(-count // _THREADS), _MOST_BLOCKS),)
        self._number = cupy.float64
        geometry = [description.dims[1:], *description.strides]
        self._geometry = (count, *(number for numbers in geometry for number in numbers))
        self._scalars = description.scalars()

    def launch(self, pointers: Sequence[int], scalars: Sequence[float]) -> None:
        """Enqueue a run. `pointers`: the result's, then each operand's; `scalars`: all of the plan's."""
        if not self._grid[0]:  # there are no elements, and CUDA refuses an empty grid
            return
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
    arguments += [f"double scalar{number}" for number in description.scalars()]
    steps = [f"long long i{axis} = rest % d{axis}; rest /= d{axis};" for axis in range(rank - 1, 0, -1)]
    loads = [
        f"const {value_type(dtype)} v{i} = {load(dtype, f'in{i}[{_place(i + 1, rank)}]')};"
        for i, dtype in enumerate(description.operands())
    ]
    values: list[str] = []
    stored = store(description.dtype, formula(description.value, values))
    if isinstance(description.value, Leaf) and description.value.dtype is description.dtype:
        loads, stored = [], f"in0[{_place(1, rank)}]"
    result = f"out[{_place(0, rank)}] = {stored};"
    body = "\n        ".join([*steps, "long long i0 = rest;", *loads, *values, result])
    return f"""{preamble()}
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


def value_type(dtype: DType) -> str:
    """The C type that holds the values of an element type, and that they are computed in."""
    if dtype is DType.UINT64:
        return "unsigned long long"
    if not dtype.is_floating:
        return "long long"
    return "double" if dtype is DType.FLOAT64 else "float"


def preamble() -> str:
    """What a source with formulas begins with."""
    return f"{PREAMBLE}{_pointwise().PREAMBLE}"


def _pointwise() -> Any:
    """The operations' module of formulas: late, because those import this one."""
    return importlib.import_module("cudnn_actor.engines.cuda.operations.pointwise")


def formula(node: Value, steps: list[str], wanted: str = "") -> str:
    """A node's value in C, of the type `wanted` if one is given.

    Appends the statements that compute it to `steps`.
    """
    match node:
        case Constant(value=number):
            return _literal(number, wanted or "double")
        case Leaf(number=number, dtype=dtype):
            name, found = f"v{number}", value_type(dtype)
        case Scalar(number=number):
            name, found = f"scalar{number}", "double"
        case Expression():
            name, found = _step(node, steps), value_type(node.dtype or node.compute)
    return name if wanted in ("", found) else f"(({wanted}){name})"


def _step(node: Expression, steps: list[str]) -> str:
    """The name of an expression's value, which the statements appended to `steps` compute."""
    function, in_c = FUNCTIONS[node.mode], _pointwise().IN_C[node.mode]
    kind = value_type(node.compute)
    given = {name: formula(value, steps, kind) for name, value in zip("abc", node.operands, strict=False)}
    given |= {
        name: _literal(value, kind) for name, value in zip(function.parameters, node.parameters, strict=True)
    }
    text = (in_c.whole or in_c.formula) if node.compute is DType.INT64 else in_c.formula
    name = f"t{len(steps)}"
    steps.append(f"const {kind} {name} = {text.format(**given, T=kind)};")
    if node.dtype is None:
        return name
    stored = store(node.dtype, name)
    if FUNCTIONS[node.mode].bits and not node.dtype.is_floating:  # it keeps the lowest bits
        stored = f"({name} & 1)" if node.dtype is DType.BOOL else f"({C_TYPES[node.dtype]}){name}"
    steps.append(f"const {value_type(node.dtype)} {name}r = {load(node.dtype, stored)};")
    return f"{name}r"


def _literal(value: float, kind: str) -> str:
    """A number in C, of a type; of an integer type it saturates."""
    if kind == "long long":
        whole = int(min(max(value, -(1 << 63)), (1 << 63) - 1))
        return f"({whole + 1}ll - 1)" if whole < 0 else f"{whole}ll"
    if math.isfinite(value):
        return f"(({kind}){float(value)!r})"
    bits = 0x7FFFFFFF if math.isnan(value) else 0x7F800000
    return f"({'-' if value < 0 else ''}({kind})__int_as_float({bits}))"
