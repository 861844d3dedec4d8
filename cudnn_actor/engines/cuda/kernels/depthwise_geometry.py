"""How a depthwise convolution, and the pointwise operations behind it, are cut into blocks and threads.

Channels lie side by side in memory (NHWC). A thread computes a few neighbouring
channels of several places of a few rows. It reads each row of the input once for
all of them, and the filter, as float32, from shared memory. Backward data is such
a sum, too, of other places. In backward filter, each block sums up a part of the
places, and then the parts are added up in a fixed order. Sums are float32. The
pointwise operations behind are computed and rounded as in `elementwise`.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple, TypeVar

import msgspec

from cudnn_actor.engines.cuda.kernels.axes import extent
from cudnn_actor.engines.cuda.kernels.element_types import ACCESS_BYTES
from cudnn_actor.engines.cuda.kernels.expressions import Expression, Result
from cudnn_actor.engines.cuda.kernels.index_code import is_wide
from cudnn_actor.protocol.types.conv import ConvSpec
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["MOST_THREADS", "Geometry", "Line", "Pass", "Tile", "tiles"]

MOST_THREADS = 128
"""The most threads of a block: a thread has many registers."""
_VECTORS, _MOST_COLUMNS = (4, 2, 1), 8
_MOST_PACKS = 8
"""The most packs of channels that a block works on."""
_MOST_NUMBERS = 128
"""The most numbers that a thread keeps: inputs of a row, and sums."""
_MOST_SHARED = 48 << 10

_FULL = 1 << 15
"""The number of threads that keep a device busy."""
_MOST_BLOCKS, _PARTS = 4096, 512
"""The most blocks of a kernel, and about the number of blocks that sum up parts in backward filter."""


K = TypeVar("K", bound="Geometry")


class Pass(enum.StrEnum):
    """One of the three convolutions: forward, backward data, backward filter."""

    FORWARD = "forward"
    DATA = "data"
    FILTER = "filter"


class Tile(msgspec.Struct, frozen=True):
    """The part that a thread computes: channels, places of a row, and rows (of the filter, in backward
    filter)."""

    vector: int
    columns: int
    rows: int


class Line(NamedTuple):
    """Padding, stride and dilation along one spatial dimension.

    Backward data reads the gradient of the output: `back` is true then, and `stride` divides.
    """

    taps: int
    stride: int
    dilation: int
    padding: int
    back: bool

    def offset(self, place: int, tap: int) -> int | None:
        """The place at which result `place` reads a tap, counted from the place of result 0; None if it has
        no such tap."""
        if not self.back:
            return place * self.stride + tap * self.dilation - self.padding
        offset, rest = divmod(place + self.padding - tap * self.dilation, self.stride)
        return None if rest else offset

    def offsets(self, places: int) -> list[int]:
        """The offsets of all places that `places` neighbouring results read, ascending."""
        found = {self.offset(place, tap) for place in range(places) for tap in range(self.taps)}
        return sorted(offset for offset in found if offset is not None)

    @property
    def reach(self) -> int:
        """The distance of the first and the last tap of one result; 0 if it has none."""
        found = self.offsets(1)
        return found[-1] - found[0] if found else 0


class Geometry(msgspec.Struct, frozen=True, dict=True):
    """A kernel as data: what it computes, and how that is cut into blocks and threads.

    Parameters
    ----------
    of, conv
        The convolution.
    x, w, y
        The dims of its input, filter and output, one of which it computes.
    body
        The expressions that are computed from its result, in this order. The result is leaf 0, and `Earlier`
        is the value of an expression before, by its index.
    results
        The tensors that are stored, all of the same dims.
    operands
        The element types of both operands of the convolution, then of the leaves from 1 on.
    strides, alignments
        The strides and the alignments in bytes of the operands, then of the results. A leaf has a stride of
        0 where it is broadcast.
    tile
        The part that a thread computes.
    """

    of: Pass
    conv: ConvSpec
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    body: tuple[Expression, ...]
    results: tuple[Result, ...]
    operands: tuple[DType, ...]
    strides: tuple[tuple[int, ...], ...]
    alignments: tuple[int, ...]
    tile: Tile

    @property
    def multiplier(self) -> int:
        """Filters for each channel."""
        return self.w[0] // self.x[1]

    @property
    def result_dims(self) -> tuple[int, ...]:
        """The dims of the results."""
        return {Pass.FORWARD: self.y, Pass.DATA: self.x, Pass.FILTER: self.w}[self.of]

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The element types of all tensors."""
        return (*self.operands, *(result.dtype for result in self.results))

    @cached_property
    def lines(self) -> tuple[Line, Line]:
        """Rows and columns."""
        conv, back = self.conv, self.of is Pass.DATA
        numbers = zip(self.w[2:], conv.stride, conv.dilation, conv.pre_padding, strict=True)
        down, across = (Line(*of, back) for of in numbers)
        return down, across

    @property
    def channels(self) -> int:
        """Channels of the results; of the output for backward filter. A thread has `tile.vector` of them."""
        return self.x[1] if self.of is Pass.DATA else self.y[1]

    @property
    def channels_read(self) -> int:
        """How many neighbouring channels of the first operand a thread reads at once."""
        vector, times = self.tile.vector, self.multiplier
        if self.of is Pass.DATA:
            return vector if times == 1 else 1
        return max(1, vector // times)

    def packs(self, tensor: int, count: int) -> bool:
        """Whether a thread can access `count` neighbouring channels of a tensor at once.

        They must lie side by side, from an aligned address on.
        """
        steps, size = self.strides[tensor], count * self.dtypes[tensor].itemsize
        return count == 1 or (
            steps[1] == 1
            and all(step % count == 0 for axis, step in enumerate(steps) if axis != 1)
            and self.alignments[tensor] % min(ACCESS_BYTES, size) == 0
        )

    @cached_property
    def wide(self) -> bool:
        """Whether offsets need 64 bits, also those of columns in the padding, from which a thread counts."""
        conv = self.conv
        rows, columns = (sum(of) for of in zip(self.x[2:], conv.pre_padding, conv.post_padding, strict=True))
        # The dims of the first operand, with all columns from which a thread counts.
        if self.of is Pass.DATA:
            first = (*self.y[:3], max(self.y[3], -(-self.x[3] // conv.stride[1])))
        else:
            first = (*self.x[:3], columns)
        dims = [first, self.y if self.of is Pass.FILTER else self.w]
        dims += [self.result_dims] * (len(self.strides) - 2)
        spans = (extent(sizes, steps) for sizes, steps in zip(dims, self.strides, strict=True))
        return is_wide(*spans, rows, columns, math.prod(self.w), sums=True)

    @property
    def _packs(self) -> int:
        """The number of a block's threads along the channels."""
        packs = self.channels // self.tile.vector
        return -(-packs // -(-packs // _MOST_PACKS))

    @property
    def block(self) -> tuple[int, int]:
        """Threads of a block along the channels, and along the places."""
        most = MOST_THREADS // self._packs
        return self._packs, most if self.of is Pass.FILTER else math.prod(self.groups_of_block)

    @property
    def chunks(self) -> int:
        """How many blocks it takes for all channels."""
        return -(-self.channels // (self.tile.vector * self._packs))

    @property
    def groups(self) -> tuple[int, int]:
        """The number of groups of rows, and of columns. A thread computes a group of rows and columns."""
        if self.of is Pass.FILTER:
            return self.y[2], -(-self.y[3] // self.tile.columns)
        return -(-self.result_dims[2] // self.tile.rows), -(-self.result_dims[3] // self.tile.columns)

    @cached_property
    def groups_of_block(self) -> tuple[int, int]:
        """The numbers of groups of rows and of columns that a block computes.

        They are chosen so that few threads idle, and little is read by two blocks.
        """
        down, across = self.groups
        most = MOST_THREADS // self._packs

        def cost(spread: tuple[int, int]) -> float:
            blocks = math.prod(-(-all_ // some) for all_, some in zip(self.groups, spread, strict=True))
            work = math.prod(spread) * self.tile.rows * self.tile.columns * math.prod(self.w[2:]) / 128
            sizes = zip(self.lines, spread, (self.tile.rows, self.tile.columns), strict=True)
            read = math.prod(line.reach + some * own for line, some, own in sizes)
            return blocks * (work + read / 32)

        choices = ((min(most // n, down), n) for n in range(1, min(most, across) + 1))
        return min(choices, key=cost)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory."""
        if self.of is Pass.FILTER:
            return math.prod(self.block) * self.tile.rows * self.w[3] * self.tile.vector * 4
        times = self.multiplier if self.of is Pass.DATA else 1
        return times * math.prod(self.w[2:]) * (self._packs + 1) * self.tile.vector * 4

    @property
    def registers(self) -> int:
        """About how many registers a thread needs for numbers."""
        tile, across = self.tile, self.lines[1]
        row = len(across.offsets(tile.columns)) * self.tile.vector
        if self.of is Pass.FILTER:
            return row + tile.vector * (tile.columns + tile.rows * self.w[3])
        return row + tile.vector * tile.columns * tile.rows

    @property
    def parts(self) -> int:
        """The number of parts of each sum that backward filter computes before it adds them up."""
        beside = self.chunks * -(-self.w[2] // self.tile.rows)
        places = self.y[0] * math.prod(self.groups)
        return max(1, min(_PARTS // beside, -(-places // self.block[1])))

    @property
    def workspace(self) -> int:
        """Bytes of memory for the parts of sums."""
        return self.parts * math.prod(self.w) * 4 if self.of is Pass.FILTER else 0

    @property
    def grid(self) -> tuple[int, int]:
        """The grid of the first launch: blocks along the places, and along the channels."""
        if self.of is Pass.FILTER:
            return self.parts, self.chunks * -(-self.w[2] // self.tile.rows)
        return max(1, min(self.blocks, _MOST_BLOCKS // self.chunks)), self.chunks

    @property
    def blocks(self) -> int:
        """The number of blocks that would each compute one group of tiles, for each chunk of channels."""
        of = zip(self.groups, self.groups_of_block, strict=True)
        return self.result_dims[0] * math.prod(-(-all_ // some) for all_, some in of)

    @property
    def cost(self) -> float:
        """About the number of instructions of all threads together, to compare tiles by."""
        tile, taps = self.tile, math.prod(self.w[2:])
        inputs = len(self.lines[1].offsets(tile.columns)) * (1 + tile.vector)
        places = math.prod(self.groups) * self.y[0] * self.channels // tile.vector
        if self.of is Pass.FILTER:
            beside = -(-self.w[2] // tile.rows)
            reads = tile.columns * (1 + tile.vector) + tile.rows * inputs
            sums = tile.rows * self.w[3] * tile.columns * tile.vector
            return places * beside * (reads + sums + 20)
        rows = len(self.lines[0].offsets(tile.rows))
        steps = rows * (inputs + 20) + tile.rows * taps * (1 + tile.columns * tile.vector)
        return steps * max(places, _FULL)


def tiles(kernel: K) -> list[K]:
    """The kernel with each tile that is worth a try, the fastest by `cost` first; empty if no tile fits."""
    vector = next((n for n in _VECTORS if _fits(kernel, n)), None)
    if vector is None:
        return []
    found = [msgspec.structs.replace(kernel, tile=tile) for tile in _tiles(kernel, vector)]
    fitting = [one for one in found if one.registers <= _MOST_NUMBERS and one.shared_bytes <= _MOST_SHARED]
    ranked = sorted(fitting, key=lambda one: (one.cost, -one.tile.columns))
    best: dict[int, K] = {}
    for one in ranked:
        best.setdefault(one.tile.rows, one)
    return list(best.values())


def _fits(kernel: Geometry, vector: int) -> bool:
    """Whether the tensors' memory lets a thread have `vector` neighbouring channels."""
    times = kernel.multiplier
    made = msgspec.structs.replace(kernel, tile=Tile(vector, 1, 1))
    if made.channels % vector or (kernel.of is not Pass.DATA and vector % times and times % vector):
        return False
    if kernel.of is Pass.FILTER:
        return made.packs(0, made.channels_read) and made.packs(1, vector)
    results = range(len(kernel.operands), len(kernel.strides))
    return made.packs(0, made.channels_read) and all(made.packs(tensor, vector) for tensor in results)


def _tiles(kernel: Geometry, vector: int) -> Iterator[Tile]:
    """The tiles with `vector` neighbouring channels."""
    down, across = kernel.lines
    if kernel.of is Pass.FILTER:
        rows = range(1, min(kernel.w[2], 3) + 1)
        columns = range(1, min(_MOST_COLUMNS, kernel.y[3]) + 1)
    else:
        # In backward data, the results of a thread begin at a multiple of the stride.
        rows = range(down.stride, down.stride + 1) if down.back and down.stride > 1 else range(1, 3)
        step = across.stride if across.back else 1
        columns = range(step, max(_MOST_COLUMNS, step) + 1, step)
    for count, row in itertools.product(columns, rows):
        if row == 1 or kernel.of is Pass.FILTER or down.dilation == 1 or down.stride == row:
            yield Tile(vector, count, row)
