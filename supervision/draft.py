"""A draft of a decision: the next state and the effects so far, and the operations that build them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from cudnn_actor.supervision.events import LifecycleEvent
from cudnn_actor.supervision.policy import ChildPolicy
from cudnn_actor.supervision.seeded import random01
from cudnn_actor.supervision.signals import (
    CancelTimer,
    Effect,
    Emit,
    KillChild,
    SetTimer,
    TimerKey,
    TimerKind,
)
from cudnn_actor.supervision.state import ChildState, SupervisorState

__all__ = ["Draft"]


class Draft:
    """Lives only within one decision, so the decision stays pure although it is built by assignments."""

    def __init__(self, state: SupervisorState, now: float) -> None:
        self.state = state
        self.now = now
        self.effects: list[Effect] = []

    def policy(self, index: int) -> ChildPolicy:
        """The child's policy."""
        return self.state.policy.children[index]

    def name(self, index: int) -> str:
        """The child's id."""
        return self.policy(index).id

    def child(self, index: int) -> ChildState:
        """The child's state in the draft."""
        return self.state.children[index]

    def change(self, **fields: Any) -> None:
        """Set fields of the supervisor."""
        self.state = replace(self.state, **fields)

    def set(self, index: int, **fields: Any) -> None:
        """Set fields of a child."""
        children = list(self.state.children)
        children[index] = replace(children[index], **fields)
        self.change(children=tuple(children))

    def draw(self) -> float:
        """The next random number of the state's own generator, in [0, 1)."""
        self.change(drawn=self.state.drawn + 1)
        return random01(self.state.seed, self.state.drawn)

    def emit(self, event: LifecycleEvent) -> None:
        """Add an effect that emits an event to the listeners."""
        self.effects.append(Emit(event=event))

    def kill(self, index: int) -> None:
        """End the child's incarnation; the caller changes its phase."""
        self.effects.append(KillChild(child=self.name(index), incarnation=self.child(index).incarnation))

    def arm(self, index: int, kind: TimerKind, at: float) -> None:
        """Set the child's one timer."""
        key = TimerKey(kind=kind, child=self.name(index), incarnation=self.child(index).incarnation)
        self.set(index, timer=key)
        self.effects.append(SetTimer(key=key, at=at))

    def disarm(self, index: int) -> None:
        """Cancel the child's timer, if it has one."""
        timer = self.child(index).timer
        if timer is not None:
            self.set(index, timer=None)
            self.effects.append(CancelTimer(key=timer))

    def outage(self, index: int) -> float:
        """When the child's current outage began; `now` if it had none until now."""
        since = self.child(index).down_since
        return self.now if since is None else since
