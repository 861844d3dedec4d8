"""Long windows along a dim, from shorter ones at all places: of 1, 2, 4, ... elements.

A window of any length is two such windows that overlap, for maxima; for sums it is one for each bit of its
length. So a window of thousands of elements takes a few dozen calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.convolution_views import laid_out
from cudnn_actor.engines.cpu.fast.kernels import Call
from cudnn_actor.engines.cpu.fast.pooling_windows import Axis
from cudnn_actor.engines.cpu.scratch import Scratch

__all__ = ["doubled", "doubling_calls", "doubling_elements", "is_long"]

Array = npt.NDArray[Any]
_LEAST = 16
"""Windows of fewer elements are reduced element by element, or one by one."""
_MANY = 64
"""So many windows of any length are doubled, if each has its own."""


def is_long(axis: Axis) -> bool:
    """Whether windows along a dim may be doubled: if they are long, or each has its own length, and many."""
    long = axis.longest >= _LEAST or (axis.taps is None and axis.count >= _MANY)
    return long and axis.count > doubling_calls(axis)


def doubling_calls(axis: Axis) -> int:
    """How many calls that takes, about."""
    return 2 * axis.longest.bit_length() + 4


def doubling_elements(axis: Axis) -> int:
    """How many elements of a line that computes, about."""
    return (axis.longest.bit_length() + 1) * (axis.size + axis.longest * axis.dilation) + 2 * axis.count


def doubled(
    axis: Axis, dim: int, x: Array, y: Array, memory: Scratch, *, ufunc: np.ufunc, neutral: float | bool
) -> Iterator[Call]:
    """Calls that reduce windows of x along a dim to elements of y.

    `ufunc`: a maximum, or `numpy.add`. `neutral`: what stands for padding.
    """
    levels = _Levels(axis, dim, x, memory, ufunc)
    yield from levels.begin(neutral)
    yield from _sums(levels, y) if ufunc is np.add else _maxima(levels, y)


class _Levels:
    """Windows of 1, 2, 4, ... elements at all places of a dim.

    Padding is added where windows reach over it. Windows of unequal lengths have no padding; for them one
    element that is neutral lies behind the last.
    """

    def __init__(self, axis: Axis, dim: int, x: Array, memory: Scratch, ufunc: np.ufunc) -> None:
        self.ufunc, self.axis = ufunc, axis
        self.width = 1
        """How many elements the windows have now."""
        self._dim, self._x = dim, x
        order = self._order = sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis]))
        self._before = (slice(None),) * dim
        regular = axis.taps is not None
        span = (axis.count - 1) * axis.stride + (axis.longest - 1) * axis.dilation + 1
        self._length = span if regular else axis.size + 1
        dims = (*x.shape[:dim], self._length, *x.shape[dim + 1 :])
        self._arrays = [laid_out(memory, dims, order, x.dtype) for _ in range(2)]
        self.least = axis.longest if regular else int(axis.members().min())
        """Elements that each window has at least."""
        found = (*x.shape[:dim], axis.count, *x.shape[dim + 1 :])
        self._found = None if regular else laid_out(memory, found, order, x.dtype)

    def _at(self, array: Array, along: slice) -> Array:
        part: Array = array[(*self._before, along)]
        return part

    def begin(self, neutral: float | bool) -> Iterator[Call]:
        """Copy the elements."""
        array, ahead = self._arrays[0], 0 if self.axis.taps is None else -self.axis.taps.start
        count = min(self.axis.size, self._length - ahead)
        for around in (slice(0, ahead), slice(ahead + count, self._length)):
            if around.start < around.stop:
                yield partial(self._at(array, around).fill, neutral)
        yield partial(
            np.copyto, self._at(array, slice(ahead, ahead + count)), self._at(self._x, slice(0, count))
        )

    def double(self) -> Call:
        """Join neighbours."""
        source, into = self._arrays
        apart = self.width * self.axis.dilation
        self._length -= apart
        one, other = (self._at(source, slice(start, start + self._length)) for start in (0, apart))
        self._arrays.reverse()
        self.width *= 2
        return partial(self.ufunc, one, other, out=self._at(into, slice(0, self._length)))

    def seen(self, ahead: int) -> Array:
        """Those that lie so many elements behind the first ones of windows of one length."""
        first, axis = ahead * self.axis.dilation, self.axis
        return self._at(
            self._arrays[0], slice(first, first + (axis.count - 1) * axis.stride + 1, axis.stride)
        )

    def taken(self, places: Array) -> tuple[Call, Array]:
        """A call that takes those at these places, and where they are then."""
        assert self._found is not None
        source, found = (array.transpose(self._order) for array in (self._arrays[0], self._found))
        return partial(source.take, places, self._order.index(self._dim), found, "clip"), self._found


def _maxima(levels: _Levels, y: Array) -> Iterator[Call]:
    """Each window is two that overlap: the longest that fit into the shortest window."""
    axis = levels.axis
    while 2 * levels.width <= levels.least:
        yield levels.double()
    if axis.taps is not None:
        yield partial(levels.ufunc, levels.seen(0), levels.seen(axis.longest - levels.width), out=y)
        return
    # They differ by 1 at most. So two of the largest power of 2 that is in the shortest cover the longest.
    call, found = levels.taken(axis.places(0))
    yield from (call, partial(np.copyto, y, found))
    call, found = levels.taken(axis.stops - levels.width)
    yield from (call, partial(levels.ufunc, y, found, out=y))


def _sums(levels: _Levels, y: Array) -> Iterator[Call]:
    """One after the other, the bits of the shortest length; then the last elements of longer windows."""
    axis, done, begun = levels.axis, 0, False
    if axis.taps is None:
        call, found = levels.taken(np.where(axis.members() > levels.least, axis.stops - 1, axis.size))
        yield from (call, partial(np.copyto, y, found))
        begun = True
    while True:
        if levels.least & levels.width:
            if axis.taps is None:
                call, part = levels.taken(axis.places(done))
                yield call
            else:
                part = levels.seen(done)
            yield partial(levels.ufunc, y, part, out=y) if begun else partial(np.copyto, y, part)
            begun = True
            done += levels.width
        if done == levels.least:
            return
        yield levels.double()
