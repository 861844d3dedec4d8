"""Lifecycle events of a service, as data and as log lines with stable names.

The events of each child come in this order: `Started` when it is ready for the first time; any number of
pairs of `Restarting`, when it goes down and will be started again, and `Restarted`, when it is ready again;
and `Stopped` when it will not be started again. A child that fails before it was ever ready begins with
`Restarting`. A transient child that was done and is started with its group begins again with `Started`. The
service's own `Stopped` (`child` is None) is the last event. If the restarts are used up, `Escalated` comes
just before it.

==================  =========  =============================================================
log event           level      fields
==================  =========  =============================================================
service.started     info       child, generation
service.restarting  warning    child, generation, cause, detail, delay_s, attempt
service.restarted   info       child, generation, downtime_s
service.stopped     info *     child (None: the service itself), reason, detail
service.escalated   error      child, cause, detail, why
==================  =========  =============================================================

(*: error if what has stopped ended by a crash or the like.)

`cause` and `reason` are an `ExitKind`'s text; `detail` is the text that came with it. If the supervisor has a
name, each line has the field `service` too. The log record has its own time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from cudnn_actor.actors.logs import Log
from cudnn_actor.protocol.types.short_repr import short_repr
from cudnn_actor.supervision.exits import ExitReason

__all__ = [
    "Clock",
    "Escalated",
    "LifecycleEvent",
    "Restarted",
    "Restarting",
    "Started",
    "Stopped",
    "log_event",
    "stamp",
]


class _Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of every event; tagged by its class's name.

    Parameters
    ----------
    service
        The name of the service (or of the supervisor, if it is one of yours); None without a name.
    at
        When it happened, in seconds of `time.time()`.
    monotonic
        The same in seconds of `time.monotonic()`, to compute differences.
    """

    service: str | None = None
    at: float = 0.0
    monotonic: float = 0.0

    __repr__ = short_repr


class Started(_Event, frozen=True, kw_only=True, tag=True):
    """A child is ready for the first time. `generation` counts its starts, from 1, failed ones included."""

    child: str
    generation: int


class Restarting(_Event, frozen=True, kw_only=True, tag=True):
    """A child goes down and will be started again.

    Parameters
    ----------
    child, generation
        The child, and the incarnation that has ended (or, in a group that is restarted, is about to end).
    cause
        The reason. If the child only goes down with its group: of kind shutdown, naming the child that
        failed.
    delay_s
        Earliest next start of the failed child, in seconds from now.
    attempt
        Consecutive failures of the failed child so far, from 1.
    """

    child: str
    generation: int
    cause: ExitReason
    delay_s: float
    attempt: int


class Restarted(_Event, frozen=True, kw_only=True, tag=True):
    """A child is ready again. `downtime_s` is the time since the last ready incarnation ended, in seconds.

    For a child that was never ready before, it is the time since its first failure.
    """

    child: str
    generation: int
    downtime_s: float


class Stopped(_Event, frozen=True, kw_only=True, tag=True):
    """A child has ended for good, or (`child` is None) the whole service has."""

    child: str | None
    reason: ExitReason


class Escalated(_Event, frozen=True, kw_only=True, tag=True):
    """The restarts are used up: `child` failed once more, with `cause`, and all children have been stopped.

    `why` is the limit that was reached: "at the 4th failure within 60 s (max_restarts=3)".
    """

    child: str
    cause: ExitReason
    why: str

    def __str__(self) -> str:
        return f"gave up {self.why}: {self.cause}"


LifecycleEvent = Started | Restarting | Restarted | Stopped | Escalated
"""Everything that `gpu.events()` yields."""


class Clock(NamedTuple):
    """The clocks that events are stamped with, in seconds: wall-clock time, and monotonic time."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


def stamp(event: LifecycleEvent, service: str | None, clock: Clock) -> LifecycleEvent:
    """A copy of an event from the core, with the fields that the core does not know: the service, the
    time."""
    return msgspec.structs.replace(event, service=service, at=clock.wall(), monotonic=clock.monotonic())


def log_event(logger: Log, event: LifecycleEvent) -> None:
    """Write one log line. The names and fields are listed in the module's docstring, and are stable."""
    match event:
        case Started():
            logger.info("service.started", **_fields(event))
        case Restarting():
            logger.warning("service.restarting", **_fields(event))
        case Restarted():
            logger.info("service.restarted", **_fields(event))
        case Stopped():
            write = logger.error if event.reason.abnormal else logger.info
            write("service.stopped", **_fields(event))
        case Escalated():
            logger.error("service.escalated", **_fields(event))


def _fields(event: LifecycleEvent) -> dict[str, Any]:
    fields = msgspec.structs.asdict(event)
    for stamp in ("at", "monotonic") if event.service is not None else ("service", "at", "monotonic"):
        del fields[stamp]
    for name, value in tuple(fields.items()):
        if isinstance(value, ExitReason):
            fields |= {name: value.kind.value, "detail": value.cause}
    return fields
