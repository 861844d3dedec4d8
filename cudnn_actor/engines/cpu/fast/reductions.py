"""Reductions over any dims: each block is reduced, and then what the blocks of a line have given.

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

from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel, Operands, Step
from cudnn_actor.engines.cpu.fast.lines import (
    Box,
    boxes,
    deal,
    in_turn,
    lines,
    one_each,
    reduced_into,
    squares_into,
    sums_into,
)
from cudnn_actor.engines.cpu.rounding import clipped
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations import Node, Reduction, ReductionMode
from cudnn_actor.protocol.operations.base import Specs
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["reduction"]

_Mode = ReductionMode
_Any = npt.NDArray[Any]
Finish = Callable[[_Any, _Any], None]
_MOST = 1 << 15
"""Elements of a block."""
_RUN = 256
"""Lines of a block whose elements are neighbours in memory, where there are so many."""
_SHORT = 16
"""Fewer neighbours than that are copied as slowly as single elements."""
_SEGMENTS = 8
"""Lines are cut into so many parts for lanes, if there are fewer blocks of lines."""
_MAGNITUDES = (_Mode.ABSOLUTE_MAX, _Mode.L1)
_SQUARES = (_Mode.SUM_OF_SQUARES, _Mode.L2)
_COMBINED: dict[ReductionMode, np.ufunc] = {
    _Mode.PRODUCT: np.multiply,
    _Mode.MIN: np.minimum,
    _Mode.MAX: np.maximum,
    _Mode.ABSOLUTE_MAX: np.maximum,
}
"""What joins two results of a mode, if not a sum."""


def reduction(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `Reduction`.

    None without elements, or where no dim is reduced, or for powers of float64 in another dtype.
    """
    assert isinstance(node, Reduction)
    x, y = specs["x"], specs["y"]
    axes = node.reduced(x.rank)
    narrows = x.dtype is DType.FLOAT64 and y.dtype is not DType.FLOAT64
    if not x.size or not axes or (narrows and node.mode is _Mode.LOG_SUM_EXP):
        return None
    wide = np.dtype(np.float32 if x.dtype.is_floating else np.int64)
    if x.dtype in (DType.FLOAT64, DType.UINT64):
        wide = x.dtype.numpy
    return _Reduction(node.mode, x.dims, axes, wide, node.keep_dims)


class _Blocks(NamedTuple):
    """How a tensor is cut. `order`: its dims that are kept, and then those reduced, the slowest first."""

    order: Dims
    kept: list[Box]
    pieces: list[list[Box]]
    """In segments."""


@dataclass(frozen=True)
class _Reduction:
    """Along `axes`, of values of the type `wide`."""

    mode: ReductionMode
    dims: Dims
    axes: Dims
    wide: np.dtype[Any]
    keep_dims: bool

    def footprint(self, lanes: int) -> int:
        """Results of a block's lines, those of a piece, a block; and the results of all segments."""
        del lanes
        most = self._lines(_RUN)
        of_segments = min(self._kept, _SEGMENTS * most) * _SEGMENTS
        return footprint((most,), (most,), (max(most, _MOST),), (of_segments,), itemsize=self.wide.itemsize)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        x, y = operands["x"], results["y"]
        if not self.keep_dims:
            y = y[tuple(None if axis in self.axes else slice(None) for axis in range(x.ndim))]
        blocks = self._blocks(x)
        of = _Pass(self.mode, x.transpose(blocks.order), y.transpose(blocks.order), blocks)
        steps = self._steps(of, lanes, _finish(self.mode, self._length))
        if self.mode is _Mode.LOG_SUM_EXP:
            return [*self._steps(of._replace(mode=_Mode.MAX), lanes, _finite), *steps]
        return steps

    @property
    def _length(self) -> int:
        return math.prod(self.dims[axis] for axis in self.axes)

    @property
    def _kept(self) -> int:
        return math.prod(self.dims) // self._length

    def _lines(self, run: int) -> int:
        """The most lines of a block, of which so many are neighbours."""
        return max(1, _MOST // self._length, min(run, _RUN) if run >= _SHORT else 1)

    def _blocks(self, x: _Any) -> _Blocks:
        kept, reduced = (
            sorted(
                (axis for axis in range(x.ndim) if (axis in self.axes) is among), key=lambda a: -x.strides[a]
            )
            for among in (False, True)
        )
        steps = [x.strides[axis] for axis in reduced if self.dims[axis] > 1]
        inner = [self.dims[axis] for axis in kept if x.strides[axis] < min(steps, default=0)]
        count = self._lines(math.prod(inner))
        of_kept = [*boxes([self.dims[axis] for axis in kept], count)]
        pieces = [*boxes([self.dims[axis] for axis in reduced], max(1, _MOST // count))]
        segments = 1 if len(of_kept) >= _SEGMENTS else min(len(pieces), _SEGMENTS)
        bounds = [len(pieces) * number // segments for number in range(segments + 1)]
        cut = [pieces[start:end] for start, end in itertools.pairwise(bounds)]
        return _Blocks((*kept, *reduced), of_kept, cut)

    def _steps(self, of: _Pass, lanes: Sequence[Scratch], finish: Finish) -> list[Step]:
        segments = len(of.blocks.pieces)
        whole = tuple(slice(0, 1) for _ in self.axes)
        scratch = [lane.fork() for lane in lanes]
        if segments == 1:

            def alone(box: Box, lane: int) -> Call:
                part = of.y[(*box, *whole)]
                own = scratch[lane].fork()
                total = own.take(part.shape, self.wide)
                found = self._reduced(of, box, of.blocks.pieces[0], total, own)
                return in_turn([found, partial(finish, total, part)])

            return [deal(of.blocks.kept, len(lanes), alone)]
        parts = scratch[0].take((segments, *of.y.shape), self.wide)

        def one(block: tuple[int, Box], lane: int) -> Call:
            number, box = block
            own = scratch[lane].fork()
            total = own.take(of.y[(*box, *whole)].shape, self.wide)
            found = self._reduced(of, box, of.blocks.pieces[number], total, own)
            return in_turn([found, partial(np.copyto, parts[number][(*box, *whole)], total)])

        def joined(box: Box, lane: int) -> Call:
            part = of.y[(*box, *whole)]
            total = scratch[lane].fork().take(part.shape, self.wide)
            each = parts[:, *box, *whole]
            combine = _COMBINED.get(of.mode, np.add)
            return in_turn([partial(combine.reduce, each, 0, out=total), partial(finish, total, part)])

        numbered = [*itertools.product(range(segments), of.blocks.kept)]
        return [deal(numbered, len(lanes), one), deal(of.blocks.kept, len(lanes), joined)]

    def _reduced(self, of: _Pass, box: Box, pieces: list[Box], total: _Any, scratch: Scratch) -> Call:
        """A call that reduces some pieces of some lines."""
        first, *others = pieces
        calls = [self._piece(of, box, first, total, scratch.fork())]
        if others:
            combine, own = _COMBINED.get(of.mode, np.add), scratch.take(total.shape, self.wide)
            for piece in others:
                calls.append(self._piece(of, box, piece, own, scratch.fork()))
                calls.append(partial(combine, total, own, out=total))
        return in_turn(calls)

    def _piece(self, of: _Pass, box: Box, piece: Box, out: _Any, scratch: Scratch) -> Call:
        """A call that reduces one piece of some lines."""
        mode, part = of.mode, of.x[(*box, *piece)]
        axes = tuple(range(len(box), part.ndim))
        calls: list[Call] = []
        own = part
        if part.dtype != self.wide or mode in _MAGNITUDES or mode is _Mode.LOG_SUM_EXP:
            own = scratch.take(part.shape, self.wide)
        if part.dtype != self.wide:
            calls.append(partial(np.copyto, own, part, casting="unsafe"))
            part = own
        if mode is _Mode.LOG_SUM_EXP:
            top = of.y[(*box, *(slice(0, 1) for _ in piece))]
            calls += [partial(np.subtract, part, top, own, casting="same_kind"), partial(np.exp, own, own)]
        elif mode in _MAGNITUDES:
            if self.wide.kind == "i":  # the least int64 has no magnitude
                calls.append(
                    partial(np.maximum, part, -np.iinfo(self.wide).max, out=own)
                )  # the least has none
                part = own
            calls.append(partial(np.absolute, part, own))
        (of_lines,), own_axes = lines(axes, own)
        into = out.reshape(one_each(of_lines, own_axes))
        if mode in _COMBINED:
            calls.append(reduced_into(_COMBINED[mode], of_lines, own_axes, into))
        elif mode in _SQUARES:
            calls.append(squares_into(of_lines, own_axes, into, scratch))
        else:
            calls.append(sums_into(of_lines, own_axes, into))
        return in_turn(calls)


class _Pass(NamedTuple):
    """What is computed of the operand and the result, whose dims are in the order of the blocks."""

    mode: ReductionMode
    x: _Any
    y: _Any
    blocks: _Blocks


def _finish(mode: ReductionMode, length: int) -> Finish:
    """What stores the results of lines of so many elements."""

    def of_floats(total: _Any, y: _Any) -> None:
        match mode:
            case _Mode.MEAN:
                np.divide(total, length, total)
            case _Mode.L2:
                np.sqrt(total, total)
            case _Mode.LOG_SUM:
                np.log(total, total)
            case _Mode.LOG_SUM_EXP:
                np.log(total, total)
                np.add(total, y, total, casting="same_kind")
        np.copyto(y, total, casting="same_kind")

    def store(total: _Any, y: _Any) -> None:
        if total.dtype.kind == "f":
            of_floats(total, y)
        else:
            np.copyto(y, clipped(total, y.dtype))

    return store


def _finite(total: _Any, y: _Any) -> None:
    """Stores what is subtracted from powers: with infinity for the largest, the sum is infinity itself."""
    np.copyto(total, 0, where=~np.isfinite(total))
    np.copyto(y, total)
