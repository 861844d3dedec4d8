"""What a builder process and those that it builds for say to each other (`processes.frames` has the bytes).

====================  =================================================================================
the process is sent   `Open` once on each connection, then one `Build` or `Tune` after the other
it sends              `Accepted` once, with two descriptors: its pidfd, and the file that it prints to;
                      `Ready` once; for each request `Began`, any number of `Progress`, and one of `Built`,
                      `Refused` and `Failed`; `Busy` and `Logged` at any time; `Leaving` before it ends by
                      itself
====================  =================================================================================
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cudnn_actor.actors.diverting import Line
from cudnn_actor.protocol.errors import ErrorRecord
from cudnn_actor.protocol.graph import OperationGraph

__all__ = [
    "ANSWERS",
    "REQUESTS",
    "Accepted",
    "Answer",
    "Began",
    "Build",
    "Built",
    "Busy",
    "Failed",
    "Leaving",
    "Logged",
    "Open",
    "Progress",
    "Ready",
    "Refused",
    "Request",
    "Tune",
]


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Open(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """Which builder to open: the first connection's is opened, and the others want the same.

    Parameters
    ----------
    make
        Import path of what makes it: "package.module:Name".
    arguments
        What that is called with.
    renew_after
        After how many builds, and candidates of tunings, the process is to end and leave the rest to another.
    """

    make: str
    arguments: tuple[str | int | float | bool | None, ...]
    renew_after: int


class Build(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """As `Builder.build`."""

    graph: OperationGraph
    workspace_limit: int | None


class Tune(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """As `Builder.tune`."""

    graph: OperationGraph
    workspace_limit: int | None


class Accepted(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """The process has the connection."""

    pid: int


class Ready(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """The builder is open."""

    fingerprint: str


class Began(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """The request is in work: it has waited for others before."""


class Busy(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """The process gets on with what another has asked for: a tuning, which may take minutes."""


class Progress(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """What tuning is about to try."""

    done: int
    of: int
    what: str


class Built(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """A plan as exported; None for one that cannot be."""

    data: bytes | None


class Refused(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """An error that callers know."""

    error: ErrorRecord


class Failed(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """An `EngineFailure`, a `StickyError` or a `MemoryError`."""

    kind: Literal["failure", "sticky", "memory"]
    status: str
    detail: str


class Logged(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """A line for the log."""

    line: Line


class Leaving(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """The process has done its share, and ends. What it has been asked for and has not begun is not lost."""


Request = Build | Tune
Answer = Accepted | Ready | Busy | Began | Progress | Built | Refused | Failed | Logged | Leaving

REQUESTS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Open | Request)
"""Decodes what a builder process is sent."""
ANSWERS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)
"""Decodes what it sends."""
