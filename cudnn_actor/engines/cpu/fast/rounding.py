"""Values rounded to those that a dtype has: to nearest, ties to even."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.exact.evaluation import round_into
from cudnn_actor.engines.cpu.fast.instructions import Code, Value
from cudnn_actor.engines.cpu.rounding import integer_range
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["round_values", "saturate", "store"]

_MANTISSA, _EXPONENT, _SIGN = 23, 0x7F800000, 0x80000000


def round_values(code: Code, x: Value, dtype: DType) -> Value:
    """Values of float32, rounded to those of float16 or bfloat16, as float32. NaN stays NaN."""
    if dtype is DType.BFLOAT16:
        return code.convert(code.convert(x, dtype.numpy), np.float32)
    return _to_float16(code, x)


def _to_float16(code: Code, x: Value) -> Value:
    """A number is added and subtracted whose unit in the last place is that of float16 at x.

    That is 1.5 * 2**13 times the power of 2 below x, and no less than for float16's subnormal numbers. What
    is too large becomes infinity when it is multiplied. NumPy's conversions take several times as long.
    """
    bits = x.bits(np.uint32)
    power = code(np.maximum, code(np.bitwise_and, bits, _EXPONENT), (127 - 14) << _MANTISSA)
    power = code(np.minimum, power, 200 << _MANTISSA)  # the number stays finite
    large = code(np.add, power, (13 << _MANTISSA) | (1 << (_MANTISSA - 1))).bits(np.float32)
    nearest = code(np.subtract, code(np.add, x, large), large)
    held = code(np.multiply, code(np.multiply, nearest, 2.0**112), 2.0**-112)
    return code(np.bitwise_or, held.bits(np.uint32), code(np.bitwise_and, bits, _SIGN)).bits(np.float32)


def saturate(whole: npt.NDArray[Any], array: npt.NDArray[Any]) -> None:
    """Store integers in an array of integers or bool: the nearest that it holds, or whether they are not 0.

    They are overwritten.
    """
    if array.dtype == np.bool_:
        np.not_equal(whole, 0, array)
        return
    (least, largest), (own_least, own_largest) = map(integer_range, (array.dtype, whole.dtype))
    np.clip(whole, max(least, own_least), min(largest, own_largest), out=whole)
    np.copyto(array, whole, "unsafe")


def store(result: npt.NDArray[Any], dtype: DType, array: npt.NDArray[Any]) -> None:
    """Store values rounded to a dtype in an array of that dtype, or of the one that it is carried in.

    What was computed in float32 is stored as it is in an array of float32.
    """
    if result.dtype == array.dtype == np.float32:
        array[...] = result
    elif array.dtype == dtype.numpy:
        round_into(result, dtype, array)
    else:
        narrow = np.empty(array.shape, dtype.numpy)
        round_into(result, dtype, narrow)
        array[...] = narrow
