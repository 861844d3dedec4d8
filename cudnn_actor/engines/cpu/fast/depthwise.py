"""Convolutions that have a filter for each channel, and their gradients: sums of shifted products.

`np.einsum` multiplies and adds in one pass over runs of channels, so blocks are in channels-last order. What
lies in another order is copied to such a block, and from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product

import numpy as np

from cudnn_actor.engines.cpu.exact.boxes import Box, box_dims, boxes
from cudnn_actor.engines.cpu.exact.geometry import ConvGeometry, spans
from cudnn_actor.engines.cpu.fast.convolution_forward import Behind
from cudnn_actor.engines.cpu.fast.convolution_views import (
    Floats,
    adding,
    copying,
    dealt_in_turn,
    even,
    filling,
    inner,
    laid_out,
    meeting,
)
from cudnn_actor.engines.cpu.fast.depthwise_rows import DepthwiseRows
from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step, dealt
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint

__all__ = ["DepthwiseData", "DepthwiseFilter", "DepthwiseForward"]

_BLOCK = 1 << 16
"""Elements of a block of results, at most."""
_LEAST_BLOCK = 1 << 15
"""Elements of a block of results, at least: a smaller one reads much that its neighbours read, too."""
_BLOCKS = 8
"""Blocks of a small tensor."""
_CHANNELS = 2048
"""Of a block, at most. Runs of fewer than a few hundred channels take longer for each."""
_FILTER = 18 << 10
"""Elements of a filter that is repeated side by side, for runs over the channels of several pixels."""


class _Depthwise:
    """What the three have in common. `_tile`: that of the tensor whose boxes are blocks."""

    def __init__(self, geometry: ConvGeometry, dims: Dims, dtype: type) -> None:
        self._geometry = geometry
        self._dtype = dtype
        self._itemsize = np.dtype(dtype).itemsize
        self._taps = math.prod(geometry.taps)
        self._axes = tuple(range(2, 2 + len(geometry.taps)))
        self._tile = _tile(dims)

    def _take(self, memory: Scratch, dims: Dims) -> Floats:
        """Scratch memory for dims N, C, spatial, in channels-last order."""
        return laid_out(memory, dims, (0, *self._axes, 1), self._dtype)

    def _reach(self, tile: Dims) -> Dims:
        """Dims of the part of padded x that a tile of y depends on."""
        spatial = (self._geometry.reach((0, extent), axis) for axis, extent in enumerate(tile[2:]))
        return (*tile[:2], *(stop - start for start, stop in spatial))

    def _padded(self, x: Floats, box: Box, memory: Scratch) -> tuple[Floats, list[Call]]:
        """The part of padded x that a box of y depends on, in channels-last order, and calls that fill it."""
        geometry = self._geometry
        reach = [geometry.reach(span, axis) for axis, span in enumerate(spans(box))]
        overlaps = [geometry.overlap(span, axis) for axis, span in enumerate(reach)]
        source = inner(x, (*box[:2], *(overlap.source for overlap in overlaps)))
        dims = (*box_dims(box[:2]), *(stop - start for start, stop in reach))
        if source.shape == dims and x.strides[1] == x.itemsize:
            return source, []
        padded = self._take(memory, dims)
        calls = [filling(padded)] if source.size < padded.size else []
        if source.size:
            calls.append(copying(source, inner(padded, (overlap.within for overlap in overlaps))))
        return padded, calls

    def _shifted(self, padded: Floats, dims: Dims) -> Floats:
        """Padded x as seen by each tap: (images, taps, spatial dims of y, channels)."""
        conv = self._geometry.conv
        taps = (step * d for step, d in zip(padded.strides[2:], conv.dilation, strict=True))
        pixels = (step * s for step, s in zip(padded.strides[2:], conv.stride, strict=True))
        strides = (padded.strides[0], *taps, *pixels, padded.strides[1])
        full = (dims[0], *self._geometry.taps, *dims[2:], dims[1])
        return np.lib.stride_tricks.as_strided(padded, full, strides, writeable=False)


class DepthwiseForward(_Depthwise):
    """y = the sum over taps of w times the shifted x."""

    def __init__(self, geometry: ConvGeometry, dtype: type) -> None:
        super().__init__(geometry, geometry.y, dtype)
        self._rows = DepthwiseRows(geometry, dtype)

    def footprint(self, lanes: int) -> int:
        """Bytes for a filter, the padded part of x, and a result that lies otherwise in y."""
        del lanes
        tile = self._tile
        taps = (self._taps, self._pixels_in_run(), self._geometry.w[0])
        nbytes = footprint(taps, self._reach(tile), tile, itemsize=self._itemsize)
        return max(nbytes, self._rows.footprint())

    def bind(
        self, operands: Operands, results: Operands, lanes: Sequence[Scratch], behind: Behind | None = None
    ) -> list[Step]:
        """See `Kernel`."""
        geometry = self._geometry
        x, w, y = operands["x"], operands["w"], results["y"]
        if self._rows.takes(x, y):
            return self._rows.bind((x, w), y, lanes, behind)
        pixels = self._pixels_in_run()
        calls: list[list[Call]] = [[] for _ in lanes]
        memories = [lane.fork() for lane in lanes]
        grid = [*boxes(geometry.y, self._tile)]
        filters = []
        for number, memory in enumerate(memories[: len(grid)]):
            taps = memory.take((*geometry.taps, pixels, geometry.w[0]), self._dtype)
            calls[number].append(copying(np.moveaxis(w, 0, -1)[0][..., None, :], taps))
            filters.append(taps)
        for number, box in enumerate(grid):
            lane = number % len(lanes)
            calls[lane] += self._block(x, filters[lane], y[box], box, memories[lane].fork())
            calls[lane] += behind(box) if behind else ()
        return [dealt(calls)]

    def _pixels_in_run(self) -> int:
        """How many pixels a run is over: the filter is as often side by side."""
        if self._geometry.conv.stride[-1] > 1 or self._tile[1] < self._geometry.w[0]:
            return 1
        return _pixels_in_run(self._taps, self._tile[1], self._tile[-1])

    def _block(self, x: Floats, taps: Floats, target: Floats, box: Box, memory: Scratch) -> list[Call]:
        rank = len(self._axes)
        padded, calls = self._padded(x, box, memory)
        shifted = self._shifted(padded, target.shape)
        into = target
        if target.strides[1] != target.itemsize:
            into = self._take(memory, target.shape)
        moved = np.moveaxis(into, 1, -1)
        w = taps[..., box[1]]
        pixels = w.shape[-2]
        joined = pixels > 1 and _run(padded, target.shape[1]) and _run(into, target.shape[1])
        if joined and target.shape[-1] % pixels == 0:
            shifted, moved = (_in_runs(each, pixels) for each in (shifted, moved))
            w = w.reshape(*w.shape[:-2], -1)
        else:
            w = w[..., 0, :]
        calls.append(_accumulating((shifted, w, moved), *_subscripts(rank)))
        if into is not target:
            calls.append(copying(into, target))
        return calls


class DepthwiseData(_Depthwise):
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

    def bind(
        self, operands: Operands, results: Operands, lanes: Sequence[Scratch], behind: Behind | None = None
    ) -> list[Step]:
        """See `Kernel`."""
        geometry = self._geometry
        dy, w, dx = operands["dy"], operands["w"], results["dx"]
        calls: list[list[Call]] = [[] for _ in lanes]
        memories = [lane.fork() for lane in lanes]
        grid = [*boxes(geometry.x, self._tile)]
        filters = []
        for number, memory in enumerate(memories[: len(grid)]):
            taps = memory.take((*geometry.taps, geometry.w[0]), self._dtype)
            calls[number].append(copying(np.moveaxis(w, 0, -1)[0], taps))
            filters.append(taps)
        for number, box in enumerate(grid):
            lane = number % len(lanes)
            calls[lane] += self._block(dy, filters[lane], dx[box], box, memories[lane].fork())
            calls[lane] += behind(box) if behind else ()
        return [dealt(calls)]

    def _block(self, dy: Floats, taps: Floats, target: Floats, box: Box, memory: Scratch) -> list[Call]:
        geometry = self._geometry
        outputs = []
        for axis, (start, stop) in enumerate(spans(box)):
            pad = geometry.conv.pre_padding[axis]
            outputs.append(geometry.touching((start + pad, stop + pad), axis))
        if any(stop <= start for start, stop in outputs):
            return [filling(target)]
        gradient = dy[(*box[:2], *(slice(*span) for span in outputs))]
        calls: list[Call] = []
        if gradient.strides[1] != gradient.itemsize:
            copy = self._take(memory, gradient.shape)
            calls.append(copying(gradient, copy))
            gradient = copy
        sums = target if target.strides[1] == target.itemsize else self._take(memory, target.shape)
        apart = self._take(memory, gradient.shape)
        calls.append(filling(sums))
        for tap in product(*map(range, geometry.taps)):
            pairs = [
                meeting(geometry, axis, place, span, outputs[axis])
                for axis, (place, span) in enumerate(zip(tap, spans(box), strict=True))
            ]
            into = inner(sums, (one for one, _ in pairs))
            if into.size:
                met = [other for _, other in pairs]
                w = inner(taps, (*tap, box[1])).reshape(-1, *(1 for _ in self._axes))
                terms = inner(apart, met)
                calls += [_multiplying(inner(gradient, met), w, terms), adding(into, terms)]
        if sums is not target:
            calls.append(copying(sums, target))
        return calls


class DepthwiseFilter(_Depthwise):
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

    def bind(
        self, operands: Operands, results: Operands, lanes: Sequence[Scratch], behind: Behind | None = None
    ) -> list[Step]:
        """See `Kernel`."""
        x, dy, dw = operands["x"], operands["dy"], results["dw"]
        cuts = [len(self._grid) * number // self._sums for number in range(self._sums + 1)]
        memories = [lane.fork() for lane in lanes]
        parts: list[list[Call]] = []
        adding_up: list[list[Call]] = []
        for channels in self._pieces:
            totals = []
            for start, stop in pairwise(cuts):
                memory = memories[len(parts) % len(lanes)]
                total = memory.take((*self._geometry.taps, channels.stop - channels.start), self._dtype)
                parts.append(
                    [
                        *self._sum(
                            x[:, channels], dy[:, channels], total, self._grid[start:stop], memory.fork()
                        )
                    ]
                )
                totals.append(total)
            first, *others = totals
            target = np.moveaxis(dw[channels, 0], 0, -1)
            adding_up.append([*(adding(first, total) for total in others), copying(first, target)])
        steps = [dealt_in_turn(parts, len(lanes)), dealt_in_turn(adding_up, len(lanes))]
        if behind is not None and (after := behind(tuple(slice(0, dim) for dim in dw.shape))):
            steps.append(dealt([after]))
        return steps

    def _sum(
        self, x: Floats, dy: Floats, total: Floats, grid: Sequence[Box], memory: Scratch
    ) -> Iterator[Call]:
        rank = len(self._axes)
        summand = memory.take(total.shape, self._dtype)
        of_x, of_w, of_y = _subscripts(rank)
        for number, one in enumerate(grid):
            box = (one[0], slice(0, total.shape[-1]), *one[2:])
            below = memory.fork()
            padded, calls = self._padded(x, box, below)
            yield from calls
            gradient = dy[box]
            if gradient.strides[1] != gradient.itemsize:
                copy = self._take(below, gradient.shape)
                yield copying(gradient, copy)
                gradient = copy
            shifted = self._shifted(padded, gradient.shape)
            into = summand if number else total
            yield _accumulating((shifted, np.moveaxis(gradient, 1, -1), into), of_x, of_y, of_w)
            if number:
                yield adding(total, summand)


def _subscripts(rank: int) -> tuple[list[int], list[int], list[int]]:
    """Of shifted x, the filter and y in sums of products: images, taps, pixels, channels."""
    image, channel = 0, 1 + 2 * rank
    taps, pixels = [*range(1, 1 + rank)], [*range(1 + rank, 1 + 2 * rank)]
    return [image, *taps, *pixels, channel], [*taps, channel], [image, *pixels, channel]


def _accumulating(
    arrays: tuple[Floats, Floats, Floats], of_a: list[int], of_b: list[int], of_sums: list[int]
) -> Call:
    """A call that sets the last array to the sums of products of the others."""
    a, b, sums = arrays
    einsum: Callable[..., object] = np.einsum
    return lambda: einsum(a, of_a, b, of_b, of_sums, out=sums)


def _multiplying(a: Floats, b: Floats, y: Floats) -> Call:
    return lambda: np.multiply(a, b, out=y)


def _tile(dims: Dims) -> Dims:
    """A tile for blocks of about equal size."""
    most = max(_LEAST_BLOCK, min(_BLOCK, math.prod(dims) // _BLOCKS))
    tile = [1, even(dims[1], _CHANNELS), *(1 for _ in dims[2:])]
    for axis in (*reversed(range(2, len(dims))), 0):
        tile[axis] = even(dims[axis], most // math.prod(tile))
    return tuple(tile)


def _pixels_in_run(taps: int, channels: int, width: int) -> int:
    """How many pixels of a row, a divisor of its width, are in a run without too large a filter."""
    most = max(1, _FILTER // (taps * channels))
    return max(count for count in range(1, min(width, most) + 1) if width % count == 0)


def _run(array: Floats, channels: int) -> bool:
    """Whether the pixels of a row lie side by side."""
    return array.strides[-1] == channels * array.itemsize


def _in_runs(array: Floats, pixels: int) -> Floats:
    """An array of dims (..., width, channels) whose rows are cut into runs of so many pixels."""
    *dims, width, channels = array.shape
    *strides, step, inner = array.strides
    return np.lib.stride_tricks.as_strided(
        array, (*dims, width // pixels, pixels * channels), (*strides, step * pixels, inner)
    )
