"""The gradient of average pooling: each window is spread over its elements, one dim after the other."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.blocks import BLOCK_ELEMENTS, FEW_CHANNELS
from cudnn_actor.engines.cpu.fast.kernels import (
    MOST_SCRATCH,
    Call,
    Kernel,
    Operands,
    Step,
    carrier_dtype,
    deal,
    in_turn,
    lanes_worth,
    most_calls,
)
from cudnn_actor.engines.cpu.fast.memory_orders import is_channels_last, memory_order, scratch_in_order
from cudnn_actor.engines.cpu.fast.pooling_element_joins import element_gradient
from cudnn_actor.engines.cpu.fast.pooling_windows import Axis, counts_of, window_axes
from cudnn_actor.engines.cpu.scratch import Scratch, footprint
from cudnn_actor.protocol.operations import AvgPoolBackward, Node, Specs

__all__ = ["Spreading", "avg_pool_backward", "spread_along"]

Array = npt.NDArray[Any]
Dims = tuple[int, ...]
_LARGE_IMAGE = 2 * BLOCK_ELEMENTS
"""Pixels of images whose channels, side by side in a line of the cache, leave it before they are
read again. Each channel is computed apart and copied, in a third to a twentieth of the time."""
_NS = 1.8
"""About how many nanoseconds an element of dx takes."""


def avg_pool_backward(node: Node, specs: Specs) -> Kernel | None:
    """The kernel for `AvgPoolBackward`."""
    assert isinstance(node, AvgPoolBackward)
    dx, dy = specs["dx"], specs["dy"]
    if 0 in dx.dims or 0 in dy.dims:
        return None
    dtype = carrier_dtype(dx.dtype)
    axes = window_axes(node.window, dx.dims, dy.dims)
    kernel = Spreading(dx.dims, dy.dims, dtype, axes, counts_of(node, axes, dtype))
    if kernel.fits() and kernel.footprint(1) <= MOST_SCRATCH:
        return kernel
    return element_gradient(node.window, dx.dims, dy.dims, dtype, kernel.counts)


@dataclass(frozen=True, eq=False)
class Spreading:
    """Adds dy, divided by counts, to all elements of dx that are in the window."""

    dx: Dims
    dy: Dims
    dtype: np.dtype[Any]
    axes: tuple[Axis, ...]
    counts: Array

    @property
    def spread_dims(self) -> list[int]:
        """The spatial dims along which windows are spread; one at least."""
        return [number for number, axis in enumerate(self.axes) if not axis.same] or [0]

    def channels(self, *, channels_last: bool) -> int:
        """How many channels of an image a block has."""
        few = min(FEW_CHANNELS, max(1, MOST_SCRATCH // self._scratch(1))) if channels_last else 1
        return min(self.dx[1], max(few, BLOCK_ELEMENTS // math.prod(self.dx[2:])))

    def partly(self, channels: int) -> Iterator[Dims]:
        """Dims of a block of dy, and of what it becomes along one dim after the other."""
        for number in self.spread_dims:
            yield (1, channels, *self.dx[2 : 2 + number], *self.dy[2 + number :])

    @functools.cached_property
    def _apart_bytes(self) -> int:
        """Bytes of scratch for a channel of a large image that is computed apart; 0 for other images."""
        if math.prod(self.dx[2:]) <= _LARGE_IMAGE:
            return 0
        nbytes = footprint(*self.partly(1), (1, 1, *self.dx[2:]), itemsize=self.dtype.itemsize)
        return nbytes if nbytes <= MOST_SCRATCH else 0

    def _scratch(self, channels: int) -> int:
        return footprint(*self.partly(channels), itemsize=self.dtype.itemsize)

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for what is spread along some of the dims."""
        del lanes
        return self._apart_bytes or self._scratch(self.channels(channels_last=True))

    def fits(self) -> bool:
        """Whether a run takes no more calls than its elements are worth."""
        nbytes = max(math.prod(self.dx), math.prod(self.dy)) * self.dtype.itemsize
        return self._most_calls() <= most_calls(nbytes)

    def _most_calls(self) -> int:
        """The most calls of a run, of either layout."""
        spread = sum(1 + (len(_by_tap(axis) or ()) or axis.count) for axis in self.axes)
        each = 1 + spread + bool(self._apart_bytes)
        return self.dx[0] * -(-self.dx[1] // self.channels(channels_last=False)) * each

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        dy, dx = operands["dy"], results["dx"]
        apart = is_channels_last(dx.strides) and bool(self._apart_bytes)
        channels_last = is_channels_last(dx.strides) and not apart
        channels = self.channels(channels_last=channels_last)
        lanes = lanes_worth(lanes, _NS * math.prod(self.dx))
        order = memory_order(dx.ndim, channels_last=channels_last)

        def call(block: tuple[int, int], lane: int) -> Call:
            image, first = block
            place = slice(image, image + 1), slice(first, min(first + channels, self.dx[1]))
            memory = lanes[lane].fork()
            size = place[1].stop - place[1].start
            partly = [scratch_in_order(memory, dims, order, self.dtype) for dims in self.partly(size)]
            into = memory.take((1, 1, *self.dx[2:]), self.dtype) if apart else dx[place]
            calls: list[Call] = [partial(np.divide, dy[place], self.counts, partly[0])]
            for axis, (y, x) in zip(self.spread_dims, itertools.pairwise([*partly, into]), strict=True):
                calls += spread_along(self.axes[axis], 2 + axis, y, x)
            if apart:
                calls.append(partial(np.copyto, dx[place], into))
            return in_turn(calls)

        blocks = itertools.product(range(self.dx[0]), range(0, self.dx[1], channels))
        return [deal(blocks, len(lanes), call)]


def _by_tap(axis: Axis) -> range | None:
    """The taps along a dim, if these are taken one by one; None if windows are, since they are far fewer."""
    return None if axis.taps is None or len(axis.taps) > 2 * axis.count else axis.taps


def spread_along(axis: Axis, dim: int, y: Array, x: Array) -> Iterator[Call]:
    """Spread windows along a dim."""
    before = (slice(None),) * dim
    if axis.same:
        yield partial(np.copyto, x, y)
        return
    yield partial(x.fill, 0)
    taps = _by_tap(axis)
    if taps is None:
        for place, (start, stop) in enumerate(zip(axis.starts, axis.stops, strict=True)):
            part = x[(*before, slice(start, stop, axis.dilation))]
            yield partial(np.add, part, y[(*before, slice(place, place + 1))], part)
        return
    for tap in taps:
        if windows := axis.inside(tap):
            first, last = tap + windows[0] * axis.stride, tap + windows[-1] * axis.stride
            part = x[(*before, slice(first, last + 1, axis.stride))]
            yield partial(np.add, part, y[(*before, slice(windows[0], windows[-1] + 1))], part)
