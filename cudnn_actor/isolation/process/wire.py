"""The messages between a worker process and its parent, as bytes. Does no I/O.

`processes.frames` has the framing. Descriptors travel with the frame that needs them. A frame that cannot be
decoded, or is too long, ends the worker, never its parent. A message that cannot be decoded, in a valid
frame, fails only its request: it would fail in every other worker, too.

=============  ==========================================================================================
parent sends   `Hello` once; `MapArena`, `UnmapArena`, `CreateArena`, `MapStage`, `UnmapStage`; `KnowGraph`
               before the first request with that graph, `ForgetGraph`, `ForgetPlans`; `KnowRun` before the
               first request that runs a model's graph, or warms it, `ForgetRun`; `Requests`;
               `Internal`, for work of the service itself; `Promote` to a standby; `Stop`
worker sends   `Ready` once; `Answers`, in the order in which requests finished; `Nearing`; `InternalDone`;
               `ArenaMade` or `ArenaRefused`; `Logged`; `Dying`, its last frame
=============  ==========================================================================================

A request carries its message as separately encoded bytes. So the parent encodes a message once, however often
it is sent, and the worker finds a message that it has seen before by a look-up of these bytes.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from cudnn_actor.isolation.known_graphs import ForgetGraph, KnowGraph, LoopKnown, RunKnown, known_form
from cudnn_actor.processes.frames import LONGEST
from cudnn_actor.protocol.errors import ErrorRecord
from cudnn_actor.protocol.messages import codec
from cudnn_actor.protocol.messages.messages import (
    ClearPlans,
    Compute,
    Copy,
    Explain,
    Fill,
    GetStatistics,
    Ping,
    Warm,
)
from cudnn_actor.protocol.messages.receipts import CacheStatistics, PlanStatistics
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.supervision import FaultRule

__all__ = [
    "FROM_WORKER",
    "LONGEST_MESSAGE",
    "Answer",
    "Answers",
    "ArenaImported",
    "ArenaMade",
    "ArenaRefused",
    "Asked",
    "Counted",
    "CreateArena",
    "Done",
    "Dropped",
    "Dying",
    "ForgetGraph",
    "ForgetRun",
    "FromParent",
    "FromWorker",
    "Given",
    "Hello",
    "ImportArena",
    "InjectFault",
    "Internal",
    "InternalDone",
    "KnowGraph",
    "KnowRun",
    "Logged",
    "MapArena",
    "MapStage",
    "Nearing",
    "Promote",
    "ReadStaged",
    "Ready",
    "Refused",
    "Request",
    "Requests",
    "RunPlaced",
    "Staged",
    "Stop",
    "UnmapArena",
    "UnmapStage",
    "WriteAllStaged",
    "WriteStaged",
    "encode_message",
]

LONGEST_MESSAGE: Final = LONGEST - (4 << 10)
"""The bytes of the longest message that fits into a frame with the request's other fields."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


# Messages that only travel between a parent and its worker.


class Staged(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, omit_defaults=True):
    """The place of values, C-contiguous in the buffer's dtype: a segment of staging memory, and the offset.

    `arrival`: the offset in the same segment of the words that say which parts of the values are there, as in
    `arrivals`; 0 if all are.
    """

    segment: int
    offset: int
    arrival: int = 0


class WriteStaged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Overwrite `dst` with staged values."""

    control = False
    dst: BufferRef
    values: Staged


class WriteAllStaged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """A `WriteWeights`: overwrite each of `buffers` with staged values."""

    control = False
    buffers: tuple[BufferRef, ...]
    values: tuple[Staged, ...]


class ReadStaged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Copy the values of `src` to staging memory."""

    control = False
    src: BufferRef
    values: Staged


class InjectFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Inject a fault for a message that the parent answers itself. `tag` is the `plan` of the log line."""

    control = False
    tag: str


class RunPlaced(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """A `RunModel`: a run whose inputs are first copied to their places, and whose outputs are then copied
    from their places.

    Parameters
    ----------
    run
        The number of a `KnowRun`.
    write, read
        The inputs in staging memory, and the outputs that are copied there: for each, the index of its buffer
        among the plan's, and the place in staging memory.
    copy_in, copy_out
        The inputs and outputs in buffers: for each, the index of its buffer among the plan's, and the
        caller's buffer.
    """

    control = False
    run: int
    write: tuple[tuple[int, Staged], ...] = ()
    read: tuple[tuple[int, Staged], ...] = ()
    copy_in: tuple[tuple[int, BufferRef], ...] = ()
    copy_out: tuple[tuple[int, BufferRef], ...] = ()


Asked = (
    Compute
    | RunKnown
    | LoopKnown
    | RunPlaced
    | Copy
    | Fill
    | Ping
    | GetStatistics
    | Warm
    | ClearPlans
    | Explain
    | WriteStaged
    | WriteAllStaged
    | ReadStaged
    | InjectFault
)
"""Messages that a worker answers."""


# From the parent.


class Hello(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The parameters of a worker's start.

    Parameters
    ----------
    make, arguments
        Import path of the engine's factory, "package.module:Name", and its arguments.
    device
        The device in buffer references: "cpu" or "cuda:N".
    generation
        The number of its incarnation. A standby gets another when it is promoted.
    window
        Places of the status page.
    workspace_limit, plan_store, autotune, cache_limit, plan_capacity
        As in `Options`.
    beat_s
        Seconds between two heartbeats.
    journal
        As in `engines.base.BuilderAccess`.
    fails
        Whether a fault plan makes this start fail.
    """

    make: str
    arguments: tuple[str | int | float | bool | None, ...]
    device: str
    generation: int
    window: int
    workspace_limit: int | None
    plan_store: str | None
    autotune: bool
    cache_limit: int
    plan_capacity: int
    beat_s: float
    journal: str
    fails: bool


class MapArena(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Map an arena by the descriptor that comes with it."""

    number: int
    nbytes: int


class UnmapArena(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Unmap an arena, which is empty."""

    number: int


class ForgetPlans(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Drop the plans of these graphs, which are not expected to come again."""

    digests: list[str]


class KnowRun(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Keep the run of a model's graph. Later requests name it by its number.

    Parameters
    ----------
    number
        Its number.
    body
        A `RunKnown`.
    copied
        The indices, among the plan's, of the buffers to which runs copy their inputs.
    """

    number: int
    body: bytes
    copied: tuple[int, ...]


class ForgetRun(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Drop the run of a model's graph. Requests that were sent earlier still run it."""

    number: int


class CreateArena(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Make an arena, map it, and send its descriptor."""

    number: int
    nbytes: int


class ImportArena(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Map another service's arena for reading, by the descriptor that comes with it. It may be of anything.

    Only this worker maps it. The answer is `ArenaImported` or `ArenaRefused`.
    """

    number: int
    nbytes: int


class MapStage(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Map a segment of host memory by the descriptor that comes with it."""

    segment: int
    nbytes: int


class UnmapStage(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Unmap a segment, which is unused."""

    segment: int


class Request(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, omit_defaults=True, gc=False
):
    """A request to run: its number and place in the window, its message as bytes, and its fault."""

    number: int
    place: int
    body: bytes
    fault: FaultRule | None = None


class Requests(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Requests in order. Without any, it says that one follows soon."""

    requests: list[Request]


class Internal(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Work of the service itself: a message as bytes, numbered from 1 for each worker.

    It has no caller. So it has no place in the window, is never withdrawn, and is not counted as begun. Its
    number is independent of the requests' numbers.
    """

    number: int
    body: bytes


class Promote(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Tell a standby that it serves from now on, as this incarnation."""

    generation: int


class Stop(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Start no more requests, finish and answer those that have begun, and end."""


FromParent = (
    Hello
    | MapArena
    | UnmapArena
    | CreateArena
    | ImportArena
    | MapStage
    | UnmapStage
    | KnowGraph
    | ForgetGraph
    | ForgetPlans
    | KnowRun
    | ForgetRun
    | Requests
    | Internal
    | Promote
    | Stop
)


# From the worker.


class Ready(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The engine is open. `generation` is the number from `Hello`."""

    generation: int


class _Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0, gc=False):
    number: int
    place: int


class Done(_Answer, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1, gc=False):
    """A request has finished: its plan, when it began (the machine's monotonic clock), and its run time."""

    plan: str
    started_ns: int
    run_us: float


class Given(_Answer, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2, gc=False):
    """The answer to a request, as `protocol.messages.codec.encode_reply` writes it."""

    body: bytes


class Counted(_Answer, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """The answer to a `GetStatistics`: the facts about caches and cuDNN that only the worker knows."""

    plans: PlanStatistics
    graphs: CacheStatistics
    cudnn_version: str | None
    converted_bytes: int


class Refused(_Answer, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3, gc=False):
    """A request has failed with this error."""

    error: ErrorRecord


class Dropped(_Answer, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4, gc=False):
    """A request was withdrawn before it began: it never ran."""


Answer = Done | Given | Counted | Refused | Dropped


class Answers(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Answers in order."""

    answers: list[Answer]


class Nearing(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The one request that the worker has is expected to end soon: a fraction of a millisecond from now."""


class InternalDone(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Work of the service itself has ended. `error` is None if it succeeded."""

    number: int
    error: ErrorRecord | None


class ArenaMade(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """An arena has been made and mapped. Its descriptor comes with this frame."""

    number: int


class ArenaImported(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """An arena of another service has been mapped."""

    number: int


class ArenaRefused(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """An arena could not be made or imported: no room, or another error that the context has survived."""

    number: int
    error: ErrorRecord


class Logged(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A log line. `number` is that of the request that was running; 0 for none."""

    number: int
    logger: str
    level: Literal["debug", "info", "warning", "error", "critical"]
    event: str
    fields: dict[str, str | int | float | bool | None]


class Dying(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Why the worker ends.

    Parameters
    ----------
    cause
        What happened, as text for people.
    context_dead
        Whether its device context is known to be dead. Then nothing of the worker runs or writes any more.
    digest
        The graph whose build ended it; None for none.
    """

    cause: str
    context_dead: bool
    digest: str | None


FromWorker = (
    Ready | Answers | Nearing | InternalDone | ArenaMade | ArenaImported | ArenaRefused | Logged | Dying
)

FROM_WORKER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromWorker)
"""Decodes what the worker sends."""


def encode_message(message: Asked) -> bytes:
    """A message as the bytes of a `Request`. Raises `TypeError` for fields that are not protocol data."""
    return codec.encode_message(known_form(message))
