"""Bases of the kernels that reduce windows in parts: one for all of them, and two for Lp pooling."""

from __future__ import annotations

import abc
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step, lanes_worth
from cudnn_actor.engines.cpu.fast.memory_orders import is_channels_last
from cudnn_actor.engines.cpu.fast.pooling_joined import BlockArrays, Edge, JoinedPooling, Parts, Store
from cudnn_actor.engines.cpu.fast.pooling_powers import clear_unread
from cudnn_actor.engines.cpu.fast.pooling_tiles import TiledPooling
from cudnn_actor.engines.cpu.fast.pooling_windows import Spread
from cudnn_actor.engines.cpu.scratch import Scratch

__all__ = ["LpGradient", "LpNorms", "WindowKernel"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class WindowKernel:
    """A kernel that reduces windows.

    Parameters
    ----------
    pooling
        Reduces the windows of what the kernel loads.
    """

    pooling: JoinedPooling | TiledPooling

    element_ns: ClassVar[float]
    """Nanoseconds of an element of the larger tensor, about."""

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs."""
        del lanes
        return self.pooling.footprint()

    def _steps(self, large: Array, lanes: Sequence[Scratch], load: Edge, store: Store) -> list[Step]:
        """The steps of a run. `large`: the larger tensor, whose order of dims blocks have in memory."""
        lanes = lanes_worth(lanes, self.element_ns * large.size)
        return self.pooling.bind(lanes, channels_last=is_channels_last(large.strides), load=load, store=store)


@dataclass(frozen=True, eq=False)
class LpNorms(WindowKernel):
    """The root of the sum of powers of each window's elements.

    Parameters
    ----------
    p
        The exponent.
    """

    p: float

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, y = operands["x"], results["y"]

        def load(block: Parts, read: Parts, arrays: BlockArrays) -> Iterator[Call]:
            return self._load(x[(*block[:2], *read)], arrays)

        def store(block: Parts, arrays: BlockArrays) -> Iterator[Call]:
            return self._store(y[block], arrays)

        return self._steps(x, lanes, load, store)

    @abc.abstractmethod
    def _load(self, x: Array, arrays: BlockArrays) -> Iterator[Call]:
        """Calls that compute, from a part of x, the elements that are joined."""

    @abc.abstractmethod
    def _store(self, y: Array, arrays: BlockArrays) -> Iterator[Call]:
        """Calls that compute a block of y from what was joined."""


@dataclass(frozen=True, eq=False)
class LpGradient(WindowKernel):
    """The gradient of the root of the sum of powers of each window's elements.

    Parameters
    ----------
    p
        The exponent.
    spread
        How y is spread along the spatial dims. `pooling` joins what is spread, by the windows of
        `Spread.axes`, to dx.
    without
        For each spatial dim, which elements are in no window.
    """

    p: float
    spread: Spread
    without: Sequence[npt.NDArray[np.bool_]]

    nothing: ClassVar[tuple[float, ...]]
    """The elements that are joined where there is no window."""

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        dy, x, y, dx = operands["dy"], operands["x"], operands["y"], results["dx"]

        def load(block: Parts, read: Parts, arrays: BlockArrays) -> Iterator[Call]:
            part, places = self.spread.part(read)
            if self.spread.has_gaps:
                for elements, nothing in zip(arrays.elements, self.nothing, strict=True):
                    yield partial(elements.fill, nothing)
            at = (*block[:2], *part)
            if y[at].size:
                into = [elements[(slice(None), slice(None), *places)] for elements in arrays.elements]
                yield from self._load(dy[at], y[at], into, arrays)

        def store(block: Parts, arrays: BlockArrays) -> Iterator[Call]:
            gradient = yield from self._gradient(x[block], arrays)
            places = [*block[2:], *(slice(None) for _ in self.without[len(block) - 2 :])]
            yield from clear_unread(gradient, [own[of] for own, of in zip(self.without, places, strict=True)])
            yield partial(np.copyto, dx[block], gradient, "same_kind")

        return self._steps(dx, lanes, load, store)

    @abc.abstractmethod
    def _load(self, dy: Array, y: Array, into: Sequence[Array], arrays: BlockArrays) -> Iterator[Call]:
        """Calls that compute, from a part of dy and y, the elements that are joined."""

    @abc.abstractmethod
    def _gradient(self, x: Array, arrays: BlockArrays) -> Generator[Call, None, Array]:
        """Calls that compute a block of dx from what was joined. Returns the array that has it then."""
