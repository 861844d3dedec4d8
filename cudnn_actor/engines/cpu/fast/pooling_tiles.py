"""Pools windows that are so large that not even a row of them fits into scratch memory, part by part.

Blocks and parts are those of `Cuts`. Each part is reduced as whole windows are. What is left of the parts
along the first spatial dim is joined, and then reduced along the other dims: so windows that share rows do
not read them again and again. What is left of parts along the other dims is joined to the block's results.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.blocks import BLOCK_ELEMENTS
from cudnn_actor.engines.cpu.fast.kernels import (
    MOST_SCRATCH,
    Call,
    Step,
    deal,
    in_turn,
    made_when_run,
    most_calls,
)
from cudnn_actor.engines.cpu.fast.memory_orders import memory_order
from cudnn_actor.engines.cpu.fast.pooling_cuts import Cuts, Piece, cuts_of, grid
from cudnn_actor.engines.cpu.fast.pooling_joined import (
    BlockArrays,
    Edge,
    JoinedPooling,
    Parts,
    Store,
    arrays_of,
    windows_reduced,
)
from cudnn_actor.engines.cpu.fast.pooling_joins import Join
from cudnn_actor.engines.cpu.fast.pooling_windows import Axis
from cudnn_actor.engines.cpu.scratch import Dims, Scratch

__all__ = ["TiledPooling", "bounded_pooling", "parts_joined"]

Array = npt.NDArray[Any]
_CALLS = 300
"""Calls that join a part of a block's windows, about."""


def bounded_pooling(x: Dims, y: Dims, axes: tuple[Axis, ...], join: Join) -> JoinedPooling | TiledPooling:
    """The pooling of windows of any size in bounded memory."""
    rows = JoinedPooling(x, y, axes, join)
    return rows if rows.fits() else TiledPooling(x, y, axes, join)


def parts_joined(x: Dims, y: Dims, axes: tuple[Axis, ...], join: Join) -> JoinedPooling | TiledPooling:
    """The pooling of windows of which a row takes much memory. A block has several images if they are
    small."""
    small = max(math.prod(x[2:]), math.prod(y[2:])) <= BLOCK_ELEMENTS
    return (JoinedPooling if small else TiledPooling)(x, y, axes, join)


@dataclass(frozen=True, eq=False)
class TiledPooling:
    """Reduces windows of arrays of dims `x` to elements of dims `y`, as `JoinedPooling` does."""

    x: Dims
    y: Dims
    axes: tuple[Axis, ...]
    join: Join
    most: int = MOST_SCRATCH
    """Bytes of scratch that each lane should have at most. A window of one element takes what it takes."""

    @functools.cached_property
    def _cuts_by_order(self) -> dict[bool, Cuts]:
        return {}

    def _cuts(self, *, channels_last: bool) -> Cuts:
        if channels_last not in self._cuts_by_order:
            self._cuts_by_order[channels_last] = cuts_of(
                self.join, self.axes, self.x[1], self.most, channels_last=channels_last
            )
        return self._cuts_by_order[channels_last]

    def footprint(self) -> int:
        """Bytes of scratch that each lane needs."""
        return max(self._cuts(channels_last=last).footprint for last in (False, True))

    def read_dims(self, *, channels_last: bool) -> Dims:
        """The most that is read at a time, along each dim of x."""
        return self._cuts(channels_last=channels_last).read

    def bind(self, lanes: Sequence[Scratch], *, channels_last: bool, load: Edge, store: Store) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        cuts = self._cuts(channels_last=channels_last)
        order = memory_order(len(self.x), channels_last=channels_last)
        blocks = [*grid(cuts, *self.x[:2])]
        pieces = [{block.start: cut.pieces(block) for block in cut.blocks} for cut in cuts.along]
        tiles = len(blocks) * math.prod(cut.count for cut in cuts.along)
        kept = _CALLS * tiles <= most_calls(8 * max(math.prod(self.x), math.prod(self.y)))

        def calls(block: Parts, lane: int) -> Iterator[Call]:
            own = [of[part.start] for of, part in zip(pieces, block[2:], strict=True)]
            tile = _Block(self.join, block, order, load, whole=cuts.along[0].count == 1)
            arrays = yield from tile.reduce_windows(own, lanes[lane].fork())
            yield from store(block, arrays)

        def call(block: Parts, lane: int) -> Call:
            return in_turn([*calls(block, lane)]) if kept else made_when_run(lambda: calls(block, lane))

        return [deal(blocks, len(lanes), call)]


@dataclass(frozen=True, eq=False)
class _Block:
    """The windows of a block. `block`: where they are in y. `whole`: they are not cut along the first dim."""

    join: Join
    block: Parts
    order: Dims
    load: Edge
    whole: bool

    def reduce_windows(
        self, pieces: Sequence[Sequence[Piece]], memory: Scratch
    ) -> Generator[Call, None, BlockArrays]:
        """Calls that reduce windows. `pieces`: their parts along each spatial dim."""
        first, *others = pieces
        if first and math.prod(map(len, others)) == 1:
            return (yield from self._along_others(first, [of[0] for of in others], memory))
        total = self._arrays([part.stop - part.start for part in self.block[2:]], memory)
        yield from self._fill(total)
        for rest in itertools.product(*others) if first else ():
            part = yield from self._along_others(first, rest, memory.fork())
            yield from self.join.calls(total, part.results, total, part.memory.fork())
        return BlockArrays(total, total, memory, self.order)

    def _along_others(
        self, first: Sequence[Piece], rest: Sequence[Piece], memory: Scratch
    ) -> Generator[Call, None, BlockArrays]:
        """Calls that reduce parts along the first dim, and then one part along the others."""
        axes = {number: axis for number, (_, axis) in enumerate(rest, 1)}
        if self.whole:
            return (yield from self._part([first[0], *rest], {0: first[0][1], **axes}, memory))
        windows = self.block[2].stop - self.block[2].start
        middle = self._arrays([windows, *(part.stop - part.start for part, _ in rest)], memory)
        yield from self._fill(middle)
        for piece in first:
            part = yield from self._part([piece, *rest], {0: piece[1]}, memory.fork())
            yield from self.join.calls(middle, part.results, middle, part.memory.fork())
        results, calls = windows_reduced(self.join, middle, axes, self.order, memory)
        yield from calls
        return BlockArrays(middle, results, memory, self.order)

    def _part(
        self, pieces: Sequence[Piece], axes: dict[int, Axis], memory: Scratch
    ) -> Generator[Call, None, BlockArrays]:
        """Calls that load a part of x, and reduce windows in it along some dims."""
        read = tuple(part for part, _ in pieces)
        elements = self._arrays([part.stop - part.start for part in read], memory)
        results, calls = windows_reduced(self.join, elements, axes, self.order, memory)
        arrays = BlockArrays(elements, results, memory, self.order)
        yield from self.load(self.block, read, arrays)
        yield from calls
        return arrays

    def _arrays(self, spatial: Sequence[int], memory: Scratch) -> list[Array]:
        channels = self.block[1].stop - self.block[1].start
        return arrays_of(self.join, (1, channels, *spatial), self.order, memory)

    def _fill(self, arrays: Sequence[Array]) -> Iterator[Call]:
        for array, neutral in zip(arrays, self.join.neutral, strict=True):
            yield partial(array.fill, neutral)
