"""A draft of a decision: the next state and the effects so far, and the operations that build them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from cudnn_actor.supervision.events import Escalated, LifecycleEvent, Stopped
from cudnn_actor.supervision.exits import ExitReason, Restart
from cudnn_actor.supervision.policy import ChildPolicy
from cudnn_actor.supervision.seeded import random01
from cudnn_actor.supervision.signals import (
    CancelTimer,
    Effect,
    Emit,
    Finish,
    KillChild,
    SetTimer,
    StopChild,
    TimerKey,
    TimerKind,
)
from cudnn_actor.supervision.state import ChildState, Mode, Phase, SupervisorState

__all__ = ["Draft"]


class Draft:
    """Lives only within one decision, so the decision stays pure although it is built by assignments.

    It has the rules for stopping in `core`'s header, one method each.
    """

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

    # How children and the supervisor stop: in reverse order, one at a time, each with its deadline.

    def stop(self, reason: ExitReason) -> None:
        """Stop the supervisor: every living child becomes doomed, every other one done."""
        self.change(mode=Mode.STOPPING, ending=reason)
        for index, child in reversed(tuple(enumerate(self.state.children))):
            match child.phase:
                case Phase.STARTING | Phase.READY:
                    self.doom(index)
                case Phase.BACKOFF:
                    self.disarm(index)
                    self.note_done(index, ExitReason.shutdown("its supervisor stops"))
                case Phase.DOWN if child.down_since is not None:
                    self.note_done(index, ExitReason.shutdown("its supervisor stops"))
                case Phase.DOWN:  # never started, or done before its group was restarted: no event to emit
                    self.set(index, phase=Phase.DONE)

    def doom(self, index: int) -> None:
        """Mark the child: it will be asked to stop when its turn comes."""
        self.disarm(index)
        self.set(index, phase=Phase.DOOMED)

    def ask_to_stop(self, index: int) -> None:
        """Ask the doomed child to stop; kill it at once if its `shutdown_s` is 0."""
        deadline = self.now + self.policy(index).shutdown_s
        if deadline <= self.now:
            self.kill_overdue(index)
            return
        self.set(index, phase=Phase.STOPPING)
        incarnation = self.child(index).incarnation
        self.effects.append(StopChild(child=self.name(index), incarnation=incarnation, deadline=deadline))
        self.arm(index, TimerKind.SHUTDOWN, deadline)

    def kill_overdue(self, index: int) -> None:
        """Kill a child that did not stop in time."""
        self.kill(index)
        within = self.policy(index).shutdown_s
        self.went_down(index, ExitReason.killed(f"not stopped within {within:g} s"))

    def went_down(self, index: int, reason: ExitReason) -> None:
        """A child that should end has ended, for whatever reason: it is down, or done."""
        self.disarm(index)
        if self.state.mode is Mode.STOPPING or self.policy(index).restart is Restart.TEMPORARY:
            self.note_done(index, reason)
        else:
            self.set(index, phase=Phase.DOWN, down_since=self.outage(index))

    def note_done(self, index: int, reason: ExitReason) -> None:
        """The child has ended for good."""
        self.set(index, phase=Phase.DONE, down_since=None, attempt=0)
        self.emit(Stopped(child=self.name(index), reason=reason))

    def finish(self) -> None:
        """No child lives any more: emit the last events, with the reason."""
        assert self.state.ending is not None
        self.change(mode=Mode.STOPPED)
        escalation = self.state.escalation
        if escalation is not None:
            self.emit(Escalated(child=escalation.child, cause=escalation.cause, why=escalation.why))
            self.effects.append(escalation)
        self.emit(Stopped(child=None, reason=self.state.ending))
        self.effects.append(Finish())
