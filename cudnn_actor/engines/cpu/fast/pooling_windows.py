"""The windows of pooling along each dim: which elements each has."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cudnn_actor.protocol.operations import AdaptiveWindow, AvgPool, AvgPoolBackward, Window

__all__ = [
    "LONG",
    "Axis",
    "Spread",
    "are_long",
    "counts_of",
    "in_windows",
    "regular_axis",
    "window_axes",
]

Array = npt.NDArray[Any]
Dims = tuple[int, ...]
LONG = 8
"""Windows of more elements are reduced by one call each where they reach over an end."""
_MANY = 16


@dataclass(frozen=True, eq=False)
class Axis:
    """The windows along one spatial dim of `size` elements.

    Parameters
    ----------
    size, count
        Elements of the dim, and how many windows there are.
    dilation
        How far apart neighbours of a window are.
    taps
        If all windows are the same but for the input's borders: where the first window's elements would lie,
        in order.
    stride
        Of such windows, how far apart neighbours are.
    bounds
        Of other windows: the first element of each, and the one behind the last. Arrays of int64.
    """

    size: int
    count: int
    dilation: int = 1
    taps: range | None = None
    stride: int = 1
    bounds: tuple[Array, Array] | None = None
    _parts: dict[tuple[int, int], tuple[slice, Axis]] = field(default_factory=dict, repr=False)
    _places: dict[tuple[int, int], Array] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def starts(self) -> Array:
        """The first element of each window: int64. A window behind all elements has none, at `size`."""
        if self.taps is None:
            assert self.bounds is not None
            return self.bounds[0]
        first, step = self._first(self.taps.start), self.dilation
        found: Array = np.minimum(first + np.maximum(0, -(first // step)) * step, self.size)
        return found

    @functools.cached_property
    def stops(self) -> Array:
        """The element behind the last one of each window: int64, at least its start."""
        if self.taps is None:
            assert self.bounds is not None
            return self.bounds[1]
        last, step = self._first(self.taps[-1]), self.dilation
        inside: Array = last - np.maximum(0, -((self.size - 1 - last) // step)) * step + 1
        return np.maximum(inside, self.starts, out=inside)

    def _first(self, tap: int) -> Array:
        return np.arange(self.count, dtype=np.int64) * self.stride + tap

    @functools.cached_property
    def same(self) -> bool:
        """Whether each window is the element of the same number, and has no padding."""
        if self.count != self.size:
            return False
        if self.taps is not None:
            return self.taps == range(1) and (self.stride == 1 or self.count == 1)
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

    @functools.cached_property
    def shortest(self) -> int:
        """The fewest elements of a window; of equal ones, with those in padding."""
        return int(self.members().min()) if self.taps is None else len(self.taps)

    def places(self, ahead: int, behind: int = 0) -> Array:
        """Elements of windows without dilation, as one array that is kept.

        The element `ahead` elements behind the first one of each window; with `behind` the one that lies so
        many before the element behind its last one.
        """
        if (ahead, behind) not in self._places:
            self._places[ahead, behind] = self.stops - behind if behind else self.starts + ahead
        return self._places[ahead, behind]

    def places_of_longer(self, least: int) -> Array:
        """The last element of windows of more than `least` elements, `size` for others; it is kept."""
        key = -1, least
        if key not in self._places:
            self._places[key] = np.where(self.members() > least, self.stops - 1, self.size)
        return self._places[key]

    def members(self) -> Array:
        """How many elements each window has."""
        found: Array = np.maximum(0, -((self.starts - self.stops) // self.dilation))
        return found

    def reach(self, first: int, last: int) -> tuple[int, int]:
        """Start and end of what windows `first` to `last - 1` lie in: some do not begin at the start."""
        if self.taps is None:
            return int(self.starts[first:last].min()), int(self.stops[first:last].max())
        begin = max(0, self.taps[0] + first * self.stride)
        end = self.taps[-1] + (last - 1) * self.stride + 1
        return min(begin, self.size), max(min(begin, self.size), min(end, self.size))

    def part(self, first: int, last: int) -> tuple[slice, Axis]:
        """The slice that windows `first` to `last - 1` read, and these windows counted from its start."""
        if (first, last) not in self._parts:
            self._parts[first, last] = self._part(first, last)
        return self._parts[first, last]

    def _part(self, first: int, last: int) -> tuple[slice, Axis]:
        begin, end = self.reach(first, last)
        if self.taps is None:
            bounds = self.starts[first:last] - begin, self.stops[first:last] - begin
            return slice(begin, end), Axis(end - begin, last - first, bounds=bounds)
        moved = first * self.stride - begin
        taps = range(self.taps.start + moved, self.taps.stop + moved, self.taps.step)
        return slice(begin, end), regular_axis(taps, self.stride, end - begin, last - first)

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
    """The windows that each element of x is in, along each spatial dim, as if the element were a window of y.

    For regular windows, y is spread: between two elements of y lie as many places as between two windows.
    """
    return tuple(
        _reversed_axis(window, axis, size, count) if isinstance(window, Window) else _adaptive(count, size)
        for axis, (size, count) in enumerate(zip(x[2:], y[2:], strict=True))
    )


def in_windows(axis: Axis) -> npt.NDArray[np.bool_]:
    """A mask of the elements along a dim that are in a window."""
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


def _reversed_axis(window: Window, axis: int, size: int, count: int) -> Axis:
    dilation, pre = window.dilation[axis], window.pre_padding[axis]
    first = pre - (window.size[axis] - 1) * dilation
    places = (count - 1) * window.stride[axis] + 1
    return regular_axis(range(first, pre + 1, dilation), 1, places, size)


def regular_axis(taps: range, stride: int, size: int, count: int) -> Axis:
    """`count` windows along a dim of some size. `taps`: where the elements of the first one would lie."""
    return Axis(size, count, taps.step, taps, stride)


def _adaptive(size: int, count: int) -> Axis:
    if size % count == 0:
        return regular_axis(range(size // count), size // count, size, count)
    places = np.arange(count, dtype=np.int64)
    return Axis(size, count, bounds=(places * size // count, -(-(places + 1) * size // count)))


class Spread(NamedTuple):
    """y, spread along its spatial dims: see `reversed_axes`.

    Parameters
    ----------
    dims
        Its dims then.
    axes
        For each element of x along each spatial dim, the windows that it is in.
    strides
        For each spatial dim, how far apart elements of y are.
    """

    dims: Dims
    axes: tuple[Axis, ...]
    strides: Sequence[int]

    @classmethod
    def of(cls, window: Window | AdaptiveWindow, x: Dims, y: Dims) -> Spread:
        """y of these dims, spread for the gradient of pooling by a window."""
        axes = reversed_axes(window, x, y)
        strides = window.stride if isinstance(window, Window) else (1,) * len(axes)
        return cls((*y[:2], *(axis.size for axis in axes)), axes, strides)

    @property
    def has_gaps(self) -> bool:
        """Whether anything lies between the elements of y."""
        return max(self.strides) > 1

    def part(self, read: Sequence[slice]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The elements of y that lie in a part of the spread y, and their places in the part.

        `read`: the part, along the first spatial dims; all of the others.
        """
        whole = (slice(0, axis.size) for axis in self.axes[len(read) :])
        along = [*zip((*read, *whole), self.strides, strict=True)]
        part = (slice(-(-of.start // step), -(-of.stop // step)) for of, step in along)
        return tuple(part), tuple(slice(-of.start % step, None, step) for of, step in along)


def are_long(axes: Sequence[Axis]) -> bool:
    """Whether windows have many elements along a dim. Definitions of joins take less time for others."""
    return max(axis.longest for axis in axes) >= _MANY


def counts_of(node: AvgPool[Any] | AvgPoolBackward[Any], axes: Sequence[Axis], dtype: np.dtype[Any]) -> Array:
    """The divisors of sums, with dims that broadcast to those of the result."""
    if node.include_padding and isinstance(node.window, Window):
        return np.array(math.prod(node.window.size), dtype)
    counts = np.ones((1, 1, *[1] * len(axes)), np.int64)
    for number, axis in enumerate(axes):
        along = [1] * (2 + len(axes))
        along[2 + number] = axis.count
        counts = counts * axis.members().reshape(along)
    return (counts if counts.min() != counts.max() else counts.reshape(-1)[0]).astype(dtype)
