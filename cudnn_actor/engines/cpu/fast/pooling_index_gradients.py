"""The gradient of max pooling: each gradient is added to the element that its index names.

An index counts only if it is in its own window: from it follow its place along each dim, and this is compared
with the first and the last element of the window. The definition compares each element of a window with the
index, which takes less time for small windows alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.blocks import BLOCK_ELEMENTS
from cudnn_actor.engines.cpu.fast.by_definition import definition_in_scratch
from cudnn_actor.engines.cpu.fast.kernels import (
    Call,
    Kernel,
    Operands,
    Step,
    carrier_dtype,
    deal,
    in_turn,
    lanes_worth,
)
from cudnn_actor.engines.cpu.fast.lines import Box, boxes_of_elements
from cudnn_actor.engines.cpu.fast.pooling_windows import Axis, window_axes
from cudnn_actor.engines.cpu.fast.rounding import saturate
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations import MaxPoolBackward, Node, Specs

__all__ = ["IndexedGradient", "max_pool_backward"]

Array = npt.NDArray[Any]
_FEW = 16
"""The definition takes less time for windows of fewer elements."""
_NS = 25
"""About how many nanoseconds an element of dy takes."""


def max_pool_backward(node: Node, specs: Specs) -> Kernel | None:
    """The kernel for `MaxPoolBackward`."""
    assert isinstance(node, MaxPoolBackward)
    dx, dy = specs["dx"], specs["dy"]
    if 0 in dx.dims or 0 in dy.dims:
        return None
    axes = window_axes(node.window, dx.dims, dy.dims)
    if math.prod(axis.longest for axis in axes) < _FEW:
        small = definition_in_scratch(node, specs)
        if small is not None:
            return small
    return IndexedGradient(dx.dims, dy.dims, carrier_dtype(dx.dtype), axes)


@dataclass(frozen=True, eq=False)
class IndexedGradient:
    """Adds dy to the elements of dx that indices name."""

    dx: Dims
    dy: Dims
    dtype: np.dtype[Any]
    axes: tuple[Axis, ...]

    @property
    def _sum_dtype(self) -> np.dtype[Any]:
        """The dtype of sums: int64 for small integers, which are rounded at the end."""
        return np.dtype(np.int64) if self.dtype.kind in "bi" or self.dtype.itemsize < 4 else self.dtype

    def _boxes(self) -> dict[tuple[int, int], list[Box]]:
        """Blocks of one image of dy, by the channels that they are of."""
        found: dict[tuple[int, int], list[Box]] = {}
        for box in boxes_of_elements(self.dy[1:], BLOCK_ELEMENTS):
            found.setdefault((box[0].start, box[0].stop), []).append(box)
        return found

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for places in dx and along a dim, and for what is added."""
        del lanes
        dims = (min(math.prod(self.dy[1:]), BLOCK_ELEMENTS),)
        return footprint(*[dims] * 5) + footprint(dims, dims, itemsize=1)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`. The channels of a block are computed by one lane, in order."""
        dy, index, dx = operands["dy"], operands["index"], results["dx"]
        wide = self.dtype != self._sum_dtype
        into = lanes[0].keep(dx.shape, self._sum_dtype) if wide else dx
        lanes = lanes_worth(lanes, _NS * dy.size)
        boxes = self._boxes()

        def call(task: tuple[int, tuple[int, int]], lane: int) -> Call:
            image, bounds = task
            sums, stored = into[image][slice(*bounds)], dx[image][slice(*bounds)]
            parts = [*boxes_of_elements(sums.shape, BLOCK_ELEMENTS)]
            calls: list[Call] = [partial(sums[part].fill, 0) for part in parts]
            first = (image * self.dx[1] + np.arange(*bounds)) * math.prod(self.dx[2:])
            for box in boxes[bounds]:
                block = _Block(sums, dy[image][box], index[image][box], box[1:], lanes[lane].fork())
                calls += block.calls(self.axes, first.reshape(-1, *[1] * len(self.axes)))
            if wide:
                calls += (partial(saturate, sums[part], stored[part]) for part in parts)
            return in_turn(calls)

        return [deal(itertools.product(range(self.dx[0]), boxes), len(lanes), call)]


class _Block:
    """Some windows of some channels of an image, and the sums of these channels."""

    def __init__(self, sums: Array, dy: Array, index: Array, windows: Box, memory: Scratch) -> None:
        self._sums, self._dy, self._index, self._windows = sums, dy, index, windows
        self._rest, self._along, self._places, self._spare = (
            memory.take(dy.shape, np.int64) for _ in range(4)
        )
        self._terms = memory.take(dy.shape, sums.dtype)
        self._wrong, self._other = (memory.take(dy.shape, np.bool_) for _ in range(2))

    def calls(self, axes: Sequence[Axis], first: Array) -> Iterator[Call]:
        """Calls that add the gradients to their elements. `first`: the numbers of the channels' first
        elements."""
        rest, wrong, places, terms = self._rest, self._wrong, self._places, self._terms
        strides = [stride // self._sums.itemsize for stride in self._sums.strides]
        yield partial(np.subtract, self._index, first, rest)
        yield partial(np.less, rest, 0, out=wrong)
        yield from self._also_wrong(np.greater_equal, rest, math.prod(self._sums.shape[1:]))
        yield partial(np.copyto, rest, 0, where=wrong)
        ahead = np.arange(len(first)) * strides[0]
        yield partial(np.copyto, places, ahead.reshape(first.shape))
        for number, (axis, of) in enumerate(zip(axes, self._windows, strict=True)):
            inner = math.prod(self._sums.shape[2 + number :])
            yield partial(np.floor_divide, rest, inner, out=self._along)
            yield from self._outside(axis, of, (-1, *[1] * (len(axes) - 1 - number)))
            yield partial(np.multiply, self._along, strides[1 + number], out=self._spare)
            yield partial(np.add, places, self._spare, places)
            yield partial(np.multiply, self._along, inner, out=self._spare)
            yield partial(np.subtract, rest, self._spare, rest)
        yield partial(np.copyto, terms, self._dy, "unsafe")
        for array in (terms, places):
            yield partial(np.copyto, array, 0, where=wrong)
        yield partial(np.add.at, _line_of(self._sums), places.reshape(-1), terms.reshape(-1))

    def _outside(self, axis: Axis, of: slice, dims: Dims) -> Iterator[Call]:
        """Calls that note which places along a dim are none of their window's."""
        starts, stops = (each[of].reshape(dims) for each in (axis.starts, axis.stops))
        yield from self._also_wrong(np.less, self._along, starts)
        yield from self._also_wrong(np.greater_equal, self._along, stops)
        if axis.dilation > 1:
            yield partial(np.subtract, self._along, starts, self._spare)
            yield partial(np.remainder, self._spare, axis.dilation, out=self._spare)
            yield from self._also_wrong(np.not_equal, self._spare, 0)

    def _also_wrong(self, ufunc: np.ufunc, array: Array, bound: Array | int) -> Iterator[Call]:
        yield partial(ufunc, array, bound, out=self._other)
        yield partial(np.logical_or, self._wrong, self._other, self._wrong)


def _line_of(array: Array) -> Array:
    """The memory of an array as one line, from its first to its last element."""
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
    return np.lib.stride_tricks.as_strided(array, (last // array.itemsize + 1,), (array.itemsize,))
