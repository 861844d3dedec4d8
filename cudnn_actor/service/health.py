"""A service's state as a record, for probes and dashboards."""

from __future__ import annotations

import enum

import msgspec

from cudnn_actor.protocol.types.short_repr import short_repr
from cudnn_actor.supervision import ExitReason, SupervisorState
from cudnn_actor.supervision.state import Mode, Phase

__all__ = ["Health", "HealthState", "health_state"]


class HealthState(enum.StrEnum):
    """A service's lifecycle state."""

    STARTING = "starting"
    """The service has not been ready yet, or has not been started."""
    READY = "ready"
    """An incarnation of its actor serves."""
    RESTARTING = "restarting"
    """The service has served before, and its actor is being replaced; requests wait."""
    STOPPING = "stopping"
    """The service was asked to stop, or gives up, and finishes the requests that have started."""
    STOPPED = "stopped"
    """The service has ended; requests get `ServiceStopped`."""


class Health(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service's state at one moment, as far as its own process knows: no worker is asked.

    Crashes and readiness count from the moment when the supervisor notes them. So a worker may have died a
    moment ago, and an answer may come a moment before `state` is "ready" again.

    Parameters
    ----------
    state
        See `HealthState`.
    generation
        Incarnations of the actor that have become ready; 0 before the first.
    working
        Whether the actor has work in progress. A message that waits in the mailbox is not in progress.
    last_progress_s
        Seconds since the work in progress last advanced. Without work: since the last work ended, or since
        the actor became ready; None before that. While there is work, `hang_after_s` limits this time.
    queued
        Messages that wait, as in `Statistics`.
    restarts
        How often the actor was replaced, over the service's life.
    restarts_left
        How many more failures would be followed by a restart if they happened now. The number grows again
        when restarts leave the window of `period_s` seconds. It is 0 for a service that stops or has ended.
    cause
        Why the service ended; while it has not ended, the reason for the last restart; None without either.
    """

    state: HealthState
    generation: int
    working: bool
    last_progress_s: float | None
    queued: int
    restarts: int
    restarts_left: int
    cause: ExitReason | None

    __repr__ = short_repr


def health_state(supervised: SupervisorState | None, *, ended: bool) -> HealthState:
    """Translate the supervisor's state into the state of a service with one child.

    Parameters
    ----------
    supervised
        None before the supervisor exists and after it has gone.
    ended
        Whether the service accepts no more requests.
    """
    if ended:
        return HealthState.STOPPED
    if supervised is None or supervised.mode is Mode.NEW:
        return HealthState.STARTING
    (child,) = supervised.children
    if supervised.mode is not Mode.UP or child.phase is Phase.DONE:
        return HealthState.STOPPING
    if child.phase is Phase.READY:
        return HealthState.READY
    return HealthState.RESTARTING if child.was_ready else HealthState.STARTING
