"""Rounds float64 values to a buffer's dtype, once.

Overflow to infinity must be silent. The caller sets `numpy.errstate` for that, because
setting it here each time would cost as much as a small convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.scratch import Array

__all__ = ["Rounding", "clip", "integer_range", "rounding_to"]

Rounding = Callable[[npt.NDArray[np.generic], Array], None]
"""Stores float64 values into an array of its own dtype and the same dims; may overwrite the values."""

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def rounding_to(dtype: np.dtype[np.generic]) -> Rounding:
    """The function that rounds float64 values to `dtype`.

    Floats round to nearest, ties to even, and overflow to infinity. Integers round likewise and
    saturate; NaN becomes 0, as in CUDA's saturating conversions. Of bool, all but 0 is true.
    """
    if dtype == _BFLOAT16:
        return _to_bfloat16
    if dtype.kind == "b":
        return _to_bool
    if dtype.kind in "iu":
        least, largest = integer_range(dtype)
        # the largest int64 is no float64, nor is the largest uint64: the next smaller one is
        return _to_integer(float(least), min(float(largest), float(np.nextafter(float(largest + 1), 0))))
    return _to_float


def integer_range(dtype: np.dtype[np.generic]) -> tuple[int, int]:
    """The least and the largest value of an integer dtype, or of bool."""
    if dtype.kind == "b":
        return 0, 1
    limits = np.iinfo(dtype.name)
    return int(limits.min), int(limits.max)


def clip(values: np.ndarray, dtype: np.dtype[np.generic]) -> np.ndarray:
    """Integers saturated to an integer dtype; of bool, all but 0 is true. Exact: no value becomes a float."""
    if dtype.kind == "b" or values.dtype.kind == "b":
        return cast("np.ndarray", (values != 0).astype(dtype)[...])
    least, largest = integer_range(dtype)
    own_least, own_largest = integer_range(values.dtype)  # `numpy.clip` takes no limits beyond these
    limited = np.clip(values, max(least, own_least), min(largest, own_largest))
    return cast("np.ndarray", limited.astype(dtype)[...])


def _to_bool(dst: npt.NDArray[np.generic], values: Array) -> None:
    np.not_equal(values, 0, out=dst)


def _to_float(dst: npt.NDArray[np.generic], values: Array) -> None:
    dst[...] = values


def _to_integer(least: float, largest: float) -> Rounding:
    def store(dst: npt.NDArray[np.generic], values: Array) -> None:
        np.rint(values, out=values)
        np.clip(values, least, largest, out=values)
        np.copyto(values, 0.0, where=np.isnan(values))
        dst[...] = values

    return store


def _to_bfloat16(dst: npt.NDArray[np.generic], values: Array) -> None:
    """Round to float32 "to odd" first, so that the second rounding, to bfloat16, rounds ties correctly.

    ml-dtypes converts float64 through the nearest float32, which rounds 1 + 2**-8 + 2**-40 down to 1.
    S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums", IEEE Trans. Comput. 57 (2008).
    """
    nearest = values.astype(np.float32, order="C")
    bits = nearest.view(np.int32)
    # +1 if the exact value is further from zero than the float32, -1 if nearer, 0 if exact or NaN.
    outwards = _compare(values, nearest) * _compare(nearest, np.float32(0))
    bits += np.where(bits & 1, 0, outwards)
    dst[...] = nearest


def _compare(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating] | np.float32) -> npt.NDArray[np.int32]:
    return (a > b).astype(np.int32) - (a < b).astype(np.int32)
