"""Convolutions as products of a filter's rows, and sums of these.

For each column of the filter, there is a copy of a block of x that is shifted to the pixels which that
column meets, because BLAS takes no matrix whose rows overlap. Where rows of x are as long as those of y, all
rows of a channel are copied as one run. A product of the filter's rows and the copies gives, for each row of
the filter, what it adds to y, shifted by whole rows. Those are added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from cudnn_actor.engines.cpu.boxes import Box
from cudnn_actor.engines.cpu.fast.convolution_views import (
    add_call,
    clear_call,
    copy_call,
    inner,
    reshaped_view,
)
from cudnn_actor.engines.cpu.fast.kernels import Call
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.geometry import ConvGeometry, Span, spans
from cudnn_actor.engines.cpu.scratch import Dims, Scratch

__all__ = ["LEAST_ROW", "ShiftedRows", "sum_calls"]

LEAST_ROW = 8
"""Pixels of a row. For shorter ones, other ways take less time."""
_MOST_SPAN = 1.25
"""Elements of a run with gaps in it, for each that is added. One such run takes less time than many."""


class ShiftedRows:
    """The copies of a convolution's images, and where products of them meet y."""

    def __init__(self, geometry: ConvGeometry, dtype: type) -> None:
        self._geometry = geometry
        self._dtype = dtype

    def _rows(self, axis: int, extent: int) -> int:
        start, stop = self._geometry.reach((0, extent), axis)
        return stop - start

    def _compute_block(
        self,
        arrays: tuple[Floats, Floats],
        box: Box,
        lane: Scratch,
        dims: Dims,
        sums_of: Callable[[Floats, Floats, Scratch], Iterator[Call]],
    ) -> Iterator[Call]:
        """Calls that compute a box of y from copies of an image's channels.

        `arrays`: the image with these channels, and the box of y. `dims`: the copies' dims. `sums_of` returns
        the calls that set an array, (channels, outer dims, pixels of all rows), from the copies.
        """
        (x, result), memory = arrays, lane.fork()
        shifted = memory.take(dims, self._dtype)
        runs = (*result.shape[:-2], math.prod(result.shape[-2:]))
        into = reshaped_view(result, runs)
        sums = memory.take(runs, self._dtype) if into is None else into
        yield from self._shift(x, shifted, box, memory)
        yield from sums_of(shifted, sums, memory)
        if into is None:
            yield copy_call(sums.reshape(result.shape), result)

    def _part_of_sums(self, product: Floats, row: Dims, dims: Dims) -> Floats:
        """The part of a product for all pixels of the copies that a row of the filter adds to sums of these
        dims.

        `row`: where in the copies the first row of y meets it.
        """
        channel, *outer, _, pixel = product.strides
        first = product[:, *(slice(place, None) for place in row)]
        places = (step * stride for step, stride in zip(outer, self._geometry.conv.stride, strict=False))
        return np.lib.stride_tricks.as_strided(first, dims, (channel, *places, pixel))

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
                yield clear_call(every)
            else:
                for padded in (every[..., : part.start, :], every[..., part.stop :, :]):
                    if padded.size:
                        yield clear_call(padded)
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
            runs = _rows_view(pixels)
            whole = span[0] == 0 and pixels.shape == target.shape[1:] and _rows_view(target[0]) is not None
            packed = runs is not None and pixels.strides[-1] == pixels.itemsize
            if whole and not packed and len(shifts) > 1:
                copy = memory.fork().take(pixels.shape, self._dtype)
                yield copy_call(pixels, copy)
                runs = copy.reshape(len(pixels), -1)
            for column, shift in shifts.items():
                if whole and runs is not None:
                    yield from _shift_calls(runs, target[column], shift)
                else:
                    met, places = self._geometry.meet_along(last, column, (0, rows.shape[-1]), span)
                    source = rows[..., met]
                    if source.shape[-1] < target.shape[-1]:
                        yield clear_call(target[column])
                    if source.size:
                        yield copy_call(source, target[column][..., places])


def sum_calls(terms: Sequence[Floats], sums: Floats) -> Iterator[Call]:
    """Calls that set an array to the sum of others, of which the first is overwritten."""
    first, *others = terms
    if not others:
        yield copy_call(first, sums)
    for term in others[:-1]:
        yield add_call(_with_gaps(first), _with_gaps(term))
    for term in others[-1:]:
        yield partial(np.add, first, term, out=sums)


def _with_gaps(array: Floats) -> Floats:
    """The memory from an array's first element to its last, as one run, if that is little more than the array
    has."""
    steps = zip(array.shape, array.strides, strict=True)
    span = 1 + sum((size - 1) * step for size, step in steps) // array.itemsize
    if span > _MOST_SPAN * array.size:
        return array
    return np.lib.stride_tricks.as_strided(array, (span,), (array.itemsize,))


def _rows_view(array: Floats) -> Floats | None:
    """A view with all dims but the first joined; None if there is none."""
    return reshaped_view(array, (len(array), math.prod(array.shape[1:])))


def _shift_calls(runs: Floats, target: Floats, shift: int) -> Iterator[Call]:
    """Calls that copy runs of rows so that each pixel lies where the one was that is `shift` before it.

    `runs`: (channels, pixels of all rows). `target`: (channels, spatial dims); pixels that would come from
    outside of their row are set to 0.
    """
    into = _rows_view(target)
    assert into is not None
    width, pixels = target.shape[-1], runs.shape[-1]
    if abs(shift) >= width:
        yield clear_call(target)
        return
    behind, before = max(shift, 0), max(-shift, 0)
    yield copy_call(runs[:, behind : pixels - before], into[:, before : pixels - behind])
    if shift:
        yield clear_call(target[..., width - behind :] if behind else target[..., :before])
