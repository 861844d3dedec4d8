"""The state of the supervision core: an immutable value, copied on write."""

from __future__ import annotations

import enum

import msgspec

from cudnn_actor.supervision.exits import ExitReason
from cudnn_actor.supervision.policy import Strategy, SupervisorPolicy
from cudnn_actor.supervision.signals import (
    ChildExited,
    ChildLost,
    ChildReady,
    ChildSignal,
    Escalate,
    RestartRequested,
    TimerFired,
    TimerKey,
)

__all__ = ["ChildState", "Mode", "Phase", "SupervisorState"]


class Mode(enum.StrEnum):
    """The supervisor's lifecycle state."""

    NEW = "new"
    UP = "up"
    """Starting, running or restarting: every child that should be ready is ready or becoming ready."""
    STOPPING = "stopping"
    STOPPED = "stopped"


class Phase(enum.StrEnum):
    """A child's lifecycle state."""

    DOWN = "down"
    """Not alive; will be started as soon as the order allows."""
    BACKOFF = "backoff"
    """Not alive; will be started after its backoff timer."""
    STARTING = "starting"
    """Alive, and not ready yet; has a readiness timer."""
    READY = "ready"
    """Alive and ready."""
    DOOMED = "doomed"
    """Alive; will be asked to stop after the children after it have ended."""
    STOPPING = "stopping"
    """Alive, asked to stop; has a shutdown timer."""
    DONE = "done"
    """Not alive; will not be started again, unless with its group."""


_SETTLED = (Phase.READY, Phase.DONE)


class ChildState(msgspec.Struct, frozen=True, kw_only=True):
    """One child. `incarnation` is the number of its latest start, alive or not, from 1; 0 before the
    first."""

    phase: Phase = Phase.DOWN
    incarnation: int = 0
    timer: TimerKey | None = None
    attempt: int = 0
    """Failures in a row."""
    was_ready: bool = False
    ready_at: float | None = None
    """When this incarnation became ready."""
    down_since: float | None = None
    """When the current outage began; None without one."""


class SupervisorState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a decision depends on, except the signal and the time. Make one with `initial`."""

    policy: SupervisorPolicy
    children: tuple[ChildState, ...]
    seed: int
    drawn: int = 0
    """How many random numbers have been drawn: with `seed`, the generator's whole state."""
    mode: Mode = Mode.NEW
    restarts: tuple[float, ...] = ()
    """When the restarts in the window were made."""
    announced: bool = False
    ending: ExitReason | None = None
    escalation: Escalate | None = None

    @classmethod
    def initial(cls, policy: SupervisorPolicy, *, seed: int = 0) -> SupervisorState:
        """A supervisor that waits for `StartRequested`; `seed` decides the jitter of its delays."""
        return cls(policy=policy, children=tuple(ChildState() for _ in policy.children), seed=seed)

    def addressee(self, signal: ChildSignal) -> int | None:
        """The index of the child that the signal names; None if its incarnation or timer is outdated."""
        name = signal.key.child if isinstance(signal, TimerFired) else signal.child
        index = self.policy.index_of(name)
        child = self.children[index]
        match signal:
            case TimerFired(key=key):
                current = key == child.timer
            case ChildReady() | ChildExited() | ChildLost():
                current = signal.incarnation == child.incarnation
            case RestartRequested():
                current = signal.incarnation in (None, child.incarnation)
        return index if current else None

    def in_phase(self, phase: Phase) -> list[int]:
        """The children in this phase, in start order."""
        return [index for index, child in enumerate(self.children) if child.phase is phase]

    def may_start(self, index: int) -> bool:
        """Whether it is the child's turn to start. Does not check for a group that is still being stopped."""
        child, strategy = self.children[index], self.policy.strategy
        if child.phase is not Phase.DOWN:
            return False
        if strategy is Strategy.ONE_FOR_ONE and child.was_ready:
            return True  # failures of siblings do not affect it; only first starts keep the order
        if strategy is Strategy.ONE_FOR_ALL and self.in_phase(Phase.BACKOFF):
            return False  # the failed child may come after children that would start before it
        return all(earlier.phase in _SETTLED for earlier in self.children[:index])

    def restarts_left(self, index: int, now: float) -> int:
        """How many failures of the child at the monotonic time `now` would be answered by a restart. 0 while
        the supervisor stops, and for a child that was ready and is not replaceable."""
        child = self.children[index]
        lost = child.ready_at is not None and not self.policy.children[index].replaceable
        if lost or child.phase is Phase.DONE or self.mode in (Mode.STOPPING, Mode.STOPPED):
            return 0
        return self.policy.intensity.restarts_left(self.restarts, now)

    @property
    def settled(self) -> bool:
        """Whether every child is ready or done."""
        return all(child.phase in _SETTLED for child in self.children)
