"""Element types of tensors."""

from __future__ import annotations

import enum
import math
from typing import Any, Literal

import ml_dtypes
import numpy as np

__all__ = ["DType", "DTypeLike", "DTypeName"]

DTypeName = Literal[
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
]
"""A member's name; for type checkers."""


class DType(enum.StrEnum):
    """An element type, named as in NumPy and in cuDNN's documentation.

    A member is equal to its name and to its NumPy dtype: `x.dtype == "float32"`, `x.dtype == array.dtype`. It
    is not equal to NumPy's class of scalars: for that, write `x.dtype.numpy == np.float32`. In sets and as
    keys, members and names are the same, and NumPy's dtypes are not: `DType.of(dtype)` is the member.
    """

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    BOOL = "bool"
    """A byte: 0 for false, 1 for true."""

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The NumPy dtype; bfloat16 is the one that ml-dtypes registers."""
        return _NUMPY[self]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _NUMPY[self].itemsize

    @property
    def is_floating(self) -> bool:
        """Whether values are floating-point numbers."""
        return self in _FLOATING

    @property
    def is_half(self) -> bool:
        """Whether values are floating-point numbers of 16 bits."""
        return self.is_floating and self.itemsize == 2

    def holds(self, value: float) -> bool:
        """Whether a tensor can have a value. Floats may round it, but not to infinity."""
        if self.is_floating:
            with np.errstate(over="ignore"):
                return not math.isfinite(value) or math.isfinite(np.float64(value).astype(self.numpy))
        least, most = (0, 1) if self is DType.BOOL else (np.iinfo(self).min, np.iinfo(self).max)
        return least <= value <= most and value == int(value)

    @classmethod
    def of(cls, dtype: object) -> DType | None:
        """The member for a NumPy dtype, a name or a member; None if there is none."""
        if dtype is None:  # NumPy would take None for float64
            return None
        if type(dtype) is cls:
            return dtype
        try:
            return _BY_NUMPY.get(np.dtype(dtype))  # type: ignore[call-overload]
        except (TypeError, ValueError, SyntaxError):  # NumPy parses strings and may raise SyntaxError
            return cls._value2member_map_.get(dtype) if isinstance(dtype, str) else None  # type: ignore[return-value]


DTypeLike = DType | DTypeName | np.dtype[Any]
"""Anything accepted as an element type; for type checkers."""

_NUMPY: dict[DType, np.dtype[np.generic]] = {
    member: np.dtype(ml_dtypes.bfloat16 if member is DType.BFLOAT16 else member.value) for member in DType
}
_BY_NUMPY = {dtype: member for member, dtype in _NUMPY.items()}
_FLOATING = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
