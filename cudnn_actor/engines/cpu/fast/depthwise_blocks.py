"""Blocks of depthwise convolutions, in channels-last order.

`np.einsum` multiplies and adds in one pass over runs of channels. Tensors in another order are copied to such
blocks, and from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from cudnn_actor.engines.cpu.boxes import Box, box_dims, boxes
from cudnn_actor.engines.cpu.fast.convolution_views import clear_call, copy_call, even, inner
from cudnn_actor.engines.cpu.fast.kernels import Call, Step, deal
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.fast.memory_orders import scratch_in_order
from cudnn_actor.engines.cpu.geometry import ConvGeometry, spans
from cudnn_actor.engines.cpu.scratch import Dims, Scratch

__all__ = ["DepthwiseBlocks", "einsum_call", "most_elements", "subscripts"]

_BLOCK = 1 << 16
"""The most elements of a block of results."""
_LEAST_BLOCK = 1 << 15
"""The fewest elements of a block of results: a smaller block reads much that its neighbours read, too."""
_BLOCKS = 8
"""How many blocks a small tensor has."""
_CHANNELS = 2048
"""The most channels of a block. Runs of fewer than a few hundred channels take longer for each channel."""


class DepthwiseBlocks:
    """The base of convolutions and gradients with a filter for each channel.

    Parameters
    ----------
    geometry
        The convolution.
    dims
        The dims of the tensor whose boxes are blocks.
    dtype
        The dtype of all arrays.
    """

    def __init__(self, geometry: ConvGeometry, dims: Dims, dtype: type) -> None:
        self._geometry = geometry
        self._dims, self._dtype = dims, dtype
        self._itemsize = np.dtype(dtype).itemsize
        self._taps = math.prod(geometry.taps)
        self._axes = tuple(range(2, 2 + len(geometry.taps)))
        self._tile = _tile(dims)

    def _step_of_blocks(
        self,
        w: Floats,
        lanes: Sequence[Scratch],
        block: Callable[[Box, Floats, Scratch], list[Call]],
        *,
        pixels: int,
    ) -> Step:
        """The step that computes all blocks with a filter.

        `block` takes a box, the filter in a lane's memory, and the rest of that memory. It returns the calls
        that compute the box. `pixels`: how often the filter is repeated side by side.
        """
        grid = [*boxes(self._dims, self._tile)]
        memories = [lane.fork() for lane in lanes[: len(grid)]]
        filters, filled = self._taps_of_lanes(w, pixels, memories)

        def calls(box: Box, lane: int) -> list[Call]:
            return block(box, filters[lane], memories[lane].fork())

        return deal(grid, len(memories), calls, filled)

    def _taps_of_lanes(
        self, w: Floats, pixels: int, memories: Sequence[Scratch]
    ) -> tuple[list[Floats], list[list[Call]]]:
        """The filter in each lane's memory as (taps, pixels, channels), repeated for each pixel, and each
        lane's first calls."""
        source = np.moveaxis(w[:, 0], 0, -1)[..., None, :]
        dims = (*source.shape[:-2], pixels, source.shape[-1])
        taps = [memory.take(dims, self._dtype) for memory in memories]
        return taps, [[copy_call(source, each)] for each in taps]

    def _take(self, memory: Scratch, dims: Dims) -> Floats:
        """Scratch memory for dims N, C, spatial, in channels-last order."""
        return scratch_in_order(memory, dims, (0, *self._axes, 1), self._dtype)

    def _reach(self, tile: Dims) -> Dims:
        """Dims of the part of padded x that a tile of y depends on."""
        spatial = (self._geometry.reach((0, extent), axis) for axis, extent in enumerate(tile[2:]))
        return (*tile[:2], *(stop - start for start, stop in spatial))

    def _pad(self, x: Floats, box: Box, memory: Scratch) -> tuple[Floats, list[Call]]:
        """The part of padded x that a box of y depends on, in channels-last order, and calls that fill it."""
        geometry = self._geometry
        reach = [geometry.reach(span, axis) for axis, span in enumerate(spans(box))]
        overlaps = [geometry.overlap(span, axis) for axis, span in enumerate(reach)]
        source = inner(x, (*box[:2], *(overlap.source for overlap in overlaps)))
        dims = (*box_dims(box[:2]), *(stop - start for start, stop in reach))
        if source.shape == dims and x.strides[1] == x.itemsize:
            return source, []
        padded = self._take(memory, dims)
        calls = [clear_call(padded)] if source.size < padded.size else []
        if source.size:
            calls.append(copy_call(source, inner(padded, (overlap.within for overlap in overlaps))))
        return padded, calls

    def _view_by_tap(self, padded: Floats, dims: Dims) -> Floats:
        """Padded x as seen by each tap: (images, taps, spatial dims of y, channels)."""
        conv = self._geometry.conv
        taps = (step * d for step, d in zip(padded.strides[2:], conv.dilation, strict=True))
        pixels = (step * s for step, s in zip(padded.strides[2:], conv.stride, strict=True))
        strides = (padded.strides[0], *taps, *pixels, padded.strides[1])
        full = (dims[0], *self._geometry.taps, *dims[2:], dims[1])
        return np.lib.stride_tricks.as_strided(padded, full, strides, writeable=False)


def subscripts(rank: int) -> tuple[list[int], list[int], list[int]]:
    """The subscripts of shifted x, of the filter and of y, with which `np.einsum` adds up products."""
    image, channel = 0, 1 + 2 * rank
    taps, pixels = [*range(1, 1 + rank)], [*range(1 + rank, 1 + 2 * rank)]
    return [image, *taps, *pixels, channel], [*taps, channel], [image, *pixels, channel]


def einsum_call(
    arrays: tuple[Floats, Floats, Floats], of_a: list[int], of_b: list[int], of_sums: list[int]
) -> Call:
    """A call that sets the last array to the sums of products of the others."""
    a, b, sums = arrays
    einsum: Callable[..., object] = np.einsum
    return lambda: einsum(a, of_a, b, of_b, of_sums, out=sums)


def most_elements(dims: Dims) -> int:
    """The most elements of a block of a tensor."""
    return max(_LEAST_BLOCK, min(_BLOCK, math.prod(dims) // _BLOCKS))


def _tile(dims: Dims) -> Dims:
    """A tile for blocks of about equal size."""
    most = most_elements(dims)
    tile = [1, even(dims[1], _CHANNELS), *(1 for _ in dims[2:])]
    for axis in (*reversed(range(2, len(dims))), 0):
        tile[axis] = even(dims[axis], most // math.prod(tile))
    return tuple(tile)
