"""The shell: a supervisor with real actors, real threads and a real clock."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pykka
import pytest

from cudnn_actor.actors import Actor, Crash, Envelope, Mailbox, MailboxRef
from cudnn_actor.supervision import (
    Backoff,
    ChildPolicy,
    ChildSpec,
    Clock,
    Escalated,
    ExitKind,
    LifecycleEvent,
    Restart,
    Restarted,
    Restarting,
    RestartIntensity,
    Started,
    Stopped,
    Strategy,
    Supervisor,
)
from cudnn_actor.supervision import supervisor as shell
from cudnn_actor.supervision.watch import look_every_s

from ..log_lines import capture_logs
from ..patience import PATIENCE_S

AT_ONCE = Backoff(initial_s=0.0)
NEVER = Backoff(initial_s=3600.0, cap_s=3600.0, jitter=0.0)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that does not end is given up soon."""
    monkeypatch.setattr(shell, "KILL_GRACE_S", 0.05)


class Diary:
    """What happened, in order; any thread writes."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: queue.Queue[LifecycleEvent] = queue.Queue()
        self.past: list[LifecycleEvent] = []

    def write(self, line: str) -> None:
        self.lines.append(line)

    def until(self, kind: type[LifecycleEvent], child: str | None = None) -> Any:
        """Wait for the next event of this kind, about this child."""
        while True:
            event = self.events.get(timeout=PATIENCE_S)
            self.past.append(event)
            if isinstance(event, kind) and event.child == child:
                return event

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.past]


class Child(Actor):
    """Does what its messages say, and writes down its life."""

    def __init__(self, name: str, diary: Diary, mailbox: Mailbox | None = None) -> None:
        super().__init__(mailbox=mailbox)
        self.name, self.diary = name, diary

    def on_start(self) -> None:
        self.diary.write(f"{self.name} starts")

    def on_stop(self) -> None:
        self.diary.write(f"{self.name} stops")

    def on_receive(self, message: Any) -> Any:
        return message() if callable(message) else message

    def on_crash(self, error: BaseException, current: Envelope | None, waiting: list[Envelope]) -> None:
        if not self._owns_mailbox:
            self.mailbox.restore(waiting)
            waiting = []
        super().on_crash(error, current, waiting)


class House:
    """Children under a supervisor: each has a mailbox and a reference that outlive its incarnations."""

    def __init__(self, names: str = "a") -> None:
        self.diary = Diary()
        self.names = names
        self.mailboxes = {name: Mailbox() for name in names}
        self.actors: dict[str, list[Actor]] = {name: [] for name in names}

    def make(self, name: str) -> Callable[[int], Actor]:
        def make(_: int) -> Actor:
            actor = Child(name, self.diary, self.mailboxes[name])
            self.actors[name].append(actor)
            return actor

        return make

    def specs(self, *, hang_after_s: float | None = None, **policy: Any) -> list[ChildSpec]:
        return [
            ChildSpec(policy=ChildPolicy(id=name, **policy), make=self.make(name), hang_after_s=hang_after_s)
            for name in self.names
        ]

    def supervisor(self, specs: Sequence[ChildSpec] | None = None, **options: Any) -> Supervisor:
        given: dict[str, Any] = {"backoff": AT_ONCE, "listener": self.diary.events.put} | options
        return Supervisor(self.specs() if specs is None else specs, **given)

    def ask(self, name: str, message: Any = "hello") -> Any:
        return self.ref(name).ask(message, timeout=PATIENCE_S)

    def ref(self, name: str) -> MailboxRef:
        return MailboxRef(self.mailboxes[name], Child, threading.Event())

    def crash(self, name: str) -> None:
        self.ref(name).tell(crash)


def crash() -> None:
    raise Crash("as told")


@contextmanager
def up(supervisor: Supervisor) -> Iterator[pykka.ActorRef[Any]]:
    ref = supervisor.launch()
    try:
        yield ref
    finally:
        supervisor.end("the test is over")
        assert supervisor.join(PATIENCE_S)


class Hang:
    """A message that never lets go of its thread, until the test does."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.released = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self.released.wait(PATIENCE_S)
        return "came back"

    def into(self, house: House, name: str) -> pykka.Future[Any]:
        reply = house.ref(name).ask(self, block=False)
        assert self.entered.wait(PATIENCE_S)
        return reply


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


class ParentWitness:
    """An observer of a supervisor."""

    def __init__(self) -> None:
        self.ready, self.exited = threading.Event(), threading.Event()
        self.exits: list[Any] = []

    def actor_ready(self) -> None:
        self.ready.set()

    def actor_exited(self, exit: Any) -> None:
        self.exits.append(exit)
        self.exited.set()


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
