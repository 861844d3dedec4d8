"""Lp pooling of at most 32 bits and its gradient, where a row of windows takes much scratch memory.

The windows' sums of powers are joined in parts: see `pooling_tiles`. The gradient's are over the windows that
an element is in: see `Spread`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call
from cudnn_actor.engines.cpu.fast.pooling_joined import BlockArrays
from cudnn_actor.engines.cpu.fast.pooling_joins import ElementJoin
from cudnn_actor.engines.cpu.fast.pooling_kernels import LpGradient, LpNorms
from cudnn_actor.engines.cpu.fast.pooling_powers import powers_of, root, shares, times_powers
from cudnn_actor.engines.cpu.fast.pooling_tiles import parts_joined
from cudnn_actor.engines.cpu.fast.pooling_windows import Axis, Spread, in_windows, window_axes
from cudnn_actor.engines.cpu.scratch import Dims
from cudnn_actor.protocol.operations import LpPoolBackward

__all__ = ["JoinedNorms", "JoinedNormsGradient", "joined_norms", "joined_norms_gradient"]

Array = npt.NDArray[Any]
_SUMS = partial(ElementJoin, np.add, np.dtype(np.float64), 0.0)
_NS = 20
"""About how many nanoseconds an element of x takes."""


def joined_norms(x: Dims, y: Dims, axes: tuple[Axis, ...], p: float) -> JoinedNorms:
    """The kernel for `LpPool`."""
    return JoinedNorms(parts_joined(x, y, axes, _SUMS(edges=1)), p)


def joined_norms_gradient(node: LpPoolBackward[Any], dx: Dims, dy: Dims) -> JoinedNormsGradient:
    """The kernel for `LpPoolBackward`."""
    spread = Spread.of(node.window, dx, dy)
    pooling = parts_joined(spread.dims, dx, spread.axes, _SUMS(edges=3))
    without = tuple(~in_windows(axis) for axis in window_axes(node.window, dx, dy))
    return JoinedNormsGradient(pooling, node.p, spread, without)


@dataclass(frozen=True, eq=False)
class JoinedNorms(LpNorms):
    """`LpNorms` whose sums of powers are float64, as they are."""

    element_ns = _NS

    def _load(self, x: Array, arrays: BlockArrays) -> Iterator[Call]:
        return powers_of(x, arrays.elements[0], self.p, arrays.order, arrays.memory)

    def _store(self, y: Array, arrays: BlockArrays) -> Iterator[Call]:
        yield from root(arrays.results[0], self.p)
        yield partial(np.copyto, y, arrays.results[0], "same_kind")


@dataclass(frozen=True, eq=False)
class JoinedNormsGradient(LpGradient):
    """sign(x) |x|^(p - 1), times the sum of dy / y^(p - 1) over the windows that an element of x is in."""

    element_ns = _NS
    nothing = (0.0,)

    def _load(self, dy: Array, y: Array, into: Sequence[Array], arrays: BlockArrays) -> Iterator[Call]:
        return shares((dy, y), into[0], self.p, arrays.order, arrays.memory)

    def _gradient(self, x: Array, arrays: BlockArrays) -> Generator[Call, None, Array]:
        (total,) = arrays.results
        yield from times_powers(total, x, self.p, arrays.order, arrays.memory)
        return total
