"""Canonical bytes: one encoding per meaning, the same on every machine.

Every value is written as a type tag and its content, lengths first, so no two
different values share an encoding. Floats are written by bit pattern, so 0.0
and -0.0 differ and a NaN equals itself.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

__all__ = ["Encoded", "blake", "canonical_bytes"]


class Encoded(bytes):
    """The canonical encoding of a value, which stands for the value where it is part of another."""


def canonical_bytes(value: object) -> bytes:
    """The canonical encoding of plain data: None, bool, int, float, str, tuple, list, Struct, and `Encoded`.

    Raises `TypeError` for anything else, such as a set or a dict, which have no canonical form here.
    """
    encode = _ENCODERS.get(type(value))  # a graph has hundreds of thousands of values: most take this way
    if encode is not None:
        return encode(value)
    if isinstance(value, enum.Enum):
        encoded = {member: canonical_bytes(member.value) for member in type(value)}
        if value in encoded:  # else it is several flags together
            _ENCODERS[type(value)] = encoded.__getitem__
        return canonical_bytes(value.value)
    for base in type(value).__mro__:
        if base in _ENCODERS:
            return _ENCODERS[base](value)
    if isinstance(value, msgspec.Struct):
        fields = sorted(type(value).__struct_fields__)
        pairs = tuple((name, getattr(value, name)) for name in fields)
        return b"R" + canonical_bytes((type(value).__name__, *pairs))
    raise TypeError(f"no canonical form for {type(value).__name__}")


def blake(data: bytes) -> str:
    """The BLAKE2b hash of `data`, 32 bytes, as 64 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


@functools.lru_cache(1 << 16)  # the tensors' numbers occur again and again
def _integer(value: int) -> bytes:
    digits = b"%d" % value
    return b"I" + _length(len(digits)) + digits


def _float(value: float) -> bytes:
    return b"D" + struct.pack("<d", value)


@functools.lru_cache(1 << 12)  # the names of fields and of operands
def _text(value: str) -> bytes:
    text = value.encode()
    return b"S" + _length(len(text)) + text


def _sequence(value: Sequence[object]) -> bytes:
    parts = [encode(one) if (encode := _ENCODERS.get(type(one))) else canonical_bytes(one) for one in value]
    return b"L" + _length(len(value)) + b"".join(parts)


_length = struct.Struct("<Q").pack

_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"T" if value else b"F",
    int: _integer,
    float: _float,
    str: _text,
    tuple: _sequence,
    list: _sequence,
    Encoded: bytes,
}
