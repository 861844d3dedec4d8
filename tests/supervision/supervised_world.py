"""A world around the supervision core: children that obey only the test, a manual clock, and timers.

It carries the core's effects out, and refuses those that no shell should ever be given.
"""

from __future__ import annotations

from cudnn_actor.supervision import (
    Backoff,
    ChildPolicy,
    Escalated,
    ExitReason,
    LifecycleEvent,
    Restart,
    Restarted,
    Restarting,
    RestartIntensity,
    Started,
    Stopped,
    Strategy,
    SupervisorPolicy,
    SupervisorState,
)
from cudnn_actor.supervision.core import decide
from cudnn_actor.supervision.signals import (
    CancelTimer,
    ChildExited,
    ChildLost,
    ChildReady,
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
    TimerKind,
)
from cudnn_actor.supervision.state import Mode

CRASH = ExitReason.crash("boom")
# What may be told of a child, by what was told last; a new start of one that had ended begins with "".
TELLS = {
    "": (Started, Restarting, Stopped),
    "Started": (Restarting, Stopped),
    "Restarting": (Restarting, Restarted, Stopped),
    "Restarted": (Restarting, Stopped),
    "Stopped": (),
}
NO_DELAY = Backoff(initial_s=0.0)
PLENTY = RestartIntensity(max_restarts=1000)


def policy_of(
    children: str | dict[str, Restart],
    strategy: Strategy = Strategy.ONE_FOR_ONE,
    intensity: RestartIntensity = PLENTY,
    backoff: Backoff = NO_DELAY,
    shutdown_s: float = 5.0,
    *,
    replaceable: bool | dict[str, bool] = True,
) -> SupervisorPolicy:
    """Children named by single letters, permanent and replaceable unless said otherwise."""
    kept = replaceable if isinstance(replaceable, dict) else dict.fromkeys(children, replaceable)
    restarts = dict.fromkeys(children, Restart.PERMANENT) if isinstance(children, str) else children
    return SupervisorPolicy(
        children=tuple(
            ChildPolicy(
                id=name,
                restart=restart,
                shutdown_s=shutdown_s,
                ready_within_s=30.0,
                replaceable=kept.get(name, True),
            )
            for name, restart in restarts.items()
        ),
        strategy=strategy,
        intensity=intensity,
        backoff=backoff,
    )


class World:
    def __init__(self, policy: SupervisorPolicy, *, seed: int = 0) -> None:
        self.policy = policy
        self.state = SupervisorState.initial(policy, seed=seed)
        self.now = 1000.0
        self.timers: dict[TimerKey, float] = {}
        self.cancelled: list[TimerKey] = []
        self.live: dict[str, int] = {}
        """The living incarnation of each child; one that was killed is no longer here."""
        self.ready_children: set[str] = set()
        self.gone: list[tuple[str, int]] = []
        self.latest = dict.fromkeys((child.id for child in policy.children), 0)
        self.temporary = {child.id for child in policy.children if child.restart is Restart.TEMPORARY}
        self.asked: dict[str, int] = {}
        """The latest incarnation of each child that was asked to stop."""
        self.been_ready: set[str] = set()
        self.told = dict.fromkeys(self.latest, "")
        self.not_before = dict.fromkeys(self.latest, self.now)
        self.failures: list[float] = []
        """When the restarts were decided."""
        self.effects: list[Effect] = []
        self.events: list[LifecycleEvent] = []
        self.stop_sent = False
        self.unkillable: set[str] = set()
        """Children whose next kill fails."""
        self.lost: set[str] = set()
        """Those whose kill has failed while the supervisor was up."""

    # what the test does

    def send(self, signal: Signal) -> tuple[Effect, ...]:
        before = self.state
        self.state, effects = decide(before, signal, self.now)
        killed = [effect.child for effect in effects if isinstance(effect, KillChild)]
        if before.mode is Mode.UP and (lost := self.unkillable.intersection(killed)):
            effects = self._tell_of_a_loss(before, signal, killed, min(lost))
        self._note_failure(effects)
        for effect in effects:
            self._carry_out(effect)
            self.effects.append(effect)
        return effects

    def _tell_of_a_loss(
        self, before: SupervisorState, signal: Signal, killed: list[str], lost: str
    ) -> tuple[Effect, ...]:
        """Do as the shell does: kill first, then have it decided anew."""
        for child in killed:
            self._note_death(child)
        self.lost.add(lost)
        if isinstance(signal, TimerFired):
            self.timers[signal.key] = self.now  # as the state before it has it
        told = ChildLost(child=lost, incarnation=self.latest[lost], reason=ExitReason.hung())
        self.state, effects = decide(before, told, self.now)
        return effects

    def up(self) -> World:
        """Start, and let each child get ready when it is started."""
        self.send(StartRequested())
        return self.ready_all()

    def ready_all(self) -> World:
        while waiting := [name for name in self.live if name not in self.ready_children]:
            self.ready(waiting[0])
        return self

    def ready(self, child: str) -> None:
        incarnation = self.live[child]
        self.ready_children.add(child)
        self.been_ready.add(child)
        self.send(ChildReady(child=child, incarnation=incarnation))

    def exit(self, child: str, reason: ExitReason = CRASH) -> tuple[Effect, ...]:
        incarnation = self._note_death(child)
        return self.send(ChildExited(child=child, incarnation=incarnation, reason=reason))

    def hang(self, child: str) -> None:
        self.send(RestartRequested(child=child, reason=ExitReason.hung(), incarnation=self.live[child]))

    def stop(self) -> None:
        self.stop_sent = True
        self.send(StopRequested())

    def advance(self, seconds: float) -> None:
        """Let time pass; timers fire at their own times, in order."""
        end = self.now + seconds
        while self.timers and min(self.timers.values()) <= end:
            key = min(self.timers, key=lambda key: self.timers[key])
            self.now = max(self.now, self.timers.pop(key))
            self.send(TimerFired(key=key))
        self.now = end

    def deadline(self, kind: TimerKind) -> float:
        """Seconds from now until the one timer of this kind."""
        (at,) = (at for key, at in self.timers.items() if key.kind is kind)
        return at - self.now

    # what the test sees

    @property
    def starts(self) -> str:
        return "".join(effect.child for effect in self.effects if isinstance(effect, StartChild))

    @property
    def stops(self) -> str:
        return "".join(effect.child for effect in self.effects if isinstance(effect, StopChild))

    @property
    def kills(self) -> str:
        return "".join(effect.child for effect in self.effects if isinstance(effect, KillChild))

    @property
    def escalations(self) -> list[Escalate]:
        return [effect for effect in self.effects if isinstance(effect, Escalate)]

    @property
    def finished(self) -> bool:
        return any(isinstance(effect, Finish) for effect in self.effects)

    def forget(self) -> World:
        """Begin the record anew."""
        self.effects.clear()
        self.events.clear()
        return self

    # what the core does

    def _carry_out(self, effect: Effect) -> None:
        assert not self.finished, f"{effect} after the end"
        match effect:
            case StartChild(child=child, incarnation=incarnation):
                self._start(child, incarnation)
            case StopChild(child=child, incarnation=incarnation, deadline=deadline):
                assert self.live.get(child) == incarnation or self.lost
                assert deadline > self.now
                self.asked[child] = incarnation
                assert not self._later(child) & set(self.live), "stopped before those after it had ended"
            case KillChild(child=child, incarnation=incarnation):
                assert self.live.get(child) == incarnation or self.lost
                if child in self.live:
                    self._note_death(child)
            case SetTimer(key=key, at=at):
                assert key not in self.timers
                assert at > self.now
                self.timers[key] = at
            case CancelTimer(key=key):
                del self.timers[key]
                self.cancelled.append(key)
            case Emit(event=event):
                self._tell(event)
            case Finish():
                assert not self.live, "finished over living children"
                assert not self.timers
            case Escalate():
                assert not self.live, "escalated over living children"
            case ReportReady():
                pass

    def _start(self, child: str, incarnation: int) -> None:
        assert not self.stop_sent, "started after the stop"
        assert not self.lost, "started although a child could not be killed"
        assert not self.asked.items() & self.live.items(), "started while another is being stopped"
        assert child not in self.live, "two living incarnations"
        assert incarnation == self.latest[child] + 1
        assert incarnation == 1 or child not in self.temporary, "a temporary child started again"
        assert self.now >= self.not_before[child], "started within its backoff"
        if self.policy.strategy is not Strategy.ONE_FOR_ONE or child not in self.been_ready:
            for earlier in self._earlier(child):
                assert earlier in self.ready_children or self.told[earlier] == "Stopped", (
                    "started out of order"
                )
        self.latest[child] = incarnation
        self.live[child] = incarnation
        if self.told[child] == "Stopped":
            self.told[child] = ""

    def _note_death(self, child: str) -> int:
        incarnation = self.live.pop(child)
        self.ready_children.discard(child)
        self.gone.append((child, incarnation))
        return incarnation

    def _note_failure(self, effects: tuple[Effect, ...]) -> None:
        """Of the children that restart in one decision the first is the one that failed."""
        told = [effect.event for effect in effects if isinstance(effect, Emit)]
        failure = next((event for event in told if isinstance(event, Restarting)), None)
        if failure is not None:
            self.failures.append(self.now)
            names = list(self.latest)
            for place in self.policy.strategy.group(names.index(failure.child), len(names)):
                self.not_before[names[place]] = self.now + failure.delay_s

    def _tell(self, event: LifecycleEvent) -> None:
        self.events.append(event)
        if event.child is None or isinstance(event, Escalated):
            assert not self.live
            return
        assert not (isinstance(event, Restarting) and event.child in self.temporary)
        assert isinstance(event, TELLS[self.told[event.child]]), f"{event} after {self.told[event.child]}"
        self.told[event.child] = type(event).__name__
        if not isinstance(event, Stopped):
            assert event.generation == self.latest[event.child]

    def _earlier(self, child: str) -> list[str]:
        names = list(self.latest)
        return names[: names.index(child)]

    def _later(self, child: str) -> set[str]:
        names = list(self.latest)
        return set(names[names.index(child) + 1 :])
