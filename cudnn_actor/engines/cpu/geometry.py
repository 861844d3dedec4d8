"""A convolution's geometry: shapes and index ranges, without values."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from cudnn_actor.engines.cpu.boxes import Box
from cudnn_actor.engines.cpu.scratch import Dims
from cudnn_actor.protocol.types.conv import ConvSpec

__all__ = ["ConvGeometry", "Overlap", "Span", "spans"]

Span = tuple[int, int]
"""Start and stop along one spatial dim."""


@dataclass(frozen=True)
class Overlap:
    """The part of a span that the unpadded input covers, counted from its start and from the input's."""

    within: slice
    source: slice


@dataclass(frozen=True)
class ConvGeometry:
    """A convolution of x (N, C, spatial) with w (K, C / groups, taps) to y (N, K, spatial)."""

    x: Dims
    w: Dims
    y: Dims
    conv: ConvSpec

    @property
    def groups(self) -> int:
        """Into how many groups channels are split."""
        return self.conv.groups

    @functools.cached_property
    def taps(self) -> Dims:
        """The filter's spatial dims."""
        return self.w[2:]

    @functools.cached_property
    def filter_matrix(self) -> Dims:
        """Dims of w as one matrix per group: filters by (channels and taps)."""
        return (self.groups, self.w[0] // self.groups, self.depth)

    @functools.cached_property
    def depth(self) -> int:
        """How many products are summed for one element of y."""
        return math.prod(self.w[1:])

    @functools.cached_property
    def meetings(self) -> int:
        """How many pairs of a tap and an output there are that depend on an input pixel, not on padding."""
        found = 1
        for axis, conv in enumerate(
            zip(self.conv.dilation, self.conv.pre_padding, self.conv.stride, strict=True)
        ):
            dilation, pad, stride = conv
            places = np.arange(self.taps[axis], dtype=np.int64) * dilation - pad
            first = np.maximum(0, -(places // stride))
            last = np.minimum(self.y[axis + 2], (self.x[axis + 2] - 1 - places) // stride + 1)
            found *= int(np.maximum(last - first, 0).sum())
        return found * self.x[0]

    @functools.cached_property
    def window(self) -> Dims:
        """The extent of the dilated filter, per spatial dim."""
        return tuple(d * (t - 1) + 1 for d, t in zip(self.conv.dilation, self.taps, strict=True))

    @functools.cached_property
    def has_padding(self) -> bool:
        """Whether there is any padding."""
        return any(self.conv.pre_padding) or any(self.conv.post_padding)

    @functools.cached_property
    def single_tap(self) -> bool:
        """Whether each output depends on one input pixel, and there is no padding."""
        return math.prod(self.taps) == 1 and not self.has_padding

    @functools.cached_property
    def pixelwise(self) -> bool:
        """Whether each pixel of y depends on the same pixel of x alone: no im2col in either direction."""
        return self.single_tap and set(self.conv.stride) == {1}

    def reach(self, outputs: Span, axis: int) -> Span:
        """The padded inputs that a non-empty span of outputs depends on."""
        start, stop = outputs
        stride = self.conv.stride[axis]
        return start * stride, (stop - 1) * stride + self.window[axis]

    def touched_outputs(self, inputs: Span, axis: int) -> Span:
        """The outputs that depend on any of a span of padded inputs; stop <= start if there are none."""
        start, stop = inputs
        stride = self.conv.stride[axis]
        first = max(0, -(-(start - self.window[axis] + 1) // stride))
        return first, min(self.y[axis + 2], (stop - 1) // stride + 1)

    def most_outputs(self, tile: Dims) -> Dims:
        """The most outputs along each spatial dim that depend on a box of x of these dims, anywhere in x."""
        return tuple(
            min(size, (extent + window - 2) // stride + 1)
            for size, extent, window, stride in zip(
                self.y[2:], tile[2:], self.window, self.conv.stride, strict=True
            )
        )

    def overlap(self, span: Span, axis: int) -> Overlap:
        """The part of a span of padded inputs that lies in x itself; empty slices if there is none."""
        pad, size = self.conv.pre_padding[axis], self.x[axis + 2]
        start = min(max(span[0] - pad, 0), size)
        stop = min(max(span[1] - pad, start), size)
        offset = start + pad - span[0]
        return Overlap(slice(offset, offset + stop - start), slice(start, stop))

    def meet_along(self, axis: int, tap: int, inputs: Span, outputs: Span) -> tuple[slice, slice]:
        """The elements of two spans, of inputs and of outputs, that meet in a tap, counted from the starts of
        the spans.

        Inputs do not count padding.
        """
        stride = self.conv.stride[axis]
        offset = tap * self.conv.dilation[axis] - self.conv.pre_padding[axis]
        first = max(outputs[0], -((offset - inputs[0]) // stride))
        stop = min(outputs[1], (inputs[1] - 1 - offset) // stride + 1)
        if stop <= first:
            return slice(0, 0), slice(0, 0)
        start = first * stride + offset - inputs[0]
        end = start + (stop - first - 1) * stride + 1
        return slice(start, end, stride), slice(first - outputs[0], stop - outputs[0])

    def meet_in_box(
        self, tap: Sequence[int], inputs: Iterable[Span], outputs: Iterable[Span]
    ) -> tuple[list[slice], list[slice]]:
        """The slices of a box of inputs and of a box of outputs that meet in a tap, for each spatial dim: see
        `meet_along`."""
        pairs = [self.meet_along(axis, *of) for axis, of in enumerate(zip(tap, inputs, outputs, strict=True))]
        return [one for one, _ in pairs], [other for _, other in pairs]

    @functools.cached_property
    def input_spans(self) -> list[Span]:
        """All of x along each spatial dim."""
        return [(0, size) for size in self.x[2:]]

    @functools.cached_property
    def output_spans(self) -> list[Span]:
        """All of y along each spatial dim."""
        return [(0, size) for size in self.y[2:]]

    def offsets(self) -> Iterator[Dims]:
        """Each tap's position in the window, the last spatial dim fastest."""
        return product(
            *(range(0, w, d) for w, d in zip(self.window, self.conv.dilation, strict=True)),
        )


def spans(box: Box) -> list[Span]:
    """A box's spatial dims as spans."""
    return [(part.start, part.stop) for part in box[2:]]
