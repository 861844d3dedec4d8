"""Readiness in time, hangs, and signals of incarnations and timers that are gone."""

from __future__ import annotations

import pytest

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.supervision import Backoff, ExitKind, ExitReason, RestartIntensity
from cudnn_actor.supervision.signals import (
    ChildExited,
    ChildLost,
    ChildReady,
    Escalate,
    RestartRequested,
    StartRequested,
    TimerFired,
    TimerKey,
    TimerKind,
)

from .supervised_world import NO_DELAY, World, policy_of

ONE_SECOND = Backoff(initial_s=1.0, factor=2.0, cap_s=8.0, jitter=0.0, reset_after_s=10.0)


def test_a_child_that_is_not_ready_in_time_is_killed_and_counts_once() -> None:
    world = World(policy_of("a", intensity=RestartIntensity(max_restarts=1)))
    world.send(StartRequested())
    world.advance(30.0)
    assert (world.kills, world.starts) == ("a", "aa")
    late = ChildExited(child="a", incarnation=1, reason=ExitReason.killed())
    state = world.state
    assert world.send(late) == ()
    assert world.state == state
    assert world.escalations == []


def test_a_readiness_timeout_names_itself() -> None:
    world = World(policy_of("a", intensity=RestartIntensity(max_restarts=0)))
    world.send(StartRequested())
    world.advance(30.0)
    reason = ExitReason.not_ready("not ready within 30 s")
    why = "at the 1st failure within 60 s (max_restarts=0)"
    assert world.escalations == [Escalate(child="a", cause=reason, why=why)]


def test_a_ready_child_has_no_timer() -> None:
    assert World(policy_of("abc")).up().timers == {}


def test_a_hung_child_is_killed_and_restarted() -> None:
    world = World(policy_of("ab")).up().forget()
    world.hang("a")
    assert (world.kills, world.stops, world.starts) == ("a", "", "a")


def test_a_restart_asked_for_without_an_incarnation_takes_whichever_lives() -> None:
    world = World(policy_of("a")).up().forget()
    world.send(RestartRequested(child="a", reason=ExitReason.crash("stale weights")))
    assert (world.kills, world.starts) == ("a", "a")


def test_a_restart_asked_for_during_backoff_does_not_count() -> None:
    world = World(policy_of("a", backoff=ONE_SECOND)).up()
    world.exit("a")
    assert world.send(RestartRequested(child="a", reason=ExitReason.hung())) == ()


def test_the_loss_of_an_old_incarnation_does_not_end_its_successor() -> None:
    world = World(policy_of("a")).up()
    world.exit("a")
    world.ready_all()
    assert world.send(ChildLost(child="a", incarnation=1, reason=ExitReason.hung())) == ()


@pytest.mark.parametrize("kind", TimerKind)
def test_a_timer_of_a_dead_incarnation_is_harmless(kind: TimerKind) -> None:
    world = World(policy_of("a", backoff=ONE_SECOND)).up()
    world.exit("a")
    world.advance(1.0)
    state = world.state
    assert world.send(TimerFired(key=TimerKey(kind=kind, child="a", incarnation=1))) == ()
    assert world.state == state


def test_an_unknown_child_is_an_error_of_the_shell() -> None:
    world = World(policy_of("a")).up()
    with pytest.raises(InvalidRequest) as caught:
        world.send(ChildReady(child="z", incarnation=1))
    assert caught.value.field == "child"


def test_a_decision_leaves_the_state_it_came_from_as_it_was() -> None:
    world = World(policy_of("ab", backoff=NO_DELAY)).up()
    before, copy = world.state, repr(world.state)
    first = world.exit("a", ExitReason(kind=ExitKind.CRASH))
    assert repr(before) == copy
    world.state, world.live, world.latest = before, {"a": 1, "b": 1}, {"a": 1, "b": 1}
    world.timers.clear()
    assert world.exit("a", ExitReason(kind=ExitKind.CRASH)) == first
