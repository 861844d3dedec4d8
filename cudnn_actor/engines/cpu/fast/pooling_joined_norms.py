"""Lp pooling of at most 32 bits and its gradient, where a row of windows takes much scratch memory.

The windows' sums of powers are joined in parts: see `TiledPooling`. The gradient's are over the windows that
an element is in: see `Spread`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.convolution_views import is_channels_last
from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step, lanes_worth
from cudnn_actor.engines.cpu.fast.pooling_joined import BlockArrays, JoinedPooling, Parts
from cudnn_actor.engines.cpu.fast.pooling_joins import ElementJoin
from cudnn_actor.engines.cpu.fast.pooling_powers import clear_unread, powers_of, root, shares, times_powers
from cudnn_actor.engines.cpu.fast.pooling_tiles import TiledPooling, parts_joined
from cudnn_actor.engines.cpu.fast.pooling_windows import Axis, Spread, in_windows, window_axes
from cudnn_actor.engines.cpu.scratch import Dims, Scratch
from cudnn_actor.protocol.operations import LpPoolBackward

__all__ = ["JoinedNorms", "JoinedNormsGradient", "joined_norms", "joined_norms_gradient"]

_SUMS = partial(ElementJoin, np.add, np.dtype(np.float64), 0.0)
_NS = 20
"""Nanoseconds of an element of x, about."""


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
class JoinedNorms:
    """The root of the sum of powers of each window's elements."""

    pooling: JoinedPooling | TiledPooling
    p: float

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs."""
        del lanes
        return self.pooling.footprint()

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, y = operands["x"], results["y"]

        def load(block: Parts, read: Parts, arrays: BlockArrays) -> Iterator[Call]:
            part = x[(*block[:2], *read)]
            return powers_of(part, arrays.elements[0], self.p, arrays.order, arrays.memory)

        def store(block: Parts, arrays: BlockArrays) -> Iterator[Call]:
            yield from root(arrays.results[0], self.p)
            yield partial(np.copyto, y[block], arrays.results[0], "same_kind")

        lanes = lanes_worth(lanes, _NS * x.size)
        return self.pooling.bind(lanes, channels_last=is_channels_last(x), load=load, store=store)


@dataclass(frozen=True, eq=False)
class JoinedNormsGradient:
    """sign(x) |x|^(p - 1), times the sum of dy / y^(p - 1) over the windows that an element of x is in.

    Parameters
    ----------
    pooling
        Adds numbers that are spread along the spatial dims, by the windows of `Spread.axes`.
    p
        The exponent.
    spread
        How y is spread.
    without
        For each spatial dim, which elements are in no window.
    """

    pooling: JoinedPooling | TiledPooling
    p: float
    spread: Spread
    without: Sequence[npt.NDArray[np.bool_]]

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs."""
        del lanes
        return self.pooling.footprint()

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        dy, x, y, dx = operands["dy"], operands["x"], operands["y"], results["dx"]

        def load(block: Parts, read: Parts, arrays: BlockArrays) -> Iterator[Call]:
            (elements,) = arrays.elements
            part, places = self.spread.part(read)
            if self.spread.has_gaps:
                yield partial(elements.fill, 0)
            at = (*block[:2], *part)
            if y[at].size:
                into = elements[(slice(None), slice(None), *places)]
                yield from shares((dy[at], y[at]), into, self.p, arrays.order, arrays.memory)

        def store(block: Parts, arrays: BlockArrays) -> Iterator[Call]:
            (total,) = arrays.results
            places = [*block[2:], *(slice(None) for _ in self.without[len(block) - 2 :])]
            yield from times_powers(total, x[block], self.p, arrays.order, arrays.memory)
            yield from clear_unread(total, [own[of] for own, of in zip(self.without, places, strict=True)])
            yield partial(np.copyto, dx[block], total, "same_kind")

        lanes = lanes_worth(lanes, _NS * dx.size)
        return self.pooling.bind(lanes, channels_last=is_channels_last(dx), load=load, store=store)
