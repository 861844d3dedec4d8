"""Convolutions as products of the filter and columns, or, of few filters in a group, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from cudnn_actor.engines.cpu.boxes import Box, box_dims, boxes, largest_tile
from cudnn_actor.engines.cpu.fast.columns import Columns
from cudnn_actor.engines.cpu.fast.convolution_views import (
    FEW_PIXELS,
    Filters,
    as_matrices,
    as_results,
    copy_call,
    even,
    has_dense_channels,
    images_joined,
    inner,
    product_call,
)
from cudnn_actor.engines.cpu.fast.group_rows import GroupRows
from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step, deal
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.fast.matrices import blas_takes
from cudnn_actor.engines.cpu.fast.memory_orders import scratch_in_order
from cudnn_actor.engines.cpu.geometry import ConvGeometry
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations.convolution import split_groups

__all__ = ["Forward"]

_COLUMN_BYTES = 1 << 19
"""Bytes of the columns of a block. They stay in the second-level cache while they are multiplied."""
_MOST_COLUMN_BYTES = 4 << 20
"""The same for a block with few pixels, whose product reads the filter more than the columns."""
_ENOUGH_BLOCKS = 6
"""The fewest blocks of which each lane computes whole ones. With fewer blocks, lanes share each block."""
_LEAST_FILTERS = 64
"""Filters of a part of a product."""
_LEAST_RUN = 16
"""Filters of a group whose results are written side by side."""
_LEAST_WORK = 1 << 21
"""Products of numbers in a part: about 60 µs."""


class Forward:
    """y = w times the columns of x, a box of y at a time, where `GroupRows` takes no less time."""

    def __init__(self, geometry: ConvGeometry, dtype: type) -> None:
        self._geometry = geometry
        self._dtype = dtype
        self._columns = Columns(geometry, dtype)
        self._rows = GroupRows(geometry, dtype)
        self._tile = _tile_of_outputs(geometry, geometry.y, self._columns_bytes)
        self._parts = _parts(geometry, len([*boxes(geometry.y, self._tile)]))

    def _columns_bytes(self, tile: Dims) -> int:
        return self._columns.nbytes(tile, self._geometry.w[1])

    def footprint(self, lanes: int) -> int:
        """Bytes for columns, for the padded part of x, and for a result that lies otherwise in y."""
        del lanes
        tile = self._tile
        result = footprint((tile[0], self._geometry.y[1], *tile[2:]), itemsize=np.dtype(self._dtype).itemsize)
        columns = self._columns_bytes(tile) + self._columns.footprint(tile, self._geometry.w[1]) + result
        return max(columns, self._rows.footprint())

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """See `Kernel`."""
        y = results["y"]
        if self._rows.takes(operands["x"], y):
            return self._rows.bind((operands["x"], operands["w"]), y, lanes)
        x = split_groups(operands["x"], self._geometry.groups)
        filters = Filters(self._geometry, operands["w"], lanes[0])
        by_pixel = self._geometry.groups == 1 and (
            filters.taps_first or (math.prod(self._geometry.taps) == 1 and has_dense_channels(operands["x"]))
        )
        bound = _Bound(x, y, filters, by_pixel)
        steps = filters.copies()
        grid = [*boxes(self._geometry.y, self._tile)]
        if len(self._parts) == 1:

            def block(box: Box, lane: int) -> list[Call]:
                memory = lanes[lane].fork()
                columns, filling = self._fill(bound, box, memory)
                return [*chain.from_iterable(filling), *self._multiply(bound, box, columns, memory)]

            return [*steps, deal(grid, len(lanes), block)]
        for box in grid:
            steps += self._steps_sharing_columns(bound, box, lanes)
        return steps

    def _steps_sharing_columns(self, bound: _Bound, box: Box, lanes: Sequence[Scratch]) -> list[Step]:
        """Steps for a box whose columns the lanes fill together, and share."""
        memories = [lane.fork() for lane in lanes]
        columns, filling = self._fill(bound, box, memories[0], [*memories[1:]])
        steps = [deal(filling, len(lanes), lambda calls, _: calls)] if any(filling) else []

        def multiply(part: slice, lane: int) -> list[Call]:
            return self._multiply(bound, (box[0], part, *box[2:]), columns, memories[lane].fork())

        return [*steps, deal(self._parts, len(lanes), multiply)]

    def _fill(
        self, bound: _Bound, box: Box, memory: Scratch, others: Sequence[Scratch] = ()
    ) -> tuple[Floats, list[list[Call]]]:
        """The columns for a box, (images, groups, channels, taps, pixels), and the calls that fill them.

        With `others`, the memory of other lanes, the calls for each part of the channels are apart.
        """
        geometry = self._geometry
        x = bound.x[box[0]]
        if geometry.pixelwise:
            view = inner(x, box[2:])
            view = view.reshape(*view.shape[:3], *(1 for _ in geometry.taps), *view.shape[3:])
            if as_matrices(view, False, len(geometry.taps)) is not None:
                return view, []
        dims = self._columns.dims(box_dims(box), geometry.w[1])
        order = self._columns.order(bound.by_pixel, bound.filters.taps_first)
        columns = scratch_in_order(memory, dims, order, self._dtype)
        filling = [
            self._columns.fill(x[:, :, part], box, columns[:, :, part], bound.by_pixel, lane.fork())
            for part, lane in self._fillings((memory, *others))
        ]
        return columns, filling

    def _fillings(self, memories: Sequence[Scratch]) -> Iterator[tuple[slice, Scratch]]:
        channels = self._geometry.w[1]
        count = len(self._parts)
        bounds = [channels * number // count for number in range(count + 1)]
        for number in range(count):
            yield slice(bounds[number], bounds[number + 1]), memories[number % len(memories)]

    def _multiply(self, bound: _Bound, box: Box, columns: Floats, memory: Scratch) -> list[Call]:
        geometry = self._geometry
        rank = len(geometry.taps)
        w = bound.filters.matrices(box[1])
        target = bound.y[box]
        into = as_results(target, geometry.groups)
        b = as_matrices(columns, bound.filters.taps_first, rank)
        assert b is not None
        if into is not None and blas_takes(into) and not _narrow(into):
            one, other = images_joined(b, into) if bound.by_pixel else (b, into)
            return [product_call(w, one, other)]
        images, filters, *pixels = target.shape
        apart = memory.take(
            (images, geometry.groups, filters // geometry.groups, math.prod(pixels)), self._dtype
        )
        return [product_call(w, b, apart), copy_call(apart.reshape(target.shape), target)]


class _Bound(NamedTuple):
    """The arrays that all blocks of a run use. Dims of `x`: images, groups, channels of a group, spatial."""

    x: Floats
    y: Floats
    filters: Filters
    by_pixel: bool


def _narrow(results: Floats) -> bool:
    """Whether products of few filters would write their pixels apart: BLAS takes twice as long then."""
    return 1 < results.shape[2] < _LEAST_RUN and results.strides[-1] != results.itemsize


def _tile_of_outputs(geometry: ConvGeometry, dims: Dims, cost: Callable[[Dims], int]) -> Dims:
    """A tile of y's dims whose columns have few bytes, or few pixels."""
    per_pixel = cost((1, dims[1], *(1 for _ in geometry.taps)))
    most = largest_tile(dims, cost, min(max(_COLUMN_BYTES, per_pixel * FEW_PIXELS), _MOST_COLUMN_BYTES))
    return tuple(even(size, extent) for size, extent in zip(dims, most, strict=True))


def _parts(geometry: ConvGeometry, count: int) -> list[slice]:
    """The parts of the filters for which products are computed apart, if there are only `count` blocks."""
    filters = geometry.w[0]
    parts = 1
    if geometry.groups == 1 and count < _ENOUGH_BLOCKS:
        work = math.prod(geometry.y) * geometry.depth // count
        parts = max(1, min(-(-8 // count), filters // _LEAST_FILTERS, work // _LEAST_WORK))
    size = -(-filters // parts)
    return [slice(start, min(start + size, filters)) for start in range(0, filters, size)]
