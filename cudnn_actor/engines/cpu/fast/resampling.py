"""Resampling and its gradient, one dim after the other: each element is a weighted sum of some others."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.boxes import Box, boxes, count_boxes
from cudnn_actor.engines.cpu.fast.blocks import BLOCK_ELEMENTS, FEW_CHANNELS
from cudnn_actor.engines.cpu.fast.kernels import (
    Call,
    Step,
    carrier_dtype,
    deal,
    in_turn,
    lanes_worth,
    made_when_run,
    most_calls,
)
from cudnn_actor.engines.cpu.fast.memory_orders import memory_order
from cudnn_actor.engines.cpu.fast.resampling_taps import (
    Allocate,
    Along,
    FoundAlong,
    HeldTaps,
    NamedTaps,
    Resized,
    TapsOf,
    found_bytes,
    kept_along,
)
from cudnn_actor.engines.cpu.rounding import integer_range
from cudnn_actor.engines.cpu.scratch import Scratch, footprint
from cudnn_actor.protocol.operations import Node, Resample, ResampleBackward, Specs
from cudnn_actor.protocol.operations.resampling import Taps
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Resampled", "resample", "resample_backward"]

Array = npt.NDArray[Any]
Dims = tuple[int, ...]
_BLOCK_SCRATCH = 1 << 20
"""Bytes for a block. Where whole images need more, they are cut along the dims that change, too."""
_NS = 1.8
"""About how many nanoseconds an element of y takes."""
_GROUP = 16
"""Taps are found once for this many blocks. Behind these blocks, progress is noted."""
_TAPS_SCRATCH = 1 << 20
"""About how many bytes the taps of a block along a dim take that each run finds again. A block of
`_LEAST_ELEMENTS` may take four times as many: then calls for each tap pay."""
_MOST_KEPT = 1 << 20
"""Taps of all elements along a dim that a program keeps. Where there are more, they are found in each run."""
_MOST_TAPS = 16
"""Taps of an element along a dim that are worth a call each on however few elements."""
_LEAST_ELEMENTS = 2048
"""Elements of a call, on average, where there are many. With fewer, the calls take more time than these."""
_UNEVEN = 4
"""The most taps that are computed along a dim, as a multiple of the taps that there are: some are added, so
that all elements have equally many."""


def resample(node: Node, specs: Specs) -> Resampled | None:
    """The kernel for `Resample`; None where many taps would each take a call on few elements."""
    assert isinstance(node, Resample)
    x, y = specs["x"], specs["y"]
    beyond: float = node.extrapolation
    if x.dtype is DType.BOOL:
        beyond = round(beyond) != 0
    elif not x.dtype.is_floating:
        least, largest = integer_range(x.dtype.numpy)
        beyond = min(max(round(beyond), least), largest)
    axes = _in_order(node.resized_dims(x.dims), x.dims, y.dims)
    kernel = Resampled(x.dims, y.dims, carrier_dtype(x.dtype), axes, NamedTaps(node, x.dims), beyond)
    return kernel if kernel.pays() else None


def resample_backward(node: Node, specs: Specs) -> Resampled | None:
    """The kernel for `ResampleBackward`.

    None where `Resample` has none, or if some elements have far more taps than others.
    """
    assert isinstance(node, ResampleBackward)
    dy, dx = specs["dy"].dims, specs["dx"].dims
    reversed_taps: dict[int, Taps] = {}
    for axis in node.resized_dims(dx):
        taps = _reverse_taps(node.taps_along(dx, axis), dx[axis])
        if taps is None:
            return None
        reversed_taps[axis] = taps
    axes, held = _in_order(reversed_taps, dy, dx), HeldTaps(reversed_taps)
    kernel = Resampled(dy, dx, carrier_dtype(specs["dy"].dtype), axes, held)
    return kernel if kernel.pays() else None


def _in_order(axes: Iterable[int], x: Dims, y: Dims) -> tuple[int, ...]:
    """The axes in the order that keeps results between them small: first those that shrink, last those that
    grow."""
    return tuple(sorted(axes, key=lambda axis: (y[axis] / x[axis], -axis)))


def _reverse_taps(taps: Taps, size: int) -> Taps | None:
    """The taps of `size` elements of an operand, each as a sum of the elements that it is part of.

    All elements have the same number of taps: some weights are 0. None if that makes far more taps.
    """
    starts, places, weights = taps.transpose(size)
    if not len(places):  # nothing is read
        places, weights = np.zeros(1, np.int64), np.zeros(1)
    counts = np.diff(starts)
    most = max(int(counts.max()), 1)
    if most * size > _UNEVEN * max(size, len(places)):
        return None
    used = np.arange(most) < counts[:, None]
    at = starts[:-1, None] + np.minimum(np.arange(most), np.maximum(counts[:, None] - 1, 0))
    at = at.clip(max=len(places) - 1)
    return Taps(places[at], np.where(used, weights[at], 0.0), np.zeros(size, bool))


@dataclass(frozen=True, eq=False)
class Resampled:
    """y from x, along some axes, one after the other; in blocks of y.

    `taps`: the taps along each axis. `beyond`: the value of elements that lie outside of x.
    """

    x: Dims
    y: Dims
    dtype: np.dtype[Any]
    axes: tuple[int, ...]
    taps: TapsOf
    beyond: float = 0.0

    def pays(self) -> bool:
        """Whether calls are few, or each is on enough elements. It is asked of packed tensors."""
        taps = {axis: self.taps.count(axis) for axis in self.axes}
        if max(taps.values(), default=0) <= _MOST_TAPS:
            return True
        extents, _ = self._cut(range(len(self.x)))
        dims, calls, elements = [*extents], 0, 0
        for axis in self.axes:
            dims[axis] = self._most_read(axis, extents[axis])
        for axis in self.axes:
            dims[axis] = extents[axis]
            calls += taps[axis]
            elements += taps[axis] * math.prod(dims)
        return elements >= _LEAST_ELEMENTS * calls

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for a block, and for taps that are not kept."""
        del lanes
        orders = ((*range(len(self.x)),), (0, *range(2, len(self.x)), 1)[: len(self.x)])
        return max(self._footprint(*self._cut(order)) for order in orders)

    def _footprint(self, extents: Dims, kept: bool) -> int:
        nbytes, found = self._block_bytes(extents), 0
        if not kept:
            for axis in self.axes:
                together = self.taps.together(axis, extents[axis])
                found += found_bytes(self.taps, self._resized_axis(axis), extents[axis])
                nbytes = max(nbytes, self.taps.nbytes(axis, together))
        return found + nbytes

    def _cut(self, order: Sequence[int]) -> tuple[Dims, bool]:
        """The dims of a block of y, and whether a program keeps the taps. `order`: as of `_extents`."""
        extents = self._extents(order, self.y)
        kept = self._calls(extents) <= most_calls(self.dtype.itemsize * math.prod(self.y))
        if kept and all(self.y[axis] * self.taps.count(axis) <= _MOST_KEPT for axis in self.axes):
            return extents, True
        most = [*self.y]
        for axis in self.axes:
            each = found_bytes(self.taps, self._resized_axis(axis), _LEAST_ELEMENTS) / _LEAST_ELEMENTS
            least = min(_LEAST_ELEMENTS, 4 * _TAPS_SCRATCH / each)
            most[axis] = int(max(1, least, _TAPS_SCRATCH / each))
        return self._extents(order, tuple(most)), False

    def _block_bytes(self, extents: Dims) -> int:
        """Bytes for a block of y of these dims: for x's part of it, and for results along some axes."""
        dims = list(extents)
        for axis in self.axes:
            dims[axis] = self._most_read(axis, extents[axis])
        total = footprint(tuple(dims), itemsize=self.dtype.itemsize)
        for axis in self.axes:
            dims[axis] = extents[axis]
            total += 2 * footprint(tuple(dims), itemsize=self.dtype.itemsize)
        return total

    def _extents(self, order: Sequence[int], most: Dims) -> Dims:
        """The dims of a block of y, of at most these. `order`: of the axes, the slowest first."""
        size = math.prod(max(self.x[axis], self.y[axis]) for axis in self.axes)
        found = [*map(min, self.y, most)]
        for axis in reversed(order):
            if axis not in self.axes:
                least = FEW_CHANNELS if axis == order[-1] else 1
                found[axis] = min(self.y[axis], max(least, BLOCK_ELEMENTS // size))
                size *= found[axis]
        for axis in (axis for axis in order if axis in self.axes):
            while found[axis] > 1 and self._block_bytes(tuple(found)) > _BLOCK_SCRATCH:
                found[axis] = -(-found[axis] // 2)
        return tuple(found)

    def _resized_axis(self, axis: int) -> Resized:
        return Resized(axis, self.x[axis], self.y[axis], self.dtype)

    def _most_read(self, axis: int, extent: int) -> int:
        """The most elements of x along an axis, from the first to the last that a block reads, where the
        block has `extent` elements of y."""
        starts = np.arange(0, self.y[axis], extent)
        ends = np.minimum(starts + extent, self.y[axis]) - 1
        first, last = (self.taps.taps(axis, each).places for each in (starts, ends))
        both = np.concatenate([first, last], 1)  # the places between them lie between theirs
        most = int((both.max(1) - both.min(1)).max()) + 1
        return most if 2 * most <= self.x[axis] else self.x[axis]

    def _calls(self, extents: Dims) -> int:
        """About how many calls a run takes, in blocks of these dims."""
        return count_boxes(self.y, extents) * sum(4 * self.taps.count(axis) for axis in self.axes)

    def bind(
        self, operands: Mapping[str, Array], results: Mapping[str, Array], lanes: Sequence[Scratch]
    ) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        (x,), (y,) = operands.values(), results.values()
        rank = len(self.x)
        last = rank > 2 and abs(y.strides[1]) < min(map(abs, y.strides[2:]))
        order = memory_order(rank, channels_last=last)
        lanes = lanes_worth(lanes, _NS * math.prod(self.y))
        extents, kept = self._cut(order)
        block = partial(self._block, (x, y), order)
        if kept:
            along = functools.cache(partial(self._keep_along, lanes[0].keep))

            def bind_box(box: Box, lane: int) -> Call:
                alongs = [along(axis, box[axis].start, box[axis].stop) for axis in self.axes]
                return in_turn([*block(box, lanes[lane].fork(), alongs)])

            return [deal(boxes(self.y, extents), len(lanes), bind_box)]
        memories = [lane.fork() for lane in lanes]
        found = [self._tap_finders(extents, memory) for memory in memories]

        def bind_group(group: Sequence[Box], lane: int) -> Call:
            def calls() -> Iterator[Call]:
                alongs: list[Along] = []
                for axis, one in zip(self.axes, found[lane], strict=True):
                    finding, along = one(group[0][axis].start, group[0][axis].stop)
                    yield from finding
                    alongs.append(along)
                for box in group:
                    yield from block(box, memories[lane], alongs)

            return made_when_run(calls)

        return [deal(self._groups(extents), len(lanes), bind_group)]

    def _groups(self, extents: Dims) -> Iterator[list[Box]]:
        """Some of the blocks that are made of the same places along the axes."""
        each = {axis: 1 if axis in self.axes else extent for axis, extent in enumerate(extents)}
        others = [1 if axis in self.axes else size for axis, size in enumerate(self.y)]
        along = [size if axis in self.axes else 1 for axis, size in enumerate(self.y)]
        rest = [*boxes(tuple(others), tuple(each.values()))]
        for places in boxes(tuple(along), extents):
            for start in range(0, len(rest), _GROUP):
                yield [
                    tuple(places[axis] if axis in self.axes else box[axis] for axis in range(len(box)))
                    for box in rest[start : start + _GROUP]
                ]

    def _keep_along(self, allocate: Allocate, axis: int, start: int, stop: int) -> Along:
        return kept_along(self.taps, self._resized_axis(axis), range(start, stop), allocate)

    def _tap_finders(self, extents: Dims, memory: Scratch) -> list[FoundAlong]:
        """The objects that find the taps of blocks along each axis, in the memory of a lane."""
        found = [FoundAlong(self.taps, self._resized_axis(axis), extents[axis], memory) for axis in self.axes]
        for one in found:
            one.use(memory.fork())
        return found

    def _block(
        self,
        arrays: tuple[Array, Array],
        order: Sequence[int],
        box: Box,
        memory: Scratch,
        alongs: Sequence[Along],
    ) -> Iterator[Call]:
        part = list(box)
        for one in alongs:
            part[one.axis] = one.reach
        places: tuple[Any, Any] = (*part, ...), (*box, ...)  # without `...`, no dims would give a number
        x, y = (array[place].transpose(order) for array, place in zip(arrays, places, strict=True))
        memory = memory.fork()
        if not alongs or not x.flags.c_contiguous:
            into = memory.take(x.shape, self.dtype) if alongs else y
            yield partial(np.copyto, into, x)
            x = into
        for number, one in enumerate(alongs):
            axis = order.index(one.axis)
            dims = (*x.shape[:axis], one.places.shape[1], *x.shape[axis + 1 :])
            final = number == len(alongs) - 1
            into = y if final and y.flags.c_contiguous else memory.take(dims, self.dtype)
            yield from _sum_along(one, axis, x, into, memory)
            x = into
            if final and into is not y:
                yield partial(np.copyto, y, into)
        for one in alongs:
            if one.outside is not None and one.outside.any():
                where = one.outside.reshape([-1 if axis == one.axis else 1 for axis in order])
                yield partial(np.copyto, y, np.array(self.beyond, y.dtype), where=where)


def _sum_along(along: Along, axis: int, x: Array, y: Array, memory: Scratch) -> Iterator[Call]:
    """Calls that compute the sums along one axis. The arrays are contiguous, as NumPy's `take` wants them."""
    if along.weights is None:
        yield partial(x.take, along.places[0], axis, y, "clip")
        return
    spare = memory.fork().take(y.shape, y.dtype)
    for number, (places, weights) in enumerate(zip(along.places, along.weights, strict=True)):
        into, dims = spare if number else y, [-1 if other == axis else 1 for other in range(y.ndim)]
        yield partial(x.take, places, axis, into, "clip")
        yield partial(np.multiply, into, weights.reshape(dims), into)
        # Not of infinity. What a run has found is there by now: each of its calls is made before the next is.
        if along.unread is not None and along.unread[number].any():
            yield partial(np.copyto, into, 0, where=along.unread[number].reshape(dims))
        if number:
            yield partial(np.add, y, spare, y)
