"""Convolutions that have a filter for each channel: sums of shifted products."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cudnn_actor.engines.cpu.boxes import Box
from cudnn_actor.engines.cpu.fast.convolution_views import add_call, channels_moved_last, copy_call
from cudnn_actor.engines.cpu.fast.depthwise_blocks import DepthwiseBlocks, einsum_call, subscripts
from cudnn_actor.engines.cpu.fast.depthwise_rows import DepthwiseRows
from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.geometry import ConvGeometry
from cudnn_actor.engines.cpu.scratch import Scratch, footprint
from cudnn_actor.protocol.types.conv import ConvSpec

__all__ = ["DepthwiseForward"]

_FILTER = 18 << 10
"""Elements of a filter that is repeated side by side, for runs over the channels of several pixels."""
_SHORT_RUN, _PIXELS = 160, 4
"""Channels of a pixel, at most, and pixels of a run, at least, with which phases of a stride pay."""


class DepthwiseForward(DepthwiseBlocks):
    """y = the sum over taps of w times the shifted x."""

    def __init__(self, geometry: ConvGeometry, dtype: type) -> None:
        super().__init__(geometry, geometry.y, dtype)
        self._rows = DepthwiseRows(geometry, dtype)
        channels = geometry.w[0]
        pays = (
            geometry.taps[-1] > 1
            and self._tile[1] == channels <= _SHORT_RUN
            and _pixels_in_run(self._taps, channels, self._tile[-1]) >= _PIXELS
        )
        self._phases = [*_phases(geometry, dtype)] if pays else []

    def footprint(self, lanes: int) -> int:
        """Bytes for a filter, the padded part of x, a result that lies otherwise in y, and a phase's sums."""
        del lanes
        tile = self._tile
        taps = (self._taps, self._pixels_in_run(), self._geometry.w[0])
        if self._phases:
            parts = [max((phase.kernel._reach(tile) for phase in self._phases), key=math.prod), tile]
        else:
            parts = [self._reach(tile)]
        nbytes = footprint(taps, tile, *parts, itemsize=self._itemsize)
        return max(nbytes, self._rows.footprint())

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """See `Kernel`."""
        x, w, y = operands["x"], operands["w"], results["y"]
        if self._rows.takes(x, y):
            return self._rows.bind((x, w), y, lanes)

        def block(box: Box, taps: Floats, memory: Scratch) -> list[Call]:
            return self._block(x, taps, y[box], box, memory)

        return [self._step_of_blocks(w, lanes, block, pixels=self._pixels_in_run())]

    def _pixels_in_run(self) -> int:
        """How many pixels a run is over: the filter is as often side by side."""
        strided = self._geometry.conv.stride[-1] > 1 and not self._phases
        if strided or self._tile[1] < self._geometry.w[0]:
            return 1
        return _pixels_in_run(self._taps, self._tile[1], self._tile[-1])

    def _block(self, x: Floats, taps: Floats, target: Floats, box: Box, memory: Scratch) -> list[Call]:
        into = target
        if target.strides[1] != target.itemsize:
            into = self._take(memory, target.shape)
        sums = self._sum_of_phases if self._phases else self._sums
        calls = sums(x, taps, into, box, memory)
        if into is not target:
            calls.append(copy_call(into, target))
        return calls

    def _sum_of_phases(self, x: Floats, taps: Floats, into: Floats, box: Box, memory: Scratch) -> list[Call]:
        calls: list[Call] = []
        terms = self._take(memory, into.shape)
        for number, phase in enumerate(self._phases):
            part, w = x[..., phase.pixels], taps[..., phase.taps, :, :]
            calls += phase.kernel._sums(part, w, terms if number else into, box, memory.fork())
            if number:
                calls.append(add_call(into, terms))
        return calls

    def _sums(self, x: Floats, taps: Floats, into: Floats, box: Box, memory: Scratch) -> list[Call]:
        padded, calls = self._pad(x, box, memory)
        pixels = taps.shape[-2]
        if pixels > 1 and not _run(padded, into.shape[1]):
            copy = self._take(memory, padded.shape)
            calls.append(copy_call(padded, copy))
            padded = copy
        shifted = self._view_by_tap(padded, into.shape)
        moved = channels_moved_last(into)
        w = taps[..., box[1]]
        joined = pixels > 1 and _run(padded, into.shape[1]) and _run(into, into.shape[1])
        if joined and into.shape[-1] % pixels == 0:
            shifted, moved = (_in_runs(each, pixels) for each in (shifted, moved))
            w = w.reshape(*w.shape[:-2], -1)
        else:
            w = w[..., 0, :]
        return [*calls, einsum_call((shifted, w, moved), *subscripts(len(self._axes)))]


class _Phase(NamedTuple):
    """Pixels of a row with one remainder modulo the stride, the taps that meet them, and their kernel."""

    pixels: slice
    taps: slice
    kernel: DepthwiseForward


def _phases(geometry: ConvGeometry, dtype: type) -> Iterator[_Phase]:
    """A convolution with a stride along rows as several without one, of parts of the pixels and of the taps.

    With a stride, only the channels of one pixel are one run; of a phase, those of several pixels are.
    For pixel w of y, column c of the filter meets pixel s * w + c * d - p of x. Columns that are a multiple
    of s / gcd(d, s) apart meet pixels with the same remainder modulo s. These are a phase.
    """
    conv, taps = geometry.conv, geometry.taps[-1]
    *_, stride = conv.stride
    if stride == 1:
        return
    period = stride // math.gcd(conv.dilation[-1], stride)
    for column in range(min(period, taps)):
        ahead, phase = divmod(column * conv.dilation[-1] - conv.pre_padding[-1], stride)
        pixels = slice(phase + stride * max(ahead, 0), None, stride)
        columns = slice(column, None, period)
        one = ConvSpec(
            pre_padding=(*conv.pre_padding[:-1], max(-ahead, 0)),
            post_padding=(*conv.post_padding[:-1], 0),
            stride=(*conv.stride[:-1], 1),
            dilation=(*conv.dilation[:-1], period * conv.dilation[-1] // stride),
            groups=conv.groups,
        )
        x = (*geometry.x[:-1], len(range(geometry.x[-1])[pixels]))
        w = (*geometry.w[:-1], len(range(taps)[columns]))
        yield _Phase(pixels, columns, DepthwiseForward(ConvGeometry(x, w, geometry.y, one), dtype))


def _pixels_in_run(taps: int, channels: int, width: int) -> int:
    """How many pixels of a row, a divisor of its width, are in a run without too large a filter."""
    most = max(1, _FILTER // (taps * channels))
    return max(count for count in range(1, min(width, most) + 1) if width % count == 0)


def _run(array: Floats, channels: int) -> bool:
    """Whether the pixels of a row lie side by side."""
    return array.strides[-1] == channels * array.itemsize


def _in_runs(array: Floats, pixels: int) -> Floats:
    """An array of dims (..., width, channels), whose rows are cut into runs of `pixels` pixels each."""
    *dims, width, channels = array.shape
    *strides, step, inner = array.strides
    return np.lib.stride_tricks.as_strided(
        array, (*dims, width // pixels, pixels * channels), (*strides, step * pixels, inner)
    )
