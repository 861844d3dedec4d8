"""Lines of a tensor reduced to a number each: first every block, then what the blocks of a line have given.

Where the fastest dim in memory is reduced, a block is of few long lines; elsewhere, of pieces of many.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call, Step, deal, in_turn
from cudnn_actor.engines.cpu.fast.lines import Box, Floats, beside, boxes_of_elements, lines, one_each
from cudnn_actor.engines.cpu.fast.sums import reduced_into, squares_into, sums_into
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint

__all__ = ["Finish", "Fold", "Folding", "Select", "store"]

_Any = npt.NDArray[Any]
Finish = Callable[[_Any, _Any], None]
"""Stores the results of some lines in an array of their dims; may overwrite them."""
Select = Callable[[_Any], _Any]
"""Gives a block's part of an array, which has the operand's dims, or 1 in place of some."""

_MOST = 1 << 15
"""Elements of a block."""
_RUN = 256
"""The most lines of a block, where elements of several lines are neighbours in memory."""
_SHORT = 16
"""The fewest neighbours that are copied faster than single elements."""
_SEGMENTS = 8
"""The number of parts into which lines are cut, so that each lane has some, if there are fewer blocks of
lines."""


def store(total: Floats, into: Floats) -> None:
    """Finish a reduction by copying its result."""
    np.copyto(into, total)


class Fold(NamedTuple):
    """The function by which a line is reduced.

    Parameters
    ----------
    join
        Joins two elements, or two results: add, multiply, minimum or maximum.
    squares
        Whether elements are squared before.
    change
        Gives the calls that compute, from a block, what is reduced; into another block. None: the elements.
    """

    join: np.ufunc = np.add
    squares: bool = False
    change: Callable[[_Any, _Any, Select], list[Call]] | None = None


@dataclass(frozen=True)
class Folding:
    """Reduces the lines along `axes` of tensors of these dims, as values of the type `wide`."""

    dims: Dims
    axes: Dims
    wide: np.dtype[Any]

    @property
    def length(self) -> int:
        """Elements of a line."""
        return math.prod(self.dims[axis] for axis in self.axes)

    def footprint(self) -> int:
        """Bytes of each lane: results of a block's lines and of a piece, two blocks, results of segments."""
        most, kept = self._lines(_RUN), math.prod(self.dims) // self.length
        segments = _SEGMENTS if self.length * most > _MOST else 0  # else, a block has whole lines
        numbers = (most, most, *[max(most, _MOST)] * 2, min(kept, _SEGMENTS * most) * segments)
        return footprint(*((count,) for count in numbers), itemsize=self.wide.itemsize)

    def steps(self, fold: Fold, x: _Any, y: _Any, lanes: Sequence[Scratch], finish: Finish) -> list[Step]:
        """Steps that reduce x into y, an array of its dims with 1 for those that are reduced."""
        cut = self._blocks(x)
        run = _Run(fold, x.transpose(cut.order), y.transpose(cut.order), cut.order, self.wide)
        scratch = [lane.fork() for lane in lanes]
        whole = tuple(slice(0, 1) for _ in self.axes)

        def total(box: Box, pieces: Sequence[Box], lane: int) -> tuple[_Any, Call]:
            own = scratch[lane].fork()
            into = own.take(run.y[(*box, *whole)].shape, self.wide)
            return into, run.reducing_call(box, pieces, into, own)

        if len(cut.segments) == 1:

            def alone(box: Box, lane: int) -> Call:
                found, call = total(box, cut.segments[0], lane)
                return in_turn([call, partial(finish, found, run.y[(*box, *whole)])])

            return [deal(cut.kept, len(lanes), alone)]
        parts = scratch[0].take((len(cut.segments), *run.y.shape), self.wide)

        def segment(block: tuple[int, Box], lane: int) -> Call:
            number, box = block
            found, call = total(box, cut.segments[number], lane)
            return in_turn([call, partial(np.copyto, parts[number][(*box, *whole)], found)])

        def join_segments(box: Box, lane: int) -> Call:
            into = run.y[(*box, *whole)]
            found = scratch[lane].fork().take(into.shape, self.wide)
            join = partial(fold.join.reduce, parts[:, *box, *whole], 0, out=found)
            return in_turn([join, partial(finish, found, into)])

        numbered = [*itertools.product(range(len(cut.segments)), cut.kept)]
        return [deal(numbered, len(lanes), segment), deal(cut.kept, len(lanes), join_segments)]

    def _lines(self, run: int) -> int:
        """The most lines of a block. `run`: how many lines have elements side by side in memory."""
        return max(1, _MOST // self.length, min(run, _RUN) if run >= _SHORT else 1)

    def _blocks(self, x: _Any) -> _Blocks:
        order = sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis]))
        kept, reduced = ([axis for axis in order if (axis in self.axes) is among] for among in (False, True))
        least = min((abs(x.strides[axis]) for axis in reduced if self.dims[axis] > 1), default=0)
        count = self._lines(math.prod(self.dims[axis] for axis in kept if abs(x.strides[axis]) < least))
        of_kept = [*boxes_of_elements([self.dims[axis] for axis in kept], count)]
        pieces = [*boxes_of_elements([self.dims[axis] for axis in reduced], max(1, _MOST // count))]
        segments = 1 if len(of_kept) >= _SEGMENTS else min(len(pieces), _SEGMENTS)
        bounds = [len(pieces) * number // segments for number in range(segments + 1)]
        cut = [pieces[start:end] for start, end in itertools.pairwise(bounds)]
        return _Blocks((*kept, *reduced), of_kept, cut)


class _Blocks(NamedTuple):
    """How a tensor is cut.

    Parameters
    ----------
    order
        Its dims: first those that are kept, then those that are reduced, of each kind the slowest first.
    kept
        Boxes of the dims that are kept: the lines of a block.
    segments
        The parts into which lines are cut for lanes: of each, its pieces, boxes of the dims that are reduced.
    """

    order: Dims
    kept: list[Box]
    segments: list[list[Box]]


class _Run(NamedTuple):
    """The arrays of a reduction: x and y, with their dims in an order."""

    fold: Fold
    x: _Any
    y: _Any
    order: Dims
    wide: np.dtype[Any]

    def reducing_call(self, box: Box, pieces: Sequence[Box], into: _Any, scratch: Scratch) -> Call:
        """A call that reduces some pieces of some lines."""
        first, *others = pieces
        calls = [self._piece((*box, *first), len(box), into, scratch.fork())]
        if others:
            found = scratch.take(into.shape, self.wide)
            for piece in others:
                calls.append(self._piece((*box, *piece), len(box), found, scratch.fork()))
                calls.append(partial(self.fold.join, into, found, out=into))
        return in_turn(calls)

    def _piece(self, block: Box, kept: int, into: _Any, scratch: Scratch) -> Call:
        """A call that reduces one block, whose first dims are kept."""
        join, squares, change = self.fold
        part = self.x[block]
        calls: list[Call] = []
        if change is not None or part.dtype != self.wide:
            own = scratch.take(part.shape, self.wide)
            if part.dtype != self.wide:
                calls.append(partial(np.copyto, own, part, casting="unsafe"))
                part = own
            if change is not None:
                calls += change(part, own, partial(self._select, block))
                part = own
        (of_lines,), _, axes = lines(range(kept, part.ndim), [part])
        out = into.reshape(one_each(of_lines, axes))
        if squares:
            calls.append(squares_into(of_lines, axes, out, scratch))
        elif join is np.add:
            calls.append(sums_into(of_lines, axes, out, scratch))
        else:
            calls.append(reduced_into(join, of_lines, axes, out))
        return in_turn(calls)

    def _select(self, block: Box, array: _Any) -> _Any:
        return beside(array.transpose(self.order), block)
