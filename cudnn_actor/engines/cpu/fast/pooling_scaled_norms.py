"""Lp pooling of float64, or with large powers, and its gradient: no power overflows.

Each sum of powers is kept in terms of the power of a number, as `LpPool` says: see `ScaledSums`. The gradient
is sign(x) (|x| / s)^(p - 1), times the sum of dy (s / y)^(p - 1) over the windows that an element is in.
There, s is the least y of these windows.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.by_definition import definition_in_scratch
from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel
from cudnn_actor.engines.cpu.fast.memory_orders import scratch_in_order
from cudnn_actor.engines.cpu.fast.pooling_joined import BlockArrays
from cudnn_actor.engines.cpu.fast.pooling_joins import ScaledSums, power
from cudnn_actor.engines.cpu.fast.pooling_kernels import LpGradient, LpNorms
from cudnn_actor.engines.cpu.fast.pooling_tiles import bounded_pooling
from cudnn_actor.engines.cpu.fast.pooling_windows import Spread, are_long, in_windows, window_axes
from cudnn_actor.protocol.operations import LpPool, LpPoolBackward, Specs

__all__ = ["ScaledNorms", "ScaledNormsGradient", "scaled_norms", "scaled_norms_gradient"]

Array = npt.NDArray[Any]
_WIDE = np.dtype(np.float64)
_FEW = 100
"""The definition of the gradient takes less time for windows of fewer elements."""
_NS = 100
"""About how many nanoseconds an element of x takes."""


def scaled_norms(node: LpPool[Any], specs: Specs) -> Kernel:
    """The kernel for `LpPool` of any power."""
    x, y = specs["x"].dims, specs["y"].dims
    axes = window_axes(node.window, x, y)
    short = None if are_long(axes) else definition_in_scratch(node, specs)
    return short or ScaledNorms(bounded_pooling(x, y, axes, ScaledSums(node.p, largest=True)), node.p)


def scaled_norms_gradient(node: LpPoolBackward[Any], specs: Specs) -> Kernel:
    """The kernel for `LpPoolBackward` of any power."""
    window, dx, dy = node.window, specs["dx"].dims, specs["dy"].dims
    own = window_axes(window, dx, dy)
    if math.prod(axis.longest for axis in own) < _FEW:
        small = definition_in_scratch(node, specs)
        if small is not None:
            return small
    spread = Spread.of(window, dx, dy)
    pooling = bounded_pooling(spread.dims, dx, spread.axes, ScaledSums(node.p - 1, largest=False))
    without = [~in_windows(axis) for axis in own]
    return ScaledNormsGradient(pooling, node.p, spread, tuple(without))


@dataclass(frozen=True, eq=False)
class ScaledNorms(LpNorms):
    """`LpNorms` whose sums of powers are each in terms of the power of the largest element."""

    element_ns = _NS

    def _load(self, x: Array, arrays: BlockArrays) -> Iterator[Call]:
        magnitude, total = arrays.elements
        yield partial(np.copyto, magnitude, x)
        yield partial(np.absolute, magnitude, magnitude)
        yield partial(total.fill, 1.0)

    def _store(self, y: Array, arrays: BlockArrays) -> Iterator[Call]:
        largest, total = arrays.results
        yield partial(np.power, total, 1 / self.p, out=total)
        yield partial(np.multiply, largest, total, largest)
        yield partial(np.copyto, y, largest, "same_kind")


@dataclass(frozen=True, eq=False)
class ScaledNormsGradient(LpGradient):
    """`LpGradient` whose sums are each in terms of the power of the least y: see this module's docstring."""

    element_ns = _NS
    nothing = (np.inf, 0.0)

    def _load(self, dy: Array, y: Array, into: Sequence[Array], arrays: BlockArrays) -> Iterator[Call]:
        """Calls that spread y and dy. Where y is 0, it is as if there were no window."""
        scale, total = into
        empty = scratch_in_order(arrays.memory.fork(), y.shape, arrays.order, np.bool_)
        yield partial(np.copyto, scale, y)
        yield partial(np.copyto, total, dy)
        yield partial(np.equal, scale, 0, empty)
        yield partial(np.copyto, scale, np.inf, where=empty)
        yield partial(np.copyto, total, 0.0, where=empty)

    def _gradient(self, x: Array, arrays: BlockArrays) -> Generator[Call, None, Array]:
        least, total = arrays.results
        memory = arrays.memory.fork()
        share, spare = (scratch_in_order(memory, x.shape, arrays.order, _WIDE) for _ in range(2))
        yield partial(np.copyto, share, x)
        yield partial(np.absolute, share, share)
        yield partial(np.divide, share, least, share)
        yield from power(share, self.p - 1, spare)
        yield partial(np.multiply, total, share, share)
        yield partial(np.copyto, spare, x)
        yield partial(np.sign, spare, spare)
        yield partial(np.multiply, share, spare, share)
        return share
