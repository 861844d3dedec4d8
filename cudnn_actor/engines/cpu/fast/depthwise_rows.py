"""Depthwise convolutions of images whose rows lie side by side: packed ones, with long rows.

For each column of the filter, there is a copy of a block of x that is shifted to the pixels which that
column meets. Where rows of x are as long as those of y, all rows of a channel are copied as one run. There, a
tap's pixels of all rows are one run, and `np.einsum` multiplies and adds in one pass over such runs. A stride
over 1 across rows divides these by their phase, whose sums are added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cudnn_actor.engines.cpu.boxes import Box, boxes
from cudnn_actor.engines.cpu.fast.convolution_views import (
    adding,
    copying,
    even,
    filling,
    inner,
    reshaped_view,
)
from cudnn_actor.engines.cpu.fast.depthwise_blocks import most_elements
from cudnn_actor.engines.cpu.fast.kernels import Call, Step, deal, in_turn
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.geometry import ConvGeometry, Span, spans
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.types.conv import ConvSpec

__all__ = ["DepthwiseRows"]

_LEAST_ROW = 20
"""Pixels of a row. For shorter ones, channels-last copies take less time."""
_COPIES_BYTES = 4 << 20
"""Shifted copies of a block, at most. They grow with the filter, both in number and in rows."""


class DepthwiseRows:
    """y = the sum over taps of w times the shifted x, in blocks of whole channels or of rows of one."""

    def __init__(self, geometry: ConvGeometry, dtype: type) -> None:
        self._lines = len(geometry.taps) == 1
        self._geometry = _of_rows(geometry) if self._lines else geometry
        self._dtype = dtype
        tile = [1, 1, *(1 for _ in self._geometry.taps)]
        for axis in (*reversed(range(2, len(tile))), 1):
            tile[axis] = even(self._geometry.y[axis], most_elements(geometry.y) // math.prod(tile))
        for axis, least in enumerate((1, *self._geometry.window), 1):
            # Blocks smaller than the window would read much that their neighbours read, too.
            while self._copies_bytes(tuple(tile[1:])) > _COPIES_BYTES and tile[axis] >= 2 * least:
                tile[axis] = even(self._geometry.y[axis], tile[axis] // 2)
        self._tile = tuple(tile)
        self._few_copies = self._copies_bytes(self._tile[1:]) <= _COPIES_BYTES

    def takes(self, x: Floats, y: Floats) -> bool:
        """Whether rows of both are runs in memory, and long ones, and the filter is not too large."""
        return self._few_copies and x.strides[-1] == y.strides[-1] == x.itemsize and y.shape[-1] >= _LEAST_ROW

    def footprint(self) -> int:
        """Bytes for shifted copies of x, for rows of which they are copies, and for two sums."""
        if not self._few_copies:
            return 0
        sums = self._tile[1:]
        rows = self._shifted_dims(sums)[2:]
        return self._copies_bytes(sums) + footprint(rows, sums, sums, itemsize=np.dtype(self._dtype).itemsize)

    def _copies_bytes(self, sums: Dims) -> int:
        return footprint(self._shifted_dims(sums), itemsize=np.dtype(self._dtype).itemsize)

    def bind(self, operands: tuple[Floats, Floats], y: Floats, lanes: Sequence[Scratch]) -> list[Step]:
        """See `Kernel`. `operands`: x and w."""
        x, w = operands
        if self._lines:
            x, w, y = (array[:, :, None] for array in (x, w, y))

        def call(box: Box, lane: int) -> Call:
            return in_turn(self._block(x[box[0]], w[box[1], 0], y[box], box, lanes[lane].fork()))

        return [deal(boxes(self._geometry.y, self._tile), len(lanes), call)]

    def _shifted_dims(self, sums: Dims) -> Dims:
        """Copies for sums of channels and spatial dims: columns, phases, channels, spatial dims."""
        *outer, rows = (self._rows(axis, extent) for axis, extent in enumerate(sums[1:-1]))
        stride = self._geometry.conv.stride[-2]
        return (self._geometry.taps[-1], stride, sums[0], *outer, -(-rows // stride), sums[-1])

    def _rows(self, axis: int, extent: int) -> int:
        start, stop = self._geometry.reach((0, extent), axis)
        return stop - start

    def _block(self, x: Floats, w: Floats, target: Floats, box: Box, memory: Scratch) -> list[Call]:
        result = target[0]
        shifted = memory.take(self._shifted_dims(result.shape), self._dtype)
        runs = (*result.shape[:-2], math.prod(result.shape[-2:]))
        into = reshaped_view(result, runs)
        sums = memory.take(runs, self._dtype) if into is None else into
        terms = memory.take(runs, self._dtype)
        calls = [*self._shift(x[0, box[1]], shifted, box, memory)]
        for number, (seen, taps) in enumerate(self._phases(shifted, w, result.shape)):
            calls.append(_accumulate(seen, taps, terms if number else sums))
            if number:
                calls.append(adding(sums, terms))
        if into is None:
            calls.append(copying(sums.reshape(result.shape), result))
        return calls

    def _shift(self, x: Floats, shifted: Floats, box: Box, memory: Scratch) -> Iterator[Call]:
        """Calls that copy x, of the box's channels, for each column of the filter and each phase of rows."""
        geometry = self._geometry
        *outer, (first, stop) = (geometry.reach(span, axis) for axis, span in enumerate(spans(box)[:-1]))
        planes = [geometry.overlap(span, axis) for axis, span in enumerate(outer)]
        stride, padding, height = geometry.conv.stride[-2], geometry.conv.pre_padding[-2], x.shape[-2]
        for phase in range(stride):
            # The rows of this phase that are not padding.
            start = first + phase - padding
            skipped = max(0, -(start // stride))
            end = min(height, stop - padding)
            rows = range(start + skipped * stride, end, stride)
            source = inner(x, (*(p.source for p in planes), slice(rows.start, max(end, 0), stride)), 1)
            part = slice(skipped, skipped + len(rows))
            every = shifted[:, phase]
            target = inner(every, (*(p.within for p in planes), part), 1)
            if math.prod(target.shape[2:-2]) < math.prod(every.shape[2:-2]):
                yield filling(every)
            else:
                for padded in (every[..., : part.start, :], every[..., part.stop :, :]):
                    if padded.size:
                        yield filling(padded)
            if target.size:
                yield from self._columns(source, target, spans(box)[-1], memory)

    def _columns(self, rows: Floats, target: Floats, span: Span, memory: Scratch) -> Iterator[Call]:
        """Calls that copy rows of x, (channels, spatial dims), for each column: the first dim of `target`.

        `span`: of the pixels in y's rows. A column of the filter meets every `stride`-th pixel of a row of x.
        If these are as many as a row of y has, all rows of a channel are copied as one run, shifted; what
        came from neighbouring rows is then set to 0.
        """
        conv, last = self._geometry.conv, target.ndim - 3
        phases: dict[int, dict[int, int]] = {}
        for column in range(len(target)):
            shift, phase = divmod(column * conv.dilation[-1] - conv.pre_padding[-1], conv.stride[-1])
            phases.setdefault(phase, {})[column] = shift
        for phase, shifts in phases.items():
            pixels = rows[..., phase :: conv.stride[-1]]
            runs = _joined(pixels)
            whole = span[0] == 0 and pixels.shape == target.shape[1:] and _joined(target[0]) is not None
            if whole and runs is None and len(shifts) > 1:
                copy = memory.fork().take(pixels.shape, self._dtype)
                yield copying(pixels, copy)
                runs = copy.reshape(len(pixels), -1)
            for column, shift in shifts.items():
                if whole and runs is not None:
                    yield from _shifting(runs, target[column], shift)
                else:
                    met, places = self._geometry.meeting(last, column, (0, rows.shape[-1]), span)
                    source = rows[..., met]
                    if source.shape[-1] < target.shape[-1]:
                        yield filling(target[column])
                    if source.size:
                        yield copying(source, target[column][..., places])

    def _phases(self, shifted: Floats, w: Floats, dims: Dims) -> Iterator[tuple[Floats, Floats]]:
        """For each phase of rows: x as seen by its taps, (channels, taps, pixels), and the taps.

        The last of the taps' dims is the column; the last of the pixels' has those of all rows.
        """
        conv, itemsize = self._geometry.conv, shifted.itemsize
        column, _, channel, *outer, row, _ = shifted.strides
        dilation, stride = conv.dilation[-2], conv.stride[-2]
        planes = [step * d for step, d in zip(outer, conv.dilation, strict=False)]
        places = [step * s for step, s in zip(outer, conv.stride, strict=False)]
        period = stride // math.gcd(dilation, stride)
        for first in range(min(period, w.shape[-2])):
            taps = w[..., first::period, :]
            skipped, phase = divmod(first * dilation, stride)
            seen = shifted[0, phase][..., skipped:, :]
            extents = (*taps.shape, *dims[1:-2], dims[-2] * dims[-1])
            strides = (channel, *planes, row * (period * dilation // stride), column, *places, itemsize)
            yield np.lib.stride_tricks.as_strided(seen, extents, strides, writeable=False), taps


def _joined(array: Floats) -> Floats | None:
    """A view with all dims but the first joined; None if there is none."""
    return reshaped_view(array, (len(array), math.prod(array.shape[1:])))


def _shifting(runs: Floats, target: Floats, shift: int) -> Iterator[Call]:
    """Calls that copy runs of rows so that each pixel lies where the one was that is `shift` before it.

    `runs`: (channels, pixels of all rows). `target`: (channels, spatial dims); pixels that would come from
    outside of their row are set to 0.
    """
    into = _joined(target)
    assert into is not None
    width, pixels = target.shape[-1], runs.shape[-1]
    if abs(shift) >= width:
        yield filling(target)
        return
    behind, before = max(shift, 0), max(-shift, 0)
    yield copying(runs[:, behind : pixels - before], into[:, before : pixels - behind])
    if shift:
        yield filling(target[..., width - behind :] if behind else target[..., :before])


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


def _accumulate(seen: Floats, taps: Floats, into: Floats) -> Call:
    """A call that sets an array, (channels, spatial dims), to sums over taps, (channels, dims of taps)."""
    of_taps = range(1, taps.ndim)
    pixels = range(taps.ndim, seen.ndim)
    einsum: Callable[..., object] = np.einsum
    subscripts = [0, *of_taps, *pixels], [0, *of_taps], [0, *pixels]
    return lambda: einsum(seen, subscripts[0], taps, subscripts[1], subscripts[2], out=into)
