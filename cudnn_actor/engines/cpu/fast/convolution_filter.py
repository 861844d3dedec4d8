"""The gradient with respect to a convolution's filter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from cudnn_actor.engines.cpu.boxes import Box, box_dims, boxes, largest_tile
from cudnn_actor.engines.cpu.fast.columns import Columns
from cudnn_actor.engines.cpu.fast.convolution_views import (
    add_call,
    copy_call,
    even,
    has_dense_channels,
    inner,
    reshaped_view,
)
from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step, deal, made_when_run
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.fast.matrices import blas_takes
from cudnn_actor.engines.cpu.fast.memory_orders import scratch_in_order
from cudnn_actor.engines.cpu.geometry import ConvGeometry
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations.convolution import split_groups

__all__ = ["BackwardFilter"]

_PIXELS = 1024
"""The fewest pixels of a block: a product of fewer takes more time to add up than to compute."""
_COLUMN_BYTES, _MOST_COLUMN_BYTES = 2 << 20, 8 << 20
"""Columns of a block, and the most of one channel: of fewer pixels where filters are very large."""
_MOST_BLOCKS = 10_000
"""The most blocks whose calls are bound. With more blocks, calls are made when they run."""
_GRADIENT = 16
"""The most bytes of a block's part of dy, as a multiple of the bytes of its columns."""
_ENOUGH_PARTS = 6
"""The fewest parts of the channels with one sum each. With fewer parts, each has several sums."""
_SUMS_BYTES = 1 << 20
"""Bytes of all sums of a part."""


class _Bound(NamedTuple):
    """The arrays that all parts of a run use. `depth_first`: products have the filters as columns."""

    x: Floats
    dy: Floats
    by_pixel: bool
    depth_first: bool


class BackwardFilter:
    """dw = dy times the columns of x transposed, summed over boxes of dy in their order.

    Parts of the channels are summed up apart. If there are few of these, so are parts of the boxes: a fixed
    number of sums, which are then added up in order.
    """

    def __init__(self, geometry: ConvGeometry, dtype: type) -> None:
        self._geometry = geometry
        self._dtype = dtype
        self._itemsize = np.dtype(dtype).itemsize
        self._columns = Columns(geometry, dtype)
        channels = geometry.w[1]
        one = self._cost(1)
        apart = geometry.groups == 1
        per_pixel = one((1, *(1 for _ in geometry.y[1:])))
        budget = _COLUMN_BYTES
        if apart:
            few = min(_PIXELS * self._itemsize * math.prod(geometry.taps), _MOST_COLUMN_BYTES)
            budget = max(few, _COLUMN_BYTES // 2 // channels)
        tile = largest_tile(geometry.y, one if apart else self._cost(channels), max(budget, per_pixel))
        self._tile = tuple(map(even, geometry.y, tile))
        sums = geometry.w[0] * math.prod(geometry.taps) * self._itemsize
        most = min(_COLUMN_BYTES // one(self._tile), _SUMS_BYTES // sums)
        part = even(channels, most) if apart else channels
        self._pieces = [slice(start, min(start + part, channels)) for start in range(0, channels, part)]
        self._grid = [*boxes(geometry.y, self._tile)]
        self._sums = 1
        if len(self._pieces) < _ENOUGH_PARTS:
            size = math.prod(geometry.w) * self._itemsize
            self._sums = max(
                1, min(len(self._grid), -(-_ENOUGH_PARTS // len(self._pieces)), _SUMS_BYTES // size)
            )

    def _cost(self, channels: int) -> Callable[[Dims], int]:
        """A function of a tile, which returns its cost: the bytes of its columns, or a part of the bytes of
        dy if there are many filters."""

        def cost(tile: Dims) -> int:
            return max(self._columns.nbytes(tile, channels), self._gradient_bytes(tile) // _GRADIENT)

        return cost

    def _gradient_bytes(self, tile: Dims) -> int:
        return footprint((tile[0], self._geometry.y[1], *tile[2:]), itemsize=self._itemsize)

    def footprint(self, lanes: int) -> int:
        """Bytes for columns, the padded part of x, a copy of dy's part, a summand, and sums."""
        tile, geometry = self._tile, self._geometry
        channels = self._pieces[0].stop
        sum_dims = (geometry.w[0], channels, *geometry.taps)
        sums = -(-self._sums * len(self._pieces) // lanes) if self._sums > 1 else 1
        return (
            self._columns.nbytes(tile, channels)
            + self._columns.footprint(tile, channels)
            + self._gradient_bytes(tile)
            + footprint(*[sum_dims] * (sums + 1), itemsize=self._itemsize)
        )

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """See `Kernel`."""
        filters, *dims = self._geometry.w
        groups = self._geometry.groups
        x, dw = operands["x"], results["dw"].reshape(groups, filters // groups, *dims)  # a view
        by_pixel = self._geometry.groups == 1 and has_dense_channels(x)
        bound = _Bound(x, operands["dy"], by_pixel, depth_first=not by_pixel and self._has_deep_filters())
        cuts = [len(self._grid) * number // self._sums for number in range(self._sums + 1)]
        memories = [lane.fork() for lane in lanes]
        totals: list[list[Floats]] = [[] for _ in self._pieces]

        def sum_part(part: tuple[int, tuple[int, int]], lane: int) -> list[Call]:
            number, (start, stop) = part
            channels, grid = self._pieces[number], self._grid[start:stop]
            memory = memories[lane].fork() if self._sums == 1 else memories[lane]
            total, calls = self._sum(bound, dw[:, :, channels], grid, channels, memory)
            totals[number].append(total)
            return calls

        def added_up(number: int, _lane: int) -> list[Call]:
            first, *others = totals[number]
            target = dw[:, :, self._pieces[number]]
            return [*(add_call(first, total) for total in others), copy_call(first, target)]

        numbers = range(len(self._pieces))
        sums = deal(product(numbers, pairwise(cuts)), len(lanes), sum_part)
        return [sums] if self._sums == 1 else [sums, deal(numbers, len(lanes), added_up)]

    def _has_deep_filters(self) -> bool:
        """Whether a part of a group has a longer filter than it has filters.

        Where both matrices of a product have their pixels side by side, BLAS takes four fifths of the time if
        the first one has more rows than the second.
        """
        geometry = self._geometry
        depth = self._pieces[0].stop * math.prod(geometry.taps)
        return depth > geometry.w[0] // geometry.groups

    def _sum(
        self, bound: _Bound, target: Floats, grid: Sequence[Box], channels: slice, memory: Scratch
    ) -> tuple[Floats, list[Call]]:
        """The sum over some boxes for some channels, and the calls that compute it.

        Its dims and those of `target` are (groups, filters of a group, channels, taps). The only sum is
        copied to `target`, if it does not lie there.
        """
        sums, order = target, (0, *_order_of_sums(len(self._geometry.taps), bound))
        total = _products(sums, order, bound)
        in_place = self._sums == 1 and total is not None
        if not in_place:
            sums = scratch_in_order(memory, target.shape, order, self._dtype)
            total = _products(sums, order, bound)
        assert total is not None
        below = memory.fork()
        summand = below.take(total.shape, self._dtype)
        calls: list[Call] = []
        few = len(self._grid) * len(self._pieces) <= _MOST_BLOCKS
        for number, box in enumerate(grid):
            into = summand if number else total
            multiply = partial(self._multiply, bound, box, channels, into, below)
            calls += multiply() if few else [made_when_run(multiply)]
            if number:
                calls.append(add_call(total, summand))
        if self._sums == 1 and not in_place:
            calls.append(copy_call(sums, target))
        return sums, calls

    def _multiply(
        self, bound: _Bound, box: Box, channels: slice, into: Floats, memory: Scratch
    ) -> list[Call]:
        """Calls that compute what one box contributes."""
        memory = memory.fork()
        geometry = self._geometry
        x, dy, by_pixel, depth_first = bound
        part = np.moveaxis(split_groups(dy[box], geometry.groups), 0, 2)
        gradient = _blas_view(part)
        calls: list[Call] = []
        if gradient is None:
            order = (*range(2, part.ndim), 0, 1) if by_pixel else range(part.ndim)
            copy = scratch_in_order(memory, part.shape, order, self._dtype)
            calls.append(copy_call(part, copy))
            gradient = _blas_view(copy)
        columns, filled = self._fill(x, box, channels, by_pixel, memory)
        assert gradient is not None
        one, other = (columns, gradient) if depth_first else (gradient, columns)
        a, b, y = (each[0] if geometry.groups == 1 else each for each in (one, other.swapaxes(1, 2), into))
        return [*calls, *filled, lambda: np.matmul(a, b, out=y)]

    def _fill(
        self, x: Floats, box: Box, channels: slice, by_pixel: bool, memory: Scratch
    ) -> tuple[Floats, list[Call]]:
        """Columns for a box, (groups, depth, pixels of all images), and the calls that fill them."""
        geometry = self._geometry
        rank = len(geometry.taps)
        source = split_groups(x[box[0]], geometry.groups)[:, :, channels]
        if geometry.pixelwise:
            found = _blas_view(np.moveaxis(inner(source, box[2:]), 0, 2))
            if found is not None:
                return found, []
        dims = self._columns.dims(box_dims(box), source.shape[2])
        taps, pixels = range(3, 3 + rank), range(3 + rank, 3 + 2 * rank)
        order = (0, *pixels, 1, *taps, 2) if by_pixel else (1, 2, *taps, 0, *pixels)
        columns = scratch_in_order(memory, dims, order, self._dtype)
        calls = self._columns.fill(source, box, columns, by_pixel, memory)
        depth = columns.transpose(1, *((*taps, 2) if by_pixel else (2, *taps)), 0, *pixels)
        extents = (geometry.groups, math.prod(depth.shape[1 : 2 + rank]), *depth.shape[2 + rank :])
        matrices = reshaped_view(depth, extents)
        assert matrices is not None
        joined = _blas_view(matrices)
        assert joined is not None
        return joined, calls


def _blas_view(array: Floats) -> Floats | None:
    """A view of three dims, the last of which are joined, if BLAS takes that."""
    found = reshaped_view(array, (*array.shape[:2], math.prod(array.shape[2:])))
    return found if found is not None and blas_takes(found) else None


def _order_of_sums(rank: int, bound: _Bound) -> tuple[int, ...]:
    """The order in which the filters (1), the channels (2) and the taps of sums lie in memory."""
    taps = range(3, 3 + rank)
    if bound.depth_first:
        return (2, *taps, 1)
    return (1, *taps, 2) if bound.by_pixel else (1, 2, *taps)


def _products(sums: Floats, order: Sequence[int], bound: _Bound) -> Floats | None:
    """Sums of dims (groups, filters, channels, taps) as a product's, if BLAS writes that view."""
    ordered = sums.transpose(order)
    if not bound.depth_first:
        return _blas_view(ordered)
    *depth, filters = ordered.shape[1:]
    found = reshaped_view(ordered, (ordered.shape[0], math.prod(depth), filters))
    return found if found is not None and found.flags.c_contiguous else None
