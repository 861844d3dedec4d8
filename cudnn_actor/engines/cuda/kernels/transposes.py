"""Copies of tensors whose neighbours in the result are no neighbours in the operand: transposes and the like.

A block moves tiles through shared memory, so that it reads along the operand's
fastest axes and writes along the result's, up to 16 bytes at a time. Where rows
begin at addresses that are no multiples of 4, words of 32 bits are still read and
written whole: an element keeps its place within a word in shared memory, and only
the elements at the ends of a column are written one by one. A thread reads its part
of a tile before it stores any of it. The tile's rows in shared memory have an odd
number of words, and the lanes of a warp are spread over rows, so that few lanes need
the same bank. Elements are moved as bits. The source depends on an element's size,
on the tile's shape, and on how many elements are read and written at once.

Matrices that fill tiles, but whose rows can be read or written by no more than a word
at once, are moved by `skewed_tiles`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from cudnn_actor.engines.cuda.kernels.axes import Axis, largest_pack, merge_dims
from cudnn_actor.engines.cuda.kernels.element_types import ACCESS_BYTES, PACK, WORD_TYPES
from cudnn_actor.engines.cuda.kernels.index_code import (
    block_loop,
    index_type,
    indexing,
    is_wide,
    split_index,
    with_divisors,
)
from cudnn_actor.engines.cuda.kernels.kernel import (
    MOST_BLOCKS,
    THREADS,
    WARP,
    Launch,
    arguments_of,
    parameters_of,
    power_of_two,
)
from cudnn_actor.engines.cuda.kernels.skewed_tiles import COPY, Skewed, describe_skewed
from cudnn_actor.protocol.graphs.step_kinds import StepKind

__all__ = ["Tiled", "describe_tiled", "tiled_source"]

_WARPS = THREADS // WARP
_WORD = 4
_LEAST = 16
"""The fewest elements along both axes for which a tile is worth it, even if they do not fill it."""


class Tiled(msgspec.Struct, frozen=True, tag="tiled"):
    """A copy by tiles, as data.

    Parameters
    ----------
    itemsize
        Bytes of an element.
    rows, columns
        The sizes of the two axes that are cut into tiles. Along the rows, the result's elements lie side by
        side; along the columns, the operand's do.
    row_step, column_step
        The operand's stride from row to row, and the result's from column to column, in elements.
    batch
        The other axes, slowest first: the size, the result's stride, the operand's stride.
    read, written
        The number of neighbours that are read, and written, at once.
    rows_within, columns_within
        Size and stride of groups of neighbouring rows, or columns, if there are groups; else (1, 0).
        `row_step` and `column_step` are then the strides from group to group.
    """

    itemsize: int
    rows: int
    columns: int
    row_step: int
    column_step: int
    batch: tuple[tuple[int, int, int], ...]
    read: int
    written: int
    rows_within: tuple[int, int] = (1, 0)
    columns_within: tuple[int, int] = (1, 0)

    @property
    def word(self) -> int:
        """The elements of a word of 32 bits; 1 if an element is larger."""
        return max(_WORD // self.itemsize, 1)

    @property
    def shifts_words(self) -> tuple[bool, bool]:
        """Whether words that are read, and words that are written, may contain elements of another row."""
        return self.read < self.word, self.written < self.word

    @property
    def skewed_tiles(self) -> Skewed | None:
        """The tiles, if they are skewed; else None."""
        together = min(self.read, self.written)
        if together > self.word or self.rows_within[0] > 1 or self.columns_within[0] > 1:
            return None
        return describe_skewed(self.itemsize, self.rows, self.columns, self.row_step)

    @property
    def tile(self) -> tuple[int, int]:
        """The rows and columns of a tile: about as many of both, if the matrix has as many."""
        if self.skewed_tiles is not None:
            return self.skewed_tiles.rows, self.skewed_tiles.columns
        side = _side(self.itemsize) if not any(self.shifts_words) else 128
        narrow = min(self.rows, self.columns) < side
        count = side * {1: side, 2: 128 if narrow else 64, 4: 64, 8: 32}[self.itemsize]
        few, least = max(self.word, 2), self.word * (2 if self.shifts_words[0] else 1)
        columns = max(least, 2, min(side, power_of_two(self.columns)))
        if self.itemsize == 2 and self.shifts_words[0] and columns == least:
            count //= 2  # each row takes a word more, and all rows together would take too much shared memory
        rows = max(few, min(count // columns, power_of_two(self.rows)))
        if columns == side:
            columns = min(count // rows, power_of_two(self.columns))
        # Each thread reads and writes at least once.
        rows = max(rows, THREADS * ACCESS_BYTES // self.itemsize // columns)
        return rows, columns

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        return math.prod(self.counts) * math.prod(size for size, *_ in self.batch)

    @property
    def counts(self) -> tuple[int, int]:
        """Tiles along the columns and along the rows."""
        rows, columns = self.tile
        down = (
            -(-self.rows // rows) if self.skewed_tiles is None else self.skewed_tiles.blocks_along(self.rows)
        )
        return -(-self.columns // columns), down

    @property
    def wide(self) -> bool:
        """Whether places need 64 bits, also those of a tile's elements behind the matrix' end."""
        rows, columns = self.tile
        behind = rows if self.skewed_tiles is None else self.skewed_tiles.rows_behind
        read = (self.rows + behind) * abs(self.row_step) + self.columns + columns
        written = (self.columns + columns) * abs(self.column_step) + self.rows + rows
        read += math.prod(map(abs, self.rows_within)) + sum(size * abs(of) for size, _, of in self.batch)
        written += math.prod(map(abs, self.columns_within)) + sum(
            size * abs(to) for size, to, _ in self.batch
        )
        return is_wide(max(read, written, self.tiles) + ACCESS_BYTES)

    @property
    def lanes(self) -> tuple[int, int]:
        """The number of a warp's lanes along a row that is read, and along a column that is written."""
        rows, columns = self.tile
        read = WARP * _WORD // (self.read * self.itemsize)
        written = (WARP if self.itemsize <= _WORD else WARP // 2) // max(
            self.written, 1 + self.shifts_words[1]
        )
        return (
            min(max(min(read, WARP), WARP // rows), columns // self.read),
            min(max(written, WARP // columns), rows // max(self.written, self.word)),
        )

    @property
    def pitch(self) -> int:
        """Elements from row to row of the tile in shared memory: an odd number of words."""
        words = self.tile[1] * self.itemsize // _WORD
        each = max(self.itemsize // _WORD, 1)
        words = words // each + (1 if words // each % 2 == 0 else 2 * self.shifts_words[0])
        return words * self.word

    @property
    def skew(self) -> int:
        """Elements by which each group of 32 rows is moved, if a warp writes from several of them; else 0."""
        columns = self.tile[1]
        return columns if columns < max(self.written, self.word) else 0

    @property
    def shared_elements(self) -> int:
        """Elements that the tile takes in shared memory."""
        if self.skewed_tiles is not None:
            return self.skewed_tiles.shared_elements
        rows, _ = self.tile
        return rows * self.pitch + (rows // WARP + 1) * self.skew

    @property
    def resident(self) -> int:
        """The number of blocks that are to run on a multiprocessor at once. There are no registers for more.

        With fewer blocks, copies of bytes were measured slower, as a thread has more to do between reads and
        writes.
        """
        if self.skewed_tiles is not None:
            return self.skewed_tiles.resident
        return 3 if any(self.shifts_words) else {1: 6, 2: 4, 4: 4, 8: 3}[self.itemsize]

    @property
    def numbers(self) -> dict[str, int]:
        """The kernel's numbers, by the names of its parameters."""
        across, down = self.counts
        sizes = {"across": across, "down": down}
        sizes |= {"rows_within": self.rows_within[0], "columns_within": self.columns_within[0]}
        found = {"tiles": self.tiles, "rows": self.rows, "columns": self.columns}
        found |= {"row_step": self.row_step, "column_step": self.column_step}
        found |= {"rows_within_step": self.rows_within[1], "columns_within_step": self.columns_within[1]}
        for n, (size, to, of) in enumerate(self.batch):
            sizes[f"b{n}"] = size
            found |= {f"to{n}": to, f"of{n}": of}
        return found | with_divisors(sizes)

    # `Kernel`. Its tensors are its result and its operand.

    name = "tiles"
    title = StepKind.COPY.step_name()
    is_empty = False

    @property
    def reads(self) -> range:
        """See `Kernel.reads`."""
        return range(1, 2)

    def launches(self) -> tuple[Launch, ...]:
        """The kernel's only launch."""
        grid = (min(self.tiles, MOST_BLOCKS),)
        arguments = arguments_of(2, *self.numbers.values())
        return (Launch("tiled", tiled_source(self), grid, (THREADS,), arguments),)


def _side(itemsize: int) -> int:
    """The most elements of a square tile along an axis."""
    return 128 if itemsize == 1 else 64


def describe_tiled(
    dims: Sequence[int], strides: Sequence[Sequence[int]], alignments: Sequence[int], itemsize: int
) -> Tiled | None:
    """Describe a copy by tiles; None if there is no need for tiles.

    The parameters have the result's strides and alignment, then the operand's.
    """
    axes = merge_dims(dims, strides)
    if 0 in dims or not axes or axes[-1][1][0] != 1 or axes[-1][1][1] == 1:
        return None
    fastest = next((axis for axis in axes if axis[1][1] == 1), None)
    if fastest is None or (axes[-1][1][1] == 0 and axes[-1][0] >= _side(itemsize)):
        return None  # there are no neighbours in the operand, or one of its elements is many of the result
    rows, columns = [axes.pop()], [fastest]
    axes.remove(fastest)
    # If an axis does not fill a tile, it is taken together with the axis whose elements lie behind its own.
    side = _side(itemsize)
    groups = ((1, columns, rows), (0, rows, columns))
    for place, group, other in sorted(groups, key=lambda each: each[1][0][0]):
        behind = next((axis for axis in axes if axis[1][place] == group[0][0]), None)
        if behind is not None and group[0][0] < side * side // min(_count(other), side):
            group.insert(0, behind)
            axes.remove(behind)
    (row_step, rows_within), (column_step, columns_within) = _steps(rows, 1), _steps(columns, 0)
    counts = _count(rows), _count(columns)
    to, of = ([axis[1][place] for axis in (*axes, *group)] for place, group in ((0, columns), (1, rows)))
    found = Tiled(
        itemsize=itemsize,
        rows=counts[0],
        columns=counts[1],
        row_step=row_step,
        column_step=column_step,
        batch=tuple((size, to, of) for size, (to, of) in axes) or ((1, 0, 0),),  # one source for all batches
        read=largest_pack(counts[1], of, alignments[1], itemsize),
        written=largest_pack(counts[0], to, alignments[0], itemsize),
        rows_within=rows_within,
        columns_within=columns_within,
    )
    tile = found.tile
    filled = math.prod(map(min, counts, tile)) * 4 >= math.prod(tile)
    return found if filled or min(counts) >= _LEAST else None


def _count(axes: Sequence[Axis]) -> int:
    return math.prod(size for size, _ in axes)


def _steps(group: Sequence[Axis], tensor: int) -> tuple[int, tuple[int, int]]:
    """The stride of a group's slower axis in a tensor, and the size and stride of its faster axis.

    A group of one axis has that axis' stride, and (1, 0).
    """
    *slow, (size, steps) = group
    return (slow[0][1][tensor], (size, steps[tensor])) if slow else (steps[tensor], (1, 0))


def tiled_source(description: Tiled) -> str:
    """The kernel in CUDA C++."""
    size = description.itemsize
    tile_rows, tile_columns = description.tile
    places = [
        f"{{ {split_index('at', 'rest', f'b{n}')} x += at * (I)of{n}; z += at * (I)to{n}; }}"
        for n in reversed(range(len(description.batch)))
    ]
    row = _place("i", "rows_within", "row_step", description.rows_within)
    column = _place("i", "columns_within", "column_step", description.columns_within)
    tiles = description.skewed_tiles
    return f"""{PACK}{indexing(wide=description.wide)}{"" if tiles is None else COPY}
typedef {WORD_TYPES[size]} E;
typedef unsigned {index_type(wide=description.wide)} U;
constexpr int ROWS = {tile_rows}, COLUMNS = {tile_columns}, WORD = {description.word};
// As numbers: the compiler keeps each element of a struct of several small ones in a register of its own.
typedef {WORD_TYPES[max(size, _WORD)]} Bits;
extern "C" __global__ void __launch_bounds__({THREADS}, {description.resident}) tiled(
    E* y, const E* from, {parameters_of(description.numbers)}
) {{
    alignas({ACCESS_BYTES}) __shared__ Bits words[{-(-description.shared_elements // description.word)}];
    E* const tile = (E*)words;
    const unsigned thread = threadIdx.x, warp = thread / {WARP}, lane = thread % {WARP};
    // Where a row begins in the operand, without `x`, and a column in the result, without `z`.
    const auto x_of = [&](I i) {{ return {row}; }};
    const auto z_of = [&](I i) {{ return {column}; }};
    const unsigned from_at = (unsigned)((unsigned long long)from / {size});
    const unsigned y_at = (unsigned)((unsigned long long)y / {size});
    {block_loop("t", "tiles")} {{
        I rest = (I)t;
        {split_index("tile_column", "rest", "across")}
        {split_index("tile_row", "rest", "down")}
        const I row = tile_row * ROWS, column = tile_column * COLUMNS;
        I x = column, z = row;
        {" ".join(places)}
        const int below = (int)min((I)rows - row, (I)ROWS);
        const int beside = (int)min((I)columns - column, (I)COLUMNS);
        {_tile_body(description) if tiles is None else tiles.body()}
        __syncthreads();
    }}
}}
"""


def _place(number: str, within: str, step: str, of: tuple[int, int]) -> str:
    """The C expression of where a row or column begins."""
    if of[0] == 1:
        return f"{number} * (I){step}"
    group = f"over({number}, {within}, {within}_by)"
    return f"{group} * (I){step} + ({number} - {group} * (I){within}) * (I){within}_step"


def _tile_body(description: Tiled) -> str:
    """The C++ that moves a tile through shared memory, if it is not skewed."""
    skew = f" + (int)((unsigned)r / {WARP}) * {description.skew}" if description.skew else ""
    read_shifted, written_shifted = description.shifts_words
    shift = " + (int)((from_at + (unsigned)(x + x_of(row + r))) & (WORD - 1))" if read_shifted else ""
    return f"""const auto stored = [&](int r, int c) {{ return r * {description.pitch}{skew} + c; }};
        const auto at = [&](int r, int c) {{ return stored(r, c){shift}; }};
        {_shifted_reads(description) if read_shifted else _reads(description)}
        __syncthreads();
        {_shifted_writes(description) if written_shifted else _writes(description)}"""


def _lane_places(lanes: int, beside: int, each: int) -> tuple[str, str]:
    """The C expressions of where step `s` of a warp is in a tile, down and across, for each of its lanes.

    `lanes`: the lanes that lie side by side; the others lie below. `beside`: the steps that lie side by side.
    `each`: the elements across that a lane has. A tile that is written column by column has both exchanged.
    """
    down = f"s / {beside} * {WARP // lanes} + lane / {lanes}"
    return down, f"(s % {beside} * {lanes} + lane % {lanes}) * {each}"


def _reads(description: Tiled) -> str:
    """The C++ that reads a tile, up to 16 bytes at a time: first all reads of a thread, then its stores."""
    rows, columns = description.tile
    lanes, read = description.lanes[0], description.read
    down, across = _lane_places(lanes, columns // (lanes * read), read)
    words = read // description.word
    return f"""struct alignas({read * description.itemsize}) Read {{ Bits of[{words}]; }};
        constexpr int READS = {rows * columns // (THREADS * read)};
        Read packs[READS];
        const auto reads = [&](int k, auto use) {{
            const unsigned s = warp + k * {_WARPS};
            const unsigned r = {down};
            use((int)r, (int)({across}));
        }};
        #pragma unroll
        for (int k = 0; k < READS; ++k) reads(k, [&](int r, int c) {{
            if (r < below && c < beside) packs[k] = *(const Read*)(from + (x + x_of(row + r) + c));
        }});
        #pragma unroll
        for (int k = 0; k < READS; ++k) reads(k, [&](int r, int c) {{
            #pragma unroll
            for (int v = 0; v < {words}; ++v) words[stored(r, c) / WORD + v] = packs[k].of[v];
        }});"""


def _shifted_reads(description: Tiled) -> str:
    """The C++ that reads all words with elements of the tile's rows."""
    rows, columns = description.tile
    beside = columns // description.word
    full = rows * beside // THREADS
    return f"""constexpr int READS = {full + -(-rows // THREADS)};
        Bits packs[READS];
        // First the words of each row, and then the word behind each row.
        const auto reads = [&](int k, auto use) {{
            const unsigned p = thread + (k < {full} ? k : k - {full}) * {THREADS};
            if (k < {full}) use((int)(p / {beside}), (int)(p % {beside}) * WORD);
            else use((int)p, COLUMNS);
        }};
        #pragma unroll
        for (int k = 0; k < READS; ++k) reads(k, [&](int r, int c) {{
            const I place = x + x_of(row + r);
            const int before = (int)((from_at + (unsigned)place) & (WORD - 1));
            if (r < below && c - before < beside) packs[k] = *(const Bits*)(from + (place - before + c));
        }});
        #pragma unroll
        for (int k = 0; k < READS; ++k) reads(k, [&](int r, int c) {{
            if (r < ROWS) words[stored(r, c) / WORD] = packs[k];
        }});"""


def _writes(description: Tiled) -> str:
    """The C++ that writes a tile, up to 16 bytes at a time."""
    rows, columns = description.tile
    lanes, written = description.lanes[1], description.written
    across, down = _lane_places(lanes, rows // (lanes * written), written)
    return f"""typedef Pack<E, {written}> Written;
        #pragma unroll
        for (int k = 0; k < {rows * columns // (THREADS * written)}; ++k) {{
            const unsigned s = warp + k * {_WARPS};
            const int r = (int)({down}), c = (int)({across});
            Written pack;
            #pragma unroll
            for (int v = 0; v < {written}; ++v) pack.of[v] = tile[at(r + v, c)];
            if (r < below && c < beside) *(Written*)(y + (z + z_of(column + c) + r)) = pack;
        }}"""


def _shifted_writes(description: Tiled) -> str:
    """The C++ that writes the whole words of each column, and then the elements at its ends."""
    rows, columns = description.tile
    lanes, word = description.lanes[1], description.word
    across, down = _lane_places(lanes, rows // (lanes * word), word)
    return f"""const auto start = [&](int c) {{ return z + z_of(column + c); }};
        const auto head = [&](I place) {{ return (int)(-(y_at + (unsigned)place) & (WORD - 1)); }};
        #pragma unroll 4
        for (int k = 0; k < {rows * columns // (THREADS * word)}; ++k) {{
            const unsigned s = warp + k * {_WARPS};
            const int c = (int)({across});
            const I place = start(c);
            const int r = (int)({down}) + head(place);
            if (c < beside && r + WORD <= below) {{
                Pack<E, WORD> pack;
                #pragma unroll
                for (int v = 0; v < WORD; ++v) pack.of[v] = tile[at(r + v, c)];
                *(Pack<E, WORD>*)(y + (place + r)) = pack;
            }}
        }}
        for (int k = (int)thread; k < COLUMNS * 2 * WORD; k += {THREADS}) {{
            const int c = k / (2 * WORD), v = k % (2 * WORD);
            const I place = start(c);
            const int before = head(place), behind = before + (below - before) / WORD * WORD;
            const int r = v < WORD ? v : behind + v - WORD;
            const bool ends = v < WORD ? v < before : below > before;
            if (c < beside && ends && r < below) y[place + r] = tile[at(r, c)];
        }}"""
