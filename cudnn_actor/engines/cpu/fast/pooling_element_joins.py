"""Max and average pooling, and the gradient of the latter, where a row of windows takes much scratch memory.

The windows are joined in parts: see `pooling_tiles`. The gradient is the sum over the windows that an element
is in: see `Spread`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step
from cudnn_actor.engines.cpu.fast.pooling_joined import BlockArrays, Parts
from cudnn_actor.engines.cpu.fast.pooling_joins import ElementJoin
from cudnn_actor.engines.cpu.fast.pooling_kernels import WindowKernel
from cudnn_actor.engines.cpu.fast.pooling_tiles import parts_joined
from cudnn_actor.engines.cpu.fast.pooling_windows import Axis, Spread
from cudnn_actor.engines.cpu.scratch import Dims, Scratch
from cudnn_actor.protocol.operations import AdaptiveWindow, Window

__all__ = ["ElementGradient", "ElementPooling", "element_gradient", "element_pooling"]

Array = npt.NDArray[Any]
_NS = 5
"""About how many nanoseconds an element of x takes."""


def element_pooling(
    x: Dims, y: Dims, axes: tuple[Axis, ...], join: ElementJoin, counts: Array | None
) -> ElementPooling:
    """The kernel for `MaxPool`, or with counts for `AvgPool`."""
    return ElementPooling(parts_joined(x, y, axes, join), counts)


def element_gradient(
    window: Window | AdaptiveWindow, dx: Dims, dy: Dims, dtype: np.dtype[Any], counts: Array
) -> ElementGradient:
    """The kernel for `AvgPoolBackward`."""
    spread = Spread.of(window, dx, dy)
    pooling = parts_joined(spread.dims, dx, spread.axes, ElementJoin(np.add, dtype, 0.0))
    return ElementGradient(pooling, spread, counts)


@dataclass(frozen=True, eq=False)
class ElementPooling(WindowKernel):
    """Joins the elements of each window. Sums are divided by counts, if there are some."""

    counts: Array | None

    element_ns = _NS

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, y = operands["x"], results["y"]

        def load(block: Parts, read: Parts, arrays: BlockArrays) -> Iterator[Call]:
            yield partial(np.copyto, arrays.elements[0], x[(*block[:2], *read)])

        def store(block: Parts, arrays: BlockArrays) -> Iterator[Call]:
            if self.counts is None:
                yield partial(np.copyto, y[block], arrays.results[0])
            else:
                yield partial(np.divide, arrays.results[0], _part(self.counts, block), y[block])

        return self._steps(x, lanes, load, store)


@dataclass(frozen=True, eq=False)
class ElementGradient(WindowKernel):
    """Adds dy, divided by counts, to all elements of dx that are in the window.

    Parameters
    ----------
    spread
        How dy is spread along the spatial dims. `pooling` adds what is spread, by the windows of
        `Spread.axes`.
    counts
        The divisors of dy.
    """

    spread: Spread
    counts: Array

    element_ns = _NS

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        dy, dx = operands["dy"], results["dx"]

        def load(block: Parts, read: Parts, arrays: BlockArrays) -> Iterator[Call]:
            (elements,) = arrays.elements
            part, places = self.spread.part(read)
            if self.spread.has_gaps:
                yield partial(elements.fill, 0)
            at = (*block[:2], *part)
            if (given := dy[at]).size:
                into = elements[(slice(None), slice(None), *places)]
                yield partial(np.divide, given, _part(self.counts, at), into)

        def store(block: Parts, arrays: BlockArrays) -> Iterator[Call]:
            yield partial(np.copyto, dx[block], arrays.results[0])

        return self._steps(dx, lanes, load, store)


def _part(counts: Array, at: Parts) -> Array:
    """The counts of a part of the windows; dims of one element are repeated."""
    if counts.ndim == 0:
        return counts
    found: Array = counts[
        tuple(slice(None) if size == 1 else of for size, of in zip(counts.shape, at, strict=False))
    ]
    return found
