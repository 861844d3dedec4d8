"""The numbers to which windows are reduced, and how two parts of a window are joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call
from cudnn_actor.engines.cpu.fast.memory_orders import scratch_in_order
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint

__all__ = ["Arrays", "ElementJoin", "FirstLargest", "Join", "ScaledSums", "power"]

Array = npt.NDArray[Any]
Arrays = Sequence[Array]
"""The numbers to which some parts of windows are reduced: arrays of the same dims."""
_WIDE = np.dtype(np.float64)
_KEY = np.dtype(np.int64)
_EDGES = 3


class Join(Protocol):
    """Joins two parts of each window: the numbers to which these were reduced."""

    @property
    def dtypes(self) -> Sequence[np.dtype[Any]]:
        """The dtypes of the arrays that parts are reduced to."""

    @property
    def neutral(self) -> Sequence[float | bool]:
        """The elements of each array for a part without elements."""

    @property
    def may_repeat(self) -> bool:
        """Whether parts may have elements in common."""

    @property
    def edges(self) -> int:
        """How many scratch arrays of 64-bit elements it takes, at most, to load or to store a block."""

    def scratch(self, dims: Dims) -> int:
        """Bytes of scratch that joining parts of these dims takes."""

    def calls(self, one: Arrays, other: Arrays, into: Arrays, memory: Scratch) -> Iterator[Call]:
        """Calls that join parts. `into`: may be `one` itself."""


@dataclass(frozen=True)
class ElementJoin:
    """Joins parts, each a single array, by a function of two elements: a maximum, or `numpy.add`."""

    ufunc: np.ufunc
    dtype: np.dtype[Any]
    least: float | bool
    edges: int = 0

    @property
    def dtypes(self) -> Sequence[np.dtype[Any]]:
        """See `Join`."""
        return (self.dtype,)

    @property
    def neutral(self) -> Sequence[float | bool]:
        """See `Join`."""
        return (self.least,)

    @property
    def may_repeat(self) -> bool:
        """See `Join`."""
        return self.ufunc is not np.add

    def scratch(self, dims: Dims) -> int:
        """See `Join`."""
        del dims
        return 0

    def calls(self, one: Arrays, other: Arrays, into: Arrays, memory: Scratch) -> Iterator[Call]:
        """See `Join`."""
        del memory
        yield partial(self.ufunc, one[0], other[0], out=into[0])


@dataclass(frozen=True)
class FirstLargest:
    """The largest element and its number, as int64. Of equal elements, the first one counts."""

    dtypes = (_KEY, _KEY)
    neutral = (int(np.iinfo(_KEY).min), int(np.iinfo(_KEY).max))
    may_repeat = True
    edges = _EDGES

    def scratch(self, dims: Dims) -> int:
        """See `Join`."""
        return footprint(dims, dims, itemsize=1)

    def calls(self, one: Arrays, other: Arrays, into: Arrays, memory: Scratch) -> Iterator[Call]:
        """See `Join`."""
        (key, number), (other_key, other_number) = one, other
        better, as_good = _spare(into[0], memory.fork(), np.dtype(bool), np.dtype(bool))
        yield partial(np.less, other_number, number, better)
        yield partial(np.equal, other_key, key, as_good)
        yield partial(np.logical_and, better, as_good, better)
        yield partial(np.greater, other_key, key, as_good)
        yield partial(np.logical_or, better, as_good, better)
        if into[1] is not number:
            yield partial(np.copyto, into[1], number)
        yield partial(np.copyto, into[1], other_number, where=better)
        yield partial(np.maximum, key, other_key, out=into[0])


@dataclass(frozen=True)
class ScaledSums:
    """Sums of powers of quotients. A quotient is at most 1, so no power overflows.

    The arrays are a scale, and the sum in terms of that scale's power. If two parts differ in their scales,
    the sum of one is multiplied by the power of their quotient.

    Parameters
    ----------
    p
        The exponent.
    largest
        Whether two parts have the larger of their scales when they are joined, and numbers are divided by it.
        Else they have the smaller one, which is divided by the numbers.
    """

    p: float
    largest: bool
    dtypes = (_WIDE, _WIDE)
    may_repeat = False
    edges = _EDGES

    @property
    def neutral(self) -> Sequence[float]:
        """See `Join`."""
        return (0.0 if self.largest else np.inf, 0.0)

    def scratch(self, dims: Dims) -> int:
        """See `Join`."""
        return footprint(dims, dims) + footprint(dims, dims, itemsize=1)

    def calls(self, one: Arrays, other: Arrays, into: Arrays, memory: Scratch) -> Iterator[Call]:
        """See `Join`."""
        (scale, total), (other_scale, other_total) = one, other
        kinds = (_WIDE, _WIDE, np.dtype(bool), np.dtype(bool))
        factor, other_factor, equal, changes = _spare(into[0], memory.fork(), *kinds)
        yield partial(np.equal, scale, other_scale, equal)
        yield partial(np.less if self.largest else np.greater, scale, other_scale, changes)
        yield partial(np.minimum, scale, other_scale, out=factor)
        yield partial(np.maximum, scale, other_scale, out=other_factor)
        yield partial(np.divide, factor, other_factor, other_factor)
        yield partial(np.copyto, other_factor, 1.0, where=equal)  # also of 0 and of infinity
        yield from power(other_factor, self.p, factor)
        yield partial(factor.fill, 1.0)
        yield partial(np.copyto, factor, other_factor, where=changes)
        yield partial(np.copyto, other_factor, 1.0, where=changes)
        yield partial(np.multiply, total, factor, factor)
        yield partial(np.multiply, other_total, other_factor, other_factor)
        yield partial(np.add, factor, other_factor, into[1])
        yield partial(np.maximum if self.largest else np.minimum, scale, other_scale, out=into[0])


def power(x: Array, p: float, spare: Array) -> Iterator[Call]:
    """Calls that raise numbers of at least 0 to a power, in place. `spare`: scratch of their dims."""
    if p not in (0, 1, 2, 3):
        yield partial(np.power, x, p, out=x)
    elif p == 0:
        yield partial(x.fill, 1)
    elif p == 2:
        yield partial(np.multiply, x, x, x)
    elif p == 3:
        yield partial(np.multiply, x, x, spare)
        yield partial(np.multiply, x, spare, x)


def _spare(like: Array, memory: Scratch, *dtypes: np.dtype[Any]) -> list[Array]:
    """Scratch arrays that lie in the order of another."""
    order = sorted(range(like.ndim), key=lambda axis: -abs(like.strides[axis]))
    return [scratch_in_order(memory, like.shape, order, dtype) for dtype in dtypes]
