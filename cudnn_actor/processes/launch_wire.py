"""What a process and its forkserver say to each other, and the packets that they say it in.

A packet of their socket is one record in MessagePack; descriptors travel beside it. The parent sends a
`Launch` at a time, and `Discard`; the server sends one `Ready` or `PreloadFailed`, one `Launched` or
`Refused` for each launch, and between them an `Exited` whenever a worker has. Workers go by the number of
their launch: a process id may be another's once its worker has been reaped.
"""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence
from typing import Any, Final

import msgspec

__all__ = [
    "FROM_SERVER",
    "TO_SERVER",
    "Discard",
    "Exited",
    "FromServer",
    "Launch",
    "Launched",
    "PreloadFailed",
    "Ready",
    "Refused",
    "ToServer",
    "receive",
    "send",
]

_LONGEST: Final = 32 << 10
"""Bytes of the longest packet that either side takes in."""
_MOST_DESCRIPTORS: Final = 253
"""Beside one packet: the kernel's own limit (SCM_MAX_FD)."""
_NUMBER: Final = array.array("i").itemsize


class _Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


class Launch(_Record, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Fork a worker.

    Parameters
    ----------
    number
        Of this launch, never used twice by one parent.
    main
        Import path of what the worker runs: "package.module:function".
    descriptors
        How many come with this: the kernel drops those that the receiver has no room for. The last one is the
        worker's end of its lifeline.
    """

    number: int
    main: str
    descriptors: int


class Discard(_Record, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Kill a worker: whoever launched it has no use for it, or no descriptor to hold it by."""

    number: int


class Ready(_Record, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The modules are imported."""


class PreloadFailed(_Record, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A module cannot be imported: the server's last word."""

    why: str


class Launched(_Record, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The worker lives; its pidfd comes with this."""

    number: int
    pid: int


class Refused(_Record, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """There is no process or descriptor to be had."""

    number: int
    why: str


class Exited(_Record, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The worker has been reaped. Both are None when somebody else has reaped it."""

    number: int
    status: int | None = None
    signal: int | None = None


ToServer = Launch | Discard
FromServer = Ready | PreloadFailed | Launched | Refused | Exited

TO_SERVER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToServer)
"""Decodes what the parent sends."""
FROM_SERVER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromServer)
"""Decodes what the server sends."""


# Not the standard library's `send_fds` and `recv_fds`: they drop the flags that they are given, so that what
# arrives is inherited by every program that this process starts, and a lost reader raises SIGPIPE.


def send(connection: socket.socket, record: ToServer | FromServer, descriptors: Sequence[int] = ()) -> None:
    """Send a record, with copies of descriptors.

    Raises `ValueError` for one that the other side would not take, else `OSError`: `ConnectionError` when
    there is no other side, `BlockingIOError` as any send does.
    """
    packet = msgspec.msgpack.encode(record)
    if len(packet) > _LONGEST:
        raise ValueError(f"a packet of {len(packet):,} bytes, where {_LONGEST:,} is the most")
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    connection.sendmsg([packet], [rights] if descriptors else [], socket.MSG_NOSIGNAL)


def receive(connection: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> tuple[Any, list[int]] | None:
    """The next record and the descriptors that came with it, the caller's now; None at the socket's end.

    Those for which this process has no room are missing. Raises `OSError`, `BlockingIOError` as any receive.
    """
    room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * _NUMBER)
    packet, ancillary, _, _ = connection.recvmsg(_LONGEST, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % _NUMBER])
    return (decoder.decode(packet), descriptors.tolist()) if packet else None
