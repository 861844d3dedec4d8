"""The supervision core: a pure function from a state and a signal to a state and effects.

It contains no thread, clock, random generator or callable. The caller (the shell, `supervisor`) passes `now`
in, and carries out the returned effects in order. A state that waits for something that may never happen has
a timer; no other state has one.

What a signal does to the supervisor, by its mode (empty: it is ignored):

=========  ==============================  ==============================  =================
mode       StartRequested                  StopRequested                   about a child
=========  ==============================  ==============================  =================
new        up: start the first             stopped: finish
up                                         stopping: all doomed            the table below
stopping                                                                   the table below
stopped
=========  ==============================  ==============================  =================

What a signal does to a child, by its phase, if the signal names the current incarnation or timer:

=========  ===========  ====================  ========================  =====================
phase      ChildReady   ChildExited           TimerFired                RestartRequested
=========  ===========  ====================  ========================  =====================
down
backoff                                       down: its turn comes
starting   ready        failed                kill; failed: not ready   kill; failed: reason
ready                   failed                                          kill; failed: reason
doomed                  down, or done
stopping                down, or done         kill; down, or done
done
=========  ===========  ====================  ========================  =====================

ChildLost, while the supervisor is up: escalate, whatever the phase. It reports that a kill has failed. It
replaces the signal that led to the kill, so for the core the child still lives.

- **failed**: if its restart type does not cover the reason, the child is done. Else, if the restart window is
  full, or if the child was ready and is not replaceable, escalate: stop all, then fail with this cause. Else
  the child is down, or in backoff for the delay, and the living members of its group are doomed. The restart
  counts once, however many are in the group. A temporary child of the group ends for good. A transient child
  of the group that was done is started again, as in OTP.
- **down, or done**: done if the supervisor stops or the child is temporary, else down. Neither counts as a
  failure, whatever the reason: a crash while stopping is an ordinary exit.
- **kill** is final. For the core the incarnation is over at once; a later exit signal is ignored as outdated.
  A child that cannot be killed (a thread in a call outside Python) gets no successor: both would write at
  once.

After each signal, as far as possible:

1. stop: while no child is being stopped, ask the last doomed one to stop; kill it at once if its
   `shutdown_s` is 0;
2. nothing starts while any child is doomed or being stopped;
3. start each child that is down, once all children before it are ready or done. With one_for_one, a child
   that has been ready before does not wait; with one_for_all, nothing starts while a child is in backoff. A
   backoff goes on while its group is being stopped. If a second child of the group fails meanwhile, the delay
   of the newer failure counts;
4. when all are ready or done, report ready, once;
5. when the supervisor stops and no child lives, emit the last events, escalate if that is the reason, finish.
"""

from __future__ import annotations

from msgspec.structs import replace

from cudnn_actor.supervision.draft import Draft
from cudnn_actor.supervision.events import Restarted, Restarting, Started
from cudnn_actor.supervision.exits import ExitReason, Restart
from cudnn_actor.supervision.signals import (
    ChildExited,
    ChildLost,
    ChildReady,
    ChildSignal,
    Effect,
    Escalate,
    ReportReady,
    RestartRequested,
    Signal,
    StartChild,
    StartRequested,
    StopRequested,
    TimerFired,
    TimerKind,
)
from cudnn_actor.supervision.state import ChildState, Mode, Phase, SupervisorState

__all__ = ["decide"]


def decide(state: SupervisorState, signal: Signal, now: float) -> tuple[SupervisorState, tuple[Effect, ...]]:
    """The state after `signal` at the monotonic time `now` (seconds), and the effects to carry out, in order.

    Raises `InvalidRequest` if the signal names a child that is not in the policy.
    """
    step = _Step(state, now)
    step.take(signal)
    step.settle()
    return step.state, tuple(step.effects)


class _Step(Draft):
    """The header's rules for signals, starts and failures, one method each."""

    def take(self, signal: Signal) -> None:
        """The first table of the header."""
        match self.state.mode, signal:
            case Mode.NEW, StartRequested():
                self.change(mode=Mode.UP)
            case Mode.NEW | Mode.UP, StopRequested(reason=reason):
                self.stop(reason)
            case Mode.UP | Mode.STOPPING, (
                ChildReady() | ChildExited() | ChildLost() | TimerFired() | RestartRequested()
            ):
                index = self.state.addressee(signal)
                if index is not None:
                    self._take_for(index, signal)

    def _take_for(self, index: int, signal: ChildSignal) -> None:
        """The second table of the header."""
        if isinstance(signal, ChildLost):
            if self.state.mode is Mode.UP:
                self.disarm(index)
                self._escalate(index, signal.reason, "because it cannot be killed")
            return
        if isinstance(signal, TimerFired):
            self.set(index, timer=None)
        match self.child(index).phase, signal:
            case Phase.STARTING, ChildReady():
                self._ready(index)
            case Phase.STARTING | Phase.READY, ChildExited(reason=reason):
                self._answer_failure(index, reason)
            case Phase.STARTING | Phase.READY, RestartRequested(reason=reason):
                self.kill(index)
                self._answer_failure(index, reason)
            case Phase.STARTING, TimerFired():
                self.kill(index)
                within = self.policy(index).ready_within_s
                self._answer_failure(index, ExitReason.not_ready(f"not ready within {within:g} s"))
            case Phase.BACKOFF, TimerFired():
                self.set(index, phase=Phase.DOWN)
            case Phase.DOOMED | Phase.STOPPING, ChildExited(reason=reason):
                self.went_down(index, reason)
            case Phase.STOPPING, TimerFired():
                self.kill_overdue(index)

    def settle(self) -> None:
        """Apply the rules at the end of the header as far as possible. Does nothing if nothing has
        changed."""
        while not self.state.in_phase(Phase.STOPPING) and (doomed := self.state.in_phase(Phase.DOOMED)):
            self.ask_to_stop(doomed[-1])
        if self.state.in_phase(Phase.STOPPING):
            return
        if self.state.mode is Mode.UP:
            self._start_those_due()
        elif self.state.mode is Mode.STOPPING:
            self.finish()

    # -- starting

    def _start_those_due(self) -> None:
        for index in range(len(self.state.children)):
            if self.state.may_start(index):
                self._start(index)
        if self.state.settled and not self.state.announced:
            self.change(announced=True)
            self.effects.append(ReportReady())

    def _start(self, index: int) -> None:
        incarnation = self.child(index).incarnation + 1
        self.set(index, phase=Phase.STARTING, incarnation=incarnation, ready_at=None)
        self.effects.append(StartChild(child=self.name(index), incarnation=incarnation))
        self.arm(index, TimerKind.READINESS, self.now + self.policy(index).ready_within_s)

    def _ready(self, index: int) -> None:
        self.disarm(index)
        child = self.child(index)
        self.set(index, phase=Phase.READY, was_ready=True, ready_at=self.now, down_since=None)
        name, generation = self.name(index), child.incarnation
        if child.down_since is None:
            self.emit(Started(child=name, generation=generation))
        else:
            downtime_s = self.now - child.down_since
            self.emit(Restarted(child=name, generation=generation, downtime_s=downtime_s))

    # -- failing

    def _answer_failure(self, index: int, reason: ExitReason) -> None:
        """Restart a child that has failed, or give it up, or escalate."""
        self.disarm(index)
        if not self.policy(index).restart.covers(reason):
            self.note_done(index, reason)
            return
        intensity = self.state.policy.intensity
        if self.child(index).ready_at is not None and not self.policy(index).replaceable:
            self._escalate(index, reason, "because nothing can take its place")
        elif (restarts := intensity.admit(self.state.restarts, self.now)) is None:
            self._escalate(index, reason, intensity.exceeded_text())
        else:
            self.change(restarts=restarts)
            self._restart(index, reason)

    def _restart(self, index: int, reason: ExitReason) -> None:
        child = self.child(index)
        attempt = self._attempt(child)
        delay_s = self.state.policy.backoff.delay(attempt, self.draw())
        self.set(index, phase=Phase.DOWN, attempt=attempt, down_since=self.outage(index))
        if delay_s > 0:
            self.set(index, phase=Phase.BACKOFF)
            self.arm(index, TimerKind.BACKOFF, self.now + delay_s)
        name = self.name(index)
        failure = Restarting(
            child=name, generation=child.incarnation, cause=reason, delay_s=delay_s, attempt=attempt
        )
        self.emit(failure)
        with_group = replace(failure, cause=ExitReason.shutdown(f"restarts with {name}"))
        for other in self.state.policy.strategy.group(index, len(self.state.children)):
            if other != index:
                self._take_along(other, with_group)

    def _take_along(self, index: int, event: Restarting) -> None:
        child = self.child(index)
        temporary = self.policy(index).restart is Restart.TEMPORARY
        match child.phase:
            case Phase.STARTING | Phase.READY:
                self.doom(index)
                if not temporary:
                    self.emit(replace(event, child=self.name(index), generation=child.incarnation))
            case Phase.BACKOFF:
                self.disarm(index)
                self.set(index, phase=Phase.DOWN)
            case Phase.DONE if not temporary:
                self.set(index, phase=Phase.DOWN)

    def _attempt(self, child: ChildState) -> int:
        backoff = self.state.policy.backoff
        stable = child.ready_at is not None and self.now - child.ready_at >= backoff.reset_after_s
        return 1 if stable else child.attempt + 1

    def _escalate(self, index: int, reason: ExitReason, why: str) -> None:
        self.note_done(index, reason)
        self.change(escalation=Escalate(child=self.name(index), cause=reason, why=why))
        self.stop(reason)
