"""The gradient with respect to a convolution's input where filters are large: tap by tap.

Columns of a block are products of all taps with all outputs that touch the block. With large filters, most
of these belong to pixels outside of the block. Here each tap is multiplied only by the outputs that it
leads to from the block. Along a dim that has far fewer outputs than taps, each output is multiplied by the
taps that lead to it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.engines.cpu.boxes import Box, boxes, count_boxes, largest_tile
from cudnn_actor.engines.cpu.fast.convolution_views import (
    FEW_PIXELS,
    add_call,
    as_results,
    clear_call,
    copy_call,
    has_dense_channels,
    images_joined,
    inner,
    product_call,
    reshaped_view,
)
from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step, deal, in_turn, made_when_run
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.fast.matrices import blas_takes
from cudnn_actor.engines.cpu.fast.memory_orders import memory_order, scratch_in_order
from cudnn_actor.engines.cpu.geometry import ConvGeometry, Span, spans
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations.convolution import split_groups

__all__ = ["BackwardDataByTap", "products_ns"]

_BLOCK_BYTES, _MOST_BLOCK_BYTES = 1 << 20, 4 << 20
"""Bytes of scratch of a block, and of a block with few pixels, whose product reads the filter most."""
_ENOUGH_BLOCKS = 8
_CALLS_NS = 8000
"""The nanoseconds that the calls for a tap of a block take. They are made when they run."""
_TAPS, _MOST_PARTS = 64, 10_000
"""Taps of a part, in each of which calls are made when it runs; and how many parts there are at most."""
_FEWER = 4
"""How many times more taps than outputs a dim must have for its outputs to be taken one by one."""
_FEW_FILTERS = 1 << 20
"""The most bytes of one tap of all filters that are copied for each output."""


def products_ns(geometry: ConvGeometry, pairs: int) -> float:
    """About how many nanoseconds it takes to compute and add up products: of `pairs` pairs of a tap and an
    output."""
    return pairs * geometry.x[1] * (0.02 * geometry.y[1] / geometry.groups + 0.3)


class _Bound(NamedTuple):
    """The arrays that all blocks of a run use. `filters`: (groups, filters of a group, channels, taps)."""

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
        few = math.prod(geometry.w[:2]) * self._itemsize <= _FEW_FILTERS
        self._by_output = [
            few and _FEWER * outputs <= taps
            for taps, outputs in zip(geometry.taps, geometry.y[2:], strict=True)
        ]
        """Whether outputs are taken one by one, not taps, along each spatial dim."""
        sizes = zip(self._by_output, geometry.taps, geometry.y[2:], strict=True)
        self._loops = [outputs if by_output else taps for by_output, taps, outputs in sizes]
        least = self._nbytes((1,) * len(geometry.x)) * FEW_PIXELS
        wanted = min(_BLOCK_BYTES, self._nbytes(geometry.x) // _ENOUGH_BLOCKS)
        self._tile = largest_tile(geometry.x, self._nbytes, min(max(wanted, least), _MOST_BLOCK_BYTES))

    def _nbytes(self, tile: Dims) -> int:
        """Bytes of scratch for a box of dx."""
        geometry, conv = self._geometry, self._geometry.conv
        outputs = tile[0]  # those that one of the taps leads to
        taps = 1  # those that lead to one of the outputs
        for axis, extent in enumerate(tile[2:]):
            if self._by_output[axis]:
                taps *= min(geometry.taps[axis], -(-extent // conv.dilation[axis]))
            else:
                outputs *= min(geometry.y[axis + 2], -(-extent // conv.stride[axis]))
        sums = (tile[0] * math.prod(tile[2:]) * geometry.x[1],)
        arrays = [(outputs * geometry.y[1],), (outputs * taps * geometry.x[1],), sums]
        if any(self._by_output):
            arrays.append((taps * math.prod(geometry.w[:2]),))
        return footprint(*arrays, itemsize=self._itemsize)

    def ns(self) -> float:
        """About how long it takes on one lane."""
        geometry = self._geometry
        calls = count_boxes(geometry.x, self._tile) * math.prod(self._loops) * _CALLS_NS
        return products_ns(geometry, geometry.meetings) + 0.1 * geometry.y[1] * geometry.meetings + calls

    def footprint(self, lanes: int) -> int:
        """Bytes for a part of dy, for its products with taps, for copies of these, and for sums."""
        del lanes
        return self._nbytes(self._tile)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """See `Kernel`."""
        geometry, dx = self._geometry, results["dx"]
        steps, filters = self._filters(operands["w"], lanes)
        by_pixel = geometry.groups == 1 and has_dense_channels(dx) and not any(self._by_output)
        bound = _Bound(operands["dy"], dx, filters, by_pixel)

        def call(box: Box, lane: int) -> Call:
            return in_turn(self._block(bound, box, lanes[lane].fork()))

        return [*steps, deal(boxes(geometry.x, self._tile), len(lanes), call)]

    def _filters(self, w: Floats, lanes: Sequence[Scratch]) -> tuple[list[Step], Floats]:
        """A filter of which BLAS takes the part of each tap, and the steps that copy it, if it is a copy."""
        geometry = self._geometry
        rank = len(geometry.taps)
        seen = w.reshape(geometry.groups, -1, *w.shape[1:])
        if any(self._by_output) or blas_takes(inner(seen, [0] * rank)):
            return [], seen
        copy = lanes[0].keep((*geometry.taps, *seen.shape[:3]), self._dtype)
        turned = copy.transpose(*range(rank, rank + 3), *range(rank))
        parts = [
            [copy_call(seen[:, number :: len(lanes)], turned[:, number :: len(lanes)])]
            for number in range(min(len(lanes), seen.shape[1]))
        ]
        return [deal(parts, len(lanes), lambda calls, _: calls)], turned

    def _block(self, bound: _Bound, box: Box, memory: Scratch) -> list[Call]:
        sums = target = bound.dx[box]
        order = memory_order(target.ndim, channels_last=bound.by_pixel)
        if target.strides[order[-1]] != target.itemsize:
            sums = scratch_in_order(memory, target.shape, order, self._dtype)
        per_group = split_groups(sums, self._geometry.groups)
        loops = math.prod(self._loops)
        step = max(_TAPS, -(-loops * count_boxes(self._geometry.x, self._tile) // _MOST_PARTS))
        calls = [clear_call(sums)]
        for start in range(0, loops, step):
            part = range(start, min(start + step, loops))
            calls.append(made_when_run(functools.partial(self._sums, bound, per_group, box, part, memory)))
        if sums is not target:
            calls.append(copy_call(sums, target))
        return calls

    def _sums(
        self, bound: _Bound, per_group: Floats, box: Box, part: range, memory: Scratch
    ) -> Iterator[Call]:
        """Calls that add the products of some taps to a box of dx. Their numbers: the last dim's fastest."""
        for number in part:
            meetings = [*map(self._meeting, count(), np.unravel_index(number, self._loops), spans(box))]
            into = inner(per_group, [pixels for pixels, _, _ in meetings])
            if into.size:
                dy = inner(bound.dy[box[0]], [outputs for _, outputs, _ in meetings])
                w = inner(bound.filters, [taps for _, _, taps in meetings])
                yield from self._multiply(bound.by_pixel, dy, w, into, memory.fork())

    def _meeting(self, axis: int, place: np.integer[Any], span: Span) -> _Meeting:
        """The pixels of a box that meet an axis' tap or output of this number, and the outputs and taps that
        they meet."""
        geometry = self._geometry
        number = int(place)
        if not self._by_output[axis]:
            pixels, outputs = geometry.meet_along(axis, number, span, (0, geometry.y[axis + 2]))
            return _Meeting(pixels, outputs, number)
        dilation = geometry.conv.dilation[axis]
        offset = number * geometry.conv.stride[axis] - geometry.conv.pre_padding[axis] - span[0]
        first, last = (
            max(0, -(offset // dilation)),
            min(geometry.taps[axis], (span[1] - span[0] - 1 - offset) // dilation + 1),
        )
        if last <= first:
            return _Meeting(slice(0, 0), number, slice(0, 0))
        start = first * dilation + offset
        pixels = slice(start, start + (last - first - 1) * dilation + 1, dilation)
        return _Meeting(pixels, number, slice(first, last))

    def _multiply(
        self, by_pixel: bool, dy: Floats, w: Floats, into: Floats, memory: Scratch
    ) -> Iterator[Call]:
        """Calls that add the products of a part of dy and of some taps to a part of the sums.

        Dims: of `dy` (images, filters, outputs), of `w` (groups, filters of a group, channels of a group,
        taps), of `into` (images, groups, channels of a group, pixels).
        """
        groups, filters, channels, *taps = w.shape
        order = memory_order(dy.ndim, channels_last=by_pixel)
        gradient = as_results(dy, groups)
        if gradient is None or not blas_takes(gradient):
            copy = scratch_in_order(memory, dy.shape, order, self._dtype)
            yield copy_call(dy, copy)
            gradient = as_results(copy, groups)
        matrices = reshaped_view(w, (groups, filters, channels * math.prod(taps)))
        if matrices is None or not blas_takes(matrices):
            packed = memory.take(w.shape, self._dtype)
            yield copy_call(w, packed)
            matrices = packed.reshape(groups, filters, -1)
        dims = (len(dy), groups * channels, *taps, *dy.shape[2:])
        products = scratch_in_order(memory, dims, order if by_pixel else range(len(dims)), self._dtype)
        result = reshaped_view(
            products, (len(dy), groups, channels * math.prod(taps), math.prod(dy.shape[2:]))
        )
        assert gradient is not None
        assert result is not None
        pair = images_joined(gradient, result) if by_pixel else (gradient, result)
        yield product_call(matrices.swapaxes(1, 2), *pair)
        yield add_call(into, split_groups(products, groups).transpose(0, 1, 2, *self._in_order()))

    def _in_order(self) -> Iterator[int]:
        """The axis of products along each spatial dim: that of its taps, or that of its outputs."""
        taps, outputs = 3, 3 + sum(self._by_output)
        for by_output in self._by_output:
            yield taps if by_output else outputs
            taps, outputs = taps + by_output, outputs + (not by_output)


class _Meeting(NamedTuple):
    """Along a dim: pixels of a box, counted from its start, and the outputs and taps that meet in them."""

    pixels: slice
    outputs: slice | int
    taps: slice | int
