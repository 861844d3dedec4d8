"""Started in order, stopped in reverse, each within its time."""

from __future__ import annotations

from cudnn_actor.supervision import Backoff, ExitReason, RestartIntensity, Stopped
from cudnn_actor.supervision.signals import Finish, ReportReady, StartRequested, StopRequested

from .supervised_world import CRASH, World, policy_of

ONE_SECOND = Backoff(initial_s=1.0, factor=2.0, cap_s=8.0, jitter=0.0, reset_after_s=10.0)


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


def test_the_first_reason_to_stop_stays_the_reason() -> None:
    world = World(policy_of("a")).up()
    world.send(StopRequested(reason=ExitReason.shutdown("first")))
    world.send(StopRequested(reason=ExitReason.shutdown("second")))
    world.exit("a", ExitReason.shutdown())
    assert world.events[-1] == Stopped(child=None, reason=ExitReason.shutdown("first"))


def test_a_crash_on_the_way_down_is_an_exit_and_no_failure() -> None:
    world = World(policy_of("abc", intensity=RestartIntensity(max_restarts=0))).up()
    world.stop()
    world.exit("a", CRASH)
    world.exit("c", CRASH)
    world.exit("b", CRASH)
    assert world.stops == "cb"
    assert world.finished
    assert world.escalations == []
    assert world.starts == "abc"


def test_a_stop_during_backoff_cancels_it() -> None:
    world = World(policy_of("a", backoff=ONE_SECOND)).up()
    world.exit("a")
    world.stop()
    assert world.finished
    assert world.timers == {}
    assert world.starts == "a"
