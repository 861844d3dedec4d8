"""What a builder and its process say to each other, as bytes. No I/O in here.

A frame is four bytes of length, little-endian, and so many bytes of MessagePack. The parent sends one
`Start`, then a `Build` or a `Tune` at a time; the child sends one `Ready`, then for each of them any number
of `Progress` and one of `Built`, `Refused` and `Failed`; a `Logged` may come at any time. Decoding runs no
code that the sender chose.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, Literal, TypeVar

import msgspec

from cudnn_actor.actors.diverting import Line
from cudnn_actor.protocol.errors import ErrorRecord
from cudnn_actor.protocol.graph import OperationGraph

__all__ = [
    "ANSWERS",
    "LONGEST",
    "REQUESTS",
    "Answer",
    "BadFrame",
    "Build",
    "Built",
    "Failed",
    "Frames",
    "Logged",
    "Progress",
    "Ready",
    "Refused",
    "Request",
    "Start",
    "Tune",
    "encode",
]

LONGEST = 64 << 20
"""Bytes of the longest frame that is taken in; a plan has some 3 to 65 thousand."""

_LENGTH = struct.Struct("<I")
_T = TypeVar("_T")


class BadFrame(Exception):
    """Raised for bytes that are no frame of this protocol; its text is the reason."""


class Start(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Which builder to open.

    Parameters
    ----------
    make
        Import path of what makes it: "package.module:Name".
    arguments
        What that is called with.
    parent
        Process id of the sender, which the child is not to outlive.
    """

    make: str
    arguments: tuple[str | int | float | bool | None, ...]
    parent: int


class Build(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """As `Builder.build`."""

    graph: OperationGraph
    workspace_limit: int | None


class Tune(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """As `Builder.tune`."""

    graph: OperationGraph
    workspace_limit: int | None


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The child's builder is open."""

    fingerprint: str


class Progress(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What tuning is about to try."""

    done: int
    of: int
    what: str


class Built(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A plan as exported; None for one that cannot be."""

    data: bytes | None


class Refused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """An error that callers know."""

    error: ErrorRecord


class Failed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """An `EngineFailure`, a `StickyError` or a `MemoryError`."""

    kind: Literal["failure", "sticky", "memory"]
    status: str
    detail: str


class Logged(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A line for the log, at any time."""

    line: Line


Request = Build | Tune
Answer = Ready | Progress | Built | Refused | Failed | Logged

REQUESTS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Start | Build | Tune)
"""Decodes what the parent sends."""
ANSWERS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)
"""Decodes what the child sends."""


def encode(content: Start | Request | Answer) -> bytes:
    """A frame as bytes, its length first."""
    body = msgspec.msgpack.encode(content)
    return _LENGTH.pack(len(body)) + body


class Frames(Generic[_T]):
    """Cuts a stream of bytes into frames.

    Parameters
    ----------
    decoder
        `REQUESTS` or `ANSWERS`.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[_T]) -> None:
        self._decoder = decoder
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Add what has been received."""
        self._bytes += data

    def next(self) -> _T | None:
        """The next frame; None when it is not all there. Raises `BadFrame`, also for one that is too long."""
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > LONGEST:
            raise BadFrame(f"a frame of {length:,} bytes, where {LONGEST:,} is the most")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return self._decoded(body)

    def _decoded(self, body: bytes) -> _T:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BadFrame(str(error)) from error
