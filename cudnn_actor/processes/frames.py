"""Frames between two processes: a length of four bytes, little-endian, then that many bytes of MessagePack.

Does no I/O. Decoding runs no code that the sender chooses. A frame that does not decode, or is too long,
raises `BadFrame`.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

__all__ = ["LENGTH", "LONGEST", "BadFrame", "encode"]

LONGEST: Final = 64 << 20
"""Bytes of the longest frame that either side accepts. A batch of requests has some ten thousand bytes, a
plan up to 65 thousand."""

LENGTH: Final = struct.Struct("<I")

_encode, _pack = msgspec.msgpack.Encoder().encode, LENGTH.pack


class BadFrame(Exception):
    """Raised for bytes that are not a valid frame. Its text is the reason."""


def encode(frame: msgspec.Struct) -> bytes:
    """A frame as bytes, with its length first. Raises `BadFrame` if it is too long for the other side."""
    body = _encode(frame)
    length = len(body)
    if length > LONGEST:
        raise BadFrame(f"a frame of {length:,} bytes, and the limit is {LONGEST:,}")
    return _pack(length) + body
