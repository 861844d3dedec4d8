"""How a service is, as a record: for probes and dashboards."""

from __future__ import annotations

import enum

import msgspec

from cudnn_actor.supervision import ExitReason, SupervisorState
from cudnn_actor.supervision.state import Mode, Phase

__all__ = ["Health", "HealthState", "health_state"]


class HealthState(enum.StrEnum):
    """Where a service is in its life."""

    STARTING = "starting"
    """It has not been ready yet, or has not been started."""
    READY = "ready"
    """An incarnation of its actor serves."""
    RESTARTING = "restarting"
    """It has served, and its actor is being replaced; requests wait."""
    STOPPING = "stopping"
    """It was asked to stop, or gives up, and finishes what has begun."""
    STOPPED = "stopped"
    """It has ended; requests get `ServiceStopped`."""


class Health(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service at one moment, as far as its own process knows: no worker is asked.

    A crash, and a successor's readiness, count from when the supervisor has noted them: a worker may have
    died a moment ago, and an answer may come a moment before `state` is "ready" again.

    Parameters
    ----------
    state
        See `HealthState`.
    generation
        Incarnations of the actor that have become ready; 0 before the first.
    working
        Whether the actor has work in hand. A message that waits in the mailbox is not in hand.
    last_progress_s
        Seconds since the work in hand last made progress, or, where there is none, since the last of it ended
        or the actor became ready; None before that. With work in hand it is what `hang_after_s` limits.
    queued
        Messages that wait, as in `Statistics`.
    restarts
        Times the actor was replaced, over the service's life.
    restarts_left
        How many more failures, if they happened now, would be answered by a restart. Grows again when
        restarts leave the window of `period_s` seconds; 0 for a service that stops or has ended.
    cause
        Why the last restart was made, or, of a service that has ended, why it did; None for neither.
    """

    state: HealthState
    generation: int
    working: bool
    last_progress_s: float | None
    queued: int
    restarts: int
    restarts_left: int
    cause: ExitReason | None


def health_state(supervised: SupervisorState | None, *, ended: bool) -> HealthState:
    """What the supervisor's decisions so far mean for a service of one child.

    Parameters
    ----------
    supervised
        None for a service that nobody supervises: not yet, or no more.
    ended
        Whether it takes no more requests.
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
