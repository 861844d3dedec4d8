"""Tensors with other sizes: along one dim after the other, sums of a few weighted elements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call, Step, carried, dealt
from cudnn_actor.engines.cpu.scratch import Scratch, footprint
from cudnn_actor.protocol.operations import Node, Resample, Specs

__all__ = ["Resampled", "resample"]

Array = npt.NDArray[Any]
Dims = tuple[int, ...]
_ELEMENTS = 16384
"""Of a block of the result, about."""
_FEW_ELEMENTS = 32768
"""Of y: a second lane would take as long to begin as one takes."""
_CHANNELS = 16
"""Channels that lie side by side are not cut into fewer: the elements of a cache line."""


def resample(node: Node, specs: Specs) -> Resampled | None:
    """The kernel for `Resample`; None where elements lie outside of x, or are made of more than four."""
    assert isinstance(node, Resample)
    x, y = specs["x"], specs["y"]
    dtype = carried(x.dtype)
    found = node.taps(x.dims)
    if any(taps.outside.any() or taps.places.shape[1] > 4 for taps in found.values()):
        return None
    alongs = [
        Along(axis, [np.ascontiguousarray(p) for p in taps.places.T], _weights(taps.weights, dtype))
        for axis, taps in found.items()
    ]
    # The fewest elements first: along dims that shrink, and at last along those that grow.
    alongs.sort(key=lambda along: (y.dims[along.axis] / x.dims[along.axis], -along.axis))
    return Resampled(x.dims, y.dims, dtype, tuple(alongs))


def _weights(weights: np.ndarray, dtype: np.dtype[Any]) -> list[Array] | None:
    """Those of each tap; None if all are 1."""
    if (weights == 1).all() and weights.shape[1] == 1:
        return None
    return [np.ascontiguousarray(of, dtype) for of in weights.T]


@dataclass(frozen=True, eq=False)
class Along:
    """For each tap, the places along an axis that it reads, and their weights; None if these are all 1."""

    axis: int
    places: list[Array]
    weights: list[Array] | None


@dataclass(frozen=True, eq=False)
class Resampled:
    """y from x, along some axes; blocks are cut along the others."""

    x: Dims
    y: Dims
    dtype: np.dtype[Any]
    alongs: tuple[Along, ...]

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for x's part of a block, and for results along some axes."""
        del lanes
        orders = ((*range(len(self.x)),), (0, *range(2, len(self.x)), 1)[: len(self.x)])
        return max(self._footprint(order) for order in orders)

    def _footprint(self, order: Sequence[int]) -> int:
        dims = list(self._extents(order))
        total = footprint(tuple(dims), itemsize=self.dtype.itemsize)
        for along in self.alongs:
            dims[along.axis] = self.y[along.axis]
            total += 2 * footprint(tuple(dims), itemsize=self.dtype.itemsize)
        return total

    def _extents(self, order: Sequence[int]) -> Dims:
        """How much of each axis of x a block has. `order`: of the axes, the slowest first."""
        whole = {along.axis for along in self.alongs}
        size = math.prod(max(self.x[axis], self.y[axis]) for axis in whole)
        found = list(self.x)
        for axis in reversed(order):
            if axis not in whole:
                least = _CHANNELS if axis == order[-1] else 1
                found[axis] = min(self.x[axis], max(least, _ELEMENTS // size))
                size *= found[axis]
        return tuple(found)

    def bind(
        self, operands: Mapping[str, Array], results: Mapping[str, Array], lanes: Sequence[Scratch]
    ) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, y = operands["x"], results["y"]
        rank = len(self.x)
        last = rank > 2 and abs(y.strides[1]) < min(map(abs, y.strides[2:]))
        order = (0, *range(2, rank), 1) if last else tuple(range(rank))
        if math.prod(self.y) <= _FEW_ELEMENTS:
            lanes = lanes[:1]
        calls: list[list[Call]] = [[] for _ in lanes]
        extents = self._extents(order)
        starts = np.ndindex(*(-(-size // extent) for size, extent in zip(self.x, extents, strict=True)))
        for number, block in enumerate(starts):
            lane = number % len(lanes)
            part = tuple(
                slice(at * extent, (at + 1) * extent) for at, extent in zip(block, extents, strict=True)
            )
            of_y = tuple(
                slice(None) if any(along.axis == axis for along in self.alongs) else own
                for axis, own in enumerate(part)
            )
            source, target = x[part].transpose(order), y[of_y].transpose(order)
            calls[lane] += self._block(source, target, order, lanes[lane].fork())
        return [dealt(calls)]

    def _block(self, x: Array, y: Array, order: Sequence[int], memory: Scratch) -> Iterator[Call]:
        if not self.alongs or not x.flags.c_contiguous:
            into = y if not self.alongs else memory.take(x.shape, self.dtype)
            yield partial(np.copyto, into, x)
            x = into
        for number, along in enumerate(self.alongs):
            axis = order.index(along.axis)
            dims = (*x.shape[:axis], len(along.places[0]), *x.shape[axis + 1 :])
            final = number == len(self.alongs) - 1
            into = y if final and y.flags.c_contiguous else memory.take(dims, self.dtype)
            yield from _summed(along, axis, x, into, memory)
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
