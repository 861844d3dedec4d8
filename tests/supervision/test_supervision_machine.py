"""Anything may happen at any time: the core's invariants under random lives of its children."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cudnn_actor.supervision import Backoff, ExitKind, ExitReason, Restart, RestartIntensity, Strategy
from cudnn_actor.supervision.signals import (
    ChildExited,
    ChildReady,
    Finish,
    RestartRequested,
    Signal,
    StartRequested,
    TimerFired,
)

from ..whole import more
from .supervised_world import World, policy_of

SHUTDOWN_S = 5.0
BACKOFFS = [
    Backoff(initial_s=0.0),
    Backoff(initial_s=1.0, factor=2.0, cap_s=3.0, jitter=0.5, reset_after_s=10.0),
]
reasons = st.sampled_from(ExitKind).map(lambda kind: ExitReason(kind=kind))
picks = st.integers(0, 1 << 16)


class SupervisedLives(RuleBasedStateMachine):
    @initialize(
        restarts=st.lists(st.sampled_from(Restart), max_size=4),
        replaceable=st.booleans(),
        strategy=st.sampled_from(Strategy),
        max_restarts=st.integers(0, 8),
        backoff=st.sampled_from(BACKOFFS),
        shutdown_s=st.sampled_from([0.0, SHUTDOWN_S]),
        seed=st.integers(0, 1 << 32),
    )
    def supervise(
        self,
        *,
        restarts: list[Restart],
        replaceable: bool,
        strategy: Strategy,
        max_restarts: int,
        backoff: Backoff,
        shutdown_s: float,
        seed: int,
    ) -> None:
        children = dict(zip("abcd", restarts, strict=False))
        intensity = RestartIntensity(max_restarts=max_restarts, period_s=8.0)
        policy = policy_of(children, strategy, intensity, backoff, shutdown_s, replaceable=replaceable)
        self.world = World(policy, seed=seed)
        self.started = False

    def _ignored(self, signal: Signal) -> None:
        before = self.world.state
        assert self.world.send(signal) == ()
        assert self.world.state == before

    @rule()
    def start(self) -> None:
        if self.started:
            self._ignored(StartRequested())
        else:
            self.world.send(StartRequested())
        self.started = True

    @precondition(lambda self: self.world.live.keys() - self.world.ready_children)
    @rule(pick=picks)
    def get_ready(self, pick: int) -> None:
        waiting = sorted(self.world.live.keys() - self.world.ready_children)
        self.world.ready(waiting[pick % len(waiting)])

    @precondition(lambda self: self.world.live.keys() - self.world.ready_children)
    @rule()
    def all_get_ready(self) -> None:
        self.world.ready_all()

    @precondition(lambda self: self.world.live)
    @rule(pick=picks, reason=reasons)
    def exit(self, pick: int, reason: ExitReason) -> None:
        living = sorted(self.world.live)
        self.world.exit(living[pick % len(living)], reason)

    @precondition(lambda self: self.world.live)
    @rule(pick=picks, named=st.booleans())
    def be_seen_to_hang(self, pick: int, named: bool) -> None:
        living = sorted(self.world.live)
        child = living[pick % len(living)]
        incarnation = self.world.live[child] if named else None
        self.world.send(RestartRequested(child=child, reason=ExitReason.hung(), incarnation=incarnation))

    @precondition(lambda self: self.world.live)
    @rule(pick=picks)
    def be_beyond_killing(self, pick: int) -> None:
        living = sorted(self.world.live)
        self.world.unkillable.add(living[pick % len(living)])

    @precondition(lambda self: self.world.gone)
    @rule(pick=picks, reason=reasons)
    def the_past_speaks(self, pick: int, reason: ExitReason) -> None:
        child, incarnation = self.world.gone[pick % len(self.world.gone)]
        self._ignored(ChildExited(child=child, incarnation=incarnation, reason=reason))
        self._ignored(ChildReady(child=child, incarnation=incarnation))
        self._ignored(RestartRequested(child=child, reason=reason, incarnation=incarnation))

    @precondition(lambda self: self.world.cancelled)
    @rule(pick=picks)
    def a_cancelled_timer_fires(self, pick: int) -> None:
        self._ignored(TimerFired(key=self.world.cancelled[pick % len(self.world.cancelled)]))

    @rule(seconds=st.sampled_from([0.25, 1.0, SHUTDOWN_S, 8.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @precondition(lambda self: self.world.timers)
    @rule()
    def the_next_timer_fires(self) -> None:
        self.world.advance(min(self.world.timers.values()) - self.world.now)

    @precondition(lambda self: self.started and len(self.world.failures) > 1)
    @rule()
    def stop(self) -> None:
        self.world.stop()

    @invariant()
    def no_window_holds_more_restarts_than_allowed(self) -> None:
        allowed, period_s = self.world.policy.intensity.max_restarts, self.world.policy.intensity.period_s
        failures = self.world.failures
        for place in range(len(failures) - allowed):
            assert failures[place + allowed] - failures[place] >= period_s

    @invariant()
    def a_child_that_cannot_be_killed_ends_its_supervisor(self) -> None:
        if self.world.lost:
            escalation = self.world.state.escalation
            assert escalation is not None
            assert escalation.child in self.world.lost

    @invariant()
    def what_cannot_be_replaced_is_not(self) -> None:
        alone = self.world.policy.strategy is Strategy.ONE_FOR_ONE
        for child, state in zip(self.world.policy.children, self.world.state.children, strict=True):
            if alone and not child.replaceable and state.was_ready:
                assert state.ready_at is not None or self.world.told[child.id] == "Stopped"

    @invariant()
    def the_timers_are_those_that_somebody_waits_for(self) -> None:
        waiting = {child.timer for child in self.world.state.children if child.timer is not None}
        assert self.world.timers.keys() == waiting

    @invariant()
    def who_is_not_ready_or_ended_is_waited_for(self) -> None:
        if self.started and not self.world.timers and not self.world.finished:
            for child, told in self.world.told.items():
                assert child in self.world.ready_children or told == "Stopped"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.stop()
        for _ in self.world.latest:  # nobody answers any more: each is killed at its deadline
            self.world.advance(SHUTDOWN_S)
        assert self.world.effects.count(Finish()) == 1
        assert self.world.effects[-1] == Finish()


SupervisedLives.TestCase.settings = settings(max_examples=more(400), stateful_step_count=50, print_blob=True)
TestSupervisedLives = SupervisedLives.TestCase
