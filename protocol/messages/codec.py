"""Messages and replies as bytes: MessagePack, typed, decoded strictly.

A frame that is not a message of this protocol raises `MalformedMessage` and
nothing else. Decoding never runs code that the sender chose.
"""

from __future__ import annotations

import functools
import numbers
from typing import Any, get_origin

import msgspec
import numpy as np

from cudnn_actor.protocol.errors import ErrorRecord, MalformedMessage
from cudnn_actor.protocol.graphs.explanation import Explanation
from cudnn_actor.protocol.messages.messages import Travelling, View
from cudnn_actor.protocol.messages.model_messages import ModelRef
from cudnn_actor.protocol.messages.receipts import Receipt, Statistics
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.device_array import DeviceArray
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["decode_message", "decode_reply", "encode_message", "encode_reply", "pack"]

ReplyValue = (
    Receipt
    | BufferRef
    | ModelRef
    | Statistics
    | Explanation
    | np.ndarray
    | dict[str, np.ndarray]
    | int
    | None
)


class _Array(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: DType
    dims: tuple[int, ...]
    data: bytes


class _Reply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    kind: str
    body: msgspec.Raw


_REPLY_TYPES: dict[str, Any] = {
    "receipt": Receipt,
    "buffer": BufferRef,
    "statistics": Statistics,
    "explanation": Explanation,
    "array": np.ndarray,
    "arrays": dict[str, np.ndarray],
    "model": ModelRef,
    "int": int,
    "none": type(None),
    "error": ErrorRecord,
}
_REPLY_KINDS = {get_origin(cls) or cls: kind for kind, cls in _REPLY_TYPES.items()}


def encode_message(message: Travelling) -> bytes:
    """A message as bytes. Raises `TypeError` for fields that are not protocol data, and for a `View`."""
    if isinstance(message, View):
        raise TypeError("a View cannot be encoded: its answer is memory of this process")
    return _encode(message)


def decode_message(frame: bytes | memoryview) -> Travelling:
    """The message in `frame`. Raises `MalformedMessage`."""
    return _decode(Travelling, frame)  # type: ignore[no-any-return]


def encode_reply(reply: object) -> bytes:
    """A reply, or the `ErrorRecord` of an error, as bytes. Raises `TypeError` for anything else."""
    kind = _REPLY_KINDS.get(type(reply))
    if kind is None or (isinstance(reply, dict) and not all(map(_is_array, reply.values()))):
        raise TypeError(f"{type(reply).__name__} is not a reply of this protocol")
    return _ENCODER.encode(_Reply(kind, msgspec.Raw(_encode(reply))))


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray)


def decode_reply(frame: bytes | memoryview) -> ReplyValue | ErrorRecord:
    """The reply in `frame`. Raises `MalformedMessage`."""
    reply = _decode(_Reply, frame)
    wanted = _REPLY_TYPES.get(reply.kind)
    if wanted is None:
        raise MalformedMessage(detail=f"unknown kind of reply {reply.kind!r}")
    return _decode(wanted, reply.body)  # type: ignore[no-any-return]


def _encode(value: object) -> bytes:
    try:
        return _ENCODER.encode(value)
    except OverflowError as error:  # whole numbers are encoded in 64 bits
        raise TypeError(str(error)) from error


def _decode(wanted: Any, frame: Any) -> Any:
    try:
        return _decoder(wanted).decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedMessage(detail=str(error)) from error


def pack(value: object) -> object:
    """Encode what msgspec does not know: NumPy's numbers and bools, fractions and arrays."""
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, np.ndarray):
        dtype = DType.of(value.dtype)
        if dtype is None:
            raise TypeError(f"arrays of {value.dtype} cannot be encoded")
        return _Array(dtype, value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, DeviceArray):
        raise TypeError("arrays on a device cannot be encoded; copy them to the host first")
    raise TypeError(f"{type(value).__name__} is not protocol data")


def _unpack_array(wanted: type, value: object) -> object:
    if wanted is not np.ndarray:
        raise TypeError(f"{wanted.__name__} cannot be decoded")
    packed = msgspec.convert(value, _Array)
    if any(dim < 0 for dim in packed.dims):
        raise ValueError(f"dims {packed.dims} contain a negative size")
    return np.frombuffer(packed.data, dtype=packed.dtype.numpy).reshape(packed.dims).copy()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=pack)


@functools.cache
def _decoder(wanted: Any) -> msgspec.msgpack.Decoder[Any]:
    """The decoder of a type. It is made at its first use: to make that of messages takes tens of ms."""
    return msgspec.msgpack.Decoder(wanted, dec_hook=_unpack_array, strict=True)
