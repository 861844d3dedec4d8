"""Places of the largest and smallest elements, and running sums and products, of blocks of lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import (
    MOST_SCRATCH,
    Call,
    Kernel,
    Operands,
    Step,
    carried,
    deal,
    in_turn,
)
from cudnn_actor.engines.cpu.fast.lines import Box, Part, blocks_of_lines, most_lines, parts_of_lines
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations import ArgReduction, Cumulative, Node, ReductionMode
from cudnn_actor.protocol.operations.base import Specs
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["arg_reduction", "cumulative"]

_Any = npt.NDArray[Any]


def arg_reduction(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `ArgReduction`; None without elements."""
    assert isinstance(node, ArgReduction)
    x = specs["x"]
    if not x.size:
        return None
    find = np.argmax if node.mode is ReductionMode.MAX else np.argmin
    return _Places(find, x.dims, node.axis % x.rank, carried(x.dtype).itemsize, node.keep_dims)


def cumulative(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `Cumulative`; None without elements, and for integers in a dtype that is not wide."""
    assert isinstance(node, Cumulative)
    x, y = specs["x"], specs["y"]
    wide = DType.UINT64 if x.dtype is DType.UINT64 else DType.INT64
    fits = carried(x.dtype).itemsize == carried(y.dtype).itemsize if x.dtype.is_floating else y.dtype is wide
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
    def _block(self) -> int:
        """Bytes for the copy of a block; 0 if lines are so long that NumPy allocates what it needs."""
        nbytes = footprint((self._count * self.dims[self.axis],), itemsize=self.itemsize)
        return nbytes if nbytes < MOST_SCRATCH else 0

    def footprint(self, lanes: int) -> int:
        """A block, and a place for each of its lines."""
        del lanes
        return self._block + footprint((self._count,), itemsize=8)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        x, y = operands["x"], results["y"]
        if not self.keep_dims:
            y = np.expand_dims(y, self.axis)

        def call(part: Part, lane: int) -> Call:
            (found,), (into,), _ = part
            scratch, calls = lanes[lane].fork(), list[Call]()
            if self._block and not found.flags.c_contiguous:  # NumPy would allocate such a copy
                own = scratch.take(found.shape, x.dtype)
                calls.append(partial(np.copyto, own, found))
                found = own.reshape(-1, own.shape[-1])
            places = scratch.take(found.shape[:-1], np.int64)
            calls.append(partial(self.find, found, found.ndim - 1, places))
            calls.append(partial(np.copyto, into, places.reshape(into.shape)))
            return in_turn(calls)

        return [deal([*parts_of_lines((self.axis,), (x,), (y,))], len(lanes), call)]


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
