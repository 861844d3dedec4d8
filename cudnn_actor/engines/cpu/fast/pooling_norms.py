"""Lp pooling of at most 32 bits and its gradient: sums of powers, which float64 holds without scaling them.

Where windows share elements, their sums are computed one dim after the other, as those of average pooling.
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

from cudnn_actor.engines.cpu.fast.by_definition import definition_in_scratch
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
)
from cudnn_actor.engines.cpu.fast.memory_orders import is_channels_last, memory_order, scratch_in_order
from cudnn_actor.engines.cpu.fast.pooling import Pooling
from cudnn_actor.engines.cpu.fast.pooling_blocks import Block, blocks
from cudnn_actor.engines.cpu.fast.pooling_gradients import Spreading, spread_along
from cudnn_actor.engines.cpu.fast.pooling_joined_norms import joined_norms, joined_norms_gradient
from cudnn_actor.engines.cpu.fast.pooling_powers import (
    clear_unread,
    gradient_scratch,
    powers_of,
    root,
    shares,
    shares_scratch,
    times_powers,
)
from cudnn_actor.engines.cpu.fast.pooling_scaled_norms import scaled_norms, scaled_norms_gradient
from cudnn_actor.engines.cpu.fast.pooling_windows import in_windows, window_axes
from cudnn_actor.engines.cpu.scratch import Scratch, footprint
from cudnn_actor.protocol.operations import LpPool, LpPoolBackward, Node, Specs

__all__ = ["Norms", "NormsGradient", "lp_pool", "lp_pool_backward"]

Array = npt.NDArray[Any]
_WIDE = np.dtype(np.float64)
_LARGEST_P = 6.0
"""Powers of float32 up to this one, in sums and divided by each other, are within 2**-1000 and 2**1000."""
_FEW = 9
"""The definition of the gradient takes less time for windows of fewer elements."""
_NS = 10
"""About how many nanoseconds an element of x takes."""


def _needs_scales(specs: Specs, p: float) -> bool:
    return p > _LARGEST_P or carrier_dtype(specs["x"].dtype) == _WIDE


def lp_pool(node: Node, specs: Specs) -> Kernel | None:
    """The kernel for `LpPool`."""
    assert isinstance(node, LpPool)
    x, y = specs["x"], specs["y"]
    if not all(spec.size for spec in specs.values()):
        return None
    if _needs_scales(specs, node.p):
        return scaled_norms(node, specs)
    axes = window_axes(node.window, x.dims, y.dims)
    kernel = Norms(Pooling(x.dims, y.dims, _WIDE, axes, np.add, 0.0, None), node.p)
    return kernel if kernel.footprint(1) <= MOST_SCRATCH else joined_norms(x.dims, y.dims, axes, node.p)


def lp_pool_backward(node: Node, specs: Specs) -> Kernel | None:
    """The kernel for `LpPoolBackward`."""
    assert isinstance(node, LpPoolBackward)
    x, y = specs["x"], specs["y"]
    if not all(spec.size for spec in specs.values()):
        return None
    axes = window_axes(node.window, x.dims, y.dims)
    if math.prod(axis.longest for axis in axes) < _FEW:
        small = definition_in_scratch(node, specs)
        if small is not None:
            return small
    if _needs_scales(specs, node.p):
        return scaled_norms_gradient(node, specs)
    without = tuple(~in_windows(axis) for axis in axes)
    kernel = NormsGradient(Spreading(x.dims, y.dims, _WIDE, axes, np.ones((), _WIDE)), node.p, without)
    fits = kernel.spreading.fits() and kernel.footprint(1) <= MOST_SCRATCH
    return kernel if fits else joined_norms_gradient(node, x.dims, y.dims)


@dataclass(frozen=True, eq=False)
class Norms:
    """The root of the sum of powers of each window's elements."""

    pooling: Pooling
    p: float

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for powers, and for their sums."""
        return max(self._footprint(last) for last in (False, True)) + self.pooling.footprint(lanes)

    def _footprint(self, channels_last: bool) -> int:
        extents = self.pooling.extents(channels_last=channels_last)
        read = self.pooling.read_dims(extents)
        return footprint(read, read, (*extents, *self.pooling.y[3:]))

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, y = operands["x"], results["y"]
        last = is_channels_last(x.strides)
        order = memory_order(x.ndim, channels_last=last)
        lanes = lanes_worth(lanes, _NS * x.size)

        def calls(block: Block, memory: Scratch) -> Iterator[Call]:
            read, axes = self.pooling.read(block)
            part, into = x[block[0], block[1], read], y[block]
            powers = scratch_in_order(memory, part.shape, order, _WIDE)
            yield from powers_of(part, powers, self.p, order, memory)
            sums = scratch_in_order(memory, into.shape, order, _WIDE)
            yield from self.pooling.reduce_windows(powers, sums, axes, memory, channels_last=last)
            yield from root(sums, self.p)
            yield partial(np.copyto, into, sums, "same_kind")

        def call(block: Block, lane: int) -> Call:
            return in_turn([*calls(block, lanes[lane].fork())])

        return [deal(blocks(self.pooling.y, self.pooling.extents(channels_last=last)), len(lanes), call)]


@dataclass(frozen=True, eq=False)
class NormsGradient:
    """sign(x) |x|^(p - 1), times the sum of dy / y^(p - 1) over the windows that an element of x is in.

    `without`: for each spatial dim, which elements are in no window.
    """

    spreading: Spreading
    p: float
    without: Sequence[npt.NDArray[np.bool_]]

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for shares of windows, elements, and their powers."""
        del lanes
        return max(map(self._footprint, (False, True)))

    def _footprint(self, channels_last: bool) -> int:
        spreading = self.spreading
        channels = spreading.channels(channels_last=channels_last)
        of_x, of_y = ((1, channels, *dims[2:]) for dims in (spreading.dx, spreading.dy))
        spare = max(shares_scratch(of_y), gradient_scratch(of_x))
        return footprint(*spreading.partly(channels), of_x) + spare

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, dx = operands["x"], results["dx"]
        spreading = self.spreading
        last = is_channels_last(dx.strides)
        order = memory_order(dx.ndim, channels_last=last)
        channels = spreading.channels(channels_last=last)
        lanes = lanes_worth(lanes, _NS * x.size)

        def calls(place: tuple[slice, slice], memory: Scratch) -> Iterator[Call]:
            size = place[1].stop - place[1].start
            partly = [scratch_in_order(memory, dims, order, _WIDE) for dims in spreading.partly(size)]
            total = scratch_in_order(memory, (1, size, *spreading.dx[2:]), order, _WIDE)
            yield from shares((operands["dy"][place], operands["y"][place]), partly[0], self.p, order, memory)
            for axis, (of, into) in zip(
                spreading.spread_dims, itertools.pairwise([*partly, total]), strict=True
            ):
                yield from spread_along(spreading.axes[axis], 2 + axis, of, into)
            yield from times_powers(total, x[place], self.p, order, memory)
            yield from clear_unread(total, self.without)
            yield partial(np.copyto, dx[place], total, "same_kind")

        def call(block: tuple[int, int], lane: int) -> Call:
            image, first = block
            place = slice(image, image + 1), slice(first, min(first + channels, spreading.dx[1]))
            return in_turn([*calls(place, lanes[lane].fork())])

        grid = itertools.product(range(spreading.dx[0]), range(0, spreading.dx[1], channels))
        return [deal(grid, len(lanes), call)]
