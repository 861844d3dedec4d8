"""The inputs of the supervision core (signals) and its outputs (effects): data only.

Times are seconds of one monotonic clock, the shell's. An incarnation is one start of a child, numbered from
1. A signal that names an incarnation or a timer that is no longer current is ignored. So the shell may
deliver signals late, and need not remove what a cancelled timer has already put in its queue.
"""

from __future__ import annotations

import enum

import msgspec

from cudnn_actor.supervision.events import LifecycleEvent
from cudnn_actor.supervision.exits import ExitReason

__all__ = [
    "CancelTimer",
    "ChildExited",
    "ChildLost",
    "ChildReady",
    "ChildSignal",
    "Effect",
    "Emit",
    "Escalate",
    "Finish",
    "KillChild",
    "ReportReady",
    "RestartRequested",
    "SetTimer",
    "Signal",
    "StartChild",
    "StartRequested",
    "StopChild",
    "StopRequested",
    "TimerFired",
    "TimerKey",
    "TimerKind",
]

_SHUTDOWN = ExitReason.shutdown("asked to stop")


class TimerKind(enum.StrEnum):
    """The purpose of a timer."""

    READINESS = "readiness"
    BACKOFF = "backoff"
    SHUTDOWN = "shutdown"


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """Frozen, comparable, hashable."""


class _OfChild(_Record, frozen=True, kw_only=True):
    """A signal about one incarnation of a child."""

    child: str
    incarnation: int


class TimerKey(_OfChild, frozen=True, kw_only=True):
    """A timer's name, never used twice: the kind of wait, the child and its incarnation."""

    kind: TimerKind


class StartRequested(_Record, frozen=True, kw_only=True):
    """Start the children in order. A repetition is ignored."""


class StopRequested(_Record, frozen=True, kw_only=True):
    """Stop the children in reverse order, then finish. A repetition is ignored."""

    reason: ExitReason = _SHUTDOWN


class ChildReady(_OfChild, frozen=True, kw_only=True):
    """The child reports that it is ready."""


class ChildExited(_OfChild, frozen=True, kw_only=True):
    """The child has ended, or could not be started at all."""

    reason: ExitReason


class ChildLost(_OfChild, frozen=True, kw_only=True):
    """The child could not be killed, and may resume at any time: it cannot be replaced."""

    reason: ExitReason


class TimerFired(_Record, frozen=True, kw_only=True):
    """The time of a `SetTimer` has come."""

    key: TimerKey


class RestartRequested(_Record, frozen=True, kw_only=True):
    """Kill the child and treat it as having exited with `reason`. Sent by a hang watchdog.

    Give the incarnation that was found hung, so that a successor is not killed in its place. None means
    the current one.
    """

    child: str
    reason: ExitReason
    incarnation: int | None = None


ChildSignal = ChildReady | ChildExited | ChildLost | TimerFired | RestartRequested
"""Signals about one child."""

Signal = StartRequested | StopRequested | ChildSignal
"""All inputs of the core."""


class StartChild(_OfChild, frozen=True, kw_only=True):
    """Start the child. `ChildReady` or `ChildExited` of this incarnation is expected."""


class StopChild(_OfChild, frozen=True, kw_only=True):
    """Ask the child, ready or still starting, to end before `deadline`. `ChildExited` is expected."""

    deadline: float


class KillChild(_OfChild, frozen=True, kw_only=True):
    """End the child without asking. Final: the core is done with this incarnation and ignores its exit.

    Kills are carried out before the other effects of their decision. If one fails while the supervisor is up,
    the other effects are dropped, and a new decision is made for `ChildLost`.
    """


class SetTimer(_Record, frozen=True, kw_only=True):
    """Send `TimerFired` with `key` at the time `at`, or as soon after as possible."""

    key: TimerKey
    at: float


class CancelTimer(_Record, frozen=True, kw_only=True):
    """The timer is no longer needed. If it fires anyway, that does no harm."""

    key: TimerKey


class Emit(_Record, frozen=True, kw_only=True):
    """Emit an event to the listeners."""

    event: LifecycleEvent


class ReportReady(_Record, frozen=True, kw_only=True):
    """All children are ready or done, so the supervisor itself is ready. Comes once at most."""


class Escalate(_Record, frozen=True, kw_only=True):
    """The restarts are used up and everything is stopped: fail, with the cause. `Finish` follows.

    `why` is what `Escalated.why` is.
    """

    child: str
    cause: ExitReason
    why: str


class Finish(_Record, frozen=True, kw_only=True):
    """No child lives and no effect follows. The last effect, exactly once."""


Effect = StartChild | StopChild | KillChild | SetTimer | CancelTimer | Emit | ReportReady | Escalate | Finish
"""All outputs of the core. The shell carries out those of a decision in order."""
