"""How children and the supervisor stop: in reverse order, one at a time, each with its deadline."""

from __future__ import annotations

from cudnn_actor.supervision.draft import Draft
from cudnn_actor.supervision.events import Escalated, Stopped
from cudnn_actor.supervision.exits import ExitReason, Restart
from cudnn_actor.supervision.signals import Finish, StopChild, TimerKind
from cudnn_actor.supervision.state import Mode, Phase

__all__ = ["StoppingDraft"]


class StoppingDraft(Draft):
    """The rules for stopping in `core`'s header, one method each."""

    def stop(self, reason: ExitReason) -> None:
        """Stop the supervisor: every living child becomes doomed, every other one done."""
        self.change(mode=Mode.STOPPING, ending=reason)
        for index, child in reversed(tuple(enumerate(self.state.children))):
            match child.phase:
                case Phase.STARTING | Phase.READY:
                    self.doom(index)
                case Phase.BACKOFF:
                    self.disarm(index)
                    self.done(index, ExitReason.shutdown("its supervisor stops"))
                case Phase.DOWN if child.down_since is not None:
                    self.done(index, ExitReason.shutdown("its supervisor stops"))
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
            self.done(index, reason)
        else:
            self.set(index, phase=Phase.DOWN, down_since=self.outage(index))

    def done(self, index: int, reason: ExitReason) -> None:
        """The child has ended for good."""
        self.set(index, phase=Phase.DONE, down_since=None, attempt=0)
        self.emit(Stopped(child=self.name(index), reason=reason))

    def finish(self) -> None:
        """No child lives any more: emit the last events, with the reason."""
        assert self.state.ending is not None
        self.change(mode=Mode.STOPPED)
        escalation = self.state.escalation
        if escalation is not None:
            self.emit(Escalated(child=escalation.child, cause=escalation.cause))
            self.effects.append(escalation)
        self.emit(Stopped(child=None, reason=self.state.ending))
        self.effects.append(Finish())
