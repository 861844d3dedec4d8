"""Windows of which not even a row fits into scratch memory: parts of windows are joined one after the other.

A block has some windows along each spatial dim. Its results begin neutral. Windows are cut along each dim
into parts of a few elements, the first ones, those behind them, and so on: such parts lie as regular windows
do. So each is reduced as whole windows are, and joined to the block's results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.convolution_views import laid_out, memory_order
from cudnn_actor.engines.cpu.fast.kernels import (
    MOST_SCRATCH,
    Call,
    Step,
    deal,
    in_turn,
    made_when_run,
    most_calls,
)
from cudnn_actor.engines.cpu.fast.pooling_doubling import doubling_scratch
from cudnn_actor.engines.cpu.fast.pooling_folding import folding_scratch
from cudnn_actor.engines.cpu.fast.pooling_joined import (
    EDGES,
    BlockArrays,
    Edge,
    JoinedPooling,
    Store,
    reduced,
)
from cudnn_actor.engines.cpu.fast.pooling_joins import Join
from cudnn_actor.engines.cpu.fast.pooling_windows import Axis, regular_axis
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint

__all__ = ["TiledPooling", "bounded_pooling"]

Array = npt.NDArray[Any]
_CALLS = 300
"""Calls that join a part of a block's windows, about."""


def bounded_pooling(
    x: Dims, y: Dims, axes: tuple[Axis, ...], join: Join
) -> JoinedPooling | TiledPooling | None:
    """What reduces windows of any size in bounded memory; None if the definition does so in less time."""
    rows = JoinedPooling(x, y, axes, join)
    if not rows.fits():
        return TiledPooling(x, y, axes, join)
    return rows if rows.is_long() or rows.footprint() > MOST_SCRATCH else None


@dataclass(frozen=True)
class _Cut:
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
    def spans(self) -> tuple[int, int]:
        """Elements between the first and the last window, and between those of a part; 0: it is not cut."""
        return (self.windows - 1) * self._step, 0 if self.whole else (self.taps - 1) * self.axis.dilation

    def halved(self, which: int) -> _Cut:
        """With half of the windows (0), or of the elements (1)."""
        if which:
            return _Cut(self.axis, self.windows, -(-self.taps // 2))
        return _Cut(self.axis, -(-self.windows // 2), self.taps)

    @cached_property
    def part(self) -> Axis:
        """The windows of a block, with padding. Along `size` lies what it reads at most."""
        if self.whole:
            starts = range(0, self.axis.count, self.windows)
            parts = [self.axis.part(at, min(at + self.windows, self.axis.count))[1] for at in starts]
            return max(parts, key=lambda axis: axis.size)
        step, dilation = self._step, self.axis.dilation
        reach = (self.windows - 1) * step + (self.taps - 1) * dilation + 1
        taps = range(-1, self.taps * dilation - 1, dilation)
        return regular_axis(taps, step, min(reach, self.axis.size), self.windows)

    @property
    def blocks(self) -> list[slice]:
        """The windows of each block."""
        count = self.axis.count
        return [slice(at, min(at + self.windows, count)) for at in range(0, count, self.windows)]

    def parts(self, block: slice) -> Iterator[tuple[slice, Axis]]:
        """What each part of a block's windows reads, and these parts counted from there."""
        if self.whole:
            yield self.axis.part(block.start, block.stop)
            return
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
class TiledPooling:
    """Reduces windows of arrays of dims `x` to elements of dims `y`, as `JoinedPooling` does."""

    x: Dims
    y: Dims
    axes: tuple[Axis, ...]
    join: Join
    most: int = MOST_SCRATCH
    """Bytes of scratch that each lane should have at most. A window of one element takes what it takes."""

    @cached_property
    def _cuts(self) -> list[_Cut]:
        found = [_Cut(axis, axis.count, axis.longest) for axis in self.axes]
        while self._footprint(found) > self.most and any(any(cut.spans) for cut in found):
            number, which = max(
                ((number, which) for number in range(len(found)) for which in range(2)),
                key=lambda at: found[at[0]].spans[at[1]],
            )
            found[number] = found[number].halved(which)
        return found

    def footprint(self) -> int:
        """Bytes of scratch that each lane needs."""
        return self._footprint(self._cuts)

    def _footprint(self, cuts: Sequence[_Cut]) -> int:
        block = (1, 1, *(cut.windows for cut in cuts))
        dims = self._read(cuts)
        arrays, most = [dims, block], footprint(*[dims] * EDGES, *[block] * EDGES) + self.join.scratch(block)
        for dim, cut in enumerate(cuts, 2):
            scratch = doubling_scratch(cut.part, dim, dims, cut.windows, self.join)
            most = max(most, scratch, folding_scratch(cut.part, dim, dims, self.join))
            dims = (*dims[:dim], cut.windows, *dims[dim + 1 :])
            arrays.append(dims)
        return most + sum(footprint(*arrays, itemsize=dtype.itemsize) for dtype in self.join.dtypes)

    def _read(self, cuts: Sequence[_Cut]) -> Dims:
        return (1, 1, *(cut.part.size for cut in cuts))

    def read_dims(self, *, channels_last: bool) -> Dims:
        """The most that is read at a time, along each dim of x."""
        del channels_last
        return self._read(self._cuts)

    def bind(self, lanes: Sequence[Scratch], *, channels_last: bool, load: Edge, store: Store) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        order, cuts = memory_order(len(self.x), channels_last=channels_last), self._cuts
        images = [[slice(at, at + 1) for at in range(size)] for size in self.x[:2]]
        of_image = math.prod(
            -(-cut.axis.count // cut.windows) * (1 if cut.whole else -(-cut.axis.longest // cut.taps))
            for cut in cuts
        )
        kept = _CALLS * of_image * math.prod(self.x[:2]) <= most_calls(
            8 * max(math.prod(self.x), math.prod(self.y))
        )

        def calls(block: tuple[slice, ...], lane: int) -> Iterator[Call]:
            memory = lanes[lane].fork()
            dims = tuple(part.stop - part.start for part in block)
            total = [laid_out(memory, dims, order, dtype) for dtype in self.join.dtypes]
            for array, neutral in zip(total, self.join.neutral, strict=True):
                yield partial(array.fill, neutral)
            pieces = ([*cut.parts(part)] for cut, part in zip(cuts, block[2:], strict=True))
            for piece in itertools.product(*pieces):
                read, axes = zip(*piece, strict=True)
                of_x = (1, 1, *(part.stop - part.start for part in read))
                arrays, own = reduced(self.join, of_x, axes, order, memory.fork())
                yield from load(block, read, arrays)
                yield from own
                yield from self.join.calls(total, arrays.results, total, arrays.memory.fork())
            yield from store(block, BlockArrays(total, total, memory, order))

        def call(block: tuple[slice, ...], lane: int) -> Call:
            return in_turn([*calls(block, lane)]) if kept else made_when_run(lambda: calls(block, lane))

        grid = itertools.product(*images, *(cut.blocks for cut in cuts))
        return [deal(grid, len(lanes), call)]
