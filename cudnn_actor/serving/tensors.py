"""Tensors as the protocol sends them: the names of element types, and raw bytes.

Raw bytes are in row-major order and little-endian, and a BF16 has two bytes. A shape alone never makes the
server take memory: it is first compared with the bytes that have arrived.
https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np

from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.serving.failures import Refused

__all__ = ["NAMES", "array_of_bytes", "bytes_of", "checked_shape", "dtype_of", "nbytes_of", "unfit"]

_DTYPES = {
    "BOOL": DType.BOOL,
    "UINT8": DType.UINT8,
    "UINT16": DType.UINT16,
    "UINT32": DType.UINT32,
    "UINT64": DType.UINT64,
    "INT8": DType.INT8,
    "INT16": DType.INT16,
    "INT32": DType.INT32,
    "INT64": DType.INT64,
    "FP16": DType.FLOAT16,
    "FP32": DType.FLOAT32,
    "FP64": DType.FLOAT64,
    "BF16": DType.BFLOAT16,
}
NAMES = {dtype: name for name, dtype in _DTYPES.items()}
"""The protocol's name of each dtype of a service."""
Bytes = bytes | bytearray | memoryview
_MOST_DIMS = 32
_LARGEST_DIM = (1 << 63) - 1
assert sys.byteorder == "little", "the protocol's bytes are read as they are"


def dtype_of(tensor: str, datatype: object) -> DType:
    """The dtype of this name in the protocol. `tensor`: the input that has it. Raises `Refused`."""
    found = _DTYPES.get(datatype) if isinstance(datatype, str) else None
    if found is None:
        problem = f"input {tensor[:100]!r} has the datatype {str(datatype)[:100]!r}"
        if datatype == "BYTES":
            raise Refused(problem=f"{problem}, and models here have numbers only", fix="send numbers")
        raise Refused(problem=problem, fix=f"use one of {', '.join(_DTYPES)}")
    return found


def checked_shape(tensor: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The sizes of a tensor. Raises `Refused` if there are too many, or if a size is out of range."""
    if len(shape) > _MOST_DIMS or any(not 0 <= size <= _LARGEST_DIM for size in shape):
        raise Refused(
            problem=f"input {tensor[:100]!r} has a shape with sizes or a rank out of range",
            fix=f"give at most {_MOST_DIMS} sizes of 0 or more",
        )
    return tuple(shape)


def nbytes_of(dtype: DType, shape: Sequence[int]) -> int:
    """The bytes of a tensor, as an integer that cannot overflow."""
    return math.prod(shape) * dtype.itemsize


def array_of_bytes(tensor: str, dtype: DType, shape: tuple[int, ...], data: Bytes) -> np.ndarray:
    """These bytes as an array; only truth values are copied. Raises `Refused`."""
    view = memoryview(data)
    wanted = nbytes_of(dtype, shape)
    if view.nbytes != wanted:
        raise Refused(
            problem=f"input {tensor[:100]!r} has {view.nbytes:,} bytes of data",
            fix=f"{NAMES[dtype]} of shape {list(shape)} has {wanted:,}",
        )
    try:
        if dtype is DType.BOOL:  # a byte that is neither 0 nor 1 must not become a truth value
            return np.ndarray(shape, np.uint8, view).astype(np.bool_)
        return np.ndarray(shape, dtype.numpy, view)
    except ValueError as error:  # no elements, and one of its sizes is too large
        raise unfit(tensor, shape) from error


def unfit(tensor: str, shape: Sequence[int]) -> Refused:
    """The refusal of a tensor whose data do not have its shape."""
    return Refused(
        problem=f"the data of input {tensor[:100]!r} do not have the shape {list(shape)}",
        fix="give as many numbers as the product of its sizes",
    )


def bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of an array in row-major order; not copied if the array is in that order."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data
