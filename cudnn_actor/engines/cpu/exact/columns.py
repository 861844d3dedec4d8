"""im2col and col2im: between images and the columns that a matrix product takes.

Scratch arrays put channels before images, so that one group's columns are one matrix:
(channels and taps) by (images and output pixels). The method is from Chellapilla, Puri, Simard,
"High performance convolutional neural networks for document processing" (2006).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from cudnn_actor.engines.cpu.boxes import Box, box_dims
from cudnn_actor.engines.cpu.exact.steps import Step, Values, load
from cudnn_actor.engines.cpu.geometry import ConvGeometry, Span, spans
from cudnn_actor.engines.cpu.scratch import Array, Dims, Scratch, footprint

__all__ = ["Gather", "Scatter"]

_MOST_TAPS = 128
"""The most taps of a filter for which the parts of a box are kept. For larger filters, each run finds
them."""


class Gather:
    """Columns of x for a box of y.

    Parameters
    ----------
    geometry
        The convolution.
    x
        The index of x among the values of a run.
    """

    def __init__(self, geometry: ConvGeometry, x: int) -> None:
        self._geometry = geometry
        self._x = x

    def footprint(self, tile: Dims) -> int:
        """Bytes of scratch for a box of y of these dims."""
        columns = footprint(self._columns_dims(tile))
        if self._geometry.single_tap:
            return columns
        reach = [self._geometry.reach((0, extent), axis) for axis, extent in enumerate(tile[2:])]
        return columns + min(footprint(self._padded_dims(tile[0], reach)), columns)

    def bind(self, box: Box, memory: Scratch) -> tuple[Array, list[Step]]:
        """Columns for a box of y, (groups, channels and taps, images and pixels), and steps to fill them."""
        geometry, tile = self._geometry, box_dims(box)
        columns = memory.take(self._columns_dims(tile))
        if geometry.single_tap:
            steps = [self._load_pixels(box, columns)]
        else:
            reach = [geometry.reach(span, axis) for axis, span in enumerate(spans(box))]
            if math.prod(self._padded_dims(tile[0], reach)) > columns.size:
                return columns.reshape(geometry.groups, geometry.depth, -1), [self._load_taps(box, columns)]
            padded = memory.take(self._padded_dims(tile[0], reach))
            steps = self._load_padded(box[0], reach, padded)
            patches = self._patches(padded, columns.shape)
            steps.append(lambda _: np.copyto(columns, patches))
        return columns.reshape(geometry.groups, geometry.depth, -1), steps

    def _columns_dims(self, tile: Dims) -> Dims:
        return (self._geometry.x[1], *self._geometry.taps, tile[0], *tile[2:])

    def _padded_dims(self, images: int, reach: list[Span]) -> Dims:
        return (self._geometry.x[1], images, *(stop - start for start, stop in reach))

    def _load_pixels(self, box: Box, columns: Array) -> Step:
        geometry = self._geometry
        strided = (
            # None instead of a step of 1, so that a box that is all of x compares equal to `whole`.
            slice(start * stride, (stop - 1) * stride + 1, stride if stride > 1 else None)
            for (start, stop), stride in zip(spans(box), geometry.conv.stride, strict=True)
        )
        into = columns.reshape(geometry.x[1], *_images_and_pixels(box)).swapaxes(0, 1)
        return load(self._x, geometry.x, (box[0], slice(0, geometry.x[1]), *strided), into)

    def _load_padded(self, images: slice, reach: list[Span], padded: Array) -> list[Step]:
        """Fill a padded copy of the part of x that the box depends on."""
        geometry = self._geometry
        overlaps = [geometry.overlap(span, axis) for axis, span in enumerate(reach)]
        inside = padded[:, :, *(o.within for o in overlaps)].swapaxes(0, 1)
        source = (images, slice(0, geometry.x[1]), *(o.source for o in overlaps))
        steps: list[Step] = []
        if inside.size < padded.size:
            steps.append(lambda _: padded.fill(0))
        if inside.size:
            steps.append(load(self._x, geometry.x, source, inside))
        return steps

    def _load_taps(self, box: Box, columns: Array) -> Step:
        """Fill columns tap by tap: strides or dilations leave out most of what a padded part of x has."""
        geometry = self._geometry
        channels = slice(0, geometry.x[1])

        def load_taps(values: Values) -> None:
            columns.fill(0)
            for tap in np.ndindex(*geometry.taps):
                inputs, outputs = geometry.meet_in_box(tap, geometry.input_spans, spans(box))
                into = columns[:, *tap, :, *outputs]
                if into.size:
                    source = (box[0], channels, *inputs)
                    load(self._x, geometry.x, source, into.swapaxes(0, 1))(values)

        return load_taps

    def _patches(self, padded: Array, dims: Dims) -> Array:
        """The columns as a view: (channels, taps, images, output pixels); entries share elements."""
        conv = self._geometry.conv
        channel, image, *pixel = padded.strides
        taps = (step * d for step, d in zip(pixel, conv.dilation, strict=True))
        outputs = (step * s for step, s in zip(pixel, conv.stride, strict=True))
        strides = (channel, *taps, image, *outputs)
        return np.lib.stride_tricks.as_strided(padded, dims, strides, writeable=False)


class Scatter:
    """Sums columns of dx, one per output pixel, into a box of dx.

    The outputs that touch a box also touch pixels around it; those sums go to a margin that is not read.
    """

    def __init__(self, geometry: ConvGeometry) -> None:
        self._geometry = geometry

    def outputs(self, box: Box) -> list[Span]:
        """The spans of outputs that touch a box of dx; one of them may be empty."""
        return [
            self._geometry.touched_outputs(span, axis) for axis, span in enumerate(self._padded_spans(box))
        ]

    def footprint(self, tile: Dims) -> int:
        """Bytes of scratch for a box of dx of these dims, columns not counted."""
        geometry = self._geometry
        if geometry.pixelwise:
            return 0
        padding = zip(geometry.conv.pre_padding, geometry.conv.post_padding, strict=True)
        extents = (
            min(extent + 2 * (window - 1), size + pre + post)
            for extent, window, size, (pre, post) in zip(
                tile[2:], geometry.window, geometry.x[2:], padding, strict=True
            )
        )
        return footprint((tile[1], tile[0], *extents))

    def bind(self, box: Box, columns: Array | None, memory: Scratch) -> tuple[Array, list[Step]]:
        """The sums in a box of dx, and the steps that compute them; zeros if there are no columns."""
        images, channels, *extents = box_dims(box)
        if columns is not None and self._geometry.pixelwise:
            return columns.reshape(channels, images, *extents).swapaxes(0, 1), []
        inputs, outputs = self._padded_spans(box), self.outputs(box)
        frame = inputs if columns is None else self._frame(inputs, outputs)
        sums = memory.take((channels, images, *(stop - start for start, stop in frame)))
        steps: list[Step] = [lambda _: sums.fill(0)]
        if columns is not None:
            steps.append(self._scatter(columns, sums, frame, outputs))
        inside = (slice(a - start, b - start) for (a, b), (start, _) in zip(inputs, frame, strict=True))
        return sums[:, :, *inside].swapaxes(0, 1), steps

    def _padded_spans(self, box: Box) -> list[Span]:
        pads = zip(spans(box), self._geometry.conv.pre_padding, strict=True)
        return [(start + pad, stop + pad) for (start, stop), pad in pads]

    def _frame(self, inputs: list[Span], outputs: list[Span]) -> list[Span]:
        """The smallest spans that hold the box and all that its outputs touch."""
        reach = (self._geometry.reach(span, axis) for axis, span in enumerate(outputs))
        return [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(inputs, reach, strict=True)]

    def _scatter(self, columns: Array, sums: Array, frame: list[Span], outputs: list[Span]) -> Step:
        geometry = self._geometry
        counts = [stop - start for start, stop in outputs]
        per_tap = columns.reshape(sums.shape[0], math.prod(geometry.taps), sums.shape[1], *counts)

        def pairs() -> Iterator[tuple[Array, Array]]:
            for tap, offsets in enumerate(geometry.offsets()):
                places = []
                for axis, stride in enumerate(geometry.conv.stride):
                    first = outputs[axis][0] * stride - frame[axis][0] + offsets[axis]
                    places.append(slice(first, first + (counts[axis] - 1) * stride + 1, stride))
                yield sums[:, :, *places], per_tap[:, tap]

        kept = [*pairs()] if math.prod(geometry.taps) <= _MOST_TAPS else None

        def scatter(_: object) -> None:
            for target, part in pairs() if kept is None else kept:
                np.add(target, part, out=target)

        return scatter


def _images_and_pixels(box: Box) -> Dims:
    images, _, *extents = box_dims(box)
    return (images, *extents)
