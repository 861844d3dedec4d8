"""Elements as whole numbers in the same order: -0 is 0, and all NaN are the largest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call

__all__ = ["PLACE_BITS", "bits_in_order", "floats_of_bits", "keys_in_order"]

Array = npt.NDArray[Any]
PLACE_BITS = 32
"""Bits of a key that are below those of the element."""


def keys_in_order(x: Array, spare: Array, nans: Array, keys: Array) -> Iterator[Call]:
    """Calls that store elements of up to 32 bits in the upper halves of int64. The lower halves are 0.

    `spare`, `nans`: scratch of x's dims, of x's dtype and of bool, that is written only for floats.
    """
    ordered = x
    if x.dtype.kind == "f":
        yield from bits_in_order(x, spare, nans, keys.view(np.int32)[..., ::2])
        ordered = spare.view(np.int32)
    yield partial(np.copyto, keys, ordered)
    if x.dtype == np.uint32:
        yield partial(np.subtract, keys, np.array(1 << 31), keys)
    yield partial(np.left_shift, keys, np.array(PLACE_BITS), keys)


def bits_in_order(x: Array, spare: Array, nans: Array, below_0: Array) -> Iterator[Call]:
    """Floats in `spare` whose bits, as whole numbers, are in order: -0 is 0, and all NaN are the largest.

    `below_0`: scratch, whole numbers as wide as x.
    """
    whole = spare.view(below_0.dtype)
    yield partial(np.add, x, np.array(0, x.dtype), spare)
    yield partial(np.isnan, spare, nans)
    yield partial(np.copyto, spare, np.array(np.nan, x.dtype), where=nans)
    yield from floats_of_bits(whole, below_0)


def floats_of_bits(whole: Array, below_0: Array) -> Iterator[Call]:
    """From whole numbers that are in order to the bits of floats, and back, in place: see `bits_in_order`."""
    # Those below 0 are in reverse.
    most = np.iinfo(below_0.dtype).max
    yield partial(np.right_shift, whole, np.array(8 * whole.itemsize - 1, below_0.dtype), below_0)
    yield partial(np.bitwise_and, below_0, np.array(most, below_0.dtype), below_0)
    yield partial(np.bitwise_xor, whole, below_0, whole)
