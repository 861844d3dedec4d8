"""The supervisor: an actor, and a thin shell around the pure core.

Signals arrive as messages, one after another, so only one thread runs the core.
The effects are carried out here, in their order. Children report from their own
threads, through the mailbox. The clock is read once per signal.
"""

from __future__ import annotations

import heapq
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pykka

from cudnn_actor.actors import DEFERRED, Actor, ActorStopped, Crash, Envelope
from cudnn_actor.actors.logs import Log
from cudnn_actor.protocol.errors import MailboxFull
from cudnn_actor.supervision.child import ChildObserver, ChildSpec
from cudnn_actor.supervision.core import decide
from cudnn_actor.supervision.events import Clock, Escalated, LifecycleEvent, log_event, stamp
from cudnn_actor.supervision.exits import ExitReason
from cudnn_actor.supervision.policy import (
    Backoff,
    RestartIntensity,
    Strategy,
    SupervisorPolicy,
)
from cudnn_actor.supervision.signals import (
    CancelTimer,
    ChildExited,
    ChildLost,
    Effect,
    Emit,
    Escalate,
    Finish,
    KillChild,
    ReportReady,
    RestartRequested,
    SetTimer,
    Signal,
    StartChild,
    StartRequested,
    StopChild,
    StopRequested,
    TimerFired,
    TimerKey,
)
from cudnn_actor.supervision.state import Mode, SupervisorState
from cudnn_actor.supervision.watch import Watch, look_every_s

__all__ = ["RestartsExhausted", "Supervisor"]

KILL_GRACE_S = 5.0
"""How long a killed child's thread may take to end, in seconds, before it is given up."""

LAST_ACT_S = 10.0
"""How long a child that ends by itself may take for its final cleanup, in seconds: longer than the kernel
may take to end a process."""

_THREAD_LOST = ExitReason.hung("its thread does not end")

log = Log("cudnn_actor.supervision")


class RestartsExhausted(Crash):
    """Raised by a supervisor that gives up. Its own supervisor treats it like any crash."""

    logged = True  # as `service.escalated`


class Supervisor(Actor):
    """Starts children in order, restarts those that fail, stops them in reverse order, escalates.

    It has a pykka reference; `stop()` ends the children first. As a child of another supervisor it is
    ready when its children are, and crashes when its restarts are used up.

    Parameters
    ----------
    children
        In start order.
    strategy, intensity, backoff
        See `supervision.policy`.
    parent
        A pykka actor that is told `Escalated` when the restarts are used up; None for none.
    listener
        Called with every lifecycle event, on the supervisor's thread; must not block or raise.
    seed
        Decides the jitter of the delays. None: each supervisor has its own, so that the services of several
        processes, which fail together, do not start again together.
    name
        The `service` field of its events and log lines; None for no such field.
    clock
        Stamps events. Timers always use `time.monotonic()`.
    """

    ready_when_started: ClassVar[bool] = False

    def __init__(
        self,
        children: Sequence[ChildSpec],
        *,
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        intensity: RestartIntensity | None = None,
        backoff: Backoff | None = None,
        parent: pykka.ActorRef[Any] | None = None,
        listener: Callable[[LifecycleEvent], None] | None = None,
        seed: int | None = None,
        name: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__()
        self.service = name
        self._clock = clock or Clock()
        policy = SupervisorPolicy(
            children=tuple(spec.policy for spec in children),
            strategy=strategy,
            intensity=intensity or RestartIntensity(),
            backoff=backoff or Backoff(),
        )
        self._specs = {spec.policy.id: spec for spec in children}
        own_seed = int.from_bytes(os.urandom(8)) if seed is None else seed
        self._state = SupervisorState.initial(policy, seed=own_seed)
        self._parent = parent
        self._listener = listener
        self._actors: dict[str, Actor] = {}
        self._now = 0.0
        self._watch = Watch()
        self._timers: list[tuple[float, int, TimerKey]] = []
        self._timer_numbers = itertools.count()
        self._live_timers: set[TimerKey] = set()
        self._stopping: list[Envelope] = []
        self._failure: RestartsExhausted | None = None

    # From outside.

    @property
    def state(self) -> SupervisorState:
        """The current state. Any thread; never blocks."""
        return self._state

    def signal(self, signal: Signal) -> None:
        """Send the supervisor a signal. Any thread; never blocks. Ignored once it has ended."""
        try:
            self.mailbox.admit(Envelope(signal))
        except ActorStopped:
            log.debug("supervisor.signal_too_late", signal=repr(signal))

    def end(self, reason: str) -> None:
        """End the children in reverse order, then the supervisor. Any thread; never blocks."""
        self.signal(StopRequested(reason=ExitReason.shutdown(reason)))

    # The actor.

    def on_start(self) -> None:
        """Start the first child."""
        self._step(StartRequested())

    def on_receive(self, message: Any) -> Any:
        """Handle a signal."""
        if isinstance(message, ChildExited) and message.incarnation == self._incarnation(message.child):
            self._actors.pop(message.child, None)
        self._step(message)

    def on_stop_message(self) -> Any:
        """Handle pykka's `stop`: it is answered when everything has ended."""
        assert self.current is not None
        self._stopping.append(self.current)
        self._step(StopRequested())
        return DEFERRED

    def poll(self) -> float | None:
        """Fire the timers that are due and look for hung children."""
        while self._timers and self._timers[0][0] <= time.monotonic():
            _, _, key = heapq.heappop(self._timers)
            if key in self._live_timers:
                self._live_timers.remove(key)
                self._step(TimerFired(key=key))
        return self._next_look()

    def on_crash(self, error: BaseException, current: Envelope | None, waiting: list[Envelope]) -> None:
        """End all children, and answer the callers that wait for the end."""
        children, self._actors = tuple(self._actors.values()), {}
        for actor in children:
            actor.abandon("its supervisor has ended")
        for actor in children:
            self._ends(actor)
        self._answer_stops()
        super().on_crash(error, current, waiting)

    def _next_look(self) -> float | None:
        self._watch.wake(time.monotonic())
        watched = [
            (name, actor, actor.working_since(), limit)
            for name, actor in self._actors.items()
            if (limit := self._specs[name].hang_after_s) is not None
        ]
        now = time.monotonic()
        begun = [since for _, _, since, _ in watched if since is not None]
        self._watch.forget_before(min(begun, default=now))
        waits = [self._look_for_hang(*child, now) for child in watched]
        every_s = min((look_every_s(limit) for *_, limit in watched), default=0.0)
        now = time.monotonic()
        waits += [at - now for at, _, _ in self._timers[:1]]  # computed last: a hang sets a timer
        pause_s = max(0.0, min(waits)) if waits else None
        self._watch.sleep(now, pause_s if watched else None, every_s=every_s)
        return pause_s

    def _look_for_hang(self, name: str, actor: Actor, since: float | None, limit: float, now: float) -> float:
        """Report the child if it is hung. Returns the seconds until the next check.

        An idle child is checked too: it may start work, and be stopped (as by SIGSTOP), a moment later.
        """
        # It may be gone already: ended together with a child that was found hung before it.
        if since is not None and self._actors.get(name) is actor:
            left = limit - self._watch.watched_s(since, now)
            if left > 0:
                return min(left, look_every_s(limit))
            reason = ExitReason.hung(f"no progress for {limit:g} s")
            self._step(RestartRequested(child=name, reason=reason, incarnation=self._incarnation(name)))
        return look_every_s(limit)

    def _incarnation(self, child: str) -> int:
        return self._state.children[self._state.policy.index_of(child)].incarnation

    def _step(self, signal: Signal) -> None:
        """Process a signal. Its kills are carried out first: the other effects depend on their success."""
        self._now = time.monotonic()
        state, effects = decide(self._state, signal, self._now)
        if (lost := self._kill(effects)) is not None and self._state.mode is Mode.UP:
            state, effects = decide(self._state, lost, self._now)
            self._kill(effects)
        self._state = state
        for effect in effects:
            self._carry_out(effect)

    def _kill(self, effects: Sequence[Effect]) -> ChildLost | None:
        """Kill the children that a decision names. Returns a signal if the thread of one does not end."""
        lost = None
        for effect in effects:
            if isinstance(effect, KillChild):
                actor = self._actors.pop(effect.child, None)
                if actor is not None and not self._ends(actor):
                    lost = ChildLost(child=effect.child, incarnation=effect.incarnation, reason=_THREAD_LOST)
        return lost

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case StartChild():
                self._start_child(effect)
            case StopChild():
                if (actor := self._actors.get(effect.child)) is not None:
                    actor.end("asked to stop by its supervisor")
            case KillChild():
                pass  # done already: see `_step`
            case SetTimer():
                self._live_timers.add(effect.key)
                late = time.monotonic() - self._now  # a kill before it may have taken long
                heapq.heappush(self._timers, (effect.at + late, next(self._timer_numbers), effect.key))
            case CancelTimer():
                self._live_timers.discard(effect.key)
            case Emit():
                self._emit(effect.event)
            case ReportReady():
                self.report_ready()
            case Escalate():
                self._failure = RestartsExhausted(f"{effect.child} gave up {effect.why}: {effect.cause}")
            case Finish():
                self._conclude()

    def _start_child(self, effect: StartChild) -> None:
        spec = self._specs[effect.child]
        try:
            actor = spec.make(effect.incarnation)
            actor.watch(ChildObserver(self.signal, effect.child, effect.incarnation))
            self._actors[effect.child] = actor
            actor.launch()
        except Exception as error:  # including: the system cannot start another thread
            log.exception("supervisor.make_failed", child=effect.child)
            self._actors.pop(effect.child, None)
            reason = ExitReason.start_failed(repr(error))
            self.signal(ChildExited(child=effect.child, incarnation=effect.incarnation, reason=reason))

    def _ends(self, actor: Actor) -> bool:
        """End a child that makes no progress. Returns whether its thread has ended. Blocks.

        A child that has begun its final cleanup gets more time. If the thread does not end, the child's
        messages are answered here.
        """
        actor.abandon("killed by its supervisor")
        if actor.join(KILL_GRACE_S):
            return True
        if not actor.give_up(ActorStopped(reason="did not respond and was given up")):
            return actor.join(LAST_ACT_S)
        log.error("supervisor.thread_lost", actor=str(actor))
        return False

    def _emit(self, event: LifecycleEvent) -> None:
        event = stamp(event, self.service, self._clock)
        log_event(log, event)
        if self._parent is not None and isinstance(event, Escalated):
            self._tell_parent(event)
        if self._listener is not None:
            self._listener(event)

    def _tell_parent(self, event: Escalated) -> None:
        assert self._parent is not None
        try:
            self._parent.tell(event)
        except (pykka.ActorDeadError, MailboxFull) as error:
            log.warning("supervisor.parent_not_told", parent=str(self._parent), error=repr(error))

    def _conclude(self) -> None:
        self._answer_stops()
        if self._failure is not None:
            raise self._failure
        super().end("stopped")

    def _answer_stops(self) -> None:
        for envelope in self._stopping:
            self.settle(envelope)
        self._stopping.clear()
