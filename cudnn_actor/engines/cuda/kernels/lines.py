"""Lines: the groups of a tensor's elements that are reduced, normalised or scanned together, in CUDA C++.

A line has the elements along some dims, and there is a line for each place in the
other dims. A warp takes a short contiguous line, a block a longer one, and a block
takes up to 32 lines that lie side by side. Every thread combines its elements in
order, and then the threads' parts are combined in a fixed order: the result is the
same each time. Contiguous elements are read 16 bytes at a time. Dims and strides
are arguments, so few kernels serve many shapes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cudnn_actor.engines.cpu.rounding import integer_range
from cudnn_actor.engines.cuda.kernels.axes import Axis, extent, merge_dims
from cudnn_actor.engines.cuda.kernels.element_types import (
    ACCESS_BYTES,
    C_TYPES,
    CONVERSIONS,
    PACK,
    load,
    store,
    value_type,
)
from cudnn_actor.engines.cuda.kernels.index_code import block_loop, indexing, is_wide, offset_of, split_all
from cudnn_actor.engines.cuda.kernels.kernel import (
    MOST_BLOCKS,
    MOST_THREADS,
    MULTIPROCESSORS,
    THREADS,
    WARP,
    parameters_of,
    power_of_two,
)
from cudnn_actor.protocol.operations import GraphTensor
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Form", "Lines", "Threads", "beginning", "lines_of", "stored_value", "value_of"]

_LONG = 1 << 13
"""The fewest elements of a line that has larger blocks, if there are few lines."""
_FEW_LINES = 2 * MULTIPROCESSORS
_ENOUGH_BLOCKS, _LEAST_PACKS = 4 * MULTIPROCESSORS, 4
"""Lines are cut into parts if there are fewer blocks than this, four for each multiprocessor of an H200. A
part has at least this many packs for each thread."""
_PACKS_OF_A_WARP = 128
"""The most packs of a contiguous line that a warp takes."""


class Form(enum.Enum):
    """The threads that have a line: a warp, a block, or a column of a block."""

    WARP = "warp"
    BLOCK = "block"
    COLUMN = "column"
    """The threads of a block with the same x."""


class Lines(NamedTuple):
    """The lines of some tensors.

    Parameters
    ----------
    across, along
        The axes from line to line, and those of a line, the slowest first. A tensor without elements along a
        line has a stride of 0 there.
    form
        The threads that have a line.
    vector
        The number of elements that are read at a time.
    wide
        Whether offsets need 64 bits.
    """

    across: tuple[Axis, ...]
    along: tuple[Axis, ...]
    form: Form
    vector: int
    wide: bool

    @property
    def total(self) -> int:
        """The number of lines."""
        return math.prod(size for size, _ in self.across)

    @property
    def length(self) -> int:
        """The elements of a line."""
        return math.prod(size for size, _ in self.along)

    @property
    def packs(self) -> int:
        """The packs of a line."""
        return self.length // self.vector

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers that a kernel needs to know of the lines, by the names of its parameters."""
        axes = {f"c{n}": axis for n, axis in enumerate(self.across)}
        axes |= {f"e{n}": axis for n, axis in enumerate(self.along)}
        found = {"lines": self.total, "length": self.length}
        found |= {f"{name}_size": size for name, (size, _) in axes.items() if name not in ("c0", "e0")}
        steps = ((f"{name}_step", steps) for name, (_, steps) in axes.items())
        return found | {f"{name}{t}": step for name, of in steps for t, step in enumerate(of)}

    def base(self, tensors: Mapping[str, int]) -> str:
        """Statements that define `{name}_base`, the offset at which the line begins in each tensor.

        `tensors`: the tensors' numbers, by name.
        """
        return self._offsets(
            "c", self.across, "line", {f"{name}_base": ("0", t) for name, t in tensors.items()}
        )

    def at(self, tensors: Mapping[str, int]) -> str:
        """Statements that define `{name}_at`, the offset of element `j` of the line in each tensor."""
        return self._offsets("e", self.along, "j", {f"{n}_at": (f"{n}_base", t) for n, t in tensors.items()})

    @staticmethod
    def _offsets(letter: str, axes: Sequence[Axis], number: str, names: Mapping[str, tuple[str, int]]) -> str:
        """Statements that take a number apart into indices, and define an offset for each name from them."""
        rest, indices = f"{letter}_rest", [f"{letter}{n}" for n in range(len(axes))]
        steps = [f"I {rest} = (I){number};"]
        if axes:
            steps.append(split_all(rest, [(index, f"(I){index}_size") for index in reversed(indices)]))
        for name, (start, t) in names.items():
            offset = offset_of(indices, (f"(I){index}_step{t}" for index in indices), start)
            steps.append(f"const I {name} = {offset};")
        return " ".join(steps)

    def kernel(self, name: str, pointers: str, body: str, more: str = "", most: int = MOST_THREADS) -> str:
        """The C++ of a kernel that runs a body for each line.

        In the body, `line`, `there`, `lane` and `lanes` are defined. All threads of a block or warp run it,
        even if they have no line; then `there` is false. `more`: parameters behind those of the lines.
        `most`: see `threads`.
        """
        threads = {Form.WARP: THREADS, Form.COLUMN: most}.get(self.form, MOST_THREADS)
        start = f'extern "C" __global__ void __launch_bounds__({threads}) {name}'
        loop = _EACH_LINE[self.form].format(body=body)
        return f"{start}({pointers}, {parameters_of(self.numbers)}{more}) {{{loop}\n}}\n"

    def threads(self, parts: int = 1, most: int = MOST_THREADS) -> Threads:
        """The grid and the block of such a kernel. `most`: the most threads of a block of columns."""
        if self.form is Form.COLUMN:
            rows = min(most, power_of_two(self.length))
            columns = min(WARP, max(power_of_two(self.across[-1][0]), most // rows))
            return self.columns(columns, min(most // columns, rows), parts)
        if self.form is Form.WARP:
            return Threads((min(-(-self.total * WARP // THREADS), MOST_BLOCKS), parts), (THREADS,))
        many = self.length >= _LONG and self.total * parts < _FEW_LINES
        return Threads((min(self.total, MOST_BLOCKS), parts), (MOST_THREADS if many else THREADS,))

    def parts(self, most: int = MOST_THREADS) -> int:
        """The number of parts of each line, so that no multiprocessor idles. `most`: see `threads`."""
        if self.form is Form.WARP:
            return 1
        grid, block = self.threads(most=most)
        threads = block[1] if self.form is Form.COLUMN else THREADS
        return max(1, min(-(-_ENOUGH_BLOCKS // max(1, grid[0])), self.packs // (threads * _LEAST_PACKS)))

    def columns(self, columns: int, rows: int, parts: int = 1) -> Threads:
        """The grid and the block if a block has `columns` lines, and `rows` threads have a line together."""
        return Threads((min(-(-self.total // columns), MOST_BLOCKS), parts), (columns, rows))


class Threads(NamedTuple):
    """The blocks that a kernel is launched with, and the threads of each."""

    grid: tuple[int, ...]
    block: tuple[int, ...]


def lines_of(
    dims: Sequence[int],
    strides: Sequence[Sequence[int]],
    axes: Sequence[int],
    dtypes: Sequence[DType],
    *,
    vectors: Sequence[int],
) -> Lines:
    """Describe the lines along some axes of tensors; the first tensor's memory decides the form.

    `vectors`: the numbers of the tensors that are read or written along a line, several elements at a time if
    that is possible.
    """
    kept = [axis for axis in range(len(dims)) if axis not in axes]
    across, along = (
        tuple(merge_dims([dims[axis] for axis in some], [[of[axis] for axis in some] for of in strides]))
        for some in (kept, axes)
    )
    wide = is_wide(*(1 + extent(dims, steps) for steps in strides), math.prod(dims), sums=True)
    fastest = [min((steps[0] for _, steps in axes), default=math.inf) for axes in (across, along)]
    if fastest[0] < fastest[1]:
        return Lines(across, along, Form.COLUMN, 1, wide)
    vector = ACCESS_BYTES // max((dtypes[t].itemsize for t in vectors), default=ACCESS_BYTES)
    last = along[-1] if along else (1, (0,) * len(strides))
    whole = all(steps[t] % vector == 0 for _, steps in (*across, *along[:-1]) for t in vectors)
    if not whole or last[0] % vector or any(last[1][t] != 1 for t in vectors):
        vector = 1
    short = math.prod(size for size, _ in along) <= _PACKS_OF_A_WARP * vector
    return Lines(across, along, Form.WARP if short else Form.BLOCK, vector, wide)


def beginning(dtype: DType, *, wide: bool) -> str:
    """The C++ at the beginning of a source: the types T of sums and I of offsets, and common functions.

    `wide`: whether offsets need 64 bits.
    """
    return f"typedef {value_type(dtype)} T;\n{CONVERSIONS}{indexing(wide=wide)}{_COMMON}"


def value_of(tensor: GraphTensor, element: str) -> str:
    """The C expression of a stored element's value, as a T."""
    return f"(T)({load(tensor.dtype, element)})"


def stored_value(tensor: GraphTensor, value: str, *, exact: bool = False) -> str:
    """The C expression of a value's stored element. `exact`: the value is a 64-bit integer, and saturates."""
    dtype = tensor.dtype
    if not exact or dtype is DType.BOOL:
        return store(dtype, value)
    least, most = integer_range(dtype.numpy)
    return f"({C_TYPES[dtype]})limited({value}, {least + 1}ll - 1, {most}ull)"


_COMMON = f"""{PACK}
#define INFINITE ((T)__int_as_float(0x7f800000))
"""
_COMMON += """typedef unsigned long long Natural;
__device__ __forceinline__ long long limited(long long value, long long least, Natural most) {
    return value < least ? least : value > 0 && (Natural)value > most ? (long long)most : value;
}
__device__ __forceinline__ Natural limited(Natural value, long long, Natural most) {
    return value > most ? most : value;
}
__device__ __forceinline__ Natural magnitude(Natural value) { return value; }
__device__ __forceinline__ long long magnitude(long long value) {
    return value >= 0 ? value : value < -0x7fffffffffffffffll ? 0x7fffffffffffffffll : -value;
}
__device__ __forceinline__ float magnitude(float value) { return fabsf(value); }
__device__ __forceinline__ double magnitude(double value) { return fabs(value); }
__device__ __forceinline__ float sum(float a, float b) { return a + b; }
__device__ __forceinline__ double sum(double a, double b) { return a + b; }
__device__ __forceinline__ long long sum(long long a, long long b) {
    return (long long)((Natural)a + (Natural)b);  // wraps around
}
__device__ __forceinline__ Natural sum(Natural a, Natural b) { return a + b; }
__device__ __forceinline__ float product(float a, float b) { return a * b; }
__device__ __forceinline__ double product(double a, double b) { return a * b; }
__device__ __forceinline__ long long product(long long a, long long b) {
    return (long long)((Natural)a * (Natural)b);
}
__device__ __forceinline__ Natural product(Natural a, Natural b) { return a * b; }
"""
_EACH_LINE = {
    Form.WARP: f"""
    const int lane = threadIdx.x % 32, lanes = 32, warps = blockDim.x / 32;
    constexpr bool there = true;
    {block_loop("line", "lines", "(long long)warps", "threadIdx.x / 32")} {{{{
        {{body}}
    }}}}""",
    Form.BLOCK: f"""
    const int lane = threadIdx.x, lanes = blockDim.x;
    constexpr bool there = true;
    {block_loop("line", "lines")} {{{{
        {{body}}
    }}}}""",
    Form.COLUMN: f"""
    const int lane = threadIdx.y, lanes = blockDim.y;
    const long long columns = blockDim.x;
    {block_loop("first", "lines", "columns")} {{{{
        const long long line = first + threadIdx.x;
        const bool there = line < lines;
        {{body}}
    }}}}""",
}
