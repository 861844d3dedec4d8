"""Who is started again after which exit, and with whom."""

from __future__ import annotations

import pytest

from cudnn_actor.supervision import Backoff, ExitReason, Restart, RestartIntensity, Stopped, Strategy
from cudnn_actor.supervision.signals import Escalate, ReportReady, StartRequested

from .supervised_world import CRASH, World, policy_of

ONE_SECOND = Backoff(initial_s=1.0, factor=2.0, cap_s=8.0, jitter=0.0, reset_after_s=10.0)


EXITS = [
    ExitReason.normal(),
    ExitReason.shutdown(),
    CRASH,
    ExitReason.start_failed("no GPU"),
    ExitReason.not_ready(),
    ExitReason.hung(),
    ExitReason.killed(),
]


@pytest.mark.pairwise
@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("restart", Restart)
@pytest.mark.parametrize("reason", EXITS, ids=lambda reason: reason.kind)
def test_a_child_is_started_again_where_its_restart_type_says_so(
    reason: ExitReason, restart: Restart, strategy: Strategy
) -> None:
    world = World(policy_of({"a": restart}, strategy)).up().forget()
    world.exit("a", reason)
    assert world.starts == ("a" if restart.covers(reason) else "")
    told = [event for event in world.events if isinstance(event, Stopped)]
    assert told == ([] if restart.covers(reason) else [Stopped(child="a", reason=reason)])


@pytest.mark.parametrize("strategy", Strategy)
def test_an_exit_that_is_not_restarted_leaves_the_others_alone(strategy: Strategy) -> None:
    world = World(policy_of({"a": Restart.TRANSIENT, "b": Restart.PERMANENT}, strategy)).up().forget()
    world.exit("a", ExitReason.normal())
    assert (world.starts, world.stops) == ("", "")


def test_a_first_start_that_fails_counts_like_a_crash_and_holds_up_those_after_it() -> None:
    world = World(policy_of("ab", intensity=RestartIntensity(max_restarts=1)))
    world.send(StartRequested())
    world.exit("a", ExitReason.start_failed("no GPU"))
    assert world.starts == "aa"
    world.exit("a", ExitReason.start_failed("no GPU"))
    why = "at the 2nd failure within 60 s (max_restarts=1)"
    assert world.escalations == [Escalate(child="a", cause=ExitReason.start_failed("no GPU"), why=why)]
    assert world.starts == "aa"


def test_a_child_that_ends_for_good_in_its_start_lets_the_next_one_start() -> None:
    world = World(policy_of({"a": Restart.TEMPORARY, "b": Restart.PERMANENT}))
    world.send(StartRequested())
    world.exit("a", ExitReason.start_failed("no GPU"))
    world.ready("b")
    assert world.starts == "ab"
    assert ReportReady() in world.effects


@pytest.mark.parametrize(
    ("strategy", "stopped", "started"),
    [
        (Strategy.ONE_FOR_ONE, "", "b"),
        (Strategy.ONE_FOR_ALL, "dca", "abcd"),
        (Strategy.REST_FOR_ONE, "dc", "bcd"),
    ],
)
def test_the_group_is_stopped_in_reverse_and_started_in_order(
    strategy: Strategy, stopped: str, started: str
) -> None:
    world = World(policy_of("abcd", strategy)).up().forget()
    world.exit("b")
    for child in stopped:
        assert world.stops[-1] == child
        assert world.starts == ""
        world.exit(child, ExitReason.shutdown())
    for place, child in enumerate(started):
        assert world.starts == started[: place + 1]
        world.ready(child)
    assert (world.stops, world.starts) == (stopped, started)
    assert len(world.state.restarts) == 1


def test_with_one_for_one_a_child_in_backoff_holds_up_nobody_who_was_ready_before() -> None:
    world = World(policy_of("ab", backoff=ONE_SECOND)).up().forget()
    world.exit("a")
    world.advance(0.75)
    world.exit("b")
    world.advance(0.25)
    assert world.starts == "a"
    world.advance(0.75)
    assert world.starts == "ab"


def test_with_one_for_all_nobody_starts_before_the_backoff_of_the_one_that_failed() -> None:
    world = World(policy_of("ab", Strategy.ONE_FOR_ALL, backoff=ONE_SECOND)).up().forget()
    world.exit("b")
    world.exit("a", ExitReason.shutdown())
    world.advance(0.75)
    assert world.starts == ""
    world.advance(0.25)
    assert world.starts == "a"


def test_a_backoff_runs_while_the_group_is_stopped_but_starts_nobody_until_it_is() -> None:
    world = World(policy_of("ab", Strategy.ONE_FOR_ALL, backoff=ONE_SECOND)).up().forget()
    world.exit("b")
    world.advance(2.0)
    assert world.starts == ""
    world.exit("a", ExitReason.shutdown())
    assert world.starts == "a"


def test_several_crashes_while_the_group_goes_down_are_one_restart() -> None:
    intensity = RestartIntensity(max_restarts=1)
    world = World(policy_of("abcd", Strategy.ONE_FOR_ALL, intensity)).up().forget()
    world.exit("b")
    world.exit("a")
    world.exit("d")
    world.exit("c")
    world.ready_all()
    assert world.starts == "abcd"
    assert world.stops == "dc"
    assert world.escalations == []


def test_a_crash_while_the_group_comes_up_is_another_restart() -> None:
    world = World(policy_of("abc", Strategy.ONE_FOR_ALL)).up().forget()
    world.exit("c")
    world.exit("b")
    world.exit("a")
    world.ready("a")
    assert world.starts == "ab"
    world.exit("a")
    assert world.stops[-1] == "b"
    world.exit("b", ExitReason.shutdown())
    world.ready_all()
    assert world.starts == "ababc"
    assert len(world.state.restarts) == 2


def test_a_group_takes_in_a_later_child_that_is_in_backoff() -> None:
    world = World(policy_of("abc", Strategy.REST_FOR_ONE, backoff=ONE_SECOND)).up().forget()
    world.exit("c")
    world.advance(0.5)
    world.exit("a")
    world.exit("b", ExitReason.shutdown())
    assert [key.child for key in world.timers] == ["a"]
    world.advance(1.0)
    world.ready_all()
    assert world.starts == "abc"


def test_a_temporary_child_of_the_group_ends_for_good() -> None:
    children = {"a": Restart.PERMANENT, "b": Restart.TEMPORARY, "c": Restart.PERMANENT}
    world = World(policy_of(children, Strategy.ONE_FOR_ALL)).up().forget()
    world.exit("a")
    world.exit("c", ExitReason.shutdown())
    world.exit("b", ExitReason.shutdown())
    world.ready_all()
    assert world.starts == "ac"


def test_a_temporary_child_that_ended_stays_so_when_its_group_restarts() -> None:
    children = {"a": Restart.PERMANENT, "b": Restart.TEMPORARY, "c": Restart.PERMANENT}
    world = World(policy_of(children, Strategy.ONE_FOR_ALL)).up()
    world.exit("b")
    world.forget().exit("a")
    world.exit("c", ExitReason.shutdown())
    world.ready_all()
    assert world.starts == "ac"


def test_a_transient_child_that_was_done_starts_anew_with_its_group() -> None:
    children = {"a": Restart.PERMANENT, "b": Restart.TRANSIENT}
    world = World(policy_of(children, Strategy.REST_FOR_ONE)).up()
    world.exit("b", ExitReason.normal())
    world.forget().exit("a")
    world.ready_all()
    assert world.starts == "ab"


def test_a_group_member_that_will_not_stop_is_killed_and_the_restart_goes_on() -> None:
    world = World(policy_of("ab", Strategy.ONE_FOR_ALL, shutdown_s=5.0)).up().forget()
    world.exit("a")
    world.advance(5.0)
    assert (world.stops, world.kills, world.starts) == ("b", "b", "a")


def test_a_stop_while_a_group_goes_down_starts_nobody() -> None:
    world = World(policy_of("abc", Strategy.ONE_FOR_ALL)).up().forget()
    world.exit("b")
    world.stop()
    world.exit("c", ExitReason.shutdown())
    world.exit("a", ExitReason.shutdown())
    assert world.finished
    assert (world.starts, world.stops) == ("", "ca")
