"""Canonical bytes: one encoding per meaning, the same on every machine.

Every value is written as a type tag and its content, lengths first, so no two
different values share an encoding. Floats are written by bit pattern, so 0.0
and -0.0 differ and a NaN equals itself.
"""

from __future__ import annotations

import enum
import hashlib
import struct

import msgspec

__all__ = ["blake", "canonical_bytes"]


def canonical_bytes(value: object) -> bytes:  # noqa: PLR0911 - one line per type
    """The canonical encoding of plain data: None, bool, int, float, str, tuple, list, Struct.

    Raises `TypeError` for anything else, such as a set or a dict, which have no canonical form here.
    """
    match value:
        case None:
            return b"N"
        case bool():
            return b"T" if value else b"F"
        case enum.Enum():
            return canonical_bytes(value.value)
        case int():
            digits = str(value).encode()
            return b"I" + _length(digits) + digits
        case float():
            return b"D" + struct.pack("<d", value)
        case str():
            text = value.encode()
            return b"S" + _length(text) + text
        case tuple() | list():
            return b"L" + _length(value) + b"".join(map(canonical_bytes, value))
        case msgspec.Struct():
            fields = sorted(type(value).__struct_fields__)
            pairs = tuple((name, getattr(value, name)) for name in fields)
            return b"R" + canonical_bytes((type(value).__name__, *pairs))
        case _:
            raise TypeError(f"no canonical form for {type(value).__name__}")


def blake(data: bytes) -> str:
    """The BLAKE2b hash of `data`, 32 bytes, as 64 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _length(sized: bytes | tuple[object, ...] | list[object]) -> bytes:
    return struct.pack("<Q", len(sized))
