"""Copies of one or more tensors side by side to rows of a result, where vectors of 16 bytes do not fit.

They are for concatenations and slices with rows that are short, or do not begin at
multiples of 16 bytes. An element, here, is the longest word, of up to 8 bytes, that
divides all sizes, strides and alignments. A thread writes the same columns of many rows,
and finds out once where they come from. It writes units of up to 4 bytes, or of one
element if that is larger, and reads their elements one by one. Neighbouring threads
write neighbouring units: so all parts of a row are written at once, and no sector of 32
bytes twice. If the result's rows are no multiples of units, but lie one behind the
other, two or four of them count as one row. Elements are moved as bits. The source
depends on the size of an element, the elements of a unit, the parts, operands and axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from cudnn_actor.engines.cuda.kernels.axes import Axis, merge_axes, merge_dims
from cudnn_actor.engines.cuda.kernels.element_types import ACCESS_BYTES, PACK, WORD_TYPES
from cudnn_actor.engines.cuda.kernels.index_code import (
    THREAD,
    indexing,
    is_wide,
    offset_of,
    place_type,
    split_index,
    with_divisors,
)
from cudnn_actor.engines.cuda.kernels.kernel import THREADS, Launch, arguments_of, blocks_for, parameters_of
from cudnn_actor.engines.cuda.kernels.walks import Walk
from cudnn_actor.protocol.graphs.step_kinds import StepKind

__all__ = ["Rows", "Segment", "row_concatenation", "row_copy", "row_source"]

_UNIT = 4
"""The bytes of a unit of small elements. A thread reads units of 16 bytes in all before it stores any."""
_MOST_PARTS = 16
_LEAST_ROWS = 8
"""The fewest rows of a copy: with fewer, finding out where a column comes from takes most of the time."""


class Segment(msgspec.Struct, frozen=True):
    """A part of a row: its number of columns, their operand, and their offset from the row's start there."""

    size: int
    operand: int
    offset: int = 0


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """Copies to rows, as data.

    Parameters
    ----------
    itemsize
        Bytes of an element, which is a word that is copied, and not an element of the tensors' dtype.
    together
        The elements of a unit. Every row of the result begins and ends at a multiple of it.
    parts
        The parts of a row, side by side.
    axes
        The axes of the rows, slowest first: the size, and the strides of the result and of each operand.
    """

    itemsize: int
    together: int
    parts: tuple[Segment, ...]
    axes: tuple[Axis, ...]

    @property
    def walk(self) -> Walk:
        """The walk over the rows: where each begins in the result, y, and in each operand."""
        return Walk("i", ("y", *(f"x{n}" for n in range(self._tensors - 1))), self.axes)

    @property
    def rows(self) -> int:
        """Rows of the result."""
        return self.walk.total

    @property
    def units(self) -> int:
        """Units of a row."""
        return sum(part.size for part in self.parts) // self.together

    @property
    def reads_at_once(self) -> int:
        """The number of units that a thread reads before it stores them."""
        return max(1, ACCESS_BYTES // (self.itemsize * self.together))

    @property
    def row_step(self) -> int:
        """The number of rows that all threads together copy at a time: the stride of their loop, in rows."""
        blocks = blocks_for(-(-self.rows * self.units // (THREADS * self.reads_at_once)))
        return max(1, min(blocks * THREADS // self.units, self.rows))

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return -(-self.row_step * self.units // THREADS)

    @property
    def wide(self) -> bool:
        """Whether places need 64 bits."""
        behind = max(part.size + abs(part.offset) for part in self.parts) + self.units * self.together
        return is_wide(max(self.rows * self.units, self.walk.span) + behind)

    @property
    def numbers(self) -> dict[str, int]:
        """The kernel's numbers, by the names of its parameters."""
        starts = [0, *itertools.accumulate(part.size for part in self.parts)]
        found = {**self.walk.numbers, "row_step": self.row_step}
        found |= with_divisors({"units": self.units})
        found |= {f"from{n}": part.offset - starts[n] for n, part in enumerate(self.parts)}
        return found | {f"start{n}": starts[n] for n in range(1, len(self.parts))}

    # `Kernel`. Its tensors are its result, then its operands.

    name = "rows"
    is_empty = False

    @property
    def title(self) -> str:
        """See `Kernel.title`."""
        return (StepKind.COPIES if self._tensors > 2 else StepKind.COPY).step_name()

    @property
    def reads(self) -> range:
        """See `Kernel.reads`."""
        return range(1, self._tensors)

    def launches(self) -> tuple[Launch, ...]:
        """The kernel's only launch."""
        arguments = arguments_of(self._tensors, *self.numbers.values())
        return (Launch("rows", row_source(self), (self.blocks,), (THREADS,), arguments),)

    @property
    def _tensors(self) -> int:
        return len(self.axes[0][1])


def row_copy(
    dims: Sequence[int], strides: Sequence[Sequence[int]], alignments: Sequence[int], itemsize: int
) -> Rows | None:
    """Describe a copy as a row kernel; None if the innermost axis is not contiguous in both tensors.

    The parameters have the result's strides and alignment, then the operand's.
    """
    axes = merge_dims(dims, strides)
    if not axes or axes[-1][1] != (1, 1):
        return None
    *slow, (size, _) = axes
    return _rows([size], slow, alignments, itemsize)


def row_concatenation(
    axis: int,
    result: Sequence[int],
    operands: Sequence[tuple[Sequence[int], Sequence[int]]],
    alignments: Sequence[int],
    itemsize: int,
) -> Rows | None:
    """Describe a concatenation as a row kernel; None if the operands are no parts of the result's rows.

    `result`: the result's strides. `operands`: dims and strides of each; none is empty. `alignments`: the
    result's, then the operands'.
    """
    if not operands:
        return None
    dims, _ = operands[0]
    order = [n for n in sorted(range(len(dims)), key=lambda n: -result[n]) if n != axis and dims[n] != 1]
    inside = [n for n in order if result[n] < result[axis]]
    across = math.prod(dims[n] for n in inside)
    if result[axis] != across:
        return None
    for of, steps in operands:
        alike = [n for n in (*inside, axis) if of[n] != 1]
        if any(steps[n] != result[n] for n in alike):
            return None
    slow = [(dims[n], (result[n], *(steps[n] for _, steps in operands))) for n in order if n not in inside]
    return _rows([of[axis] * across for of, _ in operands], merge_axes(slow), alignments, itemsize)


def _rows(
    sizes: Sequence[int], axes: Sequence[Axis], alignments: Sequence[int], itemsize: int
) -> Rows | None:
    """Describe rows with parts of these sizes; None if they are few, or if vectors of 16 bytes fit."""
    numbers = [*sizes, *(step for _, steps in axes for step in steps)]
    word = math.gcd(ACCESS_BYTES, *alignments, *(number * itemsize for number in numbers))
    if word == ACCESS_BYTES or not any(sizes) or math.prod(size for size, _ in axes) < _LEAST_ROWS:
        return None
    count = word // itemsize
    parts = [Segment(size // count, number) for number, size in enumerate(sizes)]
    slow = [(size, tuple(step // count for step in steps)) for size, steps in axes]
    for together in (4, 2, 1):
        if together * word <= max(_UNIT, word) and alignments[0] % (together * word) == 0:
            found = _in_units(word, together, parts, slow)
            if found is not None:
                return found
    return None


def _in_units(itemsize: int, together: int, parts: Sequence[Segment], axes: Sequence[Axis]) -> Rows | None:
    """Describe the rows in units of `together` elements; None if they cannot be made multiples of units.

    If one row alone is no multiple, neighbouring rows are joined.
    """
    columns = sum(part.size for part in parts)
    count = together // math.gcd(together, columns)
    *slow, (size, (step, *steps)) = axes
    if count > 1 and (step != columns or size % count):
        return None
    several = (size // count, (step * count, *(of * count for of in steps)))
    made = [
        Segment(part.size, part.operand, row * steps[part.operand]) for row in range(count) for part in parts
    ]
    aligned = all(of[0] % together == 0 for _, of in (*slow, several))
    if not aligned or len(made) > _MOST_PARTS:
        return None
    return Rows(itemsize, together, tuple(made), (*slow, several))


def row_source(description: Rows) -> str:
    """The kernel in CUDA C++."""
    walk, axes = description.walk, range(len(description.axes))
    _, *operands = walk.names
    parameters = ", ".join(["E* y", *(f"const E* {operand}" for operand in operands)])
    parameters += ", " + parameters_of(description.numbers)
    columns = [
        f"of[v] = x{part.operand}; first[v] = column + (I)from{n};"
        + "".join(f" steps[v][{axis}] = (I)i{axis}_x{part.operand};" for axis in axes)
        for n, part in enumerate(description.parts)
    ]
    columns[1:] = [f"if (column >= (I)start{n}) {{ {text} }}" for n, text in enumerate(columns[1:], 1)]
    found = "\n        ".join(columns)
    read = offset_of((f"i{axis}" for axis in axes), (f"steps[v][{axis}]" for axis in axes))
    number = place_type(wide=description.wide)
    element = WORD_TYPES[description.itemsize]
    return f"""{PACK}{indexing(wide=description.wide)}
typedef {element} E;
constexpr int TOGETHER = {description.together}, COUNT = {description.reads_at_once};
typedef Pack<E, TOGETHER> Unit;
extern "C" __global__ void __launch_bounds__({THREADS}) rows({parameters}) {{
    I row = (I)({THREAD});
    {split_index("unit", "row", "units")}
    if (row >= (I)row_step) return;
    const E* of[TOGETHER];
    I first[TOGETHER], steps[TOGETHER][{len(axes)}];
    #pragma unroll
    for (int v = 0; v < TOGETHER; ++v) {{
        const I column = unit * TOGETHER + v;
        {found}
    }}
    const {number} last = ({number})i_count, step = ({number})row_step;
    #pragma unroll 1
    for ({number} begin = ({number})row; begin < last; begin += step * COUNT) {{
        Unit read[COUNT];
        I at[COUNT];
        #pragma unroll
        for (int u = 0; u < COUNT; ++u) {{
            {walk.split("min(begin + u * step, last - 1)")}
            at[u] = unit * TOGETHER + {walk.offset("y")};
            #pragma unroll
            for (int v = 0; v < TOGETHER; ++v) read[u].of[v] = of[v][first[v] + {read}];
        }}
        #pragma unroll
        for (int u = 0; u < COUNT; ++u) if (begin + u * step < last) *(Unit*)(y + at[u]) = read[u];
    }}
}}
"""
