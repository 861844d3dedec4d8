"""What happens in a service's life, as data, and as log lines with stable names.

Of each child come, in this order: `Started` when it is ready for the first time; any number of `Restarting`,
each time it goes down to be started again, and `Restarted` when it is ready once more; and `Stopped` when it
is not to be started again. A child that fails before it was ever ready begins with `Restarting`. A transient
child that was done and is started with its group begins anew with `Started`. The service's own `Stopped`
(`child` is None) is the last event, and `Escalated`, if the restarts were used up, comes just before it.

==================  =========  =============================================================
log event           level      fields
==================  =========  =============================================================
service.started     info       child, generation
service.restarting  warning    child, generation, cause, detail, delay_s, attempt
service.restarted   info       child, generation, downtime_s
service.stopped     info       child (None: the service itself), reason, detail
service.escalated   error      child, cause, detail
==================  =========  =============================================================

`cause` and `reason` are an `ExitKind`'s text, `detail` the words that came with it. Each has `service` too,
where the supervisor has a name, and the record its own time.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cudnn_actor.actors.logs import Log
from cudnn_actor.supervision.clock import Clock
from cudnn_actor.supervision.exits import ExitReason

__all__ = [
    "Escalated",
    "LifecycleEvent",
    "Restarted",
    "Restarting",
    "Started",
    "Stopped",
    "log_event",
    "stamped",
]


class _Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every event carries; tagged by its class's name.

    Parameters
    ----------
    service
        The name of the service (of the supervisor, where that is one of yours); None for one without.
    at
        When it happened, in seconds of `time.time()`.
    monotonic
        The same in seconds of `time.monotonic()`, for differences.
    """

    service: str | None = None
    at: float = 0.0
    monotonic: float = 0.0


class Started(_Event, frozen=True, kw_only=True, tag=True):
    """A child is ready for the first time. `generation` counts its starts, from 1, failed ones included."""

    child: str
    generation: int


class Restarting(_Event, frozen=True, kw_only=True, tag=True):
    """A child goes down and will be started again.

    Parameters
    ----------
    child, generation
        Who, and which of its incarnations has ended (or, in a group that is restarted, is about to).
    cause
        Why. Of kind shutdown, naming the child that failed, where it only goes down with its group.
    delay_s
        Seconds until the failed child's next start, at the earliest.
    attempt
        How many failures in a row the failed child has now had, from 1.
    """

    child: str
    generation: int
    cause: ExitReason
    delay_s: float
    attempt: int


class Restarted(_Event, frozen=True, kw_only=True, tag=True):
    """A child is ready again. `downtime_s` runs from the end of the last ready incarnation, in seconds.

    For a child that was never ready before it runs from its first failure.
    """

    child: str
    generation: int
    downtime_s: float


class Stopped(_Event, frozen=True, kw_only=True, tag=True):
    """A child has ended for good, or (`child` is None) the whole service has."""

    child: str | None
    reason: ExitReason


class Escalated(_Event, frozen=True, kw_only=True, tag=True):
    """The restarts are used up: `child` failed once too often, of `cause`, and all have been stopped."""

    child: str
    cause: ExitReason


LifecycleEvent = Started | Restarting | Restarted | Stopped | Escalated
"""Everything that `gpu.events()` tells."""


def stamped(event: LifecycleEvent, service: str | None, clock: Clock) -> LifecycleEvent:
    """An event that happens now, as the core made it, with what that does not know: whose it is, and when."""
    return msgspec.structs.replace(event, service=service, at=clock.wall(), monotonic=clock.monotonic())


def log_event(logger: Log, event: LifecycleEvent) -> None:
    """Write one log line; names and fields stand in the module's header, and stay."""
    match event:
        case Started():
            logger.info("service.started", **_fields(event))
        case Restarting():
            logger.warning("service.restarting", **_fields(event))
        case Restarted():
            logger.info("service.restarted", **_fields(event))
        case Stopped():
            logger.info("service.stopped", **_fields(event))
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
