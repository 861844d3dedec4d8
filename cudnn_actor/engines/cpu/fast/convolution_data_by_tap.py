"""The gradient with respect to a convolution's input where filters are large: tap by tap.

Columns of a block are products of all taps with all outputs that touch the block. With large filters, most
of these belong to pixels outside of the block. Here each tap is multiplied only with the outputs that it
leads to from the block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from cudnn_actor.engines.cpu.exact.boxes import Box, boxes, count_boxes, largest_tile, whole
from cudnn_actor.engines.cpu.exact.geometry import ConvGeometry, spans
from cudnn_actor.engines.cpu.fast.convolution_views import (
    Floats,
    adding,
    as_results,
    blas_takes,
    channels_last,
    copying,
    dealt_in_turn,
    filling,
    grouped,
    images_joined,
    inner,
    laid_out,
    meeting,
    multiplying,
)
from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step, made_when_run
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint

__all__ = ["BackwardDataByTap", "products_ns"]

_BLOCK_BYTES, _MOST_BLOCK_BYTES = 1 << 20, 4 << 20
"""Scratch of a block, and of one with few pixels: of fewer, a product reads the filter more than them."""
_FEW_PIXELS = 192
_ENOUGH_BLOCKS = 8
_CALLS_NS = 8000
"""Of the calls for a tap of a block, which are made when they run."""


def products_ns(geometry: ConvGeometry, pairs: int) -> float:
    """About how long it takes to compute and add up the products of so many pairs of a tap and an output."""
    return pairs * geometry.x[1] * (0.02 * geometry.y[1] / geometry.groups + 0.3)


class _Bound(NamedTuple):
    """What the blocks of a run have in common. `filters`: (groups, filters of a group, channels, taps)."""

    dy: Floats
    dx: Floats
    filters: Floats
    by_pixel: bool


class BackwardDataByTap:
    """dx = the sum over taps of their filters transposed times their part of dy, a box of dx at a time.

    As in the definition, padding takes no part, whatever values are in w.
    """

    def __init__(self, geometry: ConvGeometry, dtype: type) -> None:
        self._geometry = geometry
        self._dtype = dtype
        self._itemsize = np.dtype(dtype).itemsize
        least = self._nbytes((1,) * len(geometry.x)) * _FEW_PIXELS
        wanted = min(_BLOCK_BYTES, self._nbytes(geometry.x) // _ENOUGH_BLOCKS)
        self._tile = largest_tile(geometry.x, self._nbytes, min(max(wanted, least), _MOST_BLOCK_BYTES))

    def _nbytes(self, tile: Dims) -> int:
        """Bytes of scratch for a box of dx."""
        geometry = self._geometry
        pixels = (
            min(size, -(-extent // stride))
            for size, extent, stride in zip(geometry.y[2:], tile[2:], geometry.conv.stride, strict=True)
        )
        count, sums = tile[0] * math.prod(pixels), tile[0] * math.prod(tile[2:])
        channels, filters = geometry.x[1], geometry.y[1]
        return footprint((count * filters,), (count * channels,), (sums * channels,), itemsize=self._itemsize)

    def ns(self) -> float:
        """About how long it takes on one lane."""
        geometry = self._geometry
        calls = count_boxes(geometry.x, self._tile) * math.prod(geometry.taps) * _CALLS_NS
        return products_ns(geometry, geometry.meetings) + 0.1 * geometry.y[1] * geometry.meetings + calls

    def footprint(self, lanes: int) -> int:
        """Bytes for a part of dy, for its products with a tap, and for sums that lie otherwise in dx."""
        del lanes
        return self._nbytes(self._tile)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """See `Kernel`."""
        geometry, dx = self._geometry, results["dx"]
        steps, filters = self._filters(operands["w"], len(lanes))
        bound = _Bound(operands["dy"], dx, filters, geometry.groups == 1 and channels_last(dx))
        parts = []
        for number, box in enumerate(boxes(geometry.x, self._tile)):
            parts.append(self._block(bound, box, lanes[number % len(lanes)].fork()))
        return [*steps, dealt_in_turn(parts, len(lanes))]

    def _filters(self, w: Floats, lanes: int) -> tuple[list[Step], Floats]:
        """A filter of which BLAS takes the part of each tap, and the steps that copy it, if it is a copy."""
        geometry = self._geometry
        rank = len(geometry.taps)
        seen = w.reshape(geometry.groups, -1, *w.shape[1:])
        if blas_takes(inner(seen, [0] * rank)):
            return [], seen
        copy = np.empty((*geometry.taps, *seen.shape[:3]), self._dtype)
        turned = copy.transpose(*range(rank, rank + 3), *range(rank))
        parts = [
            [copying(seen[:, number::lanes], turned[:, number::lanes])]
            for number in range(min(lanes, seen.shape[1]))
        ]
        return [dealt_in_turn(parts, lanes)], turned

    def _block(self, bound: _Bound, box: Box, memory: Scratch) -> list[Call]:
        sums = target = bound.dx[box]
        order = (0, *range(2, target.ndim), 1) if bound.by_pixel else range(target.ndim)
        if target.strides[order[-1]] != target.itemsize:
            sums = laid_out(memory, target.shape, order, self._dtype)
        per_group = grouped(sums, self._geometry.groups)
        adding_up = functools.partial(self._sums, bound, per_group, box, memory)
        calls = [filling(sums), made_when_run(adding_up)]
        if sums is not target:
            calls.append(copying(sums, target))
        return calls

    def _sums(self, bound: _Bound, per_group: Floats, box: Box, memory: Scratch) -> Iterator[Call]:
        """Calls that add up the products of all taps in a box of dx."""
        geometry = self._geometry
        outputs = spans(whole(geometry.y))
        along = [
            [meeting(geometry, axis, tap, span, outputs[axis]) for tap in range(count)]
            for axis, (count, span) in enumerate(zip(geometry.taps, spans(box), strict=True))
        ]
        for tap in product(*map(range, geometry.taps)):
            pairs = [of[place] for of, place in zip(along, tap, strict=True)]
            into = inner(per_group, (one for one, _ in pairs))
            if into.size:
                part = inner(bound.dy[box[0]], (other for _, other in pairs))
                yield from self._multiply(bound, tap, part, into, memory.fork())

    def _multiply(
        self, bound: _Bound, tap: Dims, part: Floats, into: Floats, memory: Scratch
    ) -> Iterator[Call]:
        """Calls that add the products of a tap with a part of dy to a part of the sums."""
        geometry = self._geometry
        order = (0, *range(2, part.ndim), 1) if bound.by_pixel else range(part.ndim)
        gradient = as_results(part, geometry.groups)
        if gradient is None or not blas_takes(gradient):
            copy = laid_out(memory, part.shape, order, self._dtype)
            yield copying(part, copy)
            gradient = as_results(copy, geometry.groups)
        dims = (len(part), geometry.x[1], *part.shape[2:])
        products = laid_out(memory, dims, order, self._dtype)
        matrices = as_results(products, geometry.groups)
        assert gradient is not None
        assert matrices is not None
        w = inner(bound.filters, tap).swapaxes(1, 2)
        pair = images_joined(gradient, matrices) if bound.by_pixel else (gradient, matrices)
        yield multiplying(w, *pair)
        yield adding(into, grouped(products, geometry.groups))
