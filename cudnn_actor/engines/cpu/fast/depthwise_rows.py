"""Depthwise convolutions of images whose rows lie side by side: packed ones, or copies of others.

A row of the filter is one row of a matrix, and a channel's copies are the rows of another. `np.einsum`
would take a pass over the copies for each tap. A stride over 1 across rows divides these by their phase.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from cudnn_actor.engines.cpu.boxes import Box, boxes
from cudnn_actor.engines.cpu.fast.convolution_views import (
    calls_of_taps,
    copy_call,
    even,
    product_call,
    reshaped_view,
)
from cudnn_actor.engines.cpu.fast.depthwise_blocks import most_elements
from cudnn_actor.engines.cpu.fast.kernels import Call, Step, deal, in_turn
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.fast.matrices import blas_takes
from cudnn_actor.engines.cpu.fast.shifted_rows import LEAST_ROW, ShiftedRows, sum_calls
from cudnn_actor.engines.cpu.geometry import ConvGeometry
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.types.conv import ConvSpec

__all__ = ["DepthwiseRows"]

_MOVED_TAPS, _LEAST_MOVED_ROW = 24, 20
"""Taps for each step of the stride, and pixels of a row, with which it pays to take images from another order
of memory, channels-last above all, and to bring them back."""
_PRODUCTS, _LEAST_PIXELS = 10**6, 512
"""OpenBLAS computes matrices of more products, on x86-64 with AVX-512, half as fast: it copies them first.
Of fewer pixels, each product's own overhead shows."""
_BLOCK_BYTES, _MOST_BLOCK_BYTES = 2 << 20, 4 << 20
"""Shifted copies and products of a block: what is aimed at, and the most. They grow with the filter."""


class DepthwiseRows(ShiftedRows):
    """y = the sum over taps of w times the shifted x, in blocks of whole channels or of rows of one."""

    def __init__(self, geometry: ConvGeometry, dtype: type) -> None:
        self._lines = len(geometry.taps) == 1
        super().__init__(_of_rows(geometry) if self._lines else geometry, dtype)
        tile = [1, 1, *(1 for _ in self._geometry.taps)]
        for axis in (*reversed(range(2, len(tile))), 1):
            tile[axis] = even(self._geometry.y[axis], most_elements(geometry.y) // math.prod(tile))
        for axis, least in enumerate((1, *self._geometry.window), 1):
            # Blocks smaller than the window would read much that their neighbours read, too.
            while self._block_bytes(tuple(tile[1:])) > _BLOCK_BYTES and tile[axis] >= 2 * least:
                tile[axis] = even(self._geometry.y[axis], tile[axis] // 2)
        self._tile = tuple(tile)
        self._few_copies = self._block_bytes(self._tile[1:]) <= _MOST_BLOCK_BYTES

    def takes(self, x: Floats, y: Floats) -> bool:
        """Whether the filter is not too large, and this way takes less time than channels-last copies."""
        if not self._few_copies:
            return False
        if x.strides[-1] == y.strides[-1] == x.itemsize:
            return bool(y.shape[-1] >= LEAST_ROW)
        taps, stride = math.prod(self._geometry.taps), self._geometry.conv.stride[-1]
        return bool(y.shape[-1] >= _LEAST_MOVED_ROW and taps >= _MOVED_TAPS * stride)

    def footprint(self) -> int:
        """Bytes for a block's copies, products, filters and sums, and for rows of which there are copies."""
        if not self._few_copies:
            return 0
        sums = self._tile[1:]
        rows, filters = self._shifted_dims(sums)[2:], (sums[0], *self._geometry.taps)
        others = footprint(rows, sums, filters, itemsize=np.dtype(self._dtype).itemsize)
        return self._block_bytes(sums) + others

    def _block_bytes(self, sums: Dims) -> int:
        shifted = self._shifted_dims(sums)
        products = (math.prod(self._geometry.taps[:-1]), *shifted[2:])
        return footprint(shifted, products, itemsize=np.dtype(self._dtype).itemsize)

    def bind(self, operands: tuple[Floats, Floats], y: Floats, lanes: Sequence[Scratch]) -> list[Step]:
        """See `Kernel`. `operands`: x and w."""
        x, w = operands
        if self._lines:
            x, w, y = (array[:, :, None] for array in (x, w, y))
        *rows, columns = self._geometry.taps
        calls = math.prod(rows) + 2 * columns  # of a block, about

        def call(box: Box, lane: int) -> Call:
            result, sums_of = y[box][0], partial(self._sums, w[box[1], 0])
            copies = self._shifted_dims(result.shape)
            image = x[box[0].start, box[1]]
            block = partial(self._compute_block, (image, result), box, lanes[lane], copies, sums_of)
            return in_turn(calls_of_taps(calls, block))

        return [deal(boxes(self._geometry.y, self._tile), len(lanes), call)]

    def _shifted_dims(self, sums: Dims) -> Dims:
        """Copies for sums of channels and spatial dims: columns, phases, channels, spatial dims."""
        *outer, rows = (self._rows(axis, extent) for axis, extent in enumerate(sums[1:-1]))
        stride = self._geometry.conv.stride[-2]
        return (self._geometry.taps[-1], stride, sums[0], *outer, -(-rows // stride), sums[-1])

    def _sums(self, w: Floats, shifted: Floats, sums: Floats, memory: Scratch) -> Iterator[Call]:
        """Calls that set `sums`, (channels, outer dims, pixels of all rows), from copies and the filter."""
        columns, _, channels, *spatial = shifted.shape
        count = math.prod(self._geometry.taps[:-1])
        products = memory.take((count, channels, math.prod(spatial)), self._dtype)
        filters = memory.take((channels, count, columns), self._dtype)
        terms = list[Floats]()
        for phase in self._phases(w):
            part = slice(len(terms), len(terms) + len(phase.rows))
            taps = reshaped_view(phase.taps, filters[:, part].shape)
            if taps is None or not blas_takes(taps):
                taps = filters[:, part]
                yield copy_call(phase.taps, taps.reshape(phase.taps.shape))
            copies = shifted[:, phase.number].reshape(columns, channels, -1)
            yield from _product_calls(taps, copies.swapaxes(0, 1), products[part].swapaxes(0, 1))
            terms += (
                self._part_of_sums(product.reshape(channels, *spatial), row, sums.shape)
                for product, row in zip(products[part], phase.rows, strict=True)
            )
        yield from sum_calls(terms, sums)

    def _phases(self, w: Floats) -> Iterator[_Phase]:
        """The phases of rows, each with the rows of the filter that meet them."""
        conv = self._geometry.conv
        across, stride = conv.dilation[-2], conv.stride[-2]
        period = stride // math.gcd(across, stride)
        for first in range(min(period, w.shape[-2])):
            taps = w[..., first::period, :]
            skipped, phase = divmod(first * across, stride)
            step = period * across // stride
            planes = (
                range(0, d * count, d) for d, count in zip(conv.dilation, taps.shape[1:-2], strict=False)
            )
            rows = (skipped + step * row for row in range(taps.shape[-2]))
            yield _Phase(phase, taps, [*itertools.product(*planes, rows)])


class _Phase(NamedTuple):
    """Rows of the filter that meet the same phase of rows.

    Parameters
    ----------
    number
        The phase.
    taps
        The taps of these rows: (channels, outer dims, rows, columns).
    rows
        For each row, in that order, where in the phase's copies the first row of y meets it.
    """

    number: int
    taps: Floats
    rows: list[Dims]


def _product_calls(a: Floats, b: Floats, y: Floats) -> Iterator[Call]:
    """Calls that compute y = a @ b, of few rows, in pieces of the columns."""
    pixels = even(y.shape[-1], max(_LEAST_PIXELS, _PRODUCTS // (a.shape[-1] * a.shape[-2])))
    for start in range(0, y.shape[-1], pixels):
        part = slice(start, start + pixels)
        yield product_call(a, b[..., part], y[..., part])


def _of_rows(geometry: ConvGeometry) -> ConvGeometry:
    """A convolution of one spatial dim as one of two, with one row."""
    conv = geometry.conv
    rows = ConvSpec(
        pre_padding=(0, *conv.pre_padding),
        post_padding=(0, *conv.post_padding),
        stride=(1, *conv.stride),
        dilation=(1, *conv.dilation),
        groups=conv.groups,
    )
    x, w, y = ((*dims[:2], 1, *dims[2:]) for dims in (geometry.x, geometry.w, geometry.y))
    return ConvGeometry(x, w, y, rows)
