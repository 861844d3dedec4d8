"""The rules of the supervision core, one by one, in a world with a manual clock."""

from __future__ import annotations

import pytest
from supervised_world import CRASH, NO_DELAY, World, policy_of

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.supervision import (
    Backoff,
    ChildExited,
    ChildReady,
    ExitKind,
    ExitReason,
    Finish,
    ReportReady,
    Restart,
    RestartIntensity,
    RestartRequested,
    StartRequested,
    Stopped,
    StopRequested,
    Strategy,
    TimerFired,
    TimerKey,
    TimerKind,
)

ONE_SECOND = Backoff(initial_s=1.0, factor=2.0, cap_s=8.0, jitter=0.0, reset_after_s=10.0)


# -- start and stop


def test_a_child_is_started_when_the_one_before_it_is_ready() -> None:
    world = World(policy_of("abc"))
    world.send(StartRequested())
    assert world.starts == "a"
    world.ready("a")
    assert world.starts == "ab"
    world.ready("b")
    assert ReportReady() not in world.effects
    world.ready("c")
    assert world.starts == "abc"
    assert world.effects[-1] == ReportReady()


def test_a_supervisor_without_children_is_ready_at_once_and_stops_at_once() -> None:
    world = World(policy_of(""))
    assert world.send(StartRequested()) == (ReportReady(),)
    world.stop()
    assert world.finished


def test_children_are_stopped_in_reverse_order_one_at_a_time() -> None:
    world = World(policy_of("abc")).up()
    world.stop()
    assert world.stops == "c"
    world.exit("c", ExitReason.shutdown())
    assert world.stops == "cb"
    world.exit("b", ExitReason.shutdown())
    world.exit("a", ExitReason.shutdown())
    assert world.stops == "cba"
    assert world.kills == ""
    assert world.effects[-1] == Finish()


def test_a_child_that_does_not_stop_by_its_deadline_is_killed() -> None:
    world = World(policy_of("ab", shutdown_s=5.0)).up()
    world.stop()
    world.advance(4.75)
    assert world.kills == ""
    world.advance(0.25)
    assert world.kills == "b"
    assert world.stops == "ba"
    world.advance(5.0)
    assert world.kills == "ba"
    assert world.finished


def test_a_child_with_no_time_to_stop_is_killed_unasked() -> None:
    world = World(policy_of("ab", shutdown_s=0.0)).up()
    world.stop()
    assert (world.stops, world.kills, world.finished) == ("", "ba", True)


def test_a_child_that_is_still_starting_is_stopped_too() -> None:
    world = World(policy_of("ab"))
    world.send(StartRequested())
    world.stop()
    assert world.stops == "a"
    world.exit("a", ExitReason.shutdown())
    assert world.finished
    assert world.starts == "a"


def test_a_stop_before_the_start_finishes_and_the_start_comes_too_late() -> None:
    world = World(policy_of("a"))
    world.stop()
    assert world.finished
    assert world.send(StartRequested()) == ()


def test_a_second_start_and_a_second_stop_change_nothing() -> None:
    world = World(policy_of("a")).up()
    assert world.send(StartRequested()) == ()
    world.stop()
    assert world.send(StopRequested()) == ()
    world.exit("a", ExitReason.shutdown())
    assert world.send(StopRequested()) == ()


def test_a_crash_on_the_way_down_is_an_exit_and_no_failure() -> None:
    world = World(policy_of("abc", intensity=RestartIntensity(max_restarts=0))).up()
    world.stop()
    world.exit("a", CRASH)
    world.exit("c", CRASH)
    world.exit("b", CRASH)
    assert world.stops == "cb"
    assert world.finished
    assert world.escalation is None
    assert world.starts == "abc"


def test_a_stop_during_backoff_cancels_it() -> None:
    world = World(policy_of("a", backoff=ONE_SECOND)).up()
    world.exit("a")
    world.stop()
    assert world.finished
    assert world.timers == {}
    assert world.starts == "a"


# -- restart type and exit reason, seen from outside

EXITS = [
    ExitReason.normal(),
    ExitReason.shutdown(),
    CRASH,
    ExitReason.start_failed("no GPU"),
    ExitReason.not_ready(),
    ExitReason.hung(),
    ExitReason.killed(),
]


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
    assert world.escalation is not None
    assert world.escalation.cause == ExitReason.start_failed("no GPU")
    assert world.starts == "aa"


def test_a_child_that_ends_for_good_in_its_start_lets_the_next_one_start() -> None:
    world = World(policy_of({"a": Restart.TEMPORARY, "b": Restart.PERMANENT}))
    world.send(StartRequested())
    world.exit("a", ExitReason.start_failed("no GPU"))
    world.ready("b")
    assert world.starts == "ab"
    assert ReportReady() in world.effects


# -- strategies


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
    assert world.escalation is None


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


# -- the window


def test_the_restart_after_the_last_one_allowed_escalates() -> None:
    world = World(policy_of("a", intensity=RestartIntensity(max_restarts=3, period_s=60.0))).up()
    for _ in range(3):
        world.advance(1.0)
        world.exit("a")
        assert world.escalation is None
        world.ready_all()
    world.exit("a")
    assert world.escalation is not None


@pytest.mark.parametrize(("wait_s", "escalates"), [(59.75, True), (60.0, False), (60.25, False)])
def test_a_restart_leaves_the_window_exactly_one_period_after_its_failure(
    wait_s: float, escalates: bool
) -> None:
    world = World(policy_of("a", intensity=RestartIntensity(max_restarts=1, period_s=60.0))).up()
    world.exit("a")
    world.ready_all()
    world.advance(wait_s)
    world.exit("a")
    assert (world.escalation is not None) is escalates


def test_the_children_share_one_window() -> None:
    world = World(policy_of("ab", intensity=RestartIntensity(max_restarts=1))).up()
    world.exit("a")
    world.exit("b")
    assert world.escalation is None
    world.exit("a", ExitReason.shutdown())  # it was starting, and is asked to stop now
    assert world.escalation is not None
    assert world.escalation.child == "b"


def test_with_no_restarts_allowed_the_first_failure_stops_all_and_escalates() -> None:
    world = World(policy_of("abc", intensity=RestartIntensity(max_restarts=0))).up().forget()
    world.exit("b")
    assert world.escalation is None
    assert world.stops == "c"
    world.exit("c", ExitReason.shutdown())
    assert world.escalation is None
    world.exit("a", ExitReason.shutdown())
    assert world.escalation is not None
    assert (world.escalation.child, world.escalation.cause) == ("b", CRASH)
    assert world.finished
    assert world.starts == ""


def test_a_stop_while_escalating_still_escalates_and_finishes_once() -> None:
    world = World(policy_of("ab", intensity=RestartIntensity(max_restarts=0))).up()
    world.exit("b")
    world.stop()
    world.exit("a")
    assert world.escalation is not None
    assert world.effects.count(Finish()) == 1


# -- backoff


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


# -- readiness, hangs and the past


def test_a_child_that_is_not_ready_in_time_is_killed_and_counts_once() -> None:
    world = World(policy_of("a", intensity=RestartIntensity(max_restarts=1)))
    world.send(StartRequested())
    world.advance(30.0)
    assert (world.kills, world.starts) == ("a", "aa")
    late = ChildExited(child="a", incarnation=1, reason=ExitReason.killed())
    state = world.state
    assert world.send(late) == ()
    assert world.state == state
    assert world.escalation is None


def test_a_readiness_that_comes_too_late_is_ignored() -> None:
    world = World(policy_of("a", backoff=ONE_SECOND))
    world.send(StartRequested())
    world.advance(30.0)
    state = world.state
    assert world.send(ChildReady(child="a", incarnation=1)) == ()
    assert world.state == state


def test_a_readiness_timeout_names_itself() -> None:
    world = World(policy_of("a", intensity=RestartIntensity(max_restarts=0)))
    world.send(StartRequested())
    world.advance(30.0)
    assert world.escalation is not None
    assert world.escalation.cause == ExitReason.not_ready("not ready within 30 s")


def test_a_ready_child_has_no_timer() -> None:
    assert World(policy_of("abc")).up().timers == {}


def test_a_hung_child_is_killed_and_restarted() -> None:
    world = World(policy_of("ab")).up().forget()
    world.hang("a")
    assert (world.kills, world.stops, world.starts) == ("a", "", "a")


def test_a_watchdog_that_saw_an_old_incarnation_hang_kills_no_successor() -> None:
    world = World(policy_of("a")).up()
    world.exit("a")
    world.ready_all()
    state = world.state
    assert world.send(RestartRequested(child="a", reason=ExitReason.hung(), incarnation=1)) == ()
    assert world.state == state


def test_a_restart_asked_for_without_an_incarnation_takes_whichever_lives() -> None:
    world = World(policy_of("a")).up().forget()
    world.send(RestartRequested(child="a", reason=ExitReason.crash("stale weights")))
    assert (world.kills, world.starts) == ("a", "a")


def test_a_restart_asked_for_during_backoff_does_not_count() -> None:
    world = World(policy_of("a", backoff=ONE_SECOND)).up()
    world.exit("a")
    assert world.send(RestartRequested(child="a", reason=ExitReason.hung())) == ()


@pytest.mark.parametrize("kind", TimerKind)
def test_a_timer_of_a_dead_incarnation_is_harmless(kind: TimerKind) -> None:
    world = World(policy_of("a", backoff=ONE_SECOND)).up()
    world.exit("a")
    world.advance(1.0)
    state = world.state
    assert world.send(TimerFired(key=TimerKey(kind=kind, child="a", incarnation=1))) == ()
    assert world.state == state


def test_a_cancelled_timer_that_fires_all_the_same_is_harmless() -> None:
    world = World(policy_of("a")).up()
    assert world.send(TimerFired(key=TimerKey(kind=TimerKind.READINESS, child="a", incarnation=1))) == ()


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
