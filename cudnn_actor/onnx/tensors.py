"""ONNX's tensors as NumPy arrays, from the model's bytes or from files beside it; and names of its dtypes."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from cudnn_actor.models.errors import InvalidModel
from cudnn_actor.protocol.errors import InvalidRequest, Words

__all__ = [
    "MOST_DIMS",
    "array_of",
    "bytes_of",
    "dtype_name",
    "first_line",
    "numpy_dtype",
    "over_nbytes",
    "size_of",
    "too_many_dims",
]

_NAMES = {code: name.lower() for name, code in onnx.TensorProto.DataType.items()}
"""ONNX's dtypes."""
MOST_DIMS = 64
"""How many dims a NumPy array can have."""
_PACKED = 8
"""The most elements that one byte, or one number, stands for."""
_VALUES = (
    "raw_data",
    *(f"{kind}_data" for kind in ("float", "double", "int32", "int64", "uint64", "string")),
)
"""The fields of ONNX's tensors that may have their values."""


def array_of(
    tensor: onnx.TensorProto, where: str, folder: Path | None = None, most: int = 1 << 62
) -> np.ndarray:
    """A tensor's values. Raises `InvalidModel` if they are not as many as its dims say, or cannot be read.

    `most`: bytes of another file that may be read; else `InvalidRequest`.
    """
    if tensor.data_type != onnx.TensorProto.STRING and numpy_dtype(tensor.data_type) is None:
        raise InvalidModel(where=where, problem=f"has an unknown dtype, number {tensor.data_type}")
    if problem := too_many_dims(tensor.dims):
        raise InvalidModel(where=where, problem=problem)
    if any(dim < 0 for dim in tensor.dims):
        raise InvalidModel(where=where, problem=f"has a dim below 0: {tuple(tensor.dims)}")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        tensor = _with_data(tensor, where, folder, most)
    _check_count(tensor, where)
    if 0 not in tensor.dims and not any(getattr(tensor, field) for field in _VALUES):
        raise InvalidModel(where=where, problem="has no values: the file was written without them")
    try:
        array = numpy_helper.to_array(tensor)
    except Exception as error:
        raise InvalidModel(where=where, problem=f"cannot be read: {first_line(error)}") from error
    if array.shape != tuple(tensor.dims):
        raise InvalidModel(
            where=where, problem=f"has values of dims {array.shape}, but says {tuple(tensor.dims)}"
        )
    return array


def too_many_dims(dims: Sequence[int]) -> str:
    """The problem with more dims than an array can have; empty if there are not too many.

    Call this first: the product of very many large numbers takes minutes.
    """
    return f"has {len(dims):,} dims, where an array has at most {MOST_DIMS}" if len(dims) > MOST_DIMS else ""


def _check_count(tensor: onnx.TensorProto, where: str) -> None:
    """Raise `InvalidModel` if there are fewer values than dims. Packed ones would be filled up with zeros."""
    size, count = math.prod(tensor.dims), sum(len(getattr(tensor, field)) for field in _VALUES)
    if count and size > _PACKED * count:
        raise InvalidModel(
            where=where, problem=f"cannot be read: it has dims {tuple(tensor.dims)}, and less data"
        )


def _with_data(tensor: onnx.TensorProto, where: str, folder: Path | None, most: int) -> onnx.TensorProto:
    """A tensor with the data that lies in a file beside the model."""
    if folder is None:
        raise InvalidModel(where=where, problem="has its data in another file; give the model by its path")
    given = {each.key: each.value for each in tensor.external_data}
    location = given.get("location", "")
    if not location or os.path.isabs(location) or ".." in Path(location).parts or "\0" in location:
        raise InvalidModel(where=where, problem=f"has its data outside of the model's folder: {location!r}")
    try:
        path, inside = (folder / location).resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle; a name that is no text
        raise InvalidModel(where=where, problem=f"has its data in no file: {first_line(error)}") from error
    if not path.is_relative_to(inside):
        raise InvalidModel(where=where, problem=f"has its data outside of the model's folder: {location!r}")
    size = _nbytes(tensor)
    try:
        offset, length = int(given.get("offset", 0)), int(given.get("length", size))
    except ValueError as error:
        raise InvalidModel(where=where, problem="has an offset or a length that is no number") from error
    if offset < 0 or length < 0:
        raise InvalidModel(where=where, problem="has an offset or a length below 0")
    if length != size:
        raise InvalidModel(where=where, problem=f"has data of length {length}, and needs {size} bytes")
    data = _bytes_in(path, offset, size, where, most)
    copy = onnx.TensorProto()
    copy.name, copy.data_type, copy.raw_data = tensor.name, tensor.data_type, data
    copy.dims.extend(tensor.dims)
    return copy


def _bytes_in(path: Path, offset: int, size: int, where: str, most: int) -> bytes:
    """The data of a tensor in a file. Missing or too many bytes are refused before memory is taken for
    them."""
    try:
        there = size_of(path) - offset
        data = bytes_of(path, offset, size) if size <= min(there, most) else b""
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidModel(where=where, problem=f"has data that cannot be read: {error}") from error
    if there < size:
        raise InvalidModel(where=where, problem=f"has {max(0, there)} bytes of data, and needs {size}")
    if size > most:
        raise over_nbytes(f"{size:,} bytes more, of {where},")
    return data


def size_of(path: Path) -> int:
    """The bytes of a file. Only regular files are allowed: a pipe would block, and a device has no end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder, not a file" if stat.S_ISDIR(found.st_mode) else "not a regular file"
        raise OSError(f"{str(path.absolute())!r} is {kind}")
    return found.st_size


def bytes_of(path: Path, offset: int, count: int) -> bytes:
    """`count` bytes of a file, from `offset` on. Raises `OSError` if there are fewer."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(count)
    if len(data) != count:
        raise OSError(f"{path.name!r} has changed")
    return data


def _nbytes(tensor: onnx.TensorProto) -> int:
    """The bytes of a tensor's raw data. Elements of less than 8 bits are packed."""
    count: int = math.prod(tensor.dims)
    name = _NAMES[tensor.data_type]
    bits = next((bits for text, bits in (("int4", 4), ("float4", 4), ("int2", 2)) if text in name), 0)
    dtype = numpy_dtype(tensor.data_type)
    return (count * bits + 7) // 8 if bits else count * (1 if dtype is None else dtype.itemsize)


def dtype_name(code: int) -> str:
    """The name of one of ONNX's dtypes."""
    return str(_NAMES.get(code, f"dtype number {code}"))


def numpy_dtype(code: int) -> np.dtype[Any] | None:
    """The NumPy dtype of one of ONNX's dtypes; None for strings and unknown dtypes."""
    if code in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
        return None
    try:
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code))
    except (KeyError, TypeError, ValueError):
        return None


def over_nbytes(what: str, limit: int | None = None) -> InvalidRequest:
    """The error for a model, or a part of it, with too many bytes. `what`: a text with the part and its
    bytes."""
    which = "" if limit is None else f", which is {limit:,}"
    return InvalidRequest(
        field="model",
        value=Words(what),
        problem=f"are over the limit ModelLimits.nbytes{which}",
        fix="raise the limit: ModelLimits(nbytes=...)",
    )


def first_line(error: Exception) -> str:
    """An error's text, without line breaks and not too long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:400] if lines else type(error).__name__
