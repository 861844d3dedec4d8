"""Generates and compiles elementwise kernels for pointwise operations that cuDNN does not fuse.

A kernel computes one or more results of the same dims. Its source depends only on
the operations, the element types, the rank and how the last axis is read; dims and
strides are arguments, so few kernels serve many shapes. Neighbours in the last axis
are read and written together, up to 16 bytes at a time. Each value is computed in
the type that its operation computes in, and rounded where the graph says so, and
nowhere else: to nearest, ties to even; integers saturate and NaN becomes 0; of
bool, all but 0 is true. A kernel that only copies, from and to one type, copies
the bits.

What a kernel reads may lie where indices say: those of another operand, which count
as the nearest in range, or those of a table, which the kernel has.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.protocol.operations import FUNCTIONS, Operation, Pointwise, PointwiseMode
from cudnn_actor.protocol.operations.functions import limited
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["C_TYPES", "PREAMBLE", "THREADS", "Computed", "Constant", "Elementwise", "Expression", "Kernel"]
__all__ += [
    "Axis",
    "Earlier",
    "Leaf",
    "Result",
    "Scalar",
    "Selection",
    "Source",
    "Table",
    "Tabled",
    "Value",
    "blocks",
    "copied",
    "elementwise",
    "expression",
    "formula",
    "functions",
    "fused",
    "load",
    "merged",
    "merged_axes",
]
__all__ += ["DIVISION", "PACK", "PLACED", "WORDS", "divided", "divisor", "in_turns", "preamble", "source"]
__all__ += ["store", "value_type"]

THREADS, _MOST_BLOCKS = 256, 1 << 16
_PACK_BYTES, _MOST_TOGETHER = 16, 8
"""The most bytes of one access, and the most elements that a thread computes together."""
_FEW_STEPS = 4
"""Of a body, if its values for several places are to fit into the registers."""
WORDS = {1: DType.UINT8, 2: DType.UINT16, 4: DType.UINT32, 8: DType.UINT64}
"""What neighbours of so many bytes are copied as."""
_MANY_BLOCKS, _MOST_TURNS = 2048, 4
"""As many blocks keep a GPU busy; if there are more, each does as much as so many at most."""
_SMALL = 1 << 31
"""Offsets below this fit into 32 bits."""

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
#if __CUDA_ARCH__ >= 800
    unsigned short found; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(found) : "f"(value)); return found;
#endif
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


PLACED = """
// An index below 0 counts from the end; one out of range counts as the nearest.
__device__ __forceinline__ long long placed(long long index, long long size) {
    if (index < 0) index += size;
    return index < 0 ? 0 : index < size ? index : size - 1;
}
"""


DIVISION = """
// n / size. Of 32 bits, and not below 0: by the host's `divisor`, a factor and, above it, a shift.
__device__ __forceinline__ int over(int n, long long, long long by) {
    return (int)((unsigned long long)(unsigned)n * (unsigned)by >> (by >> 32));
}
__device__ __forceinline__ long long over(long long n, long long size, long long) { return n / size; }
"""


def divisor(size: int) -> int:
    """A factor and a shift by which `over` divides numbers from 0 to 2**31 by a size from 1 on.

    That is exact: T. Granlund, P. Montgomery, "Division by invariant integers using multiplication", PLDI
    1994, theorem 4.2.
    """
    size = min(max(size, 1), _SMALL)  # larger ones only divide numbers of 64 bits
    shift = 31 + (size - 1).bit_length()
    return -(-(1 << shift) // size) | shift << 32


def in_turns(needed: int) -> int:
    """How many blocks do the work of so many."""
    return max(min(needed, _MANY_BLOCKS), -(-needed // _MOST_TURNS))


def divided(name: str, rest: str, size: str, by: str, times: int = 1) -> str:
    """Statements that define `name` as `times` as much as `rest` modulo `size`, and divide `rest` by it."""
    modulo = f"{rest} - {name}_over * (I){size}"
    modulo = f"({modulo}) * {times}" if times > 1 else modulo
    return f"const I {name}_over = over({rest}, {size}, {by}), {name} = {modulo}; {rest} = {name}_over;"


class Leaf(msgspec.Struct, frozen=True, tag="leaf"):
    """A tensor that the kernel reads.

    Parameters
    ----------
    number
        Its index among the operands.
    dtype
        The element type.
    offset
        How many elements further its first one lies.
    selects
        Indices that select along further axes of it.
    filling
        The value where an index of a table is below 0; None if none is.
    """

    number: int
    dtype: DType
    offset: int = 0
    selects: tuple[Selection, ...] = ()
    filling: float | int | None = None


class Tabled(msgspec.Struct, frozen=True, tag="tabled"):
    """What the kernel reads of a table: its index among the tables."""

    number: int


class Selection(msgspec.Struct, frozen=True):
    """Indices that select along an axis: what is read of them, the axis' size, and its stride in elements."""

    indices: Leaf | Tabled
    size: int
    step: int


class Table(msgspec.Struct, frozen=True):
    """Indices that are known beforehand, in range or below 0, and their strides over all dims."""

    indices: tuple[int, ...]
    steps: tuple[int, ...]


class Scalar(msgspec.Struct, frozen=True, tag="scalar"):
    """A number passed with each run: its index among the plan's scalars."""

    number: int


class Constant(msgspec.Struct, frozen=True, tag="constant"):
    """A number."""

    value: int | float


class Earlier(msgspec.Struct, frozen=True, tag="earlier"):
    """The value of an expression before, by its index in `Elementwise.body`."""

    number: int


class Expression(msgspec.Struct, frozen=True, tag="expression"):
    """A pointwise mode applied to operands.

    Parameters
    ----------
    mode, operands
        As in `Pointwise`.
    parameters
        Its parameters, in the order of its row of the table.
    compute
        The type that it is computed in: float32, float64, int64 or uint64.
    dtype
        The type that the value is rounded to before it is used; None for the type that is computed in.
    """

    mode: PointwiseMode
    operands: tuple[Expression | Leaf | Scalar | Constant | Earlier, ...]
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


class Result(msgspec.Struct, frozen=True):
    """What a kernel stores in each element of one of its results, and the element type."""

    value: Expression | Leaf | Scalar | Constant | Earlier
    dtype: DType


class Elementwise(msgspec.Struct, frozen=True):
    """A kernel as data: what it computes, and over which elements.

    Parameters
    ----------
    results
        What it stores.
    body
        Expressions that are computed first, in this order. The results and later ones use their values.
    dims
        Dims to iterate over, slowest axis first.
    strides
        The results', then the operands' and the tables', in elements; 0 where an operand is broadcast.
    tables
        The indices of each table. The kernel has them.
    together
        How many neighbours in the last axis a thread computes. Every place in memory at which the axis begins
        is a multiple of it, of a tensor whose elements lie side by side there; and so is its size, unless it
        is the only axis.
    """

    results: tuple[Result, ...]
    body: tuple[Expression, ...]
    dims: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    tables: tuple[tuple[int, ...], ...] = ()
    together: int = 1

    @property
    def rest(self) -> bool:
        """Whether elements of the only axis remain that a thread of their own computes."""
        return self.dims[-1] % self.together > 0

    @property
    def unrolled(self) -> int:
        """How often a thread reads before it stores: so often that it has 16 bytes under way."""
        if len(self.body) > _FEW_STEPS or any(leaf.selects for leaf in self.leaves()):
            return 1
        least = min(result.dtype.itemsize for result in self.results)
        return max(1, _PACK_BYTES // (least * self.together))

    @property
    def wide(self) -> bool:
        """Whether offsets need 64 bits."""
        spans = [
            sum((size - 1) * abs(step) for size, step in zip(self.dims, steps, strict=True))
            for steps in self.strides
        ]
        for leaf in self.leaves():
            selected = sum((select.size - 1) * abs(select.step) for select in leaf.selects)
            spans[len(self.results) + leaf.number] += leaf.offset + selected
        return max(math.prod(self.dims), *spans) >= _SMALL

    @property
    def geometry(self) -> tuple[int, ...]:
        """The kernel's arguments behind the pointers: sizes, in neighbours, and strides."""
        *slow, last = self.dims
        sizes = (*slow, last // self.together)
        return (
            math.prod(sizes),
            *((last,) if self.rest else ()),
            *(number for size in sizes[1:] for number in (size, divisor(size))),
            *(step for steps in self.strides for step in steps),
            *(select.step for leaf in self.leaves() for select in leaf.selects),
            *(select.size for leaf in self.leaves() for select in leaf.selects if _is_read(select)),
        )

    def leaves(self) -> tuple[Leaf, ...]:
        """What it reads, by number."""
        found = {node.number: node for node in self._nodes() if isinstance(node, Leaf)}
        return tuple(found[number] for number in sorted(found))

    def operands(self) -> tuple[DType, ...]:
        """The element types of the operands, by number."""
        return tuple(leaf.dtype for leaf in self.leaves())

    def tensor(self, read: Leaf | Tabled) -> int:
        """The place of something that it reads among the strides."""
        first = len(self.strides) - len(self.tables) if isinstance(read, Tabled) else len(self.results)
        return first + read.number

    def selects_alike(self, leaf: Leaf) -> bool:
        """Whether neighbours in the last axis have the same indices, or none."""
        return not any(self.strides[self.tensor(select.indices)][-1] for select in leaf.selects)

    def scalars(self) -> tuple[int, ...]:
        """The indices of the plan's scalars that the kernel takes, in the kernel's own order."""
        return tuple(sorted({node.number for node in self._nodes() if isinstance(node, Scalar)}))

    def _nodes(self) -> Iterator[Value]:
        waiting: list[Value] = [*self.body, *(result.value for result in self.results)]
        while waiting:
            node = waiting.pop()
            yield node
            if isinstance(node, Expression):
                waiting += node.operands
            elif isinstance(node, Leaf):
                waiting += (select.indices for select in node.selects if isinstance(select.indices, Leaf))


def _is_read(select: Selection) -> bool:
    """Whether the indices are read of memory that others write, and so may be out of range."""
    return isinstance(select.indices, Leaf)


Value = Expression | Leaf | Scalar | Constant | Earlier
Known = Mapping[int, tuple[str, str]]
Axis = tuple[int, tuple[int, ...]]
"""A dim's size, and the stride of each of several tensors in it."""


class Computed(NamedTuple):
    """A packed tensor that a kernel computes from an operation's operands before the operation runs.

    `value`: elementwise, or an operation with names of operands, one of whose launchers is "kernel".
    `operands`: the names of what the value's leaves read, in the order of their numbers, or of its inputs.
    """

    value: Value | Operation[str]
    operands: tuple[str, ...]
    dims: tuple[int, ...]
    dtype: DType


def elementwise(
    value: Value, dtype: DType, dims: Sequence[int], strides: Sequence[Sequence[int]]
) -> Elementwise:
    """A kernel with one result. `strides` are the result's, then each operand's."""
    return fused((Result(value, dtype),), (), dims, strides)


def fused(
    results: Sequence[Result],
    body: Sequence[Expression],
    dims: Sequence[int],
    strides: Sequence[Sequence[int]],
    alignments: Sequence[int] = (),
    *,
    tables: Sequence[Table] = (),
) -> Elementwise:
    """A kernel over `dims`. `strides` and `alignments`, in bytes, are the results', then the operands'.

    Without alignments, a thread computes one element at a time.
    """
    strides = [*strides, *(table.steps for table in tables)]
    axes = merged(dims, strides) or [(1, (0,) * len(strides))]
    made = Elementwise(
        results=tuple(results),
        body=tuple(body),
        dims=tuple(size for size, _ in axes),
        strides=tuple(tuple(steps[i] for _, steps in axes) for i in range(len(strides))),
        tables=tuple(table.indices for table in tables),
    )
    return msgspec.structs.replace(made, together=_together(made, alignments))


def _together(kernel: Elementwise, alignments: Sequence[int]) -> int:
    """How many neighbours in the last axis can be read and written at once."""
    apart = [(result.dtype, True, ()) for result in kernel.results] + [
        (leaf.dtype, kernel.selects_alike(leaf), (leaf.offset, *(select.step for select in leaf.selects)))
        for leaf in kernel.leaves()
    ]
    beside = [
        (dtype.itemsize, (*further, *steps), alignment)
        for (dtype, alike, further), steps, alignment in zip(apart, kernel.strides, alignments, strict=False)
        if steps[-1] == 1 and alike
    ]
    if not beside or any(steps[-1] != 1 for steps in kernel.strides[: len(kernel.results)]):
        return 1
    most = min(_MOST_TOGETHER, _PACK_BYTES // min(size for size, _, _ in beside))

    def fits(count: int) -> bool:
        return (kernel.dims[-1] % count == 0 or len(kernel.dims) == 1) and all(
            alignment % min(_PACK_BYTES, count * size) == 0 and all(step % count == 0 for step in steps[:-1])
            for size, steps, alignment in beside
        )

    return next((count for count in (8, 4, 2) if count <= most and fits(count)), 1)


def copied(
    dtypes: tuple[DType, DType],
    dims: Sequence[int],
    strides: Sequence[Sequence[int]],
    alignments: Sequence[int],
) -> Elementwise:
    """A copy, perhaps converted. `dtypes`, `strides` and `alignments` are the result's, then the operand's.

    Bits are copied as words of up to 8 bytes.
    """
    to, of = dtypes
    axes = merged(dims, strides)
    if axes and of is to and set(axes[-1][1]) == {1}:
        *slow, (size, last) = axes
        apart = [size, *(step for _, steps in slow for step in steps)]
        words = (
            (nbytes // of.itemsize, word)
            for nbytes, word in reversed(WORDS.items())
            if nbytes > of.itemsize and all(alignment % nbytes == 0 for alignment in alignments)
        )
        fitting = (pair for pair in words if all(step % pair[0] == 0 for step in apart))
        count, word = next(fitting, (1, of))
        axes = [*((n, tuple(step // count for step in steps)) for n, steps in slow), (size // count, last)]
        of = to = word
        dims, strides = [n for n, _ in axes], [[steps[t] for _, steps in axes] for t in range(2)]
    return fused([Result(Leaf(0, of), to)], [], dims, strides, alignments)


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
        self._tables = [cupy.asarray(np.asarray(indices, np.int32)) for indices in description.tables]
        if self._tables:
            cupy.cuda.get_current_stream().synchronize()  # other streams read them, too
        self._geometry = description.geometry
        self._grid = (blocks(description),)
        self._number = cupy.float64
        self._scalars = description.scalars()

    def launch(self, pointers: Sequence[int], scalars: Sequence[float]) -> None:
        """Enqueue a run. `pointers`: the results', then each operand's; `scalars`: all of the plan's."""
        if not self._grid[0]:  # there are no elements, and CUDA refuses an empty grid
            return
        numbers = [self._number(scalars[place]) for place in self._scalars]
        self._function(self._grid, (THREADS,), (*pointers, *self._tables, *self._geometry, *numbers))


def blocks(description: Elementwise) -> int:
    """How many blocks of threads a kernel is launched with: none if there are no elements."""
    places = -(-description.geometry[0] // description.unrolled) + description.rest
    return min(-(-places // THREADS), _MOST_BLOCKS)


def source(description: Elementwise) -> str:
    """The kernel in CUDA C++."""
    return Source(description).text()


class Source:
    """The source of one kernel."""

    def __init__(self, kernel: Elementwise) -> None:
        self._kernel = kernel
        self._rank, self._together = len(kernel.dims), kernel.together
        self._stored = [result.dtype for result in kernel.results]
        self._read = kernel.leaves()

    def text(self) -> str:
        """The kernel alone."""
        packs = PACK if self._together > 1 or self._kernel.unrolled > 1 else ""
        placed = PLACED if any(_is_read(select) for leaf in self._read for select in leaf.selects) else ""
        return f"""{preamble()}{packs}{placed}{DIVISION}
typedef {self._index()} I;
extern "C" __global__ void elementwise({", ".join(self.arguments())}) {{
    const long long stride = (long long)gridDim.x * blockDim.x, last = count;
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    {self._loop()}
}}
"""

    def function(self, name: str) -> str:
        """A function of the device that does the kernel's work from a place to another, at so many steps."""
        arguments = [f"const long long {given}" for given in ("first", "stride", "last")] + self.arguments()
        return f"""
struct {name} {{
    typedef {self._index()} I;
    static __device__ void run({", ".join(arguments)}) {{
    {self._loop()}
    }}
}};
"""

    def arguments(self) -> list[str]:
        """The kernel's parameters in C."""
        rank = self._rank
        arguments = [f"{C_TYPES[dtype]}* out{i}" for i, dtype in enumerate(self._stored)]
        arguments += [f"const {C_TYPES[leaf.dtype]}* in{leaf.number}" for leaf in self._read]
        arguments += [f"const int* table{number}" for number in range(len(self._kernel.tables))]
        tensors = len(self._kernel.strides)
        arguments += ["long long count", *(["long long all"] if self._kernel.rest else [])]
        arguments += [f"long long {name}{axis}" for axis in range(1, rank) for name in ("d", "by")]
        arguments += [f"long long s{i}_{axis}" for i in range(tensors) for axis in range(rank)]
        selects = [(leaf, n, select) for leaf in self._read for n, select in enumerate(leaf.selects)]
        arguments += [f"long long step{leaf.number}_{n}" for leaf, n, _ in selects]
        arguments += [f"long long size{leaf.number}_{n}" for leaf, n, select in selects if _is_read(select)]
        return arguments + [f"double scalar{number}" for number in self._kernel.scalars()]

    def _index(self) -> str:
        return "long long" if self._kernel.wide else "int"

    def _number(self) -> str:
        """The type of a place's number: one of 32 bits does not overflow, since 2**31 are too many."""
        return "long long" if self._kernel.wide else "unsigned"

    def _loop(self) -> str:
        several = self._kernel.unrolled > 1
        return f"""{self._several() if several else self._each()}
    {self._of_the_rest() if self._kernel.rest else ""}"""

    def _each(self) -> str:
        number = self._number()
        return f"""#pragma unroll 1
    for ({number} i = ({number})first; i < ({number})last; i += ({number})stride) {{
        {self._body(self._together)}
    }}"""

    def _several(self) -> str:
        """The loop of a thread that reads several times before it stores."""
        count, number = self._kernel.unrolled, self._number()
        results = [(i, f"Pack<{C_TYPES[dtype]}, {self._together}>") for i, dtype in enumerate(self._stored)]
        kept = " ".join(f"{pack} r{i}s[{count}]; I at{i}s[{count}];" for i, pack in results)
        stored = " ".join(f"*({pack}*)&out{i}[at{i}s[u]] = r{i}s[u];" for i, pack in results)
        ends = " ".join(f"r{i}s[u] = r{i}; at{i}s[u] = {self._place(i)};" for i, _ in results)
        return f"""const {number} end = ({number})last, step = ({number})stride;
    #pragma unroll 1
    for ({number} begin = ({number})first; begin < end; begin += step * {count}) {{
        {kept}
        #pragma unroll
        for (int u = 0; u < {count}; ++u) {{
        const {number} i = min(begin + u * step, end - 1);
        {self._body(self._together, ends)}
        }}
        #pragma unroll
        for (int u = 0; u < {count}; ++u) if (begin + u * step < end) {{ {stored} }}
    }}"""

    def _of_the_rest(self) -> str:
        return f"""if (first == 0) for (long long i = count * {self._together}; i < all; ++i) {{
        {self._body(1)}
    }}"""

    def _body(self, together: int, ends: str = "") -> str:
        """The statements for so many neighbours, of the number `i`. `ends`: those that keep the results."""
        rank = self._rank
        places = [
            divided(f"i{axis}", "rest", f"d{axis}", f"by{axis}", together if axis == rank - 1 else 1)
            for axis in range(rank - 1, 0, -1)
        ]
        times = f" * {together}" if together > 1 and rank == 1 else ""
        places = ["I rest = (I)i;", *places, f"const I i0 = rest{times};"]
        before, inside, after = self._accesses(together, packed=bool(ends))
        block = "\n            ".join([*inside, *self._computed(together, packed=bool(ends))])
        if ends:
            after = [ends]
        if together > 1 or ends:
            loop = f"#pragma unroll\n        for (int v = 0; v < {together}; ++v)"
            block = f"{loop} {{\n            {block}\n        }}"
        return "\n        ".join([*places, *before, block, *after])

    def _accesses(self, together: int, *, packed: bool) -> tuple[list[str], list[str], list[str]]:
        """Statements before the neighbours are computed, for each of them, and behind."""
        before: list[str] = []
        inside: list[str] = []
        after: list[str] = []
        self._elements: list[str] = []
        """What is read of each operand."""
        for i, leaf in enumerate(self._read):
            tensor = self._kernel.tensor(leaf)
            step, alike = self._kernel.strides[tensor][-1], together > 1 and self._kernel.selects_alike(leaf)
            at = self._place(tensor) + (f" + {leaf.offset}" if leaf.offset else "")
            if leaf.selects:
                (before if alike else inside).extend(self._selected(leaf, together))
                at += f" + at{i}"
            place, filled = f"in{i}[{at}]", ""
            if leaf.filling is not None:
                value = _literal(leaf.filling, value_type(leaf.dtype))
                filled = f"({C_TYPES[leaf.dtype]}){store(leaf.dtype, value)}"
            if alike and step == 1:
                pack = f"Pack<{C_TYPES[leaf.dtype]}, {together}>"
                read = f"*(const {pack}*)&{place}"
                before.append(f"const {pack} p{i} = {f'outside{i} ? {pack}() : ' if filled else ''}{read};")
                place = f"p{i}.of[v]"
            elif together > 1 and step:
                place = f"in{i}[{at} + v * (I)s{tensor}_{self._rank - 1}]"
            if filled:
                place = f"(outside{i} ? {filled} : {place})"
            self._elements.append(place)
            to = before if alike and not step else inside
            to.append(f"const {value_type(leaf.dtype)} v{i} = {load(leaf.dtype, place)};")
        if together > 1 or packed:
            for i, dtype in enumerate(self._stored):
                pack = f"Pack<{C_TYPES[dtype]}, {together}>"
                before.append(f"{pack} r{i};")
                after.append(f"*({pack}*)&out{i}[{self._place(i)}] = r{i};")
        return before, inside, after

    def _computed(self, together: int, *, packed: bool) -> list[str]:
        """The statements that compute an element of each result."""
        steps: list[str] = []
        known: dict[int, tuple[str, str]] = {}
        for n, node in enumerate(self._kernel.body):
            known[n] = _step(node, steps, known), value_type(node.dtype or node.compute)
        for i, result in enumerate(self._kernel.results):
            value = result.value
            if isinstance(value, Leaf) and value.dtype is result.dtype:
                stored = self._elements[value.number]
            else:
                stored = store(result.dtype, formula(value, steps, known=known))
            target = f"r{i}.of[v]" if together > 1 or packed else f"out{i}[{self._place(i)}]"
            steps.append(f"{target} = {stored};")
        return steps

    def _selected(self, leaf: Leaf, together: int) -> list[str]:
        """Statements that define how many elements further the indices select, and if one is below 0."""
        statements, names = [], [f"index{leaf.number}_{n}" for n in range(len(leaf.selects))]
        for n, (name, select) in enumerate(zip(names, leaf.selects, strict=True)):
            index = f"(I)placed(v{select.indices.number}, size{leaf.number}_{n})"
            if not _is_read(select):
                tensor = self._kernel.tensor(select.indices)
                along = together > 1 and self._kernel.strides[tensor][-1]
                further = f" + v * (I)s{tensor}_{self._rank - 1}" if along else ""
                index = f"(I)table{select.indices.number}[{self._place(tensor)}{further}]"
            statements.append(f"const I {name} = {index};")
        further = " + ".join(f"{name} * (I)step{leaf.number}_{n}" for n, name in enumerate(names))
        statements.append(f"const I at{leaf.number} = {further};")
        if leaf.filling is not None:
            statements.append(f"const bool outside{leaf.number} = {' || '.join(f'{n} < 0' for n in names)};")
        return statements

    def _place(self, tensor: int) -> str:
        return " + ".join(f"i{axis} * (I)s{tensor}_{axis}" for axis in range(self._rank))


PACK = """
template <class E, int N> struct alignas(sizeof(E) * N < 16 ? sizeof(E) * N : 16) Pack { E of[N]; };
"""


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
    return PREAMBLE + functions()


def functions() -> str:
    """The functions that formulas call."""
    found: str = _pointwise().PREAMBLE
    return found


def _pointwise() -> Any:
    """The operations' module of formulas: late, because those import this one."""
    return importlib.import_module("cudnn_actor.engines.cuda.operations.pointwise")


def formula(node: Value, steps: list[str], wanted: str = "", known: Known = MappingProxyType({})) -> str:
    """A node's value in C, of the type `wanted` if one is given.

    Appends the statements that compute it to `steps`. `known`: name and C type of the values before.
    """
    match node:
        case Constant(value=number):
            return _literal(number, wanted or "double")
        case Leaf(number=number, dtype=dtype):
            name, found = f"v{number}", value_type(dtype)
        case Scalar(number=number):
            name, found = f"scalar{number}", "double"
        case Earlier(number=number):
            name, found = known[number]
        case Expression():
            name, found = _step(node, steps, known), value_type(node.dtype or node.compute)
    return name if wanted in ("", found) else f"(({wanted}){name})"


def _step(node: Expression, steps: list[str], known: Known) -> str:
    """The name of an expression's value, which the statements appended to `steps` compute."""
    function, in_c = FUNCTIONS[node.mode], _pointwise().IN_C[node.mode]
    kind, parameters = value_type(node.compute), node.parameters
    if not node.compute.is_floating:
        parameters = tuple(limited(parameters, unsigned=node.compute is DType.UINT64))
    given = {
        name: formula(value, steps, kind, known) for name, value in zip("abc", node.operands, strict=False)
    }
    given |= {
        name: _literal(value, kind) for name, value in zip(function.parameters, parameters, strict=True)
    }
    text = in_c.formula if node.compute.is_floating else in_c.whole or in_c.formula
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
    """A number in C, of a type; of long long it saturates, and of unsigned long long it is modulo 2**64."""
    if kind == "long long":
        (whole,) = limited((value,), unsigned=False)
        return f"({whole + 1}ll - 1)" if whole < 0 else f"{whole}ll"
    if kind == "unsigned long long":
        return f"{int(value) % (1 << 64)}ull"
    if math.isfinite(value):
        return f"(({kind}){float(value)!r})"
    bits = 0x7FFFFFFF if math.isnan(value) else 0x7F800000
    return f"({'-' if value < 0 else ''}({kind})__int_as_float({bits}))"
