"""Resampling, one dim after the other: each element is a weighted sum of at most four."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.boxes import Box, boxes
from cudnn_actor.engines.cpu.fast.blocks import BLOCK_ELEMENTS, FEW_CHANNELS
from cudnn_actor.engines.cpu.fast.convolution_views import memory_order
from cudnn_actor.engines.cpu.fast.kernels import (
    Call,
    Step,
    carried,
    deal,
    in_turn,
    lanes_worth,
    made_when_run,
)
from cudnn_actor.engines.cpu.scratch import Scratch, footprint
from cudnn_actor.protocol.operations import Node, Resample, Specs

__all__ = ["Resampled", "resample"]

Array = npt.NDArray[Any]
Dims = tuple[int, ...]
_BLOCK_SCRATCH = 1 << 20
"""Bytes for a block. Where whole images need more, they are cut along the dims that change, too."""
_NS = 1.8
"""Nanoseconds of an element of y, about."""
_MOST_KEPT = 1 << 20
"""Elements along a dim whose taps a program keeps. Those of longer dims are found in each run."""
_MOST_NEIGHBOURS = 4


def resample(node: Node, specs: Specs) -> Resampled | None:
    """The kernel for `Resample`; None where elements lie outside of x, or are made of more than four."""
    assert isinstance(node, Resample)
    x, y = specs["x"], specs["y"]
    for axis in node.resized(x.dims):
        ends = node.taps_along(x.dims, axis, np.array([0, y.dims[axis] - 1]))
        if ends.outside.any() or ends.places.shape[1] > _MOST_NEIGHBOURS:
            return None
    # The fewest elements first: along dims that shrink, and at last along those that grow.
    axes = sorted(node.resized(x.dims), key=lambda axis: (y.dims[axis] / x.dims[axis], -axis))
    return Resampled(node, x.dims, y.dims, carried(x.dtype), tuple(axes))


Allocate = Callable[[Dims, np.dtype[Any]], Array]


def _of_taps(numbers: Array, dtype: np.dtype[Any], allocate: Allocate) -> list[Array]:
    """An array for each tap, from numbers of the dims (elements, taps)."""
    found = [allocate(of.shape, dtype) for of in numbers.T]
    for into, of in zip(found, numbers.T, strict=True):
        into[...] = of
    return found


class Along(NamedTuple):
    """Elements of y along an axis: what they read.

    Parameters
    ----------
    axis
        The axis.
    reach
        The part of x.
    places
        For each tap, places in that part.
    weights
        For each tap, weights; None if these are all 1.
    """

    axis: int
    reach: slice
    places: list[Array]
    weights: list[Array] | None


@dataclass(frozen=True, eq=False)
class Resampled:
    """y from x, along some axes, one after the other; in blocks of y."""

    node: Resample[Any]
    x: Dims
    y: Dims
    dtype: np.dtype[Any]
    axes: tuple[int, ...]

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for x's part of a block, and for results along some axes."""
        del lanes
        orders = ((*range(len(self.x)),), (0, *range(2, len(self.x)), 1)[: len(self.x)])
        return max(self._footprint(self._extents(order)) for order in orders)

    def _footprint(self, extents: Dims) -> int:
        """Bytes for a block of y of these dims."""
        dims = list(extents)
        for axis in self.axes:
            dims[axis] = self._most_read(axis, extents[axis])
        total = footprint(tuple(dims), itemsize=self.dtype.itemsize)
        for axis in self.axes:
            dims[axis] = extents[axis]
            total += 2 * footprint(tuple(dims), itemsize=self.dtype.itemsize)
        return total

    def _extents(self, order: Sequence[int]) -> Dims:
        """The dims of a block of y. `order`: of the axes, the slowest first."""
        size = math.prod(max(self.x[axis], self.y[axis]) for axis in self.axes)
        found = list(self.y)
        for axis in reversed(order):
            if axis not in self.axes:
                least = FEW_CHANNELS if axis == order[-1] else 1
                found[axis] = min(self.y[axis], max(least, BLOCK_ELEMENTS // size))
                size *= found[axis]
        for axis in (axis for axis in order if axis in self.axes):
            while found[axis] > 1 and self._footprint(tuple(found)) > _BLOCK_SCRATCH:
                found[axis] = -(-found[axis] // 2)
        return tuple(found)

    def _most_read(self, axis: int, extent: int) -> int:
        """The most elements of x that a block of so many elements of y along an axis reaches over."""
        starts = np.arange(0, self.y[axis], extent)
        ends = np.minimum(starts + extent, self.y[axis]) - 1
        first, last = (self.node.taps_along(self.x, axis, each).places for each in (starts, ends))
        both = np.concatenate([first, last], 1)  # the places between them lie between theirs
        most = int((both.max(1) - both.min(1)).max()) + 1
        return most if 2 * most <= self.x[axis] else self.x[axis]

    def _along(self, allocate: Allocate, axis: int, start: int, stop: int) -> Along:
        taps = self.node.taps_along(self.x, axis, np.arange(start, stop))
        first, last = int(taps.places.min()), int(taps.places.max())
        if 2 * (last + 1 - first) > self.x[axis]:  # whole rows are contiguous
            first, last = 0, self.x[axis] - 1
        places = _of_taps(taps.places - first, taps.places.dtype, allocate)
        alone = taps.weights.shape[1] == 1 and (taps.weights == 1).all()
        weights = None if alone else _of_taps(taps.weights, self.dtype, allocate)
        return Along(axis, slice(first, last + 1), places, weights)

    def bind(
        self, operands: Mapping[str, Array], results: Mapping[str, Array], lanes: Sequence[Scratch]
    ) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, y = operands["x"], results["y"]
        rank = len(self.x)
        last = rank > 2 and abs(y.strides[1]) < min(map(abs, y.strides[2:]))
        order = memory_order(rank, channels_last=last)
        lanes = lanes_worth(lanes, _NS * math.prod(self.y))
        extents = self._extents(order)
        kept = all(self.y[axis] <= _MOST_KEPT for axis in self.axes)
        along = (
            functools.cache(partial(self._along, lanes[0].keep)) if kept else partial(self._along, np.empty)
        )

        def call(box: Box, lane: int) -> Call:
            block = partial(self._block, (x, y), box, order, lanes[lane].fork(), along)
            return in_turn([*block()]) if kept else made_when_run(block)

        return [deal(boxes(self.y, extents), len(lanes), call)]

    def _block(
        self,
        arrays: tuple[Array, Array],
        box: Box,
        order: Sequence[int],
        memory: Scratch,
        along: Callable[[int, int, int], Along],
    ) -> Iterator[Call]:
        alongs = [along(axis, box[axis].start, box[axis].stop) for axis in self.axes]
        part = list(box)
        for one in alongs:
            part[one.axis] = one.reach
        x, y = arrays[0][tuple(part)].transpose(order), arrays[1][box].transpose(order)
        memory = memory.fork()
        if not alongs or not x.flags.c_contiguous:
            into = memory.take(x.shape, self.dtype) if alongs else y
            yield partial(np.copyto, into, x)
            x = into
        for number, one in enumerate(alongs):
            axis = order.index(one.axis)
            dims = (*x.shape[:axis], len(one.places[0]), *x.shape[axis + 1 :])
            final = number == len(alongs) - 1
            into = y if final and y.flags.c_contiguous else memory.take(dims, self.dtype)
            yield from _summed(one, axis, x, into, memory)
            x = into
            if final and into is not y:
                yield partial(np.copyto, y, into)


def _summed(along: Along, axis: int, x: Array, y: Array, memory: Scratch) -> Iterator[Call]:
    """The sums along one axis of arrays that are contiguous, as NumPy's `take` wants them."""
    if along.weights is None:
        yield partial(x.take, along.places[0], axis, y, "clip")
        return
    spare = memory.fork().take(y.shape, y.dtype)
    for number, (places, weights) in enumerate(zip(along.places, along.weights, strict=True)):
        into = spare if number else y
        yield partial(x.take, places, axis, into, "clip")
        factor = weights.reshape([-1 if other == axis else 1 for other in range(y.ndim)])
        yield partial(np.multiply, into, factor, into)
        if not factor.all():  # not of infinity
            yield partial(np.copyto, into, 0, where=factor == 0)
        if number:
            yield partial(np.add, y, spare, y)
