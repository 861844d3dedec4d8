"""What a service tells of its life, in order, and what stands in the log."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cudnn_actor.actors.logs import Log
from cudnn_actor.supervision import (
    Backoff,
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
)
from cudnn_actor.supervision.events import log_event

from ..log_lines import capture_logs
from .supervised_world import CRASH, World, policy_of

ONE_SECOND = Backoff(initial_s=1.0, jitter=0.0)
DONE = ExitReason.shutdown("asked to stop")

LINES: list[tuple[LifecycleEvent, dict[str, Any]]] = [
    (
        Started(child="gpu", generation=1),
        {"event": "service.started", "log_level": "info", "child": "gpu", "generation": 1},
    ),
    (
        Restarting(child="gpu", generation=1, cause=CRASH, delay_s=0.5, attempt=2),
        {
            "event": "service.restarting",
            "log_level": "warning",
            "child": "gpu",
            "generation": 1,
            "cause": "crash",
            "detail": "boom",
            "delay_s": 0.5,
            "attempt": 2,
        },
    ),
    (
        Restarted(child="gpu", generation=2, downtime_s=0.75),
        {
            "event": "service.restarted",
            "log_level": "info",
            "child": "gpu",
            "generation": 2,
            "downtime_s": 0.75,
        },
    ),
    (
        Stopped(child=None, reason=DONE),
        {
            "event": "service.stopped",
            "log_level": "info",
            "child": None,
            "reason": "shutdown",
            "detail": "asked to stop",
        },
    ),
    (
        Stopped(child="gpu", reason=CRASH),
        {
            "event": "service.stopped",
            "log_level": "error",
            "child": "gpu",
            "reason": "crash",
            "detail": "boom",
        },
    ),
    (
        Escalated(child="gpu", cause=CRASH, why="at the 4th failure"),
        {
            "event": "service.escalated",
            "log_level": "error",
            "child": "gpu",
            "cause": "crash",
            "detail": "boom",
            "why": "at the 4th failure",
        },
    ),
]


@pytest.mark.parametrize(("event", "line"), LINES, ids=lambda value: type(value).__name__)
def test_names_and_fields_of_the_log_are_stable(event: LifecycleEvent, line: dict[str, Any]) -> None:
    with capture_logs() as lines:
        log_event(Log("cudnn_actor.supervision"), event)
    assert lines == [line]


@pytest.mark.parametrize(("event", "line"), LINES, ids=lambda value: type(value).__name__)
def test_an_event_survives_the_wire(event: LifecycleEvent, line: dict[str, Any]) -> None:
    decoder = msgspec.msgpack.Decoder(Started | Restarting | Restarted | Stopped | Escalated)
    assert decoder.decode(msgspec.msgpack.encode(event)) == event


def test_a_life_with_one_restart_is_told_in_order() -> None:
    world = World(policy_of("a", backoff=ONE_SECOND)).up()
    world.exit("a")
    world.advance(1.5)
    world.ready_all()
    world.stop()
    world.exit("a", DONE)
    assert world.events == [
        Started(child="a", generation=1),
        Restarting(child="a", generation=1, cause=CRASH, delay_s=1.0, attempt=1),
        Restarted(child="a", generation=2, downtime_s=1.5),
        Stopped(child="a", reason=DONE),
        Stopped(child=None, reason=DONE),
    ]


def test_downtime_runs_on_through_a_start_that_fails() -> None:
    world = World(policy_of("a", backoff=ONE_SECOND)).up()
    world.exit("a")
    world.advance(1.0)
    world.exit("a", ExitReason.start_failed("no GPU"))
    world.advance(6.0)
    world.ready_all()
    assert world.events[-1] == Restarted(child="a", generation=3, downtime_s=7.0)


def test_each_outage_is_measured_by_itself() -> None:
    world = World(policy_of("a", backoff=ONE_SECOND)).up()
    for _ in range(2):
        world.advance(100.0)
        world.exit("a")
        world.advance(1.5)
        world.ready_all()
        assert world.events[-1] == Restarted(child="a", generation=world.live["a"], downtime_s=1.5)


def test_a_temporary_child_of_a_group_is_told_to_have_stopped_and_nothing_else() -> None:
    children = {"a": Restart.PERMANENT, "b": Restart.TEMPORARY}
    world = World(policy_of(children, Strategy.ONE_FOR_ALL)).up().forget()
    world.exit("a")
    world.exit("b", DONE)
    assert [event for event in world.events if event.child == "b"] == [Stopped(child="b", reason=DONE)]


def test_a_transient_child_that_was_done_begins_anew_without_its_past() -> None:
    children = {"a": Restart.PERMANENT, "b": Restart.TRANSIENT}
    world = World(policy_of(children, Strategy.REST_FOR_ONE, backoff=ONE_SECOND)).up()
    world.exit("b")
    world.advance(1.0)
    world.exit("b", ExitReason.normal())  # in its start: it is done, with an outage and an attempt behind it
    world.exit("a")
    world.advance(1.0)
    world.ready_all()
    assert world.events[-1] == Started(child="b", generation=3)
    world.forget().exit("b")
    assert world.events == [Restarting(child="b", generation=3, cause=CRASH, delay_s=1.0, attempt=1)]


def test_those_that_restart_with_a_child_say_with_whom() -> None:
    world = World(policy_of("ab", Strategy.ONE_FOR_ALL, backoff=ONE_SECOND)).up().forget()
    world.exit("b")
    world.advance(1.0)
    world.exit("a", ExitReason.shutdown())
    world.ready_all()
    with_b = ExitReason.shutdown("restarts with b")
    assert world.events == [
        Restarting(child="b", generation=1, cause=CRASH, delay_s=1.0, attempt=1),
        Restarting(child="a", generation=1, cause=with_b, delay_s=1.0, attempt=1),
        Restarted(child="a", generation=2, downtime_s=0.0),
        Restarted(child="b", generation=2, downtime_s=1.0),
    ]


def test_an_escalation_is_told_after_everyone_has_stopped() -> None:
    world = World(policy_of("ab", intensity=RestartIntensity(max_restarts=0))).up().forget()
    world.exit("a")
    world.advance(5.0)
    assert world.events == [
        Stopped(child="a", reason=CRASH),
        Stopped(child="b", reason=ExitReason.killed("not stopped within 5 s")),
        Escalated(child="a", cause=CRASH, why="at the 1st failure within 60 s (max_restarts=0)"),
        Stopped(child=None, reason=CRASH),
    ]


def test_a_child_stopped_in_its_backoff_is_told_and_one_that_never_lived_is_not() -> None:
    world = World(policy_of("ab", backoff=ONE_SECOND))
    world.up().forget()
    world.exit("a")
    world.stop()
    world.exit("b", DONE)
    stopped = [event.child for event in world.events if isinstance(event, Stopped)]
    assert stopped == ["a", "b", None]
    unborn = World(policy_of("ab"))
    unborn.stop()
    assert unborn.events == [Stopped(child=None, reason=DONE)]
