"""Long windows along a dim, from shorter ones at all places: of 1, 2, 4, ... elements.

A window of any length is two such windows that overlap, for maxima; for sums it is one for each bit of its
length. So a window of thousands of elements takes a few dozen calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call
from cudnn_actor.engines.cpu.fast.memory_orders import scratch_in_order
from cudnn_actor.engines.cpu.fast.pooling_joins import Arrays, Join
from cudnn_actor.engines.cpu.fast.pooling_windows import Axis
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint

__all__ = [
    "along_dim",
    "copies",
    "doubling_calls",
    "doubling_elements",
    "doubling_scratch",
    "is_long",
    "pad_elements",
    "padded_length",
    "reduce_by_doubling",
]

Array = npt.NDArray[Any]
_LEAST = 16
"""Windows of fewer elements are reduced element by element, or one by one."""
_MANY = 64
"""From this many windows on, windows of any length are doubled, if each has its own."""


def is_long(axis: Axis) -> bool:
    """Whether windows along a dim may be doubled: if they are long, or each has its own length, and many."""
    long = axis.longest >= _LEAST or (axis.taps is None and axis.count >= _MANY)
    return long and axis.count > doubling_calls(axis)


def doubling_calls(axis: Axis) -> int:
    """About how many calls doubling takes."""
    return 2 * axis.longest.bit_length() + 4


def doubling_elements(axis: Axis) -> int:
    """About how many elements of a line doubling computes."""
    return (axis.longest.bit_length() + 1) * (axis.size + axis.longest * axis.dilation) + 2 * axis.count


def doubling_scratch(axis: Axis, dim: int, x: Dims, count: int, join: Join) -> int:
    """Bytes that doubling `count` of the windows takes, in a part of x of these dims."""
    span = (count - 1) * axis.stride + (axis.longest - 1) * axis.dilation + 1
    most = (*x[:dim], max(span, x[dim] + 1), *x[dim + 1 :])
    after = (*x[:dim], count, *x[dim + 1 :])
    arrays = sum(footprint(most, most, after, itemsize=dtype.itemsize) for dtype in join.dtypes)
    return arrays + join.scratch(most)


def reduce_by_doubling(
    axis: Axis, dim: int, x: Arrays, y: Arrays, *, join: Join, memory: Scratch
) -> Iterator[Call]:
    """Calls that reduce windows of x along a dim to elements of y."""
    levels = _Levels(axis, dim, x, memory, join)
    yield from pad_elements(axis, dim, x, levels.elements, join)
    yield from _join_overlapping(levels, y) if join.may_repeat else _join_side_by_side(levels, y)


def padded_length(axis: Axis) -> int:
    """How many elements windows along a dim reach over, or may read: see `pad_elements`."""
    if axis.taps is None:
        return axis.size + 1
    return (axis.count - 1) * axis.stride + (axis.longest - 1) * axis.dilation + 1


def pad_elements(axis: Axis, dim: int, x: Arrays, into: Arrays, join: Join) -> Iterator[Call]:
    """Calls that copy the elements that windows reach over, and fill padding.

    `into` has `padded_length` of them. Windows of unequal lengths have no padding; for them one element that
    is neutral lies behind the last.
    """
    length, ahead = padded_length(axis), 0
    if axis.taps is not None:
        ahead = max(0, -axis.taps.start)  # behind all elements, windows begin later, and have none
    count = max(0, min(axis.size, length - ahead))
    for around in (slice(0, ahead), slice(ahead + count, length)):
        if around.start < around.stop:
            for array, neutral in zip(along_dim(into, dim, around), join.neutral, strict=True):
                yield partial(array.fill, neutral)
    if count:
        inside = along_dim(into, dim, slice(ahead, ahead + count))
        yield from copies(along_dim(x, dim, slice(0, count)), inside)


def along_dim(arrays: Arrays, dim: int, part: slice) -> list[Array]:
    """Views of a part along a dim."""
    before = (slice(None),) * dim
    return [array[(*before, part)] for array in arrays]


def copies(sources: Arrays, into: Arrays) -> Iterator[Call]:
    """Calls that copy arrays."""
    return (partial(np.copyto, one, source) for source, one in zip(sources, into, strict=True))


class _Levels:
    """Windows of 1, 2, 4, ... elements at all places of a dim.

    They begin with `elements`, which are windows of 1.
    """

    def __init__(self, axis: Axis, dim: int, x: Arrays, memory: Scratch, join: Join) -> None:
        self.join, self.axis, self.memory = join, axis, memory
        self.width = 1
        """How many elements the windows have now."""
        self._dim, first = dim, x[0]
        order = self._order = sorted(range(first.ndim), key=lambda axis: -abs(first.strides[axis]))
        regular = axis.taps is not None
        self._length = padded_length(axis)

        def arrays(count: int) -> list[Array]:
            dims = (*first.shape[:dim], count, *first.shape[dim + 1 :])
            return [scratch_in_order(memory, dims, order, dtype) for dtype in join.dtypes]

        self._arrays = [arrays(self._length) for _ in range(2)]
        self.elements = self._arrays[0]
        self.least = axis.shortest
        """Elements that each window has at least."""
        self._found = None if regular else arrays(axis.count)

    def _at(self, arrays: Arrays, along: slice) -> list[Array]:
        return along_dim(arrays, self._dim, along)

    def double(self) -> Iterator[Call]:
        """Join neighbours."""
        source, into = self._arrays
        apart = self.width * self.axis.dilation
        self._length -= apart
        one, other = (self._at(source, slice(start, start + self._length)) for start in (0, apart))
        self._arrays.reverse()
        self.width *= 2
        return self.join.calls(one, other, self._at(into, slice(0, self._length)), self.memory)

    def values_ahead(self, ahead: int) -> list[Array]:
        """The values `ahead` elements after the first ones of the windows, which all have one length."""
        first, axis = ahead * self.axis.dilation, self.axis
        return self._at(
            self._arrays[0], slice(first, first + (axis.count - 1) * axis.stride + 1, axis.stride)
        )

    def take_values(self, places: Array) -> tuple[list[Call], list[Array]]:
        """Calls that take the values at these places, and the arrays that then hold them."""
        assert self._found is not None
        calls: list[Call] = []
        for source, found in zip(self._arrays[0], self._found, strict=True):
            one, other = (array.transpose(self._order) for array in (source, found))
            calls.append(partial(one.take, places, self._order.index(self._dim), other, "clip"))
        return calls, self._found


def _join_overlapping(levels: _Levels, y: Arrays) -> Iterator[Call]:
    """Each window is two that overlap: the longest that fit into the shortest window."""
    axis, join = levels.axis, levels.join
    while 2 * levels.width <= levels.least:
        yield from levels.double()
    if axis.taps is not None:
        last = levels.values_ahead(axis.longest - levels.width)
        yield from join.calls(levels.values_ahead(0), last, y, levels.memory)
        return
    # They differ by 1 at most. So two of the largest power of 2 that is in the shortest cover the longest.
    calls, found = levels.take_values(axis.places(0))
    yield from (*calls, *copies(found, y))
    calls, found = levels.take_values(axis.places(0, levels.width))
    yield from (*calls, *join.calls(y, found, y, levels.memory))


def _join_side_by_side(levels: _Levels, y: Arrays) -> Iterator[Call]:
    """Calls that join the bits of the shortest length, one after the other, and then the last elements of
    longer windows."""
    axis, done, begun = levels.axis, 0, False
    if axis.taps is None:
        calls, found = levels.take_values(axis.places_of_longer(levels.least))
        yield from (*calls, *copies(found, y))
        begun = True
    while True:
        if levels.least & levels.width:
            part: Sequence[Array]
            if axis.taps is None:
                calls, part = levels.take_values(axis.places(done))
                yield from calls
            else:
                part = levels.values_ahead(done)
            yield from levels.join.calls(y, part, y, levels.memory) if begun else copies(part, y)
            begun = True
            done += levels.width
        if done == levels.least:
            return
        yield from levels.double()
