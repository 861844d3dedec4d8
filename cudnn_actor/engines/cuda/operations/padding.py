"""Padding on CUDA: one kernel that reads each element of the result from its place in x.

Some neighbouring threads have a row of the result, and find out once where it lies in x.
Each of them reads up to four units of it, and then writes them. If the innermost axis is
not padded, a unit has up to 16 bytes. Else the place of each of its elements is found, the
elements are read one by one, and a unit has at most 4 bytes, so that neighbouring threads
read neighbours. A thread has the same columns of several rows, so it finds their places
once. Elements are moved as bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cudnn_actor.engines.cuda.kernels.axes import largest_pack
from cudnn_actor.engines.cuda.kernels.element_types import ACCESS_BYTES, C_TYPES, CONVERSIONS, PACK, store
from cudnn_actor.engines.cuda.kernels.index_code import indexing, is_wide, split_index, with_divisors
from cudnn_actor.engines.cuda.kernels.kernel import (
    BUSY_BLOCKS,
    MOST_BLOCKS,
    MOST_TURNS,
    THREADS,
    Launch,
    arguments_of,
    parameters_of,
    power_of_two,
)
from cudnn_actor.engines.cuda.kernels.walks import Walk
from cudnn_actor.engines.cuda.operations.implementation import implement, kernels
from cudnn_actor.protocol.operations import BorderPad, GraphTensor, Pad
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["describe_padding", "padding_launches"]

_WORD = 4
"""The most bytes of a unit whose elements are read one by one."""
_UNITS, _LEAST_BESIDE = 4, 8
"""The most units of a row that a thread has, and the fewest threads of a row, if it has as many units."""


class _Axis(NamedTuple):
    """An axis of the result, or several axes without padding as one.

    `size`, `step`: the result's size and stride. `of`, `from_step`: x's, in the order of the result.
    `before`: the number of elements before x's. `gap`: the distance of two of x's elements in the result.
    """

    size: int
    step: int
    of: int
    from_step: int
    before: int = 0
    gap: int = 1

    @property
    def is_padded(self) -> bool:
        return self.size != self.of or self.gap != 1


class _Padding(NamedTuple):
    """The description of the kernel.

    Parameters
    ----------
    axes
        The axes, the slowest first.
    start
        The offset of the first of x's elements, in the order of the result.
    together
        The elements of a unit.
    alike
        Whether a unit is read at once, and not element by element.
    wide
        Whether places need 64 bits.
    """

    axes: tuple[_Axis, ...]
    start: int
    together: int
    alike: bool
    wide: bool

    @property
    def units(self) -> int:
        """The units of a row."""
        return self.axes[-1].size // self.together

    @property
    def beside(self) -> int:
        """The number of threads that have a row, or a part of it."""
        wanted = max(_LEAST_BESIDE, -(-self.units // _UNITS))
        return min(THREADS, power_of_two(min(wanted, self.units)))

    @property
    def each(self) -> int:
        """The units of a row, or of its part, that a thread has."""
        return min(_UNITS, -(-self.units // self.beside))

    @property
    def parts(self) -> int:
        """The number of parts into which a row is divided."""
        return -(-self.units // (self.beside * self.each))

    @property
    def walk(self) -> Walk:
        """The walk over the rows: where each begins in the result."""
        axes = tuple((axis.size, (axis.step,)) for axis in self.axes[:-1])
        return Walk("i", ("y",), axes or ((1, (0,)),))

    @property
    def blocks(self) -> int:
        """The number of blocks: the same number for each part of the rows."""
        needed = -(-self.walk.total * self.beside // THREADS)
        few = max(-(-needed // MOST_TURNS), BUSY_BLOCKS // self.parts)
        most = MOST_BLOCKS // self.parts if self.alike else few
        return max(min(needed, most), 1) * self.parts

    @property
    def numbers(self) -> dict[str, int]:
        """The kernel's numbers, by the names of its parameters."""
        found = {**self.walk.numbers, **with_divisors({"parts": self.parts}), "start": self.start}
        for n, axis in enumerate(self.axes):
            found |= {f"{name}{n}": number for name, number in axis._asdict().items()}
        return found


def padding_launches(operation: Pad[int] | BorderPad[int], tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launch of a padding; none if the result has no elements."""
    x, y = tensors
    if 0 in y.dims:
        return []
    found = describe_padding(operation, x, y)
    value = float(operation.value) if isinstance(operation, Pad) else 0.0
    arguments = arguments_of(2, value, *found.numbers.values())
    return [Launch("pad", _source(operation, x.dtype, found), (found.blocks,), (THREADS,), arguments)]


def _source(operation: Pad[int] | BorderPad[int], dtype: DType, found: _Padding) -> str:
    """The kernel in CUDA C++. It depends on the mode, the dtype, the axes that are padded, and the layout."""
    fills = isinstance(operation, Pad)
    mode = "constant" if isinstance(operation, Pad) else str(operation.mode)
    return f"""{CONVERSIONS}{PACK}{indexing(wide=found.wide)}{_MAPS}
typedef {C_TYPES[dtype]} T;
typedef Pack<T, {found.together}> P;
constexpr int BESIDE = {found.beside}, UNITS = {found.each};
extern "C" __global__ void pad(
    const T* x, T* y, const double value, {parameters_of(found.numbers)}
) {{
    const T filling = (T){store(dtype, "value")};
    P filled;
    for (int v = 0; v < {found.together}; ++v) filled.of[v] = filling;
    const int rows = blockDim.x / BESIDE;
    I block = (I)blockIdx.x;
    {split_index("part", "block", "parts")}
    const I first = part * (BESIDE * UNITS) + (I)(threadIdx.x % BESIDE);
    {"" if found.alike else _columns(mode, found)}
    const long long step = gridDim.x / (unsigned)parts * (long long)rows;
    #pragma unroll 1
    for (long long row = block * (long long)rows + threadIdx.x / BESIDE; row < i_count; row += step) {{
        {found.walk.at("row")}
        {"bool" if fills else "constexpr bool"} inside = true;
        I base = (I)start;
        {_row(mode, found, fills=fills)}
        {_units(found, fills=fills)}
    }}
}}
"""


def _columns(mode: str, found: _Padding) -> str:
    """The statements that find the places in x of the columns of a thread's units."""
    return f"""I columns[UNITS][{found.together}];
    #pragma unroll
    for (int k = 0; k < UNITS; ++k)
        #pragma unroll
        for (int v = 0; v < {found.together}; ++v) {{
            const I i = (first + k * BESIDE) * {found.together} + v;
            columns[k][v] = {_source_index(mode, found, len(found.axes) - 1, "i")};
        }}"""


def _row(mode: str, found: _Padding, *, fills: bool) -> str:
    """The statements that find a row's offset in x, `base`, and whether it is `inside` x."""
    checked = "inside &= m >= 0; " if fills else ""
    return " ".join(
        f"{{ const I m = {_source_index(mode, found, n, f'i{n}')}; {checked}base += m * (I)from_step{n}; }}"
        for n in range(len(found.axes) - 1)
    )


def _units(found: _Padding, *, fills: bool) -> str:
    """The statements that read a thread's units of a row, and then write them."""
    last = len(found.axes) - 1
    read = f"""#pragma unroll
            for (int v = 0; v < {found.together}; ++v) {{
                const I m = columns[k][v];
                const bool read = there{" && inside && m >= 0" if fills else ""};
                pack.of[v] = read ? x[base + m * (I)from_step{last}] : filling;
            }}"""
    if found.alike:
        read = "if (there) pack = inside ? *(const P*)(x + (base + i)) : filled;"
    place = f"y_at + i * (I)step{last}" if found.axes[-1].step != 1 else "y_at + i"
    return f"""P packs[UNITS];
        #pragma unroll
        for (int k = 0; k < UNITS; ++k) {{
            const I i = (first + k * BESIDE) * {found.together};
            const bool there = i < (I)size{last};
            P& pack = packs[k];
            {read}
        }}
        #pragma unroll
        for (int k = 0; k < UNITS; ++k) {{
            const I i = (first + k * BESIDE) * {found.together};
            if (i < (I)size{last}) *(P*)(y + ({place})) = packs[k];
        }}"""


def _source_index(mode: str, found: _Padding, n: int, place: str) -> str:
    """The C expression of the index in x of a place along an axis."""
    axis = found.axes[n]
    if not axis.is_padded:
        return place
    return f"{_map(mode, axis)}<I>({place} - (I)before{n}, (I)of{n}, (I)gap{n})"


def _map(mode: str, axis: _Axis) -> str:
    """The name of the C function that returns an element's index in x."""
    if mode == "constant":
        return mode if axis.gap == 1 else "spaced"
    around = max(axis.before, axis.size - axis.before - axis.of)
    return mode if mode == "edge" or around >= axis.of else f"near_{mode}"


def describe_padding(operation: Pad[int] | BorderPad[int], x: GraphTensor, y: GraphTensor) -> _Padding:
    """The axes in the order of the result's memory; those without padding are one where they can be."""
    steps = operation.steps if isinstance(operation, Pad) else (1,) * len(x.dims)
    axes: list[_Axis] = []
    start = 0
    for n in sorted(range(len(x.dims)), key=lambda n: -y.strides[n]):
        if y.dims[n] == 1 == x.dims[n]:
            continue
        reverse = steps[n] < 0 < x.dims[n]
        start += (x.dims[n] - 1) * x.strides[n] if reverse else 0
        step = -x.strides[n] if reverse else x.strides[n]
        axis = _Axis(y.dims[n], y.strides[n], x.dims[n], step, operation.before[n], abs(steps[n]))
        outer = axes[-1] if axes else axis
        joined = outer.step == axis.size * axis.step and outer.from_step == axis.size * axis.from_step
        if axes and joined and not outer.is_padded and not axis.is_padded:
            size = outer.size * axis.size
            axes[-1] = axis._replace(size=size, of=size)
        else:
            axes.append(axis)
    axes = axes or [_Axis(1, 1, 1, 1)]
    last, apart = axes[-1], [axis.step for axis in axes[:-1]]
    alike = last.step == last.from_step == 1 and not last.is_padded
    if alike:
        apart += [start, *(axis.from_step for axis in axes[:-1])]
    alignment = math.gcd(x.alignment, y.alignment) if alike else y.alignment
    most = 0 if last.step != 1 else ACCESS_BYTES if alike else _WORD
    together = largest_pack(last.size, apart, alignment, y.dtype.itemsize, most)
    spans = sum((axis.of - 1) * abs(axis.from_step) for axis in axes), sum(a.size * a.step for a in axes)
    behind = THREADS * _UNITS * ACCESS_BYTES  # the last of a row's parts may be shorter
    mirrored = (2 * axis.of for axis in axes if axis.is_padded)  # what `near_reflect` and others compute
    wide = is_wide(max(math.prod(y.dims), *spans, *mirrored) + behind)
    return _Padding(tuple(axes), start, together, alike, wide)


_MAPS = """
// Each returns the index in x of an element, by its distance from x's first element; -1 for one that is
// filled.
#define MAP template <class I> __device__ __forceinline__ I
MAP constant(I i, I n, I) { return i < 0 || i >= n ? -1 : i; }
MAP spaced(I i, I n, I gap) { return i < 0 || i % gap || i / gap >= n ? -1 : i / gap; }
MAP edge(I i, I n, I) { return min(max(i, (I)0), n - 1); }
// For an x with at least as many elements as are before it, and behind it.
MAP near_wrap(I i, I n, I) { return i < 0 ? i + n : i < n ? i : i - n; }
MAP near_symmetric(I i, I n, I) { return i < 0 ? -1 - i : i < n ? i : 2 * n - 1 - i; }
MAP near_reflect(I i, I n, I) { return i < 0 ? -i : i < n ? i : 2 * n - 2 - i; }
// For a shorter x.
MAP wrap(I i, I n, I) {
    i %= n;
    return i < 0 ? i + n : i;
}
MAP symmetric(I i, I n, I) { return near_symmetric<I>(wrap<I>(i, 2 * n, 1), n, 1); }
MAP reflect(I i, I n, I) { return n == 1 ? 0 : near_reflect<I>(wrap<I>(i, 2 * n - 2, 1), n, 1); }
"""


implement(Pad, BorderPad, launchers=kernels(padding_launches), exact=True)
