"""Calls that reduce each line of a block to a number: by BLAS where it can, short ones side by side."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.fast.kernels import Call, in_turn
from cudnn_actor.engines.cpu.fast.lines import Floats, joined_axes
from cudnn_actor.engines.cpu.scratch import Scratch

__all__ = ["dots_into", "has_dense_rows", "ones", "reduced_into", "squares_into", "sums_into"]

_SHORT = 16
"""The most elements of lines that are reduced side by side, one element of all lines at a time."""
_LONG, _PARTS = 1024, (64, 128, 32, 16)
"""Lines with at least `_LONG` elements are added up in parts, of the first of these sizes that divides
them."""


def has_dense_rows(array: Floats) -> bool:
    """Whether it is a matrix with neighbouring elements in its rows, as BLAS adds them up."""
    return (
        array.ndim == 2
        and array.strides[1] == array.itemsize
        and array.strides[0] % array.itemsize == 0
        and (array.strides[0] >= array.shape[1] * array.itemsize)
    )


def reduced_into(ufunc: np.ufunc, array: Floats, axes: tuple[int, ...], out: Floats) -> Call:
    """A call that reduces the lines of an array. `out` has the array's dims, with 1 for those of the
    lines."""
    if axes == (1,) and array.ndim == 2 and array.shape[1] <= _SHORT < array.shape[0]:
        columns = [array[:, place : place + 1] for place in range(array.shape[1])]
        return partial(_fold, ufunc, columns, out)
    return partial(ufunc.reduce, array, axes, out=out, keepdims=True)


def _fold(ufunc: np.ufunc, columns: Sequence[Floats], out: Floats) -> None:
    """Reduce short lines: NumPy takes longer for the beginning of each."""
    np.copyto(out, columns[0])
    for column in columns[1:]:
        ufunc(out, column, out=out)


def sums_into(array: Floats, axes: tuple[int, ...], out: Floats, scratch: Scratch) -> Call:
    """A call that adds up the lines of an array, as `reduced_into`. It adds up long lines in parts: that
    loses less to rounding. The sums of parts have memory of their own in `scratch`.
    """
    if axes != (1,) or array.dtype.kind != "f" or not has_dense_rows(array) or array.shape[1] == 1:
        return reduced_into(np.add, array, axes, out)
    count, length = array.shape
    if length < _LONG:
        return partial(np.matmul, array, ones(length, array.dtype), out)
    size = next((size for size in _PARTS if not length % size), 1)
    parts = joined_axes(array.reshape(count, length // size, size), range(2)) if size > 1 else None
    if parts is None:
        return reduced_into(np.add, array, axes, out)  # which adds up in pairs
    sums = scratch.keep((count, length // size), array.dtype)
    of_parts = sums_into(parts, (1,), sums.reshape(-1, 1), scratch)
    return in_turn([of_parts, sums_into(sums, (1,), out, scratch)])


@functools.lru_cache(64)
def ones(length: int, dtype: np.dtype[Any]) -> Floats:
    """A column of ones, with which BLAS adds up rows. Shared: not to be written."""
    return np.ones((length, 1), dtype)


def squares_into(array: Floats, axes: tuple[int, ...], out: Floats, scratch: Scratch) -> Call:
    """A call that adds up the squares of lines, as `sums_into`. It may take scratch of `array`'s dims."""
    return dots_into(array, array, axes, out, scratch)


def dots_into(a: Floats, b: Floats, axes: tuple[int, ...], out: Floats, scratch: Scratch) -> Call:
    """A call that adds up the products of two arrays' lines, as `squares_into`."""
    if axes == (1,) and has_dense_rows(a) and has_dense_rows(b) and a.dtype.kind == "f":
        return partial(np.matmul, a[:, None, :], b[:, :, None], out[:, :, None])
    products = scratch.take(a.shape, a.dtype)
    return in_turn([partial(np.multiply, a, b, products), sums_into(products, axes, out, scratch)])
