"""Windows reduced to several numbers each, one spatial dim after the other, all of it in scratch memory.

The calls of a block depend on its dims and on how its windows lie, not on where it is. So blocks that are
alike share them on a lane; only what loads a block and what stores it is its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call, Step, deal, in_turn, made_when_run, most_calls
from cudnn_actor.engines.cpu.fast.memory_orders import memory_order, scratch_in_order
from cudnn_actor.engines.cpu.fast.pooling_blocks import Block, blocks, extents_of_blocks, part_read, read_dims
from cudnn_actor.engines.cpu.fast.pooling_doubling import doubling_scratch, reduce_by_doubling
from cudnn_actor.engines.cpu.fast.pooling_folding import (
    folding_groups,
    folding_pays,
    folding_scratch,
    reduce_by_folding,
)
from cudnn_actor.engines.cpu.fast.pooling_joins import Join
from cudnn_actor.engines.cpu.fast.pooling_windows import Axis
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint

__all__ = [
    "BlockArrays",
    "Edge",
    "JoinedPooling",
    "Parts",
    "Store",
    "arrays_of",
    "joins_of",
    "windows_reduced",
]

Array = npt.NDArray[Any]
_MOST_SCRATCH = 8 << 20
"""Bytes for each lane. Blocks that need more read the same rows again and again."""
_CALLS = 20
"""About how many calls a join takes; loading a block takes as many, and so does storing it."""


class BlockArrays(NamedTuple):
    """The arrays in a lane's memory from which it computes blocks, and those of the results.

    Parameters
    ----------
    elements
        The part of x that a block is computed from, in the arrays that the join has.
    results
        The block itself, in arrays of the same dtypes.
    memory
        Scratch that is free while a block is loaded or stored.
    order
        The axes in the order in which they lie in memory, the slowest first.
    """

    elements: list[Array]
    results: list[Array]
    memory: Scratch
    order: Dims


Parts = tuple[slice, ...]
"""Slices along the first dims of a tensor."""
Edge = Callable[[Parts, Parts, BlockArrays], Iterator[Call]]
"""Calls that load what a block is computed from. The second slices: where it lies along spatial dims of x."""
Store = Callable[[Parts, BlockArrays], Iterator[Call]]
"""Calls that store a block."""


@dataclass(frozen=True, eq=False)
class JoinedPooling:
    """Reduces windows of arrays of dims `x` to elements of dims `y`."""

    x: Dims
    y: Dims
    axes: tuple[Axis, ...]
    join: Join

    def fits(self) -> bool:
        """Whether a block of it needs no more scratch than lanes should have."""
        return self.footprint() <= _MOST_SCRATCH

    def footprint(self) -> int:
        """Bytes of scratch that each lane needs."""
        return max(self._footprint(self.extents(channels_last=last)) for last in (False, True))

    def _footprint(self, extents: Dims) -> int:
        dims = read_dims(self.x, self.y, self.axes, extents)
        arrays, most = [dims], footprint(*[dims] * self.join.edges)
        for number in self._reduced_dims:
            axes = self._first_axes(extents) if number == 0 else [self.axes[number]]
            most = max(most, *(_scratch(axis, 2 + number, dims, self.join) for axis in axes))
            count = extents[2] if number == 0 else self.y[2 + number]
            dims = (*dims[: 2 + number], count, *dims[3 + number :])
            arrays.append(dims)
        most = max(most, footprint(*[dims] * self.join.edges))
        return most + sum(footprint(*arrays, itemsize=dtype.itemsize) for dtype in self.join.dtypes)

    @property
    def _reduced_dims(self) -> list[int]:
        """The spatial dims along which windows are reduced."""
        return [number for number, axis in enumerate(self.axes) if not axis.same]

    def extents(self, *, channels_last: bool) -> Dims:
        """How much of the batch, of the channels and of the first spatial dim of y a block has."""
        larger = tuple(map(max, self.x, self.y))
        found = [*extents_of_blocks(larger, self.y, self.axes, channels_last=channels_last)]
        for axis in (1, 2):
            while found[axis] > 1 and self._footprint(tuple(found)) > _MOST_SCRATCH:
                found[axis] = -(-found[axis] // 2)
        return tuple(found)

    def read_dims(self, *, channels_last: bool) -> Dims:
        """The most that a block is computed from, along each dim of x."""
        return read_dims(self.x, self.y, self.axes, self.extents(channels_last=channels_last))

    def bind(self, lanes: Sequence[Scratch], *, channels_last: bool, load: Edge, store: Store) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        extents = self.extents(channels_last=channels_last)
        order = memory_order(len(self.x), channels_last=channels_last)
        kept = self._calls(extents) <= most_calls(8 * max(math.prod(self.x), math.prod(self.y)))
        known: dict[object, tuple[BlockArrays, Iterable[Call]]] = {}

        def calls(block: Block, lane: int) -> Iterator[Call]:
            read, axes = part_read(self.axes, block)
            dims = [part.stop - part.start for part in (*block[:2], read)]
            key = lane, *dims, _lie(axes[0])
            found = known.get(key)
            if found is None:
                found = self._reduce_part((*dims, *self.x[3:]), axes, order, lanes[lane].fork())
                if kept:
                    found = known[key] = found[0], [*found[1]]
            arrays, own = found
            yield from load(block, (read,), arrays)
            yield from own
            yield from store(block, arrays)

        def call(block: Block, lane: int) -> Call:
            return in_turn([*calls(block, lane)]) if kept else made_when_run(lambda: calls(block, lane))

        return [deal(blocks(self.y, extents), len(lanes), call)]

    def _reduce_part(
        self, dims: Dims, axes: Sequence[Axis], order: Dims, memory: Scratch
    ) -> tuple[BlockArrays, Iterable[Call]]:
        """Arrays for a part of x of these dims, and the calls that reduce the windows in it."""
        elements = arrays_of(self.join, dims, order, memory)
        results, calls = windows_reduced(self.join, elements, dict(enumerate(axes)), order, memory)
        return BlockArrays(elements, results, memory, order), calls

    def _calls(self, extents: Dims) -> int:
        """About how many calls a run takes that are kept."""
        count = math.prod(-(-size // extent) for size, extent in zip(self.y, extents, strict=False))
        inner = sum(map(joins_of, self.axes[1:]))
        return _CALLS * (count + sum(joins_of(first) + inner for first in self._first_axes(extents)))

    def _first_axes(self, extents: Dims) -> Iterable[Axis]:
        """The windows of blocks along the first spatial dim, those that differ."""
        starts = range(0, self.y[2], extents[2])
        found = (self.axes[0].part(start, min(start + extents[2], self.y[2]))[1] for start in starts)
        return {_lie(axis): axis for axis in found}.values()


def arrays_of(join: Join, dims: Dims, order: Dims, memory: Scratch) -> list[Array]:
    """New arrays of a join's dtypes."""
    return [scratch_in_order(memory, dims, order, dtype) for dtype in join.dtypes]


def windows_reduced(
    join: Join, elements: list[Array], axes: Mapping[int, Axis], order: Dims, memory: Scratch
) -> tuple[list[Array], Iterator[Call]]:
    """The arrays of the results, and the calls that reduce windows along some spatial dims.

    `axes`: the windows along each of these dims. The results are in new arrays, or are the elements
    themselves if there is nothing to do.
    """
    stages = [elements]
    wanted = {number: axis for number, axis in axes.items() if not axis.same}
    for number, axis in wanted.items():
        dims = stages[-1][0].shape
        stages.append(arrays_of(join, (*dims[: 2 + number], axis.count, *dims[3 + number :]), order, memory))

    def calls() -> Iterator[Call]:
        for (number, axis), x, y in zip(wanted.items(), stages, stages[1:], strict=False):
            along = reduce_by_folding if folding_pays(axis) else reduce_by_doubling
            yield from along(axis, 2 + number, x, y, join=join, memory=memory.fork())

    return stages[-1], calls()


def _scratch(axis: Axis, dim: int, x: Dims, join: Join) -> int:
    """Bytes that reducing windows along a dim of a part of x takes."""
    if folding_pays(axis):
        return folding_scratch(axis, dim, x, join)
    return doubling_scratch(axis, dim, x, axis.count, join)


def joins_of(axis: Axis) -> int:
    """How many joins reduce the windows along a dim, about."""
    levels = 2 * axis.longest.bit_length()
    return levels * folding_groups(axis) if folding_pays(axis) else levels


def _lie(axis: Axis) -> object:
    """A key that is equal for windows which lie in the same way in parts of the same size."""
    if axis.taps is None:
        return axis
    return axis.size, axis.count, axis.taps, axis.stride
