"""What a process and its forkserver say to each other (`frames` has the bytes).

The parent sends a `Launch` at a time, and `Discard`; the server sends one `Ready` or `PreloadFailed`, one
`Launched` or `Refused` for each launch, and between them an `Exited` whenever a worker has. Workers go by the
number of their launch: a process id may be another's once its worker has been reaped.
"""

from __future__ import annotations

from typing import Any

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
]


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
        How many come with this. The last one is the worker's end of its lifeline.
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
