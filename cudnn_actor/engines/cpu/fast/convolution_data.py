"""The gradient with respect to a convolution's input."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from cudnn_actor.engines.cpu.boxes import Box, boxes, count_boxes, largest_tile
from cudnn_actor.engines.cpu.fast.columns import Columns
from cudnn_actor.engines.cpu.fast.convolution_data_by_tap import BackwardDataByTap, products_ns
from cudnn_actor.engines.cpu.fast.convolution_views import (
    FEW_PIXELS,
    MOST_BOUND_TAPS,
    Filters,
    add_call,
    as_matrices,
    as_results,
    calls_of_taps,
    clear_call,
    copy_call,
    has_dense_channels,
    images_joined,
    inner,
    product_call,
    reshaped_view,
)
from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step, deal, in_turn
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.fast.matrices import blas_takes
from cudnn_actor.engines.cpu.fast.memory_orders import memory_order, scratch_in_order
from cudnn_actor.engines.cpu.geometry import ConvGeometry, Span, spans
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations.convolution import split_groups

__all__ = ["BackwardData", "backward_data"]

_COLUMN_BYTES = 1 << 20
"""Bytes of the columns of a block. Outputs that a block shares with its neighbours are computed for each."""
_MOST_COLUMN_BYTES = 4 << 20
"""The same for a block with few pixels, whose product reads the filter more than the columns."""
_SUMS, _GRADIENT = 4, 16
"""How many times the bytes of columns the sums of a block may have, and its part of dy."""
_LEAST_ROWS = 64
"""Taps and channels of a block: each product reads all of its part of dy."""
_LEAST_CHANNELS = 32
"""Columns of fewer channels are stored by tap, so that sums are over longer runs."""
_CALL_NS, _LATE_CALL_NS = 1000, 4000
"""Nanoseconds to add up the columns of a tap, by a bound call, and by one that is made when it runs."""
_CLEARLY = 1.3
"""How many times faster the way tap by tap must be by its estimate: estimates are right within this
factor."""
_MOST_OUTPUTS = 12
"""Outputs for each pixel of a block. With more, as large filters have, columns are stored by tap, too."""


def backward_data(geometry: ConvGeometry, dtype: type) -> BackwardData | BackwardDataByTap:
    """The kernel for the gradient: of the two ways, the one that takes less time by their estimates."""
    columns, by_tap = BackwardData(geometry, dtype), BackwardDataByTap(geometry, dtype)
    return by_tap if _CLEARLY * by_tap.ns() < columns.ns() else columns


class _Bound(NamedTuple):
    """The arrays that all blocks of a run use."""

    dy: Floats
    dx: Floats
    filters: Filters
    by_pixel: bool


class BackwardData:
    """dx = the sum of the columns of (w transposed times dy), a box of dx at a time.

    As in the definition, padding takes no part, whatever values are in w.
    """

    def __init__(self, geometry: ConvGeometry, dtype: type) -> None:
        self._geometry = geometry
        self._dtype = dtype
        self._itemsize = np.dtype(dtype).itemsize
        self._tiles = {False: self._tile(False)}
        if geometry.groups == 1 and geometry.x[1] >= _LEAST_CHANNELS:
            tile = self._tile(True)
            outputs = tile[0] * math.prod(geometry.most_outputs(tile))
            if outputs <= _MOST_OUTPUTS * math.prod((tile[0], *tile[2:])):
                self._tiles[True] = tile

    def _tile(self, by_pixel: bool) -> Dims:
        """A tile of dx."""
        dims, channels = self._geometry.x, self._channels(by_pixel)
        cost = self._cost(channels)
        budget = max(_COLUMN_BYTES, cost((1, *(1 for _ in dims[1:]))) * FEW_PIXELS)
        tile = largest_tile(dims, cost, min(budget, _MOST_COLUMN_BYTES))
        return (tile[0], channels, *tile[2:])

    def _channels(self, by_pixel: bool) -> int:
        """Channels of a block. Fewer leave room for more pixels, and make blocks for more lanes."""
        dims, taps = self._geometry.x, math.prod(self._geometry.taps)
        if self._geometry.groups > 1:
            return dims[1]
        if by_pixel:
            return dims[1] if dims[1] < 4 * _LEAST_ROWS else max(_LEAST_ROWS, -(-dims[1] // 8))
        image = self._cost(dims[1])((1, *dims[1:]))
        if dims[0] > 8 and 4 * image <= _COLUMN_BYTES:
            return dims[1]
        least = min(dims[1], -(-_LEAST_ROWS // taps))
        return max(least, min(dims[1] // 4, _COLUMN_BYTES * dims[1] // (2 * image)))

    def _columns_bytes(self, tile: Dims) -> int:
        dims = (tile[0], tile[1], *self._geometry.taps, *self._geometry.most_outputs(tile))
        return footprint(dims, itemsize=self._itemsize)

    def _gradient_bytes(self, tile: Dims) -> int:
        dims = (tile[0], self._geometry.y[1], *self._geometry.most_outputs(tile))
        return footprint(dims, itemsize=self._itemsize)

    def _cost(self, channels: int) -> Callable[[Dims], int]:
        """A function of a tile, which returns its cost: the bytes of its columns, or a part of the bytes of
        its sums or of dy if that is more."""

        def cost(tile: Dims) -> int:
            tile = (tile[0], channels, *tile[2:])
            sums = footprint(tile, itemsize=self._itemsize)
            return max(self._columns_bytes(tile), sums // _SUMS, self._gradient_bytes(tile) // _GRADIENT)

        return cost

    def ns(self) -> float:
        """About how long it takes on one lane, at most."""
        geometry, tile = self._geometry, self._tiles[False]
        counts = [-(-size // extent) for size, extent in zip(geometry.x[2:], tile[2:], strict=True)]
        outputs = geometry.x[0] * math.prod(counts) * math.prod(geometry.most_outputs(tile))
        taps = math.prod(geometry.taps)
        each = _CALL_NS if taps <= MOST_BOUND_TAPS else _LATE_CALL_NS
        return products_ns(geometry, outputs * taps) + count_boxes(geometry.x, tile) * taps * each

    def footprint(self, lanes: int) -> int:
        """Bytes for columns, for a copy of dy's part, and for sums that lie otherwise in dx."""
        del lanes
        return max(
            self._columns_bytes(tile) + self._gradient_bytes(tile) + footprint(tile, itemsize=self._itemsize)
            for tile in self._tiles.values()
        )

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """See `Kernel`."""
        geometry = self._geometry
        filters = Filters(geometry, operands["w"], lanes[0])
        by_pixel = True in self._tiles and (
            filters.taps_first or (math.prod(geometry.taps) == 1 and has_dense_channels(results["dx"]))
        )
        bound = _Bound(operands["dy"], results["dx"], filters, by_pixel)

        def call(box: Box, lane: int) -> Call:
            return in_turn(self._block(bound, box, lanes[lane].fork()))

        return [*filters.copies(), deal(boxes(geometry.x, self._tiles[by_pixel]), len(lanes), call)]

    def _block(self, bound: _Bound, box: Box, memory: Scratch) -> list[Call]:
        dy, dx, filters, by_pixel = bound
        geometry = self._geometry
        target = dx[box]
        outputs = [self._touched_outputs(span, axis) for axis, span in enumerate(spans(box))]
        if any(stop <= start for start, stop in outputs):
            return [clear_call(target)]
        pixels = tuple(stop - start for start, stop in outputs)
        part = dy[(box[0], slice(None), *(slice(*span) for span in outputs))]
        gradient = as_results(part, geometry.groups)
        calls: list[Call] = []
        if gradient is None or not blas_takes(gradient):
            copy = memory.take(part.shape, self._dtype)
            calls.append(copy_call(part, copy))
            gradient = as_results(copy, geometry.groups)
            assert gradient is not None
        w = self._transpose_filter(filters, box[1])
        if geometry.pixelwise:
            into = as_results(target, geometry.groups)
            if into is not None and blas_takes(into):
                return [
                    *calls,
                    product_call(w, *(images_joined(gradient, into) if by_pixel else (gradient, into))),
                ]
        columns = self._columns(target.shape, pixels, by_pixel, filters.taps_first, memory)
        into = as_matrices(columns, filters.taps_first, len(pixels))
        if filters.taps_first and target.shape[1] < geometry.x[1]:
            # Those of some channels are not one matrix, but one for each tap.
            taps, channels = math.prod(geometry.taps), target.shape[1]
            into = reshaped_view(
                np.moveaxis(columns[:, 0], 1, -len(pixels) - 1), (len(target), taps, channels, -1)
            )
        assert into is not None
        one, other = images_joined(gradient, into) if by_pixel and into.shape[1] == 1 else (gradient, into)
        calls.append(product_call(w, one, other))
        return calls + self._scatter(bound, columns, box, outputs, memory)

    def _columns(self, dims: Dims, pixels: Dims, by_pixel: bool, taps_first: bool, memory: Scratch) -> Floats:
        geometry = self._geometry
        order = Columns(geometry, self._dtype).order(by_pixel, taps_first)
        full = (dims[0], geometry.groups, dims[1] // geometry.groups, *geometry.taps, *pixels)
        return scratch_in_order(memory, full, order, self._dtype)

    def _transpose_filter(self, filters: Filters, channels: slice) -> Floats:
        """The filter as matrices (groups, depth of some channels, filters of a group)."""
        geometry = self._geometry
        w = filters.matrices(slice(None))
        if geometry.groups == 1 and channels != slice(0, geometry.x[1]):
            taps = math.prod(geometry.taps)
            if filters.taps_first:
                # As (taps, channels, filters).
                return w.reshape(-1, taps, geometry.x[1])[..., channels].transpose(1, 2, 0)
            w = w[:, :, channels.start * taps : channels.stop * taps]
        return w.swapaxes(1, 2)

    def _touched_outputs(self, span: Span, axis: int) -> Span:
        pad = self._geometry.conv.pre_padding[axis]
        return self._geometry.touched_outputs((span[0] + pad, span[1] + pad), axis)

    def _scatter(
        self, bound: _Bound, columns: Floats, box: Box, outputs: list[Span], memory: Scratch
    ) -> list[Call]:
        """Calls that add up columns in a box of dx."""
        geometry = self._geometry
        sums = target = bound.dx[box]
        order = memory_order(target.ndim, channels_last=bound.by_pixel)
        if target.strides[order[-1]] != target.itemsize:
            sums = scratch_in_order(memory, target.shape, order, self._dtype)
        per_group = split_groups(sums, geometry.groups)
        make_sums = functools.partial(self._sums, per_group, columns, box, outputs)
        calls = [clear_call(sums), *calls_of_taps(math.prod(geometry.taps), make_sums)]
        if sums is not target:
            calls.append(copy_call(sums, target))
        return calls

    def _sums(self, per_group: Floats, columns: Floats, box: Box, outputs: list[Span]) -> Iterator[Call]:
        geometry = self._geometry
        for tap in product(*map(range, geometry.taps)):
            pixels, met = geometry.meet_in_box(tap, spans(box), outputs)
            into = inner(per_group, pixels)
            if into.size:
                yield add_call(into, inner(columns, (*tap, *met)))
