"""Places of the largest and smallest elements, and running sums and products, of blocks of lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel, Operands, Step, carrier_dtype, deal, in_turn
from cudnn_actor.engines.cpu.fast.lines import Box, Part, blocks_of_lines, most_lines, parts_of_lines
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations import ArgReduction, Cumulative, Node, ReductionMode
from cudnn_actor.protocol.operations.base import Specs
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["arg_reduction", "cumulative"]

_Any = npt.NDArray[Any]
_PIECE_BYTES = 1 << 20
"""Longer lines are copied piece by piece. Blocks of several lines are smaller: see `most_lines`."""


def arg_reduction(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `ArgReduction`; None without elements."""
    assert isinstance(node, ArgReduction)
    x = specs["x"]
    if not x.size:
        return None
    find = np.argmax if node.mode is ReductionMode.MAX else np.argmin
    return _Places(find, x.dims, node.axis % x.rank, carrier_dtype(x.dtype).itemsize, node.keep_dims)


def cumulative(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `Cumulative`; None without elements, and for integers in a dtype that is not wide."""
    assert isinstance(node, Cumulative)
    x, y = specs["x"], specs["y"]
    wide = DType.UINT64 if x.dtype is DType.UINT64 else DType.INT64
    fits = (
        carrier_dtype(x.dtype).itemsize == carrier_dtype(y.dtype).itemsize
        if x.dtype.is_floating
        else y.dtype is wide
    )
    if not x.size or not fits:
        return None
    ufunc = np.add if node.mode is ReductionMode.SUM else np.multiply
    return _Running(ufunc, node.axis % x.rank, node.exclusive, node.reverse)


@dataclass(frozen=True)
class _Places:
    """Finds the places of elements along `axis` of tensors of these dims."""

    find: Any
    dims: Dims
    axis: int
    itemsize: int
    keep_dims: bool

    @property
    def _count(self) -> int:
        """The most lines of a block."""
        return most_lines(self.dims, (self.axis,), self.itemsize)

    @property
    def _piece(self) -> int:
        """The most elements that are copied at a time: a block's, or those of a part of a long line."""
        return min(self._count * self.dims[self.axis], _PIECE_BYTES // self.itemsize)

    @property
    def _pieces(self) -> int:
        """How many pieces a line has."""
        return -(-self.dims[self.axis] // self._piece)

    def footprint(self, lanes: int) -> int:
        """A piece, the element that is found in each, and its place; or a place for each line of a block."""
        del lanes
        copied = footprint((self._piece,), (self._pieces,), itemsize=self.itemsize)
        return copied + footprint((self._pieces,), (1,), (self._count,), itemsize=8)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        x, y = operands["x"], results["y"]
        if not self.keep_dims:
            y = np.expand_dims(y, self.axis)

        def call(part: Part, lane: int) -> Call:
            (found,), (into,), _ = part
            scratch, calls = lanes[lane].fork(), list[Call]()
            places = scratch.take(found.shape[:-1], np.int64)
            if found.flags.c_contiguous:
                calls.append(partial(self.find, found, found.ndim - 1, places))
            elif self._pieces > 1:
                calls += self._in_pieces(found.reshape(-1), places.reshape(1), scratch)
            else:  # NumPy would allocate such a copy
                own = scratch.take(found.shape, x.dtype)
                calls.append(partial(np.copyto, own, found))
                calls.append(partial(self.find, own, own.ndim - 1, places))
            calls.append(partial(np.copyto, into, places.reshape(into.shape)))
            return in_turn(calls)

        return [deal([*parts_of_lines((self.axis,), (x,), (y,))], len(lanes), call)]

    def _in_pieces(self, line: _Any, into: _Any, scratch: Scratch) -> Iterator[Call]:
        """Calls that find the place in a line with gaps: the first of the best elements of its pieces."""
        own = scratch.take((self._piece,), line.dtype)
        best = scratch.take((self._pieces,), line.dtype)
        places, at = (scratch.take((count,), np.int64) for count in (self._pieces, 1))
        for number, start in enumerate(range(0, line.size, self._piece)):
            elements = line[start : start + self._piece]
            copy, one = own[: elements.size], slice(number, number + 1)
            yield partial(np.copyto, copy, elements)
            yield partial(self.find, copy[None], 1, places[one])
            yield partial(copy.take, places[one], None, best[one], "clip")
            yield partial(np.add, places[one], start, places[one])
        yield partial(self.find, best[None], 1, at)
        yield partial(places.take, at, None, into, "clip")


@dataclass(frozen=True)
class _Running:
    ufunc: np.ufunc
    axis: int
    exclusive: bool
    reverse: bool

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch of a lane: none."""
        del lanes
        return 0

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        x, y = (np.moveaxis(each, self.axis, -1) for each in (operands["x"], results["y"]))
        if self.reverse:
            x, y = x[..., ::-1], y[..., ::-1]
        axis = x.ndim - 1

        def call(box: Box, lane: int) -> Call:
            del lane
            of_x, of_y = x[box], y[box]
            calls: list[Call] = []
            if self.exclusive:
                calls.append(partial(of_y[..., :1].fill, self.ufunc.identity))
                of_x, of_y = of_x[..., :-1], of_y[..., 1:]
            if x.dtype != y.dtype:  # NumPy would allocate a copy of that type
                calls.append(partial(np.copyto, of_y, of_x))
                of_x = of_y
            return in_turn([*calls, partial(self.ufunc.accumulate, of_x, axis, None, of_y)])

        return [deal([*blocks_of_lines(y, (axis,))], len(lanes), call)]
