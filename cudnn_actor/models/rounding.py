"""Rounding of floating-point numbers to another dtype: a finite number stays finite."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["largest", "round_to"]


def largest(dtype: DType) -> float:
    """The largest finite number of a floating-point dtype."""
    return float(ml_dtypes.finfo(dtype.numpy).max)  # type: ignore[no-untyped-call]


def round_to(array: np.ndarray, dtype: DType) -> np.ndarray:
    """An array of floats in a floating-point dtype: finite numbers beyond its limits become its limits.

    A model may mask scores with float32's least number, and multiply that by zeros. As -inf, it would make
    them NaN.
    """
    if array.dtype == dtype.numpy:
        return array
    with np.errstate(over="ignore"):
        found: np.ndarray[Any, Any] = np.asarray(array.astype(dtype.numpy))
    beyond = np.isinf(found) & np.isfinite(array)
    if beyond.any():
        found[beyond] = np.where(array[beyond] > 0, 1, -1) * largest(dtype)
    return found
