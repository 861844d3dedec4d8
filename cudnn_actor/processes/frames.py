"""Bytes between two processes, in frames: four bytes of length, little-endian, and so many of MessagePack.

No I/O in here. Decoding runs no code that the sender chose: what does not decode, or is too long, is a
`BadFrame`.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

__all__ = ["LENGTH", "LONGEST", "BadFrame", "encode"]

LONGEST: Final = 64 << 20
"""Bytes of the longest frame that either side takes in: a batch of requests has some ten thousand, a plan up
to 65 thousand."""

LENGTH: Final = struct.Struct("<I")

_ENCODER = msgspec.msgpack.Encoder()


class BadFrame(Exception):
    """Raised for bytes that are no frame of a protocol; its text is the reason."""


def encode(frame: msgspec.Struct) -> bytes:
    """A frame as bytes, its length first. Raises `BadFrame` for one that the other side would not take."""
    body = _ENCODER.encode(frame)
    if len(body) > LONGEST:
        raise BadFrame(f"a frame of {len(body):,} bytes, where {LONGEST:,} is the most")
    return LENGTH.pack(len(body)) + body
