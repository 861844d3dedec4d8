"""The messages between a process and its forkserver (`frames` has the framing).

The parent sends one `Launch` at a time, and `Discard`. The server sends one `Ready` or `PreloadFailed`, one
`Launched` or `Refused` for each launch, and an `Exited` whenever a worker has exited. Workers are identified
by the number of their launch, because a process id may be reused once its worker has been reaped.
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
        The number of this launch, which one parent never uses twice.
    main
        Import path of what the worker runs: "package.module:function".
    descriptors
        How many descriptors come with this. The last one is the worker's end of its lifeline.
    """

    number: int
    main: str
    descriptors: int


class Discard(_Record, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Kill a worker, because its parent has no use for it, or has no room for its pidfd."""

    number: int


class Ready(_Record, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The modules are imported."""


class PreloadFailed(_Record, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A module cannot be imported. The server ends after this."""

    why: str


class Launched(_Record, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The worker has been forked. Its pidfd comes with this."""

    number: int
    pid: int


class Refused(_Record, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The system gives no process or no descriptor."""

    number: int
    why: str


class Exited(_Record, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The worker has exited. `status` and `signal` are both None if other code has reaped it."""

    number: int
    status: int | None = None
    signal: int | None = None


ToServer = Launch | Discard
FromServer = Ready | PreloadFailed | Launched | Refused | Exited

TO_SERVER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToServer)
"""Decodes what the parent sends."""
FROM_SERVER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromServer)
"""Decodes what the server sends."""
