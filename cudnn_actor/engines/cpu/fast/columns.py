"""Columns of images, block by block: what matrix products take instead of images.

A product's depth is what it sums over: the channels of a group, and the taps of the filter. Filters are read
where they lie, so they decide in which order. Columns are stored in one of two ways:

- *by pixel*: each output pixel has its taps and channels side by side. A row of taps is one run in memory.
- *by tap*: each tap of each channel has its output pixels side by side. A row of pixels is one run.

Both are filled from a part of the image that lies in the same order, whatever the order of the tensor: that
part is padded, and has as many elements as the columns divided by the taps. Where strides or dilations leave
out most elements, the part would have more elements than the columns. Then columns are filled tap by tap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.boxes import Box
from cudnn_actor.engines.cpu.fast.convolution_views import calls_of_taps, clear_call, copy_call, inner
from cudnn_actor.engines.cpu.fast.kernels import Call
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.fast.memory_orders import scratch_in_order
from cudnn_actor.engines.cpu.geometry import ConvGeometry, spans
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint

__all__ = ["Columns"]


class Columns:
    """Columns of x for boxes of y's pixels.

    Arrays have the dims (images, groups, channels of a group, taps, output pixels); `order` says in which
    order these lie in memory.
    """

    def __init__(self, geometry: ConvGeometry, dtype: npt.DTypeLike) -> None:
        self._geometry = geometry
        self._dtype = np.dtype(dtype)
        self._rank = len(geometry.taps)

    def order(self, by_pixel: bool, taps_first: bool) -> tuple[int, ...]:
        """The axes of an array of columns in the order in which they lie in memory."""
        taps = range(3, 3 + self._rank)
        pixels = range(3 + self._rank, 3 + 2 * self._rank)
        depth = (*taps, 2) if taps_first else (2, *taps)
        return (0, *pixels, 1, *depth) if by_pixel else (0, 1, *depth, *pixels)

    def dims(self, tile: Dims, channels: int) -> Dims:
        """Dims of the columns for a tile of y, with `channels` channels of each group."""
        geometry = self._geometry
        return (tile[0], geometry.groups, channels, *geometry.taps, *tile[2:])

    def footprint(self, tile: Dims, channels: int) -> int:
        """Bytes of scratch that `fill` needs for a box of at most these dims: not more than columns take."""
        geometry = self._geometry
        reach = [geometry.reach((0, extent), axis) for axis, extent in enumerate(tile[2:])]
        dims = (tile[0], geometry.groups * channels, *(stop - start for start, stop in reach))
        return min(footprint(dims, itemsize=self._dtype.itemsize), self.nbytes(tile, channels))

    def nbytes(self, tile: Dims, channels: int) -> int:
        """Bytes of scratch that an array of columns takes."""
        return footprint(self.dims(tile, channels), itemsize=self._dtype.itemsize)

    def fill(self, x: Floats, box: Box, into: Floats, by_pixel: bool, memory: Scratch) -> list[Call]:
        """Calls that fill columns for a box of y, of all images and channels of x that `into` is for.

        `x` has the dims (images, groups, channels of a group, spatial): those of the box and of `into` alone.
        """
        geometry = self._geometry
        reach = [geometry.reach(span, axis) for axis, span in enumerate(spans(box))]
        overlaps = [geometry.overlap(span, axis) for axis, span in enumerate(reach)]
        source = inner(x, [overlap.source for overlap in overlaps])
        extents = tuple([stop - start for start, stop in reach])
        whole = source.shape[3:] == extents
        if whole and (geometry.single_tap or self._lies(x, by_pixel)):
            return [copy_call(self._patches(source, into.shape), into)]
        if math.prod(extents) > math.prod(into.shape[3:]):
            by_tap = partial(self._by_tap, x, box, into)
            return calls_of_taps(math.prod(geometry.taps), by_tap)
        spatial = range(3, 3 + self._rank)
        order = (0, *spatial, 1, 2) if by_pixel else (0, 1, 2, *spatial)
        dims = (*x.shape[:3], *extents)
        padded = scratch_in_order(memory, dims, order, self._dtype)
        calls: list[Call] = []
        if not whole:
            calls.append(clear_call(padded))
        if source.size:
            calls.append(copy_call(source, inner(padded, [overlap.within for overlap in overlaps])))
        calls.append(copy_call(self._patches(padded, into.shape), into))
        return calls

    def _by_tap(self, x: Floats, box: Box, into: Floats) -> Iterator[Call]:
        """Calls that fill columns from where x lies."""
        geometry = self._geometry
        for tap in product(*map(range, geometry.taps)):
            inputs, outputs = geometry.meet_in_box(tap, geometry.input_spans, spans(box))
            whole = inner(into, (*tap, *[slice(None)] * self._rank))
            target = inner(whole, outputs)
            if target.size < whole.size:
                yield clear_call(whole)
            if target.size:
                yield copy_call(inner(x, inputs), target)

    def _lies(self, x: Floats, by_pixel: bool) -> bool:
        """Whether runs of x are runs of columns."""
        return x.strides[2 if by_pixel else -1] == x.itemsize

    def _patches(self, padded: Floats, dims: Dims) -> Floats:
        """The columns as a view: entries share elements."""
        conv = self._geometry.conv
        taps = (step * d for step, d in zip(padded.strides[3:], conv.dilation, strict=True))
        pixels = (step * s for step, s in zip(padded.strides[3:], conv.stride, strict=True))
        strides = (*padded.strides[:3], *taps, *pixels)
        return np.lib.stride_tricks.as_strided(padded, dims, strides, writeable=False)
