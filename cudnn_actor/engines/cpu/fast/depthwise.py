"""Convolutions that have a filter for each channel: sums of shifted products."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cudnn_actor.engines.cpu.exact.boxes import Box, boxes
from cudnn_actor.engines.cpu.exact.geometry import ConvGeometry
from cudnn_actor.engines.cpu.fast.convolution_views import Floats, channels_moved_last, copying
from cudnn_actor.engines.cpu.fast.depthwise_blocks import DepthwiseBlocks, accumulating, subscripts
from cudnn_actor.engines.cpu.fast.depthwise_rows import DepthwiseRows
from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step, dealt
from cudnn_actor.engines.cpu.scratch import Scratch, footprint

__all__ = ["DepthwiseForward"]

_FILTER = 18 << 10
"""Elements of a filter that is repeated side by side, for runs over the channels of several pixels."""


class DepthwiseForward(DepthwiseBlocks):
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

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """See `Kernel`."""
        x, w, y = operands["x"], operands["w"], results["y"]
        if self._rows.takes(x, y):
            return self._rows.bind((x, w), y, lanes)
        grid = [*boxes(self._geometry.y, self._tile)]
        memories = [lane.fork() for lane in lanes[: len(grid)]]
        filters, calls = self._taps_of_lanes(w, self._pixels_in_run(), memories)
        for number, box in enumerate(grid):
            lane = number % len(memories)
            calls[lane] += self._block(x, filters[lane], y[box], box, memories[lane].fork())
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
        moved = channels_moved_last(into)
        w = taps[..., box[1]]
        pixels = w.shape[-2]
        joined = pixels > 1 and _run(padded, target.shape[1]) and _run(into, target.shape[1])
        if joined and target.shape[-1] % pixels == 0:
            shifted, moved = (_in_runs(each, pixels) for each in (shifted, moved))
            w = w.reshape(*w.shape[:-2], -1)
        else:
            w = w[..., 0, :]
        calls.append(accumulating((shifted, w, moved), *subscripts(rank)))
        if into is not target:
            calls.append(copying(into, target))
        return calls


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
