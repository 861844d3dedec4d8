"""Writes ONNX models: as much of the format as graphs of one function, without control flow, need.

The package onnx writes them too. To import it takes 0.15 s, which each new worker would take longer to answer
again, and 13 MB. `tests/engines/cpu/test_sessions.py` reads what is written here with that package.

https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["IR_VERSION", "OPSET", "ElementType", "Value", "external_tensor", "model", "node", "tensor"]

IR_VERSION, OPSET = 10, 21
"""The versions of May 2024, which ONNX Runtime has since 1.18."""
Value = int | float | str | Sequence[int] | Sequence[str]
"""The value of an attribute."""

_VARINT, _BYTES, _FIXED32 = 0, 2, 5
_FLOAT, _INT, _STRING, _INTS, _STRINGS = 1, 2, 3, 7, 8
"""`AttributeProto.AttributeType`."""
_EXTERNAL = 1
"""A value of `TensorProto.DataLocation`."""


class ElementType(enum.IntEnum):
    """`TensorProto.DataType`, by the names of our dtypes."""

    FLOAT32 = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    BOOL = 9
    FLOAT16 = 10
    FLOAT64 = 11
    UINT32 = 12
    UINT64 = 13
    BFLOAT16 = 16

    @classmethod
    def of(cls, dtype: DType) -> ElementType:
        """The type of that dtype."""
        return cls[dtype.name]


def model(
    nodes: Iterable[bytes],
    constants: Iterable[bytes],
    inputs: Mapping[str, tuple[ElementType, Sequence[int]]],
    outputs: Mapping[str, tuple[ElementType, Sequence[int]]],
) -> bytes:
    """A model of nodes in their order."""
    graph = b"".join(
        [
            *(_field(1, each) for each in nodes),
            _field(2, b"graph"),
            *(_field(5, each) for each in constants),
            *(_field(11, _port(name, *of)) for name, of in inputs.items()),
            *(_field(12, _port(name, *of)) for name, of in outputs.items()),
        ]
    )
    return b"".join([_number(1, IR_VERSION), _field(7, graph), _field(8, _number(2, OPSET))])


def node(
    operator: str,
    inputs: Iterable[str],
    outputs: Iterable[str],
    attributes: Mapping[str, Value],
    name: str,
) -> bytes:
    """A node. An input or output that is left out has no name."""
    return b"".join(
        [
            *(_field(1, each.encode()) for each in inputs),
            *(_field(2, each.encode()) for each in outputs),
            _field(3, name.encode()),
            _field(4, operator.encode()),
            *(_field(5, _attribute(key, value)) for key, value in attributes.items()),
        ]
    )


def tensor(name: str, array: np.ndarray) -> bytes:
    """A constant, of a dtype that NumPy has itself."""
    dtype = DType.of(array.dtype)
    assert dtype is not None
    values = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    dims = b"".join(_number(1, size) for size in array.shape)
    return dims + _number(2, ElementType.of(dtype)) + _field(8, name.encode()) + _field(9, values)


def external_tensor(name: str, dtype: ElementType, sizes: Sequence[int]) -> bytes:
    """A constant whose values are given beside the model, by its name."""
    dims = b"".join(_number(1, size) for size in sizes)
    location = _field(13, _field(1, b"location") + _field(2, name.encode()))
    return dims + _number(2, dtype) + _field(8, name.encode()) + location + _number(14, _EXTERNAL)


def _attribute(name: str, value: Value) -> bytes:
    match value:
        case int():
            of, kind = _number(3, value), _INT
        case float():
            of, kind = _varint(2 << 3 | _FIXED32) + struct.pack("<f", value), _FLOAT
        case str():
            of, kind = _field(4, value.encode()), _STRING
        case _:
            texts = [_field(9, each.encode()) for each in value if isinstance(each, str)]
            of = b"".join(texts or (_number(8, int(each)) for each in value))
            kind = _STRINGS if texts else _INTS
    return _field(1, name.encode()) + of + _number(20, kind)


def _port(name: str, dtype: ElementType, dims: Sequence[int]) -> bytes:
    """An input or output of the model."""
    shape = b"".join(_field(1, _number(1, size)) for size in dims)
    return _field(1, name.encode()) + _field(2, _field(1, _number(1, dtype) + _field(2, shape)))


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value % (1 << 64))  # negative ones have all 64 bits


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
