"""The gradients of convolutions that have a filter for each channel."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import numpy as np

from cudnn_actor.engines.cpu.boxes import Box, boxes
from cudnn_actor.engines.cpu.fast.convolution_views import (
    add_call,
    calls_of_taps,
    channels_moved_last,
    clear_call,
    copy_call,
    inner,
)
from cudnn_actor.engines.cpu.fast.depthwise_blocks import DepthwiseBlocks, einsum_call, subscripts
from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step, deal
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.geometry import ConvGeometry, Span, spans
from cudnn_actor.engines.cpu.scratch import Scratch, footprint

__all__ = ["DepthwiseData", "DepthwiseFilter"]


class DepthwiseData(DepthwiseBlocks):
    """dx = the sum over taps of w times the shifted dy. As in the definition, padding takes no part."""

    def __init__(self, geometry: ConvGeometry, dtype: type) -> None:
        super().__init__(geometry, geometry.x, dtype)

    def footprint(self, lanes: int) -> int:
        """Bytes for a filter, dy's part, a product, and a result that lies otherwise in dx."""
        del lanes
        tile, geometry = self._tile, self._geometry
        outputs = (
            *tile[:2],
            *(min(e + w, y) for e, w, y in zip(tile[2:], geometry.window, geometry.y[2:], strict=True)),
        )
        return footprint((self._taps, geometry.w[0]), outputs, outputs, tile, itemsize=self._itemsize)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """See `Kernel`."""
        dy, w, dx = operands["dy"], operands["w"], results["dx"]

        def block(box: Box, taps: Floats, memory: Scratch) -> list[Call]:
            return self._block(dy, taps, dx[box], box, memory)

        return [self._step_of_blocks(w, lanes, block, pixels=1)]

    def _block(self, dy: Floats, taps: Floats, target: Floats, box: Box, memory: Scratch) -> list[Call]:
        geometry = self._geometry
        outputs = []
        for axis, (start, stop) in enumerate(spans(box)):
            pad = geometry.conv.pre_padding[axis]
            outputs.append(geometry.touched_outputs((start + pad, stop + pad), axis))
        if any(stop <= start for start, stop in outputs):
            return [clear_call(target)]
        gradient = dy[(*box[:2], *(slice(*span) for span in outputs))]
        calls: list[Call] = []
        if gradient.strides[1] != gradient.itemsize:
            copy = self._take(memory, gradient.shape)
            calls.append(copy_call(gradient, copy))
            gradient = copy
        sums = target if target.strides[1] == target.itemsize else self._take(memory, target.shape)
        apart = self._take(memory, gradient.shape)
        calls.append(clear_call(sums))
        make_products = functools.partial(self._products, (gradient, taps, apart, sums), box, outputs)
        calls += calls_of_taps(self._taps, make_products)
        if sums is not target:
            calls.append(copy_call(sums, target))
        return calls

    def _products(
        self, arrays: tuple[Floats, Floats, Floats, Floats], box: Box, outputs: list[Span]
    ) -> Iterator[Call]:
        gradient, taps, apart, sums = arrays
        geometry = self._geometry
        for tap in product(*map(range, geometry.taps)):
            pixels, met = geometry.meet_in_box(tap, spans(box), outputs)
            into = inner(sums, pixels)
            if into.size:
                w = inner(taps, (*tap, 0, box[1])).reshape(-1, *(1 for _ in self._axes))
                terms = inner(apart, met)
                yield _multiply_call(inner(gradient, met), w, terms)
                yield add_call(into, terms)


class DepthwiseFilter(DepthwiseBlocks):
    """dw = the sum over pixels of dy times the shifted x: sums of parts of them, added up in order."""

    def __init__(self, geometry: ConvGeometry, dtype: type) -> None:
        super().__init__(geometry, geometry.y, dtype)
        self._pieces = [
            slice(start, min(start + self._tile[1], geometry.w[0]))
            for start in range(0, geometry.w[0], self._tile[1])
        ]
        pixels = (geometry.y[0], self._tile[1], *geometry.y[2:])
        self._grid = [*boxes(pixels, self._tile)]
        self._sums = max(1, min(len(self._grid), -(-8 // len(self._pieces))))

    def footprint(self, lanes: int) -> int:
        """Bytes for the padded part of x, dy's part, sums and a summand."""
        tile = self._tile
        sums = -(-self._sums * len(self._pieces) // lanes)
        sum_dims = (self._taps, tile[1])
        return footprint(self._reach(tile), tile, *[sum_dims] * (sums + 1), itemsize=self._itemsize)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """See `Kernel`."""
        x, dy, dw = operands["x"], operands["dy"], results["dw"]
        cuts = [len(self._grid) * number // self._sums for number in range(self._sums + 1)]
        memories = [lane.fork() for lane in lanes]
        totals: list[list[Floats]] = [[] for _ in self._pieces]

        def sum_part(part: tuple[int, Span], lane: int) -> list[Call]:
            number, (start, stop) = part
            channels, memory = self._pieces[number], memories[lane]
            total = memory.take((*self._geometry.taps, channels.stop - channels.start), self._dtype)
            totals[number].append(total)
            grid = self._grid[start:stop]
            return [*self._sum(x[:, channels], dy[:, channels], total, grid, memory.fork())]

        def added_up(number: int, _lane: int) -> list[Call]:
            first, *others = totals[number]
            target = np.moveaxis(dw[self._pieces[number], 0], 0, -1)
            return [*(add_call(first, total) for total in others), copy_call(first, target)]

        numbers = range(len(self._pieces))
        sums = deal(product(numbers, pairwise(cuts)), len(lanes), sum_part)
        return [sums, deal(numbers, len(lanes), added_up)]

    def _sum(
        self, x: Floats, dy: Floats, total: Floats, grid: Sequence[Box], memory: Scratch
    ) -> Iterator[Call]:
        rank = len(self._axes)
        summand = memory.take(total.shape, self._dtype)
        of_x, of_w, of_y = subscripts(rank)
        for number, one in enumerate(grid):
            box = (one[0], slice(0, total.shape[-1]), *one[2:])
            below = memory.fork()
            padded, calls = self._pad(x, box, below)
            yield from calls
            gradient = dy[box]
            if gradient.strides[1] != gradient.itemsize:
                copy = self._take(below, gradient.shape)
                yield copy_call(gradient, copy)
                gradient = copy
            shifted = self._view_by_tap(padded, gradient.shape)
            into = summand if number else total
            yield einsum_call((shifted, channels_moved_last(gradient), into), of_x, of_y, of_w)
            if number:
                yield add_call(total, summand)


def _multiply_call(a: Floats, b: Floats, y: Floats) -> Call:
    return lambda: np.multiply(a, b, out=y)
