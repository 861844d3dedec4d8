"""Cuts windows that are so large that not even a row of them fits into scratch memory.

Along each spatial dim a block has some windows, whose elements are cut into parts of a few: the first ones,
those behind them, and so on. Such parts lie as regular windows do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from cudnn_actor.engines.cpu.fast.pooling_doubling import doubling_scratch
from cudnn_actor.engines.cpu.fast.pooling_folding import most_folding_scratch
from cudnn_actor.engines.cpu.fast.pooling_joined import joins_of
from cudnn_actor.engines.cpu.fast.pooling_joins import Join
from cudnn_actor.engines.cpu.fast.pooling_windows import Axis, regular_axis
from cudnn_actor.engines.cpu.scratch import Dims, footprint

__all__ = ["Cuts", "Piece", "cuts_of", "grid"]

Piece = tuple[slice, Axis]
"""A part of a dim, and the windows in it, or the parts of windows, counted from the part's start."""
_CALL = 1000
"""About how many elements are joined in the time that a call takes beside its elements."""
_RUN = 100
"""About how many elements are joined in the time that it takes to begin with a run of neighbours in x, when x
is loaded."""


@dataclass(frozen=True, eq=False)
class Cut:
    """Along a spatial dim: how many windows a block has, and how many elements a part of a window."""

    axis: Axis
    windows: int
    taps: int

    @property
    def whole(self) -> bool:
        """Whether windows of unequal lengths are not cut."""
        return self.axis.taps is None and self.windows > 1

    @property
    def _step(self) -> int:
        """How far apart two windows are, about."""
        return self.axis.stride if self.axis.taps is not None else -(-self.axis.size // self.axis.count)

    @property
    def count(self) -> int:
        """How many parts a window has."""
        return 1 if self.whole else -(-self.axis.longest // self.taps)

    @cached_property
    def halves(self) -> tuple[Cut, ...]:
        """The cuts with half of the windows, and with half of the elements, if there are several."""
        found = []
        if self.windows > 1:
            found.append(Cut(self.axis, -(-self.windows // 2), self.taps))
        if self.taps > 1 and not self.whole:
            found.append(Cut(self.axis, self.windows, -(-self.taps // 2)))
        return tuple(found)

    @cached_property
    def part(self) -> Axis:
        """The windows of the largest block, with padding. Their `size` is the most elements that a block
        reads."""
        if self.whole:
            return self._whole(max(self.blocks, key=self._extent))[1]
        step, dilation = self._step, self.axis.dilation
        reach = (self.windows - 1) * step + (self.taps - 1) * dilation + 1
        taps = range(-1, self.taps * dilation - 1, dilation)
        return regular_axis(taps, step, min(reach, self.axis.size), self.windows)

    def _extent(self, block: slice) -> tuple[int, int]:
        """How many elements a block lies in, and how many windows it has."""
        begin, end = self.axis.reach(block.start, block.stop)
        return end - begin, block.stop - block.start

    @property
    def blocks(self) -> list[slice]:
        """The windows of each block."""
        count = self.axis.count
        return [slice(at, min(at + self.windows, count)) for at in range(0, count, self.windows)]

    def pieces(self, block: slice) -> list[Piece]:
        """The pieces that the parts of a block's windows read. Parts that have only padding are left out."""
        return [self._whole(block)] if self.whole else [*self._parts(block)]

    def _whole(self, block: slice) -> Piece:
        return self.axis.part(block.start, block.stop)

    def _parts(self, block: slice) -> Iterator[Piece]:
        first, count = block.start, block.stop - block.start
        if self.axis.taps is None:
            taps = range(int(self.axis.starts[first]), int(self.axis.stops[first]))
        else:
            own, ahead = self.axis.taps, first * self.axis.stride
            taps = range(own.start + ahead, own.stop + ahead, own.step)
        for at in range(0, len(taps), self.taps):
            axis = regular_axis(taps[at : at + self.taps], self.axis.stride, self.axis.size, count)
            begin, end = axis.reach(0, count)
            if begin < end:
                yield axis.part(0, count)


@dataclass(frozen=True, eq=False)
class Cuts:
    """How images are cut.

    Parameters
    ----------
    join
        The join of two elements.
    channels
        How many channels a block has.
    along
        The windows of a block along each spatial dim.
    channels_last
        Whether channels lie side by side.
    """

    join: Join
    channels: int
    along: tuple[Cut, ...]
    channels_last: bool

    @property
    def block(self) -> Dims:
        """The most windows of a block."""
        return (1, self.channels, *(cut.windows for cut in self.along))

    @property
    def read(self) -> Dims:
        """The most that is read at a time."""
        return (1, self.channels, *(cut.part.size for cut in self.along))

    @property
    def _middle(self) -> Dims:
        """The dims of the part that is left after windows along the first dim are reduced."""
        return (1, self.channels, self.along[0].windows, *(cut.part.size for cut in self.along[1:]))

    @property
    def _first(self) -> Mapping[int, Axis]:
        return {0: self.along[0].part}

    @property
    def _others(self) -> Mapping[int, Axis]:
        return {number: cut.part for number, cut in enumerate(self.along) if number}

    def halves(self) -> Iterator[Cuts]:
        """The cuts with half of the channels, and with a half along each dim, as far as that is possible."""
        if self.channels > 1:
            yield replace(self, channels=-(-self.channels // 2))
        for number, cut in enumerate(self.along):
            for half in cut.halves:
                yield replace(self, along=(*self.along[:number], half, *self.along[number + 1 :]))

    @cached_property
    def footprint(self) -> int:
        """Bytes of scratch: for a block's results, for what is left behind the first dim, and for a part."""
        block, middle, join = self.block, self._middle, self.join
        kept = self._bytes(block)
        if self.along[0].count == 1:
            own = self._reduction(self.read, {**self._first, **self._others}, loaded=True)
        else:
            kept += self._bytes(middle)
            own = max(
                self._reduction(self.read, self._first, loaded=True),
                self._reduction(middle, self._others) - self._bytes(middle),
            )
        return kept + max(own, footprint(*[block] * join.edges))

    def _bytes(self, dims: Dims) -> int:
        return sum(footprint(dims, itemsize=dtype.itemsize) for dtype in self.join.dtypes)

    def _reduction(self, dims: Dims, axes: Mapping[int, Axis], *, loaded: bool = False) -> int:
        """Bytes that reducing windows along some dims takes, with the elements, and joining the results."""
        most, total = footprint(*[dims] * self.join.edges) if loaded else 0, self._bytes(dims)
        for number, axis in axes.items():
            # Parts at borders are shorter. So they may be folded where others are doubled, and the reverse.
            doubling = doubling_scratch(axis, 2 + number, dims, axis.count, self.join)
            most = max(most, doubling, most_folding_scratch(axis, 2 + number, dims, self.join))
            dims = (*dims[: 2 + number], axis.count, *dims[3 + number :])
            total += self._bytes(dims)
        return total + max(most, self.join.scratch(dims))

    @cached_property
    def cost(self) -> float:
        """How long a channel of an image takes, about. In elements that are joined."""
        first, *others = self.along
        rest = math.prod(cut.count for cut in others)
        run = self.channels if self.channels_last else self.read[-1]
        loaded = math.prod(self.read) * (1 + _RUN / run)
        own = first.count * (loaded + self._join_cost(self.read, self._first))
        own += self._join_cost(self._middle, self._others)
        # The last block along a dim is as large as the others, or smaller.
        blocks = math.prod(-(-cut.axis.count // cut.windows) for cut in self.along)
        return blocks * rest * own / self.channels

    def _join_cost(self, dims: Dims, axes: Mapping[int, Axis]) -> float:
        total = _CALL + math.prod(dims)
        for number, axis in axes.items():
            total += joins_of(axis) * (_CALL + math.prod(dims))
            dims = (*dims[: 2 + number], axis.count, *dims[3 + number :])
        return total


def cuts_of(join: Join, axes: Iterable[Axis], channels: int, most: int, *, channels_last: bool) -> Cuts:
    """The cuts with which a block takes at most `most` bytes of scratch, or those of one element.

    `channels`: how many images have. Where channels do not lie side by side, a block has one of them.
    """
    along = tuple(Cut(axis, axis.count, axis.longest) for axis in axes)
    found = Cuts(join, channels if channels_last else 1, along, channels_last)
    while found.footprint > most:
        halves = [*found.halves()]
        if not halves:
            break
        found = min(halves, key=lambda cuts: cuts.cost * cuts.footprint)
    return found


def grid(cuts: Cuts, batch: int, channels: int) -> Iterator[tuple[slice, ...]]:
    """The blocks of a result."""
    images = [slice(at, at + 1) for at in range(batch)]
    of_channels = [slice(at, min(at + cuts.channels, channels)) for at in range(0, channels, cuts.channels)]
    yield from itertools.product(images, of_channels, *(cut.blocks for cut in cuts.along))
