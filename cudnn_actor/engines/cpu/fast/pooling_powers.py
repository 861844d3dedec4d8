"""The functions of elements and of windows in Lp pooling and its gradient, whatever joins the windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call
from cudnn_actor.engines.cpu.fast.memory_orders import scratch_in_order
from cudnn_actor.engines.cpu.fast.pooling_joins import power
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint

__all__ = [
    "clear_unread",
    "gradient_scratch",
    "powers_of",
    "root",
    "shares",
    "shares_scratch",
    "times_powers",
]

Array = npt.NDArray[Any]
_WIDE = np.dtype(np.float64)


def powers_of(x: Array, into: Array, p: float, order: Dims, memory: Scratch) -> Iterator[Call]:
    """Calls that raise the magnitudes of elements to a power. Scratch: an array of float64 of x's dims."""
    yield partial(np.copyto, into, x)
    yield partial(np.absolute, into, into)
    yield from power(into, p, scratch_in_order(memory.fork(), x.shape, order, _WIDE))


def root(x: Array, p: float) -> Iterator[Call]:
    """Calls that take a root, in place."""
    if p == 2:
        yield partial(np.sqrt, x, x)
    elif p == 3:
        yield partial(np.cbrt, x, x)
    elif p != 1:
        yield partial(np.power, x, 1 / p, out=x)


def shares_scratch(dims: Dims) -> int:
    """Bytes of scratch that `shares` takes, for y of these dims."""
    return footprint(dims, dims) + footprint(dims, itemsize=1)


def shares(
    windows: tuple[Array, Array], into: Array, p: float, order: Dims, memory: Scratch
) -> Iterator[Call]:
    """Calls that compute dy / y^(p - 1), of `windows` dy and y; 0 where y is 0."""
    (dy, y), own = windows, memory.fork()
    powers, spare = (scratch_in_order(own, y.shape, order, _WIDE) for _ in range(2))
    empty = scratch_in_order(own, y.shape, order, np.bool_)
    yield partial(np.copyto, into, dy)
    yield partial(np.copyto, powers, y)
    yield partial(np.equal, powers, 0, out=empty)
    yield from power(powers, p - 1, spare)
    yield partial(np.divide, into, powers, into)
    yield partial(np.copyto, into, 0, where=empty)


def gradient_scratch(dims: Dims) -> int:
    """Bytes of scratch that `times_powers` takes, for x of these dims."""
    return footprint(dims, dims)


def times_powers(total: Array, x: Array, p: float, order: Dims, memory: Scratch) -> Iterator[Call]:
    """Calls that multiply sums of shares by sign(x) |x|^(p - 1)."""
    own = memory.fork()
    powers = scratch_in_order(own, x.shape, order, _WIDE)
    yield from powers_of(x, powers, p - 1, order, own)
    yield partial(np.multiply, total, powers, total)
    yield partial(np.copyto, powers, x)
    yield partial(np.sign, powers, powers)
    yield partial(np.multiply, total, powers, total)


def clear_unread(gradient: Array, without: Sequence[npt.NDArray[np.bool_]]) -> Iterator[Call]:
    """Calls that set gradients to 0 of elements in no window: there, an infinite x gives no NaN.

    `without`: for each spatial dim, which elements are in no window.
    """
    for number, own in enumerate(without):
        if own.any():
            where = own.reshape([-1 if axis == 2 + number else 1 for axis in range(gradient.ndim)])
            yield partial(np.copyto, gradient, 0.0, where=where)
