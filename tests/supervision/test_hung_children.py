"""Children that hang, or end late, and a supervisor that crashes itself."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import msgspec
import pykka
import pytest

from cudnn_actor.actors import Actor, Crash, Envelope
from cudnn_actor.supervision import (
    ChildPolicy,
    ChildSpec,
    Escalated,
    ExitKind,
    LifecycleEvent,
    Restart,
    Restarted,
    Restarting,
    Started,
    Stopped,
    Strategy,
    Supervisor,
)
from cudnn_actor.supervision import supervisor as shell
from cudnn_actor.supervision.watch import look_every_s

from ..patience import PATIENCE_S
from .houses import Child, Diary, Hang, House, ParentWitness, crash, up


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that does not end is given up soon."""
    monkeypatch.setattr(shell, "KILL_GRACE_S", 0.05)


class AwareHang(Hang):
    """A message that waits, but lets go when its actor is abandoned."""

    def __init__(self, house: House, name: str) -> None:
        super().__init__()
        self.house, self.name = house, name

    def __call__(self) -> str:
        self.entered.set()
        assert self.house.actors[self.name][0].abandoned.wait(PATIENCE_S)
        raise Crash("abandoned")


def pretend_that_it_has_hung_for_an_hour(house: House, name: str, supervisor: Supervisor) -> None:
    actor = house.actors[name][-1]
    assert actor.busy_since is not None
    actor.busy_since -= 3600.0
    supervisor.mailbox.nudge()


# Hanging.


def test_a_hung_child_that_notices_is_replaced() -> None:
    house = House("a")
    supervisor = house.supervisor(house.specs(hang_after_s=60.0))
    with up(supervisor):
        house.diary.until(Started, "a")
        reply = AwareHang(house, "a").into(house, "a")
        pretend_that_it_has_hung_for_an_hour(house, "a", supervisor)
        assert house.diary.until(Restarting, "a").cause.kind is ExitKind.HUNG
        house.diary.until(Restarted, "a")
        with pytest.raises(Crash, match="abandoned"):
            reply.get(timeout=PATIENCE_S)
        assert house.ask("a") == "hello"


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("strategy", Strategy)
def test_a_hung_child_that_notices_nothing_has_no_successor(strategy: Strategy) -> None:
    house, hang = House("ab"), Hang()
    supervisor = house.supervisor(house.specs(hang_after_s=60.0), strategy=strategy)
    supervisor.launch()
    house.diary.until(Started, "b")
    reply = hang.into(house, "a")
    pretend_that_it_has_hung_for_an_hour(house, "a", supervisor)
    escalated = house.diary.until(Escalated, "a")
    assert (escalated.cause.kind, escalated.cause.cause) == (ExitKind.HUNG, "its thread does not end")
    with pytest.raises(pykka.ActorDeadError, match="given up"):
        reply.get(timeout=PATIENCE_S)
    assert supervisor.join(PATIENCE_S)
    assert [len(house.actors[name]) for name in "ab"] == [1, 1]
    assert not [event for event in house.diary.past if isinstance(event, Restarting)]
    hang.released.set()
    assert house.actors["a"][0].join(PATIENCE_S)


@pytest.mark.usefixtures("short_grace")
def test_one_that_hangs_in_its_start_has_no_successor_either() -> None:
    house, released = House("a"), threading.Event()

    class Stuck(Child):
        def on_start(self) -> None:
            assert released.wait(PATIENCE_S)

    spec = ChildSpec(policy=ChildPolicy(id="a", ready_within_s=0.05), make=lambda _: Stuck("a", house.diary))
    supervisor = house.supervisor([spec])
    supervisor.launch()
    assert house.diary.until(Escalated, "a").cause.cause == "its thread does not end"
    assert supervisor.join(PATIENCE_S)
    released.set()


class SlowToEnd(Child):
    """Takes its time for its last act, unless a successor is made meanwhile."""

    def on_crash(self, error: BaseException, current: Envelope | None, waiting: list[Envelope]) -> None:
        self.diary.write("last act begins")
        self.successor_made.wait(1.0)
        self.diary.write("last act ends")
        super().on_crash(error, current, waiting)

    successor_made = threading.Event()


@pytest.mark.usefixtures("short_grace")
def test_a_successor_waits_for_the_last_act_of_one_that_ends_by_itself_after_it_was_given_up() -> None:
    house = House("a")
    SlowToEnd.successor_made.clear()

    def make(_: int) -> Actor:
        kind = Child if house.actors["a"] else SlowToEnd
        if kind is Child:
            house.diary.write("successor is made")
            SlowToEnd.successor_made.set()
        house.actors["a"].append(kind("a", house.diary, house.mailboxes["a"]))
        return house.actors["a"][-1]

    specs = [msgspec.structs.replace(spec, make=make) for spec in house.specs(hang_after_s=60.0)]
    supervisor = house.supervisor(specs)
    with up(supervisor):
        house.diary.until(Started, "a")
        AwareHang(house, "a").into(house, "a")
        pretend_that_it_has_hung_for_an_hour(house, "a", supervisor)
        house.diary.until(Restarted, "a")
        assert house.ask("a") == "hello"
    lines = [line for line in house.diary.lines if "act" in line or "made" in line]
    assert lines == ["last act begins", "last act ends", "successor is made"]


def test_of_two_that_hang_in_one_group_the_successor_is_not_taken_for_its_predecessor() -> None:
    house = House("ab")
    specs = house.specs(hang_after_s=60.0, shutdown_s=0.0)
    supervisor = house.supervisor(specs, strategy=Strategy.ONE_FOR_ALL)
    with up(supervisor):
        house.diary.until(Started, "b")
        for name in "ab":
            AwareHang(house, name).into(house, name)
        second = house.actors["b"][0]
        assert second.busy_since is not None
        second.busy_since -= 3600.0
        pretend_that_it_has_hung_for_an_hour(house, "a", supervisor)
        house.diary.until(Restarted, "b")
        assert [house.ask(name) for name in "ab"] == ["hello", "hello"]
    assert [len(house.actors[name]) for name in "ab"] == [2, 2]


@pytest.mark.usefixtures("short_grace")
def test_a_child_that_does_not_stop_in_time_is_killed() -> None:
    house, hang = House("ab"), Hang()
    slow, patient = house.specs(shutdown_s=0.05)[1], house.specs()[0]
    supervisor = house.supervisor([patient, slow])
    ref = supervisor.launch()
    house.diary.until(Started, "b")
    hang.into(house, "b")
    assert ref.stop(timeout=PATIENCE_S) is True
    assert house.diary.until(Stopped, "b").reason.kind is ExitKind.KILLED
    assert house.diary.until(Stopped, "a").reason.kind is ExitKind.NORMAL
    hang.released.set()


def test_the_time_that_a_kill_takes_is_not_taken_from_the_next_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "KILL_GRACE_S", 0.6)
    house, hang = House("ab"), Hang()
    supervisor = house.supervisor(house.specs(shutdown_s=0.5))
    ref = supervisor.launch()
    house.diary.until(Started, "b")
    hang.into(house, "b")
    assert ref.stop(timeout=PATIENCE_S) is True
    assert house.diary.until(Stopped, "b").reason.kind is ExitKind.KILLED
    assert house.diary.until(Stopped, "a").reason.kind is ExitKind.NORMAL
    hang.released.set()


def test_busy_children_within_the_limit_are_left_alone() -> None:
    house, hang = House("a"), Hang()
    supervisor = house.supervisor(house.specs(hang_after_s=60.0))
    with up(supervisor) as ref:
        house.diary.until(Started, "a")
        reply = hang.into(house, "a")
        for _ in range(10):
            ref.ask("look around", timeout=PATIENCE_S)
        hang.released.set()
        assert reply.get(timeout=PATIENCE_S) == "came back"
    assert len(house.actors["a"]) == 1


def test_one_that_makes_progress_is_left_alone_however_long_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it makes none. The supervisor's clock goes from look to look, for twice the limit and longer."""
    house, ahead_s = House("a"), 0.0
    limit_s, real = 60.0, time.monotonic
    monkeypatch.setattr(shell, "time", SimpleNamespace(monotonic=lambda: real() + ahead_s))
    supervisor = house.supervisor(house.specs(hang_after_s=limit_s))
    with up(supervisor) as ref:
        house.diary.until(Started, "a")
        reply = AwareHang(house, "a").into(house, "a")
        actor = house.actors["a"][0]
        looks = 0
        while house.actors["a"] == [actor] and looks < 32:
            ahead_s += look_every_s(limit_s)
            looks += 1
            if looks <= 16:
                actor.busy_since = real() + ahead_s - limit_s / 2
            for _ in range(2):  # it looks before it takes the second
                ref.ask("look around", timeout=PATIENCE_S)
        assert 16 + 4 <= looks < 32
        assert house.diary.until(Restarting, "a").cause.kind is ExitKind.HUNG
        with pytest.raises(Crash, match="abandoned"):
            reply.get(timeout=PATIENCE_S)


# The supervisor itself.


@pytest.mark.usefixtures("short_grace")
def test_a_supervisor_that_crashes_leaves_no_child_behind_not_even_one_that_hangs() -> None:
    diary, hang = Diary(), Hang()
    children: list[Child] = []

    def make(_: int) -> Actor:
        children.append(Child("a", diary))
        return children[-1]

    def listener(event: LifecycleEvent) -> None:
        diary.events.put(event)
        if isinstance(event, Stopped):
            raise SystemExit("a listener's mistake")

    specs = [ChildSpec(policy=ChildPolicy(id=name, restart=Restart.TEMPORARY), make=make) for name in "ab"]
    supervisor = Supervisor(specs, listener=listener)
    supervisor.watch(witness := ParentWitness())
    ref = supervisor.launch()
    diary.until(Started, "b")
    running = children[0].actor_ref.ask(hang, block=False)
    assert hang.entered.wait(PATIENCE_S)
    queued = children[0].actor_ref.ask("behind it", block=False)
    children[1].actor_ref.tell(crash)
    assert witness.exited.wait(PATIENCE_S)
    assert witness.exits[0].kind == "crash"
    assert not ref.is_alive()
    with pytest.raises(pykka.ActorDeadError, match="given up"):
        running.get(timeout=PATIENCE_S)
    with pytest.raises(pykka.ActorDeadError):
        queued.get(timeout=PATIENCE_S)
    hang.released.set()


@pytest.mark.usefixtures("short_grace")
def test_a_nested_supervisor_whose_child_hangs_is_given_up_with_everything_below() -> None:
    house, hang, above = House("a"), Hang(), Diary()
    specs = house.specs(shutdown_s=3600.0)
    spec = ChildSpec(policy=ChildPolicy(id="nested", shutdown_s=0.05), make=lambda _: house.supervisor(specs))
    supervisor = Supervisor([spec], listener=above.events.put)
    ref = supervisor.launch()
    above.until(Started, "nested")
    reply = hang.into(house, "a")
    assert ref.stop(timeout=PATIENCE_S) is True
    assert above.until(Stopped, "nested").reason.kind is ExitKind.KILLED
    with pytest.raises(pykka.ActorDeadError, match="given up"):
        reply.get(timeout=PATIENCE_S)
    hang.released.set()


def test_a_crash_that_races_a_stop_ends_all_the_same() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(40):
            house = House("ab")
            supervisor = house.supervisor()
            ref = supervisor.launch()
            house.diary.until(Started, "b")
            house.crash("a")
            assert ref.stop(timeout=PATIENCE_S) is True
            assert supervisor.join(PATIENCE_S)
    finally:
        sys.setswitchinterval(before)


def test_signals_after_the_end_are_ignored() -> None:
    supervisor = House("a").supervisor()
    supervisor.launch().stop(timeout=PATIENCE_S)
    assert supervisor.join(PATIENCE_S)
    supervisor.end("once more")
