"""The taps of a resampled tensor: the elements of which each element is a sum, and their weights.

A program keeps them, or each run finds them again. Along a dim of a million elements, all taps take several
times as many bytes as the result. Such taps are found for one block at a time, in scratch memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call
from cudnn_actor.engines.cpu.fast.recording import Recorded, Recording
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations import Resample
from cudnn_actor.protocol.operations.resampling import Coordinates, ResampleMode, Taps

__all__ = [
    "Allocate",
    "Along",
    "FoundAlong",
    "HeldTaps",
    "NamedTaps",
    "Resized",
    "TapsOf",
    "found_bytes",
    "kept_along",
]

Array = npt.NDArray[Any]
Allocate = Callable[[Dims, np.dtype[Any]], Array]
_TOGETHER = 4096
"""About how many taps are found at a time: their arrays stay in the cache."""
_PLACE = np.dtype(np.int64)


class Resized(NamedTuple):
    """An axis: its sizes in x and in y, and the dtype of weights."""

    axis: int
    x: int
    y: int
    dtype: np.dtype[Any]


class Along(NamedTuple):
    """The elements of x that elements of y read along an axis, with their weights.

    Parameters
    ----------
    axis
        The axis.
    reach
        The part of x that they read.
    places
        For each tap, places in that part.
    weights
        For each tap, weights; None if these are all 1.
    unread
        For each tap, where its weight is 0, so that nothing is read; None if none is.
    outside
        Which elements of y lie outside of x, and have the value for that; None if none does.
    """

    axis: int
    reach: slice
    places: Array
    weights: Array | None
    unread: Array | None
    outside: Array | None


Find = Callable[[int, int], tuple[Sequence[Call], Taps]]
"""From the number of an element and a count: calls that find the taps of these elements, and these taps.

The arrays hold the taps once the calls have been made, until the calls for other elements are made.
"""


class TapsOf(Protocol):
    """The taps of which elements of a result are sums along an axis.

    From one element to the next, places never decrease, or never increase.
    """

    def taps(self, axis: int, elements: npt.NDArray[np.int64]) -> Taps:
        """The taps of some elements."""

    def count(self, axis: int) -> int:
        """How many taps each element has."""

    def alone(self, axis: int) -> bool:
        """Whether each element of the result is a single element of the operand. This may take long."""

    @property
    def may_be_outside(self) -> bool:
        """Whether some elements may lie outside of the operand."""

    def together(self, axis: int, count: int) -> int:
        """For how many of `count` elements taps are to be found at a time."""

    def nbytes(self, axis: int, count: int) -> int:
        """Bytes of scratch in which the taps of `count` elements are found."""

    def finder(self, axis: int, count: int, memory: Scratch) -> Find:
        """A function that finds the taps of up to `count` elements at a time, in scratch memory."""


@dataclass(frozen=True, eq=False)
class NamedTaps:
    """The taps of an operation, by its formulas."""

    node: Resample[Any]
    x: Dims

    def taps(self, axis: int, elements: npt.NDArray[np.int64]) -> Taps:
        """See `TapsOf`."""
        return self.node.taps_along(self.x, axis, elements)

    def count(self, axis: int) -> int:
        """See `TapsOf`."""
        return int(self.taps(axis, np.zeros(1, np.int64)).places.shape[1])

    def alone(self, axis: int) -> bool:
        """See `TapsOf`."""
        del axis
        return self.node.mode is ResampleMode.NEAREST

    @property
    def may_be_outside(self) -> bool:
        """See `TapsOf`."""
        return self.node.coordinates is Coordinates.TF_CROP_AND_RESIZE

    def together(self, axis: int, count: int) -> int:
        """See `TapsOf`."""
        return max(1, min(count, _TOGETHER // self.count(axis)))

    def nbytes(self, axis: int, count: int) -> int:
        """See `TapsOf`."""
        return footprint((self._recording_of(axis, count)[0].nbytes,), itemsize=1)

    def finder(self, axis: int, count: int, memory: Scratch) -> Find:
        """See `TapsOf`."""
        recording, given, taps = self._recording_of(axis, count)
        calls, array = recording.on(memory.take((recording.nbytes,), np.uint8), {})
        numbers, elements = np.arange(count), array(given)
        whole: list[Array] = [array(each) if isinstance(each, Recorded) else each for each in taps]

        def find(start: int, count: int) -> tuple[Sequence[Call], Taps]:
            begin: Call = partial(np.add, numbers, start, elements)
            return (begin, *calls), Taps(*(each[:count] for each in whole))

        return find

    @functools.cached_property
    def _recordings(self) -> dict[tuple[int, int], tuple[Recording, Recorded, Sequence[Any]]]:
        """The recordings so far, by axis and count. All programs of a plan use them."""
        return {}

    def _recording_of(self, axis: int, count: int) -> tuple[Recording, Recorded, Sequence[Any]]:
        """The recording that finds the taps of `count` elements, with its input and its results."""
        if (axis, count) not in self._recordings:
            recording = Recording()
            given = recording.new((count,), np.int64)
            elements: Any = given
            taps: Sequence[Any] = self.node.taps_along(self.x, axis, elements)
            recording.finish([given], [each for each in taps if isinstance(each, Recorded)])
            self._recordings[axis, count] = recording, given, taps
        return self._recordings[axis, count]


@dataclass(frozen=True, eq=False)
class HeldTaps:
    """Taps that a plan holds, of all elements along each axis."""

    of: Mapping[int, Taps]

    def taps(self, axis: int, elements: npt.NDArray[np.int64]) -> Taps:
        """See `TapsOf`."""
        return Taps(*(each[elements] for each in self.of[axis]))

    def count(self, axis: int) -> int:
        """See `TapsOf`."""
        return int(self.of[axis].places.shape[1])

    def alone(self, axis: int) -> bool:
        """See `TapsOf`."""
        return _are_ones(self.of[axis])

    @property
    def may_be_outside(self) -> bool:
        """See `TapsOf`."""
        return False

    def together(self, axis: int, count: int) -> int:
        """See `TapsOf`."""
        del axis
        return count

    def nbytes(self, axis: int, count: int) -> int:
        """See `TapsOf`."""
        del axis, count
        return 0

    def finder(self, axis: int, count: int, memory: Scratch) -> Find:
        """See `TapsOf`."""
        del count, memory

        def find(start: int, count: int) -> tuple[Sequence[Call], Taps]:
            return (), Taps(*(each[start : start + count] for each in self.of[axis]))

        return find


def kept_along(of: TapsOf, resized: Resized, part: range, allocate: Allocate) -> Along:
    """The taps of some elements of y along an axis, in memory that is allocated."""
    taps = of.taps(resized.axis, np.arange(part.start, part.stop))
    reach = _reach(int(taps.places.min()), int(taps.places.max()), resized.x)

    def keep_copy(values: Array, dtype: npt.DTypeLike) -> Array:
        copy = allocate(values.shape, np.dtype(dtype))
        copy[...] = values
        return copy

    def if_any(mask: Array) -> Array | None:
        return keep_copy(mask, np.bool_) if mask.any() else None

    places = keep_copy(taps.places.T - reach.start, _PLACE)
    if _are_ones(taps):
        return Along(resized.axis, reach, places, None, None, if_any(taps.outside))
    weights = keep_copy(taps.weights.T, resized.dtype)
    return Along(resized.axis, reach, places, weights, if_any(weights == 0), if_any(taps.outside))


def _reach(first: int, last: int, size: int) -> slice:
    """The part of x between two elements; all of x if that is more than half: whole rows are contiguous."""
    return slice(0, size) if 2 * (last + 1 - first) > size else slice(first, last + 1)


def _are_ones(taps: Taps) -> bool:
    """Whether each element is a single element of x, as it is."""
    return taps.weights.shape[1] == 1 and bool((taps.weights == 1).all())


def found_bytes(of: TapsOf, resized: Resized, extent: int) -> int:
    """Bytes of scratch that `FoundAlong` has for blocks of `extent` elements."""
    dims = of.count(resized.axis), extent
    return (
        footprint(dims)
        + footprint(dims, itemsize=resized.dtype.itemsize)
        + footprint(dims, (extent,), itemsize=1)
    )


class FoundAlong:
    """Finds the taps of blocks of y along an axis, in scratch memory, when they are asked for."""

    def __init__(self, of: TapsOf, resized: Resized, extent: int, memory: Scratch) -> None:
        """`extent`: the elements of a block. `memory`: for `found_bytes`."""
        self._axis, self._of, self._alone = resized.axis, of, of.alone(resized.axis)
        self._places, self._weights, self._unread = (
            memory.take((of.count(self._axis), extent), kind) for kind in (_PLACE, resized.dtype, np.bool_)
        )
        self._outside = memory.take((extent,), np.bool_)
        self._together = of.together(self._axis, extent)
        self._find: Find | None = None
        starts = np.arange(0, resized.y, extent)
        ends = np.minimum(starts + extent, resized.y) - 1
        both = np.concatenate([of.taps(self._axis, each).places for each in (starts, ends)], 1)
        reaches = zip(both.min(1).tolist(), both.max(1).tolist(), strict=True)
        self._reaches = [_reach(first, last, resized.x) for first, last in reaches]
        self._extent = extent

    def use(self, memory: Scratch) -> None:
        """Use this memory, of `TapsOf.nbytes` bytes, to find taps. It is free again behind the calls."""
        self._find = self._of.finder(self._axis, self._together, memory)

    def __call__(self, start: int, stop: int) -> tuple[Iterator[Call], Along]:
        """Calls that find the taps of elements from one to another, and the arrays that then hold them."""
        reach, count = self._reaches[start // self._extent], stop - start
        places, weights, unread = (each[:, :count] for each in (self._places, self._weights, self._unread))
        outside = self._outside[:count] if self._of.may_be_outside else None
        along = Along(self._axis, reach, places, weights, unread, outside)
        if self._alone:
            along = along._replace(weights=None, unread=None)
        return self._calls(start, along), along

    def _calls(self, start: int, along: Along) -> Iterator[Call]:
        assert self._find is not None, "`use` comes first"
        count = along.places.shape[1]
        for first in range(0, count, self._together):
            part = slice(first, min(first + self._together, count))
            calls, taps = self._find(start + first, part.stop - first)
            yield from calls
            yield partial(np.subtract, taps.places.T, along.reach.start, along.places[:, part])
            if along.weights is not None:
                yield partial(np.copyto, along.weights[:, part], taps.weights.T, "same_kind")
            if along.outside is not None:
                yield partial(np.copyto, along.outside[part], taps.outside)
        if along.unread is not None:
            yield partial(np.equal, along.weights, 0, along.unread)
