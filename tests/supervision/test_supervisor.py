"""The shell: a supervisor with real actors, real threads and a real clock."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pykka
import pytest

from cudnn_actor.actors import Actor
from cudnn_actor.supervision import (
    Backoff,
    ChildPolicy,
    ChildSpec,
    Clock,
    Escalated,
    ExitKind,
    Restart,
    Restarted,
    Restarting,
    RestartIntensity,
    Started,
    Stopped,
    Strategy,
    Supervisor,
)

from ..log_lines import capture_logs
from ..patience import PATIENCE_S
from .houses import AT_ONCE, Child, Diary, Hang, House, ParentWitness, up

NEVER = Backoff(initial_s=3600.0, cap_s=3600.0, jitter=0.0)


# Starting and stopping.


def test_children_start_in_order_and_stop_in_reverse() -> None:
    house = House("abc")
    with up(house.supervisor()):
        house.diary.until(Started, "c")
    assert house.diary.lines == [f"{name} starts" for name in "abc"] + [f"{name} stops" for name in "cba"]


def test_each_child_starts_when_the_one_before_it_is_ready() -> None:
    house, gate = House("ab"), threading.Event()

    class Slow(Child):
        def on_start(self) -> None:
            assert gate.wait(PATIENCE_S)
            super().on_start()

    def slow(_: int) -> Actor:
        return Slow("a", house.diary)

    specs = house.specs()
    specs[0] = ChildSpec(policy=specs[0].policy, make=slow)
    with up(house.supervisor(specs)) as ref:
        assert ref.ask("a sign of life", timeout=PATIENCE_S) is None
        assert house.actors["b"] == []
        gate.set()
        house.diary.until(Started, "b")
    assert house.diary.lines[:2] == ["a starts", "b starts"]


def test_a_stop_is_answered_when_the_children_have_ended() -> None:
    house, hang = House("ab"), Hang()
    supervisor = house.supervisor()
    ref = supervisor.launch()
    house.diary.until(Started, "b")
    reply = hang.into(house, "a")
    stopping = ref.stop(block=False)
    house.diary.until(Stopped, "b")
    with pytest.raises(pykka.Timeout):
        stopping.get(timeout=0.05)
    hang.released.set()
    assert reply.get(timeout=PATIENCE_S) == "came back"
    assert stopping.get(timeout=PATIENCE_S) is True
    assert house.diary.lines[-2:] == ["b stops", "a stops"]
    assert supervisor.join(PATIENCE_S)


def test_every_stop_is_answered() -> None:
    house = House("ab")
    supervisor = house.supervisor()
    ref = supervisor.launch()
    stops = [ref.stop(block=False) for _ in range(5)]
    assert pykka.get_all(stops, timeout=PATIENCE_S) == [True] * 5
    assert supervisor.join(PATIENCE_S)


def test_a_supervisor_without_children_starts_and_stops() -> None:
    supervisor = House("").supervisor()
    supervisor.watch(witness := ParentWitness())
    ref = supervisor.launch()
    assert witness.ready.wait(PATIENCE_S)
    assert ref.stop(timeout=PATIENCE_S) is True


# Restarting.


def test_a_child_that_crashes_is_restarted_and_its_mailbox_waits_for_it() -> None:
    house = House("a")
    with up(house.supervisor()):
        house.diary.until(Started, "a")
        house.crash("a")
        assert house.ask("a") == "hello"
        restarted = house.diary.until(Restarted, "a")
    assert restarted.generation == 2
    assert house.diary.kinds()[:3] == ["Started", "Restarting", "Restarted"]


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()], ids=repr)
def test_a_child_that_dies_of_a_base_exception_is_restarted_too(error: BaseException) -> None:
    def die() -> None:
        raise error

    house = House("ab")
    with up(house.supervisor()):
        house.diary.until(Started, "b")
        house.ref("a").tell(die)
        assert house.diary.until(Restarting, "a").cause.kind is ExitKind.CRASH
        house.diary.until(Restarted, "a")
        assert house.ask("b") == "hello"
    assert len(house.actors["b"]) == 1


def test_one_for_all_takes_the_others_along_in_order() -> None:
    house = House("abc")
    with up(house.supervisor(strategy=Strategy.ONE_FOR_ALL)):
        house.diary.until(Started, "c")
        house.crash("b")
        house.diary.until(Restarted, "c")
    again = ["c stops", "a stops", "a starts", "b starts", "c starts"]
    assert house.diary.lines[3:8] == again


def test_a_transient_child_that_ends_by_itself_stays_ended() -> None:
    house = House("a")
    with up(house.supervisor(house.specs(restart=Restart.TRANSIENT))):
        house.diary.until(Started, "a")
        assert house.ref("a").stop(timeout=PATIENCE_S)
        assert house.diary.until(Stopped, "a").reason.kind is ExitKind.NORMAL
    assert len(house.actors["a"]) == 1


def test_a_stop_during_a_backoff_does_not_wait_for_it() -> None:
    house = House("a")
    supervisor = house.supervisor(backoff=NEVER)
    ref = supervisor.launch()
    house.diary.until(Started, "a")
    house.crash("a")
    assert house.diary.until(Restarting, "a").delay_s == 3600.0
    assert ref.stop(timeout=PATIENCE_S) is True
    assert len(house.actors["a"]) == 1
    assert supervisor.join(PATIENCE_S)


# Giving up.


class Parent(pykka.ThreadingActor):
    """A plain pykka actor that is told of escalations."""

    use_daemon_thread = True

    def __init__(self, heard: queue.Queue[Any]) -> None:
        super().__init__()
        self._heard = heard

    def on_receive(self, message: Any) -> None:
        self._heard.put(message)


def test_restarts_used_up_are_told_to_a_pykka_parent() -> None:
    heard: queue.Queue[Any] = queue.Queue()
    parent = Parent.start(heard)
    house = House("ab")
    intensity = RestartIntensity(max_restarts=2)
    supervisor = house.supervisor(intensity=intensity, parent=parent)
    ref = supervisor.launch()
    house.diary.until(Started, "b")
    for _ in range(3):
        house.crash("a")
    escalated = heard.get(timeout=PATIENCE_S)
    assert isinstance(escalated, Escalated)
    assert escalated.child == "a"
    assert escalated.cause.kind is ExitKind.CRASH
    assert supervisor.join(PATIENCE_S)
    assert not ref.is_alive()
    assert house.diary.lines[-1] == "b stops"
    parent.stop(timeout=PATIENCE_S)


def test_a_parent_that_is_gone_harms_nobody() -> None:
    parent = Parent.start(queue.Queue())
    parent.stop(timeout=PATIENCE_S)
    house = House("a")
    supervisor = house.supervisor(intensity=RestartIntensity(max_restarts=0), parent=parent)
    supervisor.launch()
    house.diary.until(Started, "a")
    house.crash("a")
    assert house.diary.until(Stopped).reason.kind is ExitKind.CRASH
    assert supervisor.join(PATIENCE_S)


def test_restarts_used_up_are_a_crash_to_the_supervisor_above_which_restarts_all_below() -> None:
    house, above = House("ab"), Diary()

    def nested(_: int) -> Actor:
        return house.supervisor(intensity=RestartIntensity(max_restarts=1))

    spec = ChildSpec(policy=ChildPolicy(id="nested"), make=nested)
    with up(Supervisor([spec], backoff=AT_ONCE, listener=above.events.put)):
        above.until(Started, "nested")
        for _ in range(2):
            house.crash("a")
        restarting = above.until(Restarting, "nested")
        assert restarting.cause.kind is ExitKind.CRASH
        assert "as told" in restarting.cause.cause
        above.until(Restarted, "nested")
        assert [house.ask(name) for name in "ab"] == ["hello", "hello"]
    assert [len(house.actors[name]) for name in "ab"] == [3, 2]


def test_a_nested_supervisor_is_ready_when_its_children_are() -> None:
    house, above, gate = House("a"), Diary(), threading.Event()

    class Slow(Child):
        def on_start(self) -> None:
            assert gate.wait(PATIENCE_S)

    slow = ChildSpec(policy=ChildPolicy(id="a"), make=lambda _: Slow("a", house.diary))
    nested = house.supervisor([slow])
    spec = ChildSpec(policy=ChildPolicy(id="nested"), make=lambda _: nested)
    with up(Supervisor([spec], listener=above.events.put)) as ref:
        nested.actor_ref.ask("it has started", timeout=PATIENCE_S)
        ref.ask("and would have said so", timeout=PATIENCE_S)
        assert above.events.empty()
        gate.set()
        above.until(Started, "nested")


def test_a_nested_supervisor_ends_its_children_before_its_supervisor_ends() -> None:
    house = House("ab")
    spec = ChildSpec(policy=ChildPolicy(id="nested"), make=lambda _: house.supervisor())
    above = Diary()
    supervisor = Supervisor([spec], listener=above.events.put)
    ref = supervisor.launch()
    above.until(Started, "nested")
    assert ref.stop(timeout=PATIENCE_S)
    assert house.diary.lines[-2:] == ["b stops", "a stops"]


# Failing to start.


def test_a_make_that_raises_is_a_failed_start_and_is_tried_again() -> None:
    house = House("a")
    make, attempts = house.make("a"), iter([RuntimeError("no room"), OSError("still none")])

    def failing(incarnation: int) -> Actor:
        for error in attempts:
            raise error
        return make(incarnation)

    spec = ChildSpec(policy=ChildPolicy(id="a"), make=failing)
    with up(house.supervisor([spec])):
        assert house.diary.until(Restarting, "a").cause.kind is ExitKind.START_FAILED
        assert "still none" in house.diary.until(Restarting, "a").cause.cause
        house.diary.until(Restarted, "a")
        assert house.ask("a") == "hello"


def test_a_make_that_always_raises_uses_the_restarts_up() -> None:
    def failing(_: int) -> Actor:
        raise RuntimeError("never")

    diary = Diary()
    spec = ChildSpec(policy=ChildPolicy(id="a"), make=failing)
    supervisor = Supervisor([spec], backoff=AT_ONCE, listener=diary.events.put)
    supervisor.launch()
    assert diary.until(Escalated, "a").cause.kind is ExitKind.START_FAILED
    assert supervisor.join(PATIENCE_S)


def test_a_child_that_is_not_ready_in_time_is_replaced_and_its_late_readiness_ignored() -> None:
    house, started = House("a"), threading.Event()

    class NeverReady(Child):
        ready_when_started = False

        def on_start(self) -> None:
            started.set()

    def make(incarnation: int) -> Actor:
        if incarnation == 1:
            return NeverReady("a", house.diary)
        return house.make("a")(incarnation)

    spec = ChildSpec(policy=ChildPolicy(id="a", ready_within_s=0.5), make=make)
    with up(house.supervisor([spec])):
        assert house.diary.until(Restarting, "a").cause.kind is ExitKind.NOT_READY
        house.diary.until(Restarted, "a")
        assert house.ask("a") == "hello"
    assert started.is_set()


# What its events say of themselves.


def test_events_have_the_supervisors_name_and_its_clocks_time() -> None:
    house = House("ab")
    seconds = iter(range(100))
    clock = Clock(wall=lambda: 1000.0 + next(seconds), monotonic=lambda: 0.5)
    with up(house.supervisor(name="house", clock=clock)), capture_logs() as lines:
        house.diary.until(Started, "b")
    assert {event.service for event in house.diary.past} == {"house"}
    assert [event.at for event in house.diary.past] == [1000.0 + count for count in range(2)]
    assert {event.monotonic for event in house.diary.past} == {0.5}
    assert {line["service"] for line in lines} <= {"house"}


def test_a_supervisor_without_a_name_says_none() -> None:
    house = House("a")
    before = time.time()
    with up(house.supervisor()):
        started = house.diary.until(Started, "a")
    assert started.service is None
    assert before <= started.at <= time.time()
