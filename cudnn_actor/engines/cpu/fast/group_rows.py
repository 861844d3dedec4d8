"""Convolutions of few filters in a group, of images whose rows lie side by side.

Columns, as other convolutions have, are a copy of the image for each tap. For few filters, these take longer
than their product. Here there is a copy for each column of the filter, and a matrix with a row for each
filter and each row of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from cudnn_actor.engines.cpu.boxes import Box, boxes
from cudnn_actor.engines.cpu.fast.convolution_views import (
    calls_of_taps,
    copy_call,
    even,
    product_call,
)
from cudnn_actor.engines.cpu.fast.kernels import Call, Step, deal, in_turn
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.fast.shifted_rows import LEAST_ROW, ShiftedRows, sum_calls
from cudnn_actor.engines.cpu.geometry import ConvGeometry
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint

__all__ = ["GroupRows"]

_MOST_FILTERS = 8
"""Filters of a group. With 16, columns take no longer; with more, they take less time."""
_LEAST_DEPTH, _LEAST_PIXELS = 24, 512
"""Elements of a filter, and pixels of y. For fewer, each call's own overhead shows."""
_FEW_ROWS, _MANY_CHANNELS = 4, 64
"""With fewer rows in the matrix of filters and at least this many channels, BLAS is no faster than with
columns, where the matrix has one row."""
_BLOCK_BYTES = 4 << 20
"""Shifted copies and products of a block, at most."""
_ENOUGH_BLOCKS, _WINDOWS, _LEAST_BLOCK_BYTES = 8, 4, 1 << 18
"""The fewest blocks, so that each lane has one; and the fewest windows and bytes of a block."""


class GroupRows(ShiftedRows):
    """y = the sum over rows of w of their products with shifted copies of x, in blocks of a group's rows."""

    def __init__(self, geometry: ConvGeometry, dtype: type) -> None:
        super().__init__(geometry, dtype)
        self._filters = geometry.w[0] // geometry.groups
        self._tile = self._tile_of_results() if len(geometry.taps) > 1 else ()
        self.fits = (
            len(geometry.taps) > 1
            and min(geometry.taps[-2:]) > 1
            and geometry.conv.stride[-2] == 1
            and self._filters <= _MOST_FILTERS
            and geometry.w[1] > 1
            and geometry.depth >= _LEAST_DEPTH
            and (self._filters * geometry.taps[-2] >= _FEW_ROWS or geometry.w[1] < _MANY_CHANNELS)
            and geometry.y[-1] >= LEAST_ROW
            and math.prod(geometry.y[2:]) >= _LEAST_PIXELS
            and self._has_large_blocks()
        )
        """Whether it may take less time than columns."""

    def _tile_of_results(self) -> Dims:
        """A block of y: rows of one group. It does not depend on the lanes, as bits must not."""
        tile = [1, self._filters, *self._geometry.y[2:]]
        for axis in range(2, len(tile) - 1):
            while self._block_bytes(tuple(tile[1:])) > _BLOCK_BYTES and tile[axis] > 1:
                tile[axis] = even(tile[axis], tile[axis] // 2)
        least = _WINDOWS * self._geometry.window[-2]
        while (
            len([*boxes(self._geometry.y, tuple(tile))]) < _ENOUGH_BLOCKS
            and self._block_bytes(tuple(tile[1:])) >= 2 * _LEAST_BLOCK_BYTES
            and tile[-2] >= 2 * least
        ):
            tile[-2] = even(tile[-2], tile[-2] // 2)
        return tuple(tile)

    def _has_large_blocks(self) -> bool:
        """Whether blocks are half as large as the window: else each reads much that its neighbours read."""
        if self._block_bytes(self._tile[1:]) > _BLOCK_BYTES:
            return False
        sizes = zip(self._tile[2:], self._geometry.y[2:], self._geometry.window, strict=True)
        return all(size == extent or 2 * size >= window for size, extent, window in sizes)

    def takes(self, x: Floats, y: Floats) -> bool:
        """Whether it takes less time than columns for images that lie so."""
        return self.fits and x.strides[-1] == y.strides[-1] == x.itemsize

    def footprint(self) -> int:
        """Bytes for a block's copies and products, a group's filters, a result, and rows that are copied."""
        if not self.fits:
            return 0
        sums = self._tile[1:]
        filters, rows = self._geometry.w[1:], self._shifted_dims(sums)[2:]
        others = footprint((self._filters, *filters), sums, rows, itemsize=np.dtype(self._dtype).itemsize)
        return self._block_bytes(sums) + others

    def bind(self, operands: tuple[Floats, Floats], y: Floats, lanes: Sequence[Scratch]) -> list[Step]:
        """See `Kernel`. `operands`: x and w."""
        x, w = operands
        *rows, columns = self._geometry.taps
        calls = math.prod(rows) + 2 * columns  # of a block, about
        channels = self._geometry.w[1]

        def call(box: Box, lane: int) -> Call:
            group = box[1].start // self._filters
            image = x[box[0].start, group * channels : (group + 1) * channels]
            result, sums_of = y[box][0], partial(self._sums, w[box[1]])
            copies = self._shifted_dims(result.shape)
            block = partial(self._compute_block, (image, result), box, lanes[lane], copies, sums_of)
            return in_turn(calls_of_taps(calls, block))

        return [deal(boxes(self._geometry.y, self._tile), len(lanes), call)]

    def _block_bytes(self, sums: Dims) -> int:
        copies = self._shifted_dims(sums)
        products = (math.prod(self._geometry.taps[:-1]) * self._filters, *copies[3:])
        return footprint(copies, products, itemsize=np.dtype(self._dtype).itemsize)

    def _shifted_dims(self, sums: Dims) -> Dims:
        """Copies for sums of filters and spatial dims: columns, one phase, channels, spatial dims."""
        reach = (self._rows(axis, extent) for axis, extent in enumerate(sums[1:-1]))
        return (self._geometry.taps[-1], 1, self._geometry.w[1], *reach, sums[-1])

    def _sums(self, w: Floats, shifted: Floats, sums: Floats, memory: Scratch) -> Iterator[Call]:
        """Calls that set `sums`, (filters, outer dims, pixels of all rows), from copies and filters."""
        *taps, columns = self._geometry.taps
        _, _, channels, *spatial = shifted.shape
        rows = math.prod(taps)
        filters = memory.take((rows, len(w), columns, channels), self._dtype)
        places = tuple(range(2, 2 + len(taps)))
        yield copy_call(w.transpose(*places, 0, -1, 1), filters.reshape(*taps, len(w), columns, channels))
        products = memory.take((rows, len(w), math.prod(spatial)), self._dtype)
        depth = columns * channels
        yield product_call(
            filters.reshape(-1, depth), shifted.reshape(depth, -1), products.reshape(rows * len(w), -1)
        )
        dilation = self._geometry.conv.dilation
        offsets = itertools.product(*(range(0, d * n, d) for d, n in zip(dilation, taps, strict=False)))
        terms = [
            self._part_of_sums(product.reshape(len(w), *spatial), row, sums.shape)
            for product, row in zip(products, offsets, strict=True)
        ]
        yield from sum_calls(terms, sums)
