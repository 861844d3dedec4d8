"""The messages between a builder process and its clients (`processes.frames` encodes them).

=====================  =================================================================================
a client sends         `Open` once on each connection, then one `Build` after the other
the process sends      `Accepted` once, with two descriptors: its pidfd, and the file that it prints to;
                       `Ready` once; for each request `Began`, any number of `Progress`, and one of
                       `Built`, `Refused` and `Failed` (only `Built` if it has the plan already); `Busy`
                       and `Logged` at any time; `Leaving` before it exits by itself
=====================  =================================================================================
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cudnn_actor.actors.diverting import Line
from cudnn_actor.engines.base import Effort
from cudnn_actor.protocol.errors import ErrorRecord
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = [
    "ANSWERS",
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
    "Piece",
    "Progress",
    "Ready",
    "Refused",
]


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Open(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """Asks the process to open a builder. The first `Open` counts; a connection with another one is closed.

    Parameters
    ----------
    make
        Import path of the callable that makes the builder: "package.module:Name".
    arguments
        The callable's arguments.
    renew_after
        The number of builds and tuning candidates after which the process exits; another takes over.
    quiet_s
        For how long after a build that is waited for no candidate is begun of what is built behind.
    """

    make: str
    arguments: tuple[str | int | float | bool | None, ...]
    renew_after: int
    quiet_s: float = 0.0


class Build(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """Build a plan as `Builder.build` does or, if `tunes`, tune one as `Builder.tune` does."""

    graph: OperationGraph
    workspace_limit: int | None
    tunes: bool = False
    effort: Effort = "best"


class Accepted(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """The process has the connection."""

    pid: int


class Ready(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """The builder is open."""

    fingerprint: str


class Began(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """Work on the request has begun, or goes on; until now it waited for other clients' requests."""


class Busy(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """The process is working for another client, which may take minutes, and makes progress."""


class Progress(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """The plan that is about to be tried. `of`: how many there are; 0 if that is not known."""

    done: int
    of: int
    what: str


class Piece(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """The exported plan of a piece of the graph, of which that of the whole will consist if it is built."""

    data: bytes


class Built(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """The exported plan; None if it cannot be exported."""

    data: bytes | None


class Refused(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """A `CudnnActorError`, which is passed on to the caller."""

    error: ErrorRecord


class Failed(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """An `EngineFailure`, a `StickyError` or a `MemoryError`."""

    kind: Literal["failure", "sticky", "memory"]
    status: str
    detail: str
    operations: tuple[int, ...] = ()


class Logged(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """A line for the log."""

    line: Line


class Leaving(_Frame, frozen=True, forbid_unknown_fields=True, tag=True):
    """The process exits after `renew_after` builds. Its successor takes requests that have not begun."""


Answer = Accepted | Ready | Busy | Began | Progress | Piece | Built | Refused | Failed | Logged | Leaving

ANSWERS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)
"""Decodes what a builder process sends."""
