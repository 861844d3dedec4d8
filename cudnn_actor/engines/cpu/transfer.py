"""Values from and to the host: casts within a kind, and nothing that would change a value's meaning."""

from __future__ import annotations

import math

import numpy as np

from cudnn_actor.engines.cpu.rounding import integer_range, rounding_to
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.errors import InvalidRequest

__all__ = ["fill", "read", "write"]


def write(dst: np.ndarray, array: np.ndarray) -> None:
    """Copy host values of the same dims into a buffer.

    Floats are rounded to nearest, overflowing to infinity; integers are kept exactly, or rounded to
    nearest where the buffer holds floats.

    Raises `InvalidRequest` on `data` for other dims, for what is no number, for floats into integers and
    for integers that do not fit.
    """
    if array.shape != dst.shape:
        problem = f"has other dims than the buffer, {dst.shape}"
        raise _bad_data(array.shape, problem, "reshape it, or upload it to a new buffer")
    _check_kind(dst.dtype, array)
    with np.errstate(all="ignore"):
        if array.dtype == np.float64:
            rounding_to(dst.dtype)(dst, array)
        else:
            dst[...] = array


def read(src: np.ndarray) -> np.ndarray:
    """A buffer's values as a new C-contiguous array."""
    return np.array(src, order="C")


def fill(dst: np.ndarray, value: float) -> None:
    """Set every element to `value`, rounded to nearest where the buffer holds floats.

    Raises `InvalidRequest` on `value` where the dtype has nothing near it: NaN, fractions or numbers out
    of range for integers, finite numbers that would become infinite for floats.
    """
    one = np.empty(1, dst.dtype)
    if dst.dtype.kind in "iu":
        least, largest = integer_range(dst.dtype)
        if not (float(value).is_integer() and least <= value <= largest):
            raise _bad_value(value, dst, f"use a whole number from {least} to {largest}")
    with np.errstate(all="ignore"):
        rounding_to(dst.dtype)(one, np.array([value], np.float64))
    if math.isfinite(value) and not np.isfinite(one[0]):
        raise _bad_value(value, dst, f"{dst.dtype.name} would make it infinite; use a smaller number")
    dst[...] = one[0]


def _check_kind(dst: np.dtype[np.generic], array: np.ndarray) -> None:
    known = DType.of(array.dtype)
    floating = array.dtype.kind == "f" or (known is not None and known.is_floating)
    if not floating and array.dtype.kind not in "iub":
        raise _bad_data(array.dtype, "holds no real numbers", "convert it: array.astype('float32')")
    if dst.kind in "iu":
        if floating:
            fix = f"round and cast it first: np.rint(array).astype('{dst.name}')"
            raise _bad_data(array.dtype, f"floats would lose their fractions in a buffer of {dst.name}", fix)
        _check_range(dst, array)


def _check_range(dst: np.dtype[np.generic], array: np.ndarray) -> None:
    if np.can_cast(array.dtype, dst, "safe"):
        return
    least, largest = integer_range(dst)
    for extreme in (int(array.min()), int(array.max())):
        if not least <= extreme <= largest:
            problem = f"does not fit {dst.name}, which holds {least} to {largest}"
            raise _bad_data(extreme, problem, "clip or scale it first, or use a wider buffer")


def _bad_data(value: object, problem: str, fix: str) -> InvalidRequest:
    return InvalidRequest(field="data", value=str(value), problem=problem, fix=fix)


def _bad_value(value: float, dst: np.ndarray, fix: str) -> InvalidRequest:
    return InvalidRequest(field="value", value=value, problem=f"cannot be held by {dst.dtype.name}", fix=fix)
