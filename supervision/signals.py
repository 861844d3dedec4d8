"""What goes into the supervision core (signals) and what comes out of it (effects): data only.

Times are seconds of one monotonic clock, the shell's. An incarnation is one start of a child, numbered from
1; what names an incarnation or a timer that is no longer current is ignored, so the shell may be late with
anything, and need not undo what a cancelled timer has already put in its queue.
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
    """What a timer waits for."""

    READINESS = "readiness"
    BACKOFF = "backoff"
    SHUTDOWN = "shutdown"


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """Frozen, comparable, hashable."""


class TimerKey(_Record, frozen=True, kw_only=True):
    """A timer's name, never used twice: which wait, of which incarnation of which child."""

    kind: TimerKind
    child: str
    incarnation: int


class StartRequested(_Record, frozen=True, kw_only=True):
    """Begin: start the children in order. Counts once."""


class StopRequested(_Record, frozen=True, kw_only=True):
    """End: stop the children in reverse order, then finish. Counts once."""

    reason: ExitReason = _SHUTDOWN


class ChildReady(_Record, frozen=True, kw_only=True):
    """The child says that it can work."""

    child: str
    incarnation: int


class ChildExited(_Record, frozen=True, kw_only=True):
    """The child has ended, or could not be started at all."""

    child: str
    incarnation: int
    reason: ExitReason


class ChildLost(_Record, frozen=True, kw_only=True):
    """The child could not be killed, and may go on at any time: it cannot be replaced."""

    child: str
    incarnation: int
    reason: ExitReason


class TimerFired(_Record, frozen=True, kw_only=True):
    """The time of a `SetTimer` has come."""

    key: TimerKey


class RestartRequested(_Record, frozen=True, kw_only=True):
    """Kill the child and treat it as having exited with `reason`; what a hang watchdog says.

    Give the incarnation that was seen to hang, so that a successor isn't killed in its place; None means
    whichever lives.
    """

    child: str
    reason: ExitReason
    incarnation: int | None = None


ChildSignal = ChildReady | ChildExited | ChildLost | TimerFired | RestartRequested
"""Signals about one child."""

Signal = StartRequested | StopRequested | ChildSignal
"""All that the core is told."""


class StartChild(_Record, frozen=True, kw_only=True):
    """Start the child. `ChildReady` or `ChildExited` of this incarnation is expected."""

    child: str
    incarnation: int


class StopChild(_Record, frozen=True, kw_only=True):
    """Ask the child, ready or still starting, to end before `deadline`. `ChildExited` is expected."""

    child: str
    incarnation: int
    deadline: float


class KillChild(_Record, frozen=True, kw_only=True):
    """End the child without asking. Final: the core is done with this incarnation and ignores its exit.

    Kills are carried out before the other effects of their decision. Where one fails in a supervisor that is
    up, none of those is: the decision is taken anew, on `ChildLost`.
    """

    child: str
    incarnation: int


class SetTimer(_Record, frozen=True, kw_only=True):
    """Say `TimerFired` with `key` at the time `at`, or as soon after as possible."""

    key: TimerKey
    at: float


class CancelTimer(_Record, frozen=True, kw_only=True):
    """The timer is no longer needed. That it fires all the same does no harm."""

    key: TimerKey


class Emit(_Record, frozen=True, kw_only=True):
    """Tell whoever listens."""

    event: LifecycleEvent


class ReportReady(_Record, frozen=True, kw_only=True):
    """All children have been ready, or are done: the supervisor itself is ready. Comes once at most."""


class Escalate(_Record, frozen=True, kw_only=True):
    """The restarts are used up and everything is stopped: fail, with the cause. `Finish` follows."""

    child: str
    cause: ExitReason


class Finish(_Record, frozen=True, kw_only=True):
    """Nothing lives and nothing more will come. The last effect, exactly once."""


Effect = StartChild | StopChild | KillChild | SetTimer | CancelTimer | Emit | ReportReady | Escalate | Finish
"""All that the core wants done, in this order."""
