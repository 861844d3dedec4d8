"""Copies of tensors whose neighbours in the result are no neighbours in the operand: transposes.

A block moves tiles by way of shared memory, so that it reads along the operand's
fastest axis and writes along the result's, up to 16 bytes at a time. A row of the
tile in shared memory is one 32-bit word longer than the tile, and the lanes of a
warp are spread over rows, so that no two of them want one bank. Elements are
moved as bits. The source depends on their size, and on how many are read and
written at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.plans.kernels import PACK, merged

__all__ = ["Tiled", "TiledKernel", "tiled", "tiled_source"]

_WARPS, _LANES = 8, 32
_MOST_BLOCKS = 1 << 16
_PACK_BYTES, _WORD = 16, 4
_LEAST = 16
"""Elements along each axis of the tiles. Of fewer, the caches hold what a warp does not use at once."""
_SMALL = 1 << 31
_ELEMENTS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}


class Tiled(msgspec.Struct, frozen=True):
    """A kernel as data.

    Parameters
    ----------
    itemsize
        Bytes of an element.
    rows, columns
        Sizes of the axes of the tiles: that along which the result's elements lie side by side, and that
        along which the operand's do.
    row_step, column_step
        The operand's stride from row to row, and the result's from column to column, in elements.
    batch
        The other axes, slowest first: the size, the result's stride, the operand's stride.
    read, written
        How many neighbours are read and written at once.
    """

    itemsize: int
    rows: int
    columns: int
    row_step: int
    column_step: int
    batch: tuple[tuple[int, int, int], ...]
    read: int
    written: int

    @property
    def tile(self) -> int:
        """How many elements a tile has along each of its axes."""
        return 128 if self.itemsize == 1 else 64

    @property
    def tiles(self) -> int:
        """How many there are."""
        each = (-(-size // self.tile) for size in (self.rows, self.columns))
        return math.prod(each) * math.prod(size for size, *_ in self.batch)


def tiled(
    dims: Sequence[int], strides: Sequence[Sequence[int]], alignments: Sequence[int], itemsize: int
) -> Tiled | None:
    """A copy by tiles; None if there is no need. The result's strides and alignment, then the operand's."""
    axes = merged(dims, strides)
    if 0 in dims or not axes or axes[-1][1][0] != 1 or axes[-1][1][1] == 1:
        return None
    fastest = next((axis for axis in axes if axis[1][1] == 1), None)
    if fastest is None:
        return None
    last = axes[-1]
    batch = [axis for axis in axes if axis is not fastest and axis is not last]
    if min(last[0], fastest[0]) < _LEAST:
        return None
    return Tiled(
        itemsize=itemsize,
        rows=last[0],
        columns=fastest[0],
        row_step=last[1][1],
        column_step=fastest[1][0],
        batch=tuple((size, to, of) for size, (to, of) in batch),
        read=_together(fastest[0], [axis[1][1] for axis in (*batch, last)], alignments[1], itemsize),
        written=_together(last[0], [axis[1][0] for axis in (*batch, fastest)], alignments[0], itemsize),
    )


def _together(size: int, steps: Sequence[int], alignment: int, itemsize: int) -> int:
    """How many neighbours along an axis can be accessed at once."""
    counts = (_PACK_BYTES // itemsize >> shift for shift in range(5))
    return next(
        count
        for count in counts
        if count == 1
        or (size % count == 0 == alignment % (count * itemsize) and all(step % count == 0 for step in steps))
    )


class TiledKernel:
    """A compiled kernel. `launch` enqueues it on the current stream."""

    def __init__(self, description: Tiled) -> None:
        code = tiled_source(description)
        self._function = libraries().cupy.RawKernel(code, "tiled", options=("--std=c++17",))
        self._function.compile()
        self._grid = (min(description.tiles, _MOST_BLOCKS),)
        given = description
        self._arguments = [given.tiles, given.rows, given.columns, given.row_step, given.column_step]
        self._arguments += [number for axis in given.batch for number in axis]

    def launch(self, pointers: Sequence[int], _: Sequence[float]) -> None:
        """Enqueue a run. `pointers`: the result's and the operand's."""
        self._function(self._grid, (_WARPS * _LANES,), (*pointers, *self._arguments))


def tiled_source(description: Tiled) -> str:
    """The kernel in CUDA C++."""
    size, tile, read, written = (
        description.itemsize,
        description.tile,
        description.read,
        description.written,
    )
    wide = _span(description) >= _SMALL
    # Lanes beside each other in a row of the tile that is read, and in a column that is written: see above.
    lanes_read = min(_LANES * _WORD // (read * size), _LANES)
    lanes_written = (_LANES if size <= _WORD else _LANES // 2) // written
    beside, below = tile // (lanes_read * read), tile // (lanes_written * written)
    batch = range(len(description.batch))
    names = [f"const long long {name}{n}" for n in batch for name in ("size", "to", "of")]
    parameters = "".join(f", {name}" for name in names)
    places = [
        f"{{ const I at = rest % (I)size{n}; rest /= (I)size{n}; x += at * (I)of{n}; z += at * (I)to{n}; }}"
        for n in reversed(batch)
    ]
    return f"""{PACK}
typedef {_ELEMENTS[size]} E;
typedef {"long long" if wide else "int"} I;
typedef Pack<E, {read}> Read;
typedef Pack<E, {written}> Written;
extern "C" __global__ void tiled(
    E* y, const E* from, const long long tiles, const long long rows, const long long columns,
    const long long row_step, const long long column_step{parameters}
) {{
    __shared__ E tile[{tile}][{tile + max(_WORD // size, 1)}];
    const int warp = threadIdx.x / {_LANES}, lane = threadIdx.x % {_LANES};
    const I across = (I)((columns + {tile - 1}) / {tile}), down = (I)((rows + {tile - 1}) / {tile});
    for (long long t = blockIdx.x; t < tiles; t += gridDim.x) {{
        I rest = (I)t;
        const I column = rest % across * {tile};
        rest /= across;
        const I row = rest % down * {tile};
        rest /= down;
        I x = row * (I)row_step + column, z = column * (I)column_step + row;
        {" ".join(places)}
        #pragma unroll
        for (int s = warp; s < {tile * tile // (_LANES * read)}; s += {_WARPS}) {{
            const int c = (s % {beside} * {lanes_read} + lane % {lanes_read}) * {read};
            const int r = s / {beside} * {_LANES // lanes_read} + lane / {lanes_read};
            if (row + r < (I)rows && column + c < (I)columns) {{
                const Read pack = *(const Read*)(from + (x + r * (I)row_step + c));
                #pragma unroll
                for (int v = 0; v < {read}; ++v) tile[r][c + v] = pack.of[v];
            }}
        }}
        __syncthreads();
        #pragma unroll
        for (int s = warp; s < {tile * tile // (_LANES * written)}; s += {_WARPS}) {{
            const int r = (s % {below} * {lanes_written} + lane % {lanes_written}) * {written};
            const int c = s / {below} * {_LANES // lanes_written} + lane / {lanes_written};
            if (row + r < (I)rows && column + c < (I)columns) {{
                Written pack;
                #pragma unroll
                for (int v = 0; v < {written}; ++v) pack.of[v] = tile[r + v][c];
                *(Written*)(y + (z + c * (I)column_step + r)) = pack;
            }}
        }}
        __syncthreads();
    }}
}}
"""


def _span(description: Tiled) -> int:
    """The largest place that the kernel computes: also of a tile's elements behind the last."""
    tile = description.tile
    read = (description.rows + tile) * abs(description.row_step) + description.columns + tile
    written = (description.columns + tile) * abs(description.column_step) + description.rows + tile
    read += sum(size * abs(of) for size, _, of in description.batch)
    written += sum(size * abs(to) for size, to, _ in description.batch)
    return max(read, written, description.tiles)
