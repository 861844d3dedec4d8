"""The windows of pooling along each dim: which elements each has."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.protocol.operations import AdaptiveWindow, AvgPool, AvgPoolBackward, Window

__all__ = ["LONG", "Axis", "counts_of", "in_windows", "regular_axis", "reversed_axes", "window_axes"]

Array = npt.NDArray[Any]
Dims = tuple[int, ...]
LONG = 8
"""Windows of more elements are reduced by one call each where they reach over an end."""


@dataclass(frozen=True, eq=False)
class Axis:
    """The windows along one spatial dim of `size` elements: the elements of each, from `starts` to `stops`.

    These are arrays of int64. `taps`: if all windows are the same but for the input's borders: where the
    first window's elements would lie, in order, and `stride`, the distance of two windows.
    """

    size: int
    starts: Array
    stops: Array
    dilation: int = 1
    taps: range | None = None
    stride: int = 1
    _parts: dict[tuple[int, int], tuple[slice, Axis]] = field(default_factory=dict, repr=False)
    _places: dict[int, Array] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        """How many windows there are."""
        return len(self.starts)

    @functools.cached_property
    def same(self) -> bool:
        """Whether each window is the element of the same number."""
        numbers = np.arange(self.size)
        return np.array_equal(self.starts, numbers) and np.array_equal(self.stops, numbers + 1)

    def calls(self, count: int) -> int:
        """The most calls that reduce `count` of the windows, all of one block."""
        if self.taps is None or len(self.taps) > 2 * count:
            return count
        edges = count - max(0, self.inside(self.taps[-1]).stop - self.inside(self.taps[0]).start)
        each = 1 if len(self.taps) > LONG else len(self.taps)
        return len(self.taps) + 2 + min(count, max(0, edges)) * each

    @functools.cached_property
    def longest(self) -> int:
        """The most elements of a window; of equal ones, those in padding too."""
        return int(self.members().max()) if self.taps is None else len(self.taps)

    def places(self, ahead: int) -> Array:
        """The element `ahead` elements behind the first one of each window, in windows without dilation."""
        if ahead not in self._places:
            self._places[ahead] = self.starts + ahead
        return self._places[ahead]

    def members(self) -> Array:
        """How many elements each window has."""
        found: Array = np.maximum(0, -((self.starts - self.stops) // self.dilation))
        return found

    def reach(self, first: int, last: int) -> tuple[int, int]:
        """Start and end of what windows `first` to `last - 1` read."""
        return int(self.starts[first:last].min()), int(self.stops[first:last].max())

    def part(self, first: int, last: int) -> tuple[slice, Axis]:
        """The slice that windows `first` to `last - 1` read, and these windows counted from its start."""
        if (first, last) not in self._parts:
            self._parts[first, last] = self._part(first, last)
        return self._parts[first, last]

    def _part(self, first: int, last: int) -> tuple[slice, Axis]:
        begin, end = self.reach(first, last)
        starts, stops = self.starts[first:last] - begin, self.stops[first:last] - begin
        taps, moved = self.taps, first * self.stride - begin
        if taps is not None:
            taps = range(taps.start + moved, taps.stop + moved, taps.step)
        return slice(begin, end), Axis(end - begin, starts, stops, self.dilation, taps, self.stride)

    def inside(self, tap: int) -> range:
        """The windows that have an element at a tap. `tap`: where that lies in the first window."""
        return range(
            -(-max(0, -tap) // self.stride), min(self.count, (self.size - 1 - tap) // self.stride + 1)
        )


def window_axes(window: Window | AdaptiveWindow, x: Dims, y: Dims) -> tuple[Axis, ...]:
    """The windows along each spatial dim."""
    return tuple(
        _regular(window, axis, size, count) if isinstance(window, Window) else _adaptive(size, count)
        for axis, (size, count) in enumerate(zip(x[2:], y[2:], strict=True))
    )


def reversed_axes(window: Window | AdaptiveWindow, x: Dims, y: Dims) -> tuple[Axis, ...]:
    """For each element of x along each spatial dim, the windows that it is in: as if it were a window of y.

    Of regular windows, y is spread: between two of them lie as many places as between the windows.
    """
    return tuple(
        _reversed(window, axis, size, count) if isinstance(window, Window) else _adaptive(count, size)
        for axis, (size, count) in enumerate(zip(x[2:], y[2:], strict=True))
    )


def in_windows(axis: Axis) -> npt.NDArray[np.bool_]:
    """Which elements along a dim are in a window."""
    found = np.zeros(axis.size, np.bool_)
    if axis.taps is None or len(axis.taps) > axis.count:
        for start, stop in zip(axis.starts, axis.stops, strict=True):
            found[start : stop : axis.dilation] = True
    else:
        for tap in axis.taps:
            if windows := axis.inside(tap):
                first, last = (tap + number * axis.stride for number in (windows[0], windows[-1]))
                found[first : last + 1 : axis.stride] = True
    return found


def _regular(window: Window, axis: int, size: int, count: int) -> Axis:
    stride, dilation, pre = window.stride[axis], window.dilation[axis], window.pre_padding[axis]
    taps = range(-pre, window.size[axis] * dilation - pre, dilation)
    return regular_axis(taps, stride, size, count)


def _reversed(window: Window, axis: int, size: int, count: int) -> Axis:
    dilation, pre = window.dilation[axis], window.pre_padding[axis]
    first = pre - (window.size[axis] - 1) * dilation
    places = (count - 1) * window.stride[axis] + 1
    found = regular_axis(range(first, pre + 1, dilation), 1, places, size)
    starts = np.minimum(found.starts, places)  # those behind the last window are in none
    return replace(found, starts=starts, stops=np.maximum(found.stops, starts))


def regular_axis(taps: range, stride: int, size: int, count: int) -> Axis:
    """`count` windows along a dim of some size. `taps`: where the elements of the first one would lie."""
    first = np.arange(count, dtype=np.int64) * stride + taps.start
    last, dilation = first + (taps[-1] - taps.start), taps.step
    starts = first + np.maximum(0, -(first // dilation)) * dilation
    stops = last - np.maximum(0, -((size - 1 - last) // dilation)) * dilation + 1
    return Axis(size, starts, stops, dilation, taps, stride)


def _adaptive(size: int, count: int) -> Axis:
    places = np.arange(count, dtype=np.int64)
    starts, stops = places * size // count, -(-(places + 1) * size // count)
    if size % count:
        return Axis(size, starts, stops)
    return Axis(size, starts, stops, 1, range(size // count), size // count)


def counts_of(node: AvgPool[Any] | AvgPoolBackward[Any], axes: Sequence[Axis], dtype: np.dtype[Any]) -> Array:
    """What sums are divided by, of dims that broadcast to the result's."""
    if node.include_padding and isinstance(node.window, Window):
        return np.array(math.prod(node.window.size), dtype)
    counts = np.ones((1, 1, *[1] * len(axes)), np.int64)
    for number, axis in enumerate(axes):
        along = [1] * (2 + len(axes))
        along[2 + number] = axis.count
        counts = counts * axis.members().reshape(along)
    return (counts if counts.min() != counts.max() else counts.reshape(-1)[0]).astype(dtype)
