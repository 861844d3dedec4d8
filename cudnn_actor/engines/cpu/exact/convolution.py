"""Forward, backward data and backward filter as matrix products over columns, in float64.

Products of 8-bit integers are exact in float64, and so are their sums below 2**53.

A kernel is bound to scratch memory box by box of `grid`, the dims of a tensor. `kept`: dims of the array that
is kept from one box to the next, after the steps of `begin`. `bind` gives a view of scratch memory in N, C,
spatial order, and the steps that compute it; if the kernel `accumulates`, it is complete only after the last
box. `footprint`: the bytes of scratch for a box, without `kept`.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from cudnn_actor.engines.cpu.boxes import Box, box_dims, largest_tile, whole
from cudnn_actor.engines.cpu.exact.columns import Gather, Scatter
from cudnn_actor.engines.cpu.exact.steps import Step, Values, load
from cudnn_actor.engines.cpu.geometry import ConvGeometry, Span, spans
from cudnn_actor.engines.cpu.scratch import Array, Dims, Scratch, footprint

__all__ = ["TILE_BYTES", "BackwardFilter", "Forward", "Kernel", "backward_data"]

TILE_BYTES = 16 << 20
"""Scratch for one box. With ResNet shapes, run times are flat from 8 to 32 MiB and rise on both sides."""
_MOST_OUTPUTS = 3
"""How many times the outputs that pixels depend on are computed for boxes, which share those around them."""


class _Filtering:
    """The base of forward and backward data. It keeps the filter as one float64 matrix per group."""

    accumulates: ClassVar[bool] = False

    def __init__(self, geometry: ConvGeometry, w: int) -> None:
        self.kept = geometry.filter_matrix
        self._geometry = geometry
        self._w = w

    def begin(self, kept: Array) -> list[Step]:
        """Load the filter."""
        dims = self._geometry.w
        return [load(self._w, dims, whole(dims), kept.reshape(dims))]


class Forward(_Filtering):
    """y = w times the columns of x, a box of y at a time."""

    def __init__(self, geometry: ConvGeometry, x: int, w: int) -> None:
        super().__init__(geometry, w)
        self.grid = geometry.y
        self._gather = Gather(geometry, x)

    def footprint(self, tile: Dims) -> int:
        """Bytes for columns of x and a box of y."""
        return self._gather.footprint(tile) + footprint(tile)

    def bind(self, box: Box, kept: Array, memory: Scratch) -> tuple[Array, list[Step]]:
        """A box of y: gather, then multiply."""
        columns, steps = self._gather.bind(box, memory)
        images, filters, *pixels = box_dims(box)
        product = memory.take((*kept.shape[:2], columns.shape[2]))
        steps.append(lambda _: np.matmul(kept, columns, out=product))
        return product.reshape(filters, images, *pixels).swapaxes(0, 1), steps


class BackwardData(_Filtering):
    """dx = the sum of the columns of (w transposed times dy), a box of dx at a time."""

    def __init__(self, geometry: ConvGeometry, dy: int, w: int) -> None:
        super().__init__(geometry, w)
        self.grid = geometry.x
        self._dy = dy
        self._scatter = Scatter(geometry)

    def footprint(self, tile: Dims) -> int:
        """Bytes for the part of dy that a box of dx depends on, its columns, and their sums."""
        pixels = (tile[0], *self._geometry.most_outputs(tile))
        gradient, columns = (self._geometry.y[1], *pixels), self._columns_dims(math.prod(pixels))
        return footprint(gradient, columns) + self._scatter.footprint(tile)

    def bind(self, box: Box, kept: Array, memory: Scratch) -> tuple[Array, list[Step]]:
        """A box of dx: multiply, then scatter."""
        outputs = self._scatter.outputs(box)
        if any(stop <= start for start, stop in outputs):
            return self._scatter.bind(box, None, memory)
        gradient, steps = _load_gradient(self._geometry, self._dy, box[0], outputs, memory)
        columns = memory.take(self._columns_dims(gradient.shape[2]))
        transposed = kept.swapaxes(1, 2)
        steps.append(lambda _: np.matmul(transposed, gradient, out=columns))
        result, scattering = self._scatter.bind(box, columns, memory)
        return result, steps + scattering

    def _columns_dims(self, pixels: int) -> Dims:
        return (self._geometry.groups, self._geometry.depth, pixels)


class BackwardDataByTap(_Filtering):
    """dx = the sum over taps of their filters transposed times their part of dy, a box of dx at a time.

    For large filters: most columns of a box would belong to pixels around it.
    """

    def __init__(self, geometry: ConvGeometry, dy: int, w: int) -> None:
        super().__init__(geometry, w)
        self.grid = geometry.x
        self._dy = dy

    def footprint(self, tile: Dims) -> int:
        """Bytes for the part of dy that a tap leads to, for its products, and for a box of dx."""
        return footprint(*self._dims(tile), tile)

    def _dims(self, tile: Dims) -> tuple[Dims, Dims]:
        geometry = self._geometry
        pixels = math.prod(
            min(size, -(-extent // stride))
            for size, extent, stride in zip(geometry.y[2:], tile[2:], geometry.conv.stride, strict=True)
        )
        return (geometry.y[1], tile[0] * pixels), (tile[1], tile[0] * pixels)

    def bind(self, box: Box, kept: Array, memory: Scratch) -> tuple[Array, list[Step]]:
        """A box of dx: multiply and add, tap by tap."""
        geometry = self._geometry
        groups, filters, _ = kept.shape
        images, channels, *extents = box_dims(box)
        sums = memory.take((channels, images, *extents))
        gradients, products = (memory.take((math.prod(dims),)) for dims in self._dims(box_dims(box)))
        by_tap = kept.reshape(groups, filters, channels // groups, *geometry.taps)

        def add_up(values: Values) -> None:
            sums.fill(0)
            for tap in np.ndindex(*geometry.taps):
                inputs, outputs = geometry.meet_in_box(tap, spans(box), geometry.output_spans)
                into = sums[:, :, *inputs]
                if not into.size:
                    continue
                part = values[self._dy][box[0]][:, :, *outputs]
                gradient, product = gradients[: part.size], products[: into.size]
                gradient.reshape(part.swapaxes(0, 1).shape)[...] = part.swapaxes(0, 1)
                w = by_tap[(..., *tap)].swapaxes(1, 2)
                count = into.size // channels
                result = product.reshape(groups, channels // groups, count)
                np.matmul(w, gradient.reshape(groups, filters, count), out=result)
                np.add(into, product.reshape(into.shape), out=into)

        return sums.swapaxes(0, 1), [add_up]


def backward_data(geometry: ConvGeometry, dy: int, w: int) -> BackwardData | BackwardDataByTap:
    """The kernel that takes less time."""
    columns = BackwardData(geometry, dy, w)
    tile = largest_tile(geometry.x, columns.footprint, TILE_BYTES)
    counts = (-(-size // extent) for size, extent in zip(geometry.x[2:], tile[2:], strict=True))
    outputs = geometry.x[0] * math.prod(counts) * math.prod(geometry.most_outputs(tile))
    by_tap = outputs * math.prod(geometry.taps) > _MOST_OUTPUTS * geometry.meetings
    return BackwardDataByTap(geometry, dy, w) if by_tap else columns


class BackwardFilter:
    """dw = dy times the columns of x transposed, summed over boxes of dy."""

    accumulates: ClassVar[bool] = True

    def __init__(self, geometry: ConvGeometry, x: int, dy: int) -> None:
        self.grid = geometry.y
        # The sum so far, and one box's contribution.
        self.kept = (2, *geometry.filter_matrix)
        self._geometry = geometry
        self._dy = dy
        self._gather = Gather(geometry, x)

    def footprint(self, tile: Dims) -> int:
        """Bytes for columns of x and a box of dy."""
        return self._gather.footprint(tile) + footprint(tile)

    def begin(self, _kept: Array) -> list[Step]:
        """No steps: the first box sets the sum, so it need not be cleared."""
        return []

    def bind(self, box: Box, kept: Array, memory: Scratch) -> tuple[Array, list[Step]]:
        """The steps of a box, and all of dw, summed over the boxes up to this one."""
        columns, steps = self._gather.bind(box, memory)
        gradient, loading = _load_gradient(self._geometry, self._dy, box[0], spans(box), memory)
        steps += loading
        total, summand = kept
        transposed = columns.swapaxes(1, 2)
        if all(part.start == 0 for part in box):
            steps.append(lambda _: np.matmul(gradient, transposed, out=total))
        else:
            steps.append(lambda _: np.matmul(gradient, transposed, out=summand))
            steps.append(lambda _: np.add(total, summand, out=total))
        return total.reshape(self._geometry.w), steps


Kernel = Forward | BackwardData | BackwardDataByTap | BackwardFilter


def _load_gradient(
    geometry: ConvGeometry, dy: int, images: slice, outputs: list[Span], memory: Scratch
) -> tuple[Array, list[Step]]:
    """A box of dy, dims (groups, filters of a group, images and pixels)."""
    filters = geometry.y[1]
    box = (images, slice(0, filters), *(slice(start, stop) for start, stop in outputs))
    count, _, *pixels = box_dims(box)
    gradient = memory.take((filters, count, *pixels))
    steps = [load(dy, geometry.y, box, gradient.swapaxes(0, 1))]
    return gradient.reshape(*geometry.filter_matrix[:2], -1), steps
