"""The restart window and the backoff, as the supervisor keeps them."""

from __future__ import annotations

import pytest

from cudnn_actor.supervision import Backoff, ExitKind, ExitReason, Restart, RestartIntensity, Strategy
from cudnn_actor.supervision.signals import Escalate, Finish, StartRequested, TimerKind

from .supervised_world import CRASH, World, policy_of

ONE_SECOND = Backoff(initial_s=1.0, factor=2.0, cap_s=8.0, jitter=0.0, reset_after_s=10.0)


def test_the_restart_after_the_last_one_allowed_escalates() -> None:
    world = World(policy_of("a", intensity=RestartIntensity(max_restarts=3, period_s=60.0))).up()
    for _ in range(3):
        world.advance(1.0)
        world.exit("a")
        assert world.escalations == []
        world.ready_all()
    world.exit("a")
    assert len(world.escalations) == 1


@pytest.mark.parametrize(
    ("most", "number"),
    [(0, "1st"), (1, "2nd"), (2, "3rd"), (3, "4th"), (10, "11th"), (12, "13th"), (21, "22nd")],
)
def test_the_limit_that_was_reached_is_told_in_words(most: int, number: str) -> None:
    limit = RestartIntensity(max_restarts=most, period_s=2.5).exceeded_text()
    assert limit == f"at the {number} failure within 2.5 s (max_restarts={most})"


def test_what_is_left_says_how_many_more_failures_are_answered_by_a_restart() -> None:
    world = World(policy_of("a", intensity=RestartIntensity(max_restarts=2, period_s=60.0))).up()
    for left in (2, 1, 0):
        assert world.state.restarts_left(0, world.now) == left
        assert world.escalations == []
        world.exit("a")
        world.ready_all()
    assert len(world.escalations) == 1
    assert world.state.restarts_left(0, world.now + 1e6) == 0


def test_nothing_is_left_of_a_child_that_cannot_be_replaced_once_it_is_ready() -> None:
    world = World(policy_of("a", intensity=RestartIntensity(max_restarts=2), replaceable=False))
    world.send(StartRequested())
    assert world.state.restarts_left(0, world.now) == 2
    world.ready("a")
    assert world.state.restarts_left(0, world.now) == 0


@pytest.mark.parametrize(("wait_s", "escalates"), [(59.75, True), (60.0, False), (60.25, False)])
def test_a_restart_leaves_the_window_exactly_one_period_after_its_failure(
    wait_s: float, escalates: bool
) -> None:
    world = World(policy_of("a", intensity=RestartIntensity(max_restarts=1, period_s=60.0))).up()
    world.exit("a")
    world.ready_all()
    world.advance(wait_s)
    world.exit("a")
    assert bool(world.escalations) is escalates


def test_the_children_share_one_window() -> None:
    world = World(policy_of("ab", intensity=RestartIntensity(max_restarts=1))).up()
    world.exit("a")
    world.exit("b")
    assert world.escalations == []
    world.exit("a", ExitReason.shutdown())  # it was starting, and is asked to stop now
    why = "at the 2nd failure within 60 s (max_restarts=1)"
    assert world.escalations == [Escalate(child="b", cause=CRASH, why=why)]


def test_with_no_restarts_allowed_the_first_failure_stops_all_and_escalates() -> None:
    world = World(policy_of("abc", intensity=RestartIntensity(max_restarts=0))).up().forget()
    world.exit("b")
    assert world.escalations == []
    assert world.stops == "c"
    world.exit("c", ExitReason.shutdown())
    assert world.escalations == []
    world.exit("a", ExitReason.shutdown())
    assert world.escalations == [
        Escalate(child="b", cause=CRASH, why="at the 1st failure within 60 s (max_restarts=0)")
    ]
    assert world.finished
    assert world.starts == ""


@pytest.mark.pairwise
@pytest.mark.parametrize("was_ready", [False, True], ids=["starting", "ready"])
@pytest.mark.parametrize("restart", Restart)
@pytest.mark.parametrize("kind", ExitKind)
def test_a_child_that_cannot_be_replaced_is_tried_again_until_it_is_ready_and_never_after(
    kind: ExitKind, restart: Restart, was_ready: bool
) -> None:
    reason = ExitReason(kind=kind)
    world = World(policy_of({"a": restart}, replaceable=False))
    world.send(StartRequested())
    if was_ready:
        world.ready("a")
    world.exit("a", reason)
    covered = restart.covers(reason)
    assert world.starts == ("aa" if covered and not was_ready else "a")
    escalation = Escalate(child="a", cause=reason, why="because nothing can take its place")
    assert world.escalations == ([escalation] if covered and was_ready else [])


def test_a_hung_child_that_cannot_be_replaced_is_killed_and_escalates() -> None:
    world = World(policy_of("a", replaceable=False)).up()
    world.hang("a")
    assert (world.kills, world.starts, world.finished) == ("a", "a", True)
    why = "because nothing can take its place"
    assert world.escalations == [Escalate(child="a", cause=ExitReason.hung(), why=why)]


def test_starts_of_a_child_that_cannot_be_replaced_use_the_restarts_up_like_any_other_s() -> None:
    world = World(policy_of("a", intensity=RestartIntensity(max_restarts=2), replaceable=False))
    world.send(StartRequested())
    for _ in range(3):
        world.exit("a", ExitReason.start_failed("no GPU"))
    assert world.starts == "aaa"
    assert len(world.escalations) == 1


def test_a_child_that_cannot_be_replaced_starts_anew_with_its_group_all_the_same() -> None:
    world = World(policy_of("ab", Strategy.ONE_FOR_ALL, replaceable={"a": False})).up().forget()
    world.exit("b")
    world.exit("a", ExitReason.shutdown())
    assert world.starts == "a"
    assert world.escalations == []


def test_a_stop_while_escalating_still_escalates_and_finishes_once() -> None:
    world = World(policy_of("ab", intensity=RestartIntensity(max_restarts=0))).up()
    world.exit("b")
    world.stop()
    world.exit("a")
    assert len(world.escalations) == 1
    assert world.effects.count(Finish()) == 1


def test_failures_in_a_row_wait_longer() -> None:
    world = World(policy_of("a", backoff=ONE_SECOND)).up()
    for delay_s in (1.0, 2.0, 4.0, 8.0, 8.0):
        world.exit("a")
        assert world.deadline(TimerKind.BACKOFF) == delay_s
        world.advance(delay_s)
        world.ready_all()


@pytest.mark.parametrize(("stable_s", "delay_s"), [(9.75, 2.0), (10.0, 1.0), (10.25, 1.0)])
def test_the_backoff_begins_anew_after_a_stable_time(stable_s: float, delay_s: float) -> None:
    world = World(policy_of("a", backoff=ONE_SECOND)).up()
    world.exit("a")
    world.advance(1.0)
    world.ready_all()
    world.advance(stable_s)
    world.exit("a")
    assert world.deadline(TimerKind.BACKOFF) == delay_s


def test_time_spent_in_starting_is_not_stable_time() -> None:
    world = World(policy_of("a", backoff=ONE_SECOND)).up()
    world.exit("a")
    world.advance(1.0 + 20.0)
    world.exit("a", ExitReason.start_failed("no GPU"))
    assert world.deadline(TimerKind.BACKOFF) == 2.0


def test_jitter_is_decided_by_the_seed() -> None:
    def delays(seed: int) -> list[float]:
        world = World(policy_of("a", backoff=Backoff(initial_s=1.0, cap_s=1.0, jitter=1.0)), seed=seed).up()
        found = []
        for _ in range(8):
            world.exit("a")
            found.append(world.deadline(TimerKind.BACKOFF))
            world.advance(1.0)
            world.ready_all()
        return found

    assert delays(1) == delays(1)
    assert delays(1) != delays(2)
    assert len(set(delays(1))) == 8
