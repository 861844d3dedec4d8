"""What pykka's own actors get wrong in their lives; the table stands in `actors.actor`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from typing import Any

import pykka
import pytest

from cudnn_actor.actors import DEFERRED, Actor, ActorStopped, Crash, Envelope, Mailbox, ask, submit, tell

from ..patience import PATIENCE_S
from .actor_fixtures import Caller, Gate, Urgent, Witness, held, running


def raising(error: BaseException) -> Any:
    def message() -> None:
        raise error

    return message


# Errors of handlers.


async def test_a_handlers_error_is_the_answer_and_the_actor_goes_on() -> None:
    with running(Caller()) as actor:
        with pytest.raises(ValueError, match="just this one"):
            await ask(actor.mailbox, raising(ValueError("just this one")))
        assert await ask(actor.mailbox, "alive") == "alive"
        assert actor.counters.failed == 1
        assert actor.counters.finished == 1


async def test_a_crash_ends_the_actor_and_is_the_answer() -> None:
    actor = Caller()
    actor.watch(witness := Witness())
    actor.launch()
    with pytest.raises(Crash, match="broken"):
        await ask(actor.mailbox, raising(Crash("broken")))
    assert witness.outcome().kind == "crash"
    assert not actor.actor_ref.is_alive()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
async def test_a_base_exception_ends_its_own_actor_only(error: BaseException) -> None:
    dying = Caller()
    dying.watch(witness := Witness())
    dying.launch()
    with running(Caller()) as bystander:
        with pytest.raises(ActorStopped, match=type(error).__name__):
            await ask(dying.mailbox, raising(error))
        assert witness.outcome().error is error
        assert await ask(bystander.mailbox, "alive") == "alive"


def test_a_pykka_asker_survives_a_base_exception_too() -> None:
    dying = Caller()
    dying.launch()
    with pytest.raises(pykka.ActorDeadError, match="SystemExit"):
        dying.actor_ref.ask(raising(SystemExit(3)), timeout=PATIENCE_S)


def test_an_actor_that_crashes_answers_those_who_wait_behind() -> None:
    actor = Caller()
    actor.launch()
    with held(actor) as gate:
        gate.result = Crash("down with all")
        waiting = [actor.actor_ref.ask(number, block=False) for number in range(100)]
    for future in waiting:
        with pytest.raises(pykka.ActorDeadError, match=r"down with all|crash"):
            future.get(timeout=PATIENCE_S)


# Starting.


class StillBorn(Caller):
    """Dies in on_start, once the test lets it."""

    def __init__(self, error: BaseException, mailbox: Mailbox | None = None) -> None:
        super().__init__(mailbox=mailbox)
        self.gate = Gate(error)

    def on_start(self) -> None:
        self.gate()


@pytest.mark.parametrize("error", [RuntimeError("no device"), SystemExit(1)], ids=repr)
async def test_an_actor_that_dies_in_on_start_answers_what_it_had_accepted(error: BaseException) -> None:
    actor = StillBorn(error)
    actor.watch(witness := Witness())
    actor.launch()
    actor.gate.await_entry()
    future = submit(actor.mailbox, "early")
    asked = actor.actor_ref.ask("early", block=False)
    actor.gate.open()
    with pytest.raises(ActorStopped):
        await future
    with pytest.raises(pykka.ActorDeadError):
        asked.get(timeout=PATIENCE_S)
    assert witness.outcome().kind == "start_failed"
    assert witness.outcome().error is error
    assert not witness.ready.is_set()


def test_a_mailbox_that_outlives_its_actor_keeps_what_waits_for_the_next() -> None:
    mailbox = Mailbox()
    first = StillBorn(RuntimeError("no device"), mailbox)
    first.launch()
    future = first.actor_ref.ask("patient", block=False)
    first.gate.open()
    assert first.join(PATIENCE_S)
    with running(Caller(mailbox=mailbox)):
        assert future.get(timeout=PATIENCE_S) == "patient"


def test_readiness_is_told_when_on_start_has_returned() -> None:
    class Slow(Caller):
        gate = Gate()

        def on_start(self) -> None:
            self.gate()

    actor = Slow()
    actor.watch(witness := Witness())
    with running(actor):
        actor.gate.await_entry()
        assert not witness.ready.is_set()
        actor.gate.open()
        assert witness.ready.wait(PATIENCE_S)


# Idling.


class Thing:
    """A message or result that can be watched."""


class Idler(Caller):
    """Tells when it is about to sleep, having dealt with so many messages."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = threading.Condition()
        self.dealt_with = 0

    def poll(self) -> None:
        with self.looked:
            self.dealt_with = self.counters.finished + self.counters.failed + self.counters.withdrawn
            self.looked.notify_all()

    def await_sleep(self, messages: int) -> None:
        with self.looked:
            assert self.looked.wait_for(lambda: self.dealt_with == messages, PATIENCE_S)


@pytest.mark.parametrize("how", ["asked", "told", "failed ask", "failed tell", "withdrawn"])
async def test_an_idle_actor_keeps_no_message_alive(how: str) -> None:
    with running(Idler()) as actor:
        thing = Thing()
        seen = weakref.ref(thing)
        if how == "asked":
            assert await ask(actor.mailbox, thing) is thing
        elif how == "failed ask":
            with contextlib.suppress(ValueError):
                await ask(actor.mailbox, Failing(thing))
        elif how == "withdrawn":
            with held(actor):
                submit(actor.mailbox, thing).cancel()
        else:
            tell(actor.mailbox, thing if how == "told" else Failing(thing))
        del thing
        actor.await_sleep(messages=2 if how == "withdrawn" else 1)
        await asyncio.sleep(0)  # for the replies of those who have gone
        gc.collect()
        assert seen() is None


class Failing:
    """A message whose handling fails."""

    def __init__(self, thing: Thing) -> None:
        self.thing = thing

    def __call__(self) -> None:
        raise ValueError("as planned")


def test_the_thread_is_a_daemon() -> None:
    with running(Caller()) as actor:
        assert actor.thread is not None
        assert actor.thread.daemon


# Ending.


def test_an_end_that_comes_while_the_actor_looks_around_is_not_slept_through() -> None:
    class LookingAround(Caller):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Gate(None)

        def poll(self) -> None:
            self.gate()

    actor = LookingAround()
    actor.launch()
    actor.gate.await_entry()
    actor.end("right between the look and the sleep")
    actor.gate.open()
    assert actor.join(PATIENCE_S)


def test_end_leaves_the_mailbox_to_a_successor() -> None:
    mailbox = Mailbox()
    first = Caller(mailbox=mailbox)
    first.launch()
    with held(first):
        futures = [first.actor_ref.ask(number, block=False) for number in range(3)]
        first.end("replaced")
    assert first.join(PATIENCE_S)
    assert mailbox.closed is None
    with running(Caller(mailbox=mailbox)):
        assert [future.get(timeout=PATIENCE_S) for future in futures] == [0, 1, 2]


def test_what_a_batch_leaves_behind_goes_back_in_order() -> None:
    mailbox = Mailbox()
    first = Caller(mailbox=mailbox)
    with_gate = Gate()
    for message in (with_gate, "a", "b", "c"):
        tell(mailbox, message)
    first.launch()
    with_gate.await_entry()
    first.end("in the middle of a batch")
    with_gate.open()
    assert first.join(PATIENCE_S)
    assert [envelope.message for envelope in mailbox.take(10, 0.0)] == ["a", "b", "c"]


def test_a_failing_stop_hook_is_a_crash_but_everybody_is_answered() -> None:
    class BadEnd(Caller):
        def on_stop(self) -> None:
            raise RuntimeError("cannot close")

    actor = BadEnd()
    actor.watch(witness := Witness())
    actor.launch()
    assert actor.actor_ref.stop(timeout=PATIENCE_S)
    assert witness.outcome().kind == "crash"


@pytest.mark.parametrize("error", [RuntimeError("worse"), SystemExit("worse")], ids=repr)
async def test_a_failing_crash_hook_leaves_nobody_without_an_answer(error: BaseException) -> None:
    class BadCrash(Caller):
        def on_crash(self, cause: BaseException, current: Any, waiting: Any) -> None:
            raise error

    actor = BadCrash()
    actor.watch(witness := Witness())
    actor.launch()
    with pytest.raises(Crash, match="first"):
        await ask(actor.mailbox, raising(Crash("first")))
    assert witness.outcome().kind == "crash"
    assert actor.mailbox.closed is not None


@pytest.mark.parametrize("error", [RuntimeError("worse"), SystemExit("worse")], ids=repr)
def test_a_failing_failure_hook_does_not_keep_the_end_secret(error: BaseException) -> None:
    class BadFailure(Caller):
        def on_failure(self, *_: Any) -> None:
            raise error

    actor = BadFailure()
    actor.watch(witness := Witness())
    actor.launch()
    actor.actor_ref.tell(raising(Crash("first")))
    assert witness.outcome().kind == "crash"


# Batches, timers, deferred replies.


def test_each_batch_ends_with_its_hook_before_the_replies_are_flushed() -> None:
    class Fenced(Caller):
        batch_limit = 3

        def __init__(self) -> None:
            super().__init__()
            self.fences: list[int] = []

        def on_batch_end(self) -> None:
            self.fences.append(self.counters.finished)

    actor = Fenced()
    futures = [actor.actor_ref.ask(number, block=False) for number in range(7)]
    with running(actor):
        assert pykka.get_all(futures, timeout=PATIENCE_S) == list(range(7))
    assert actor.fences[:3] == [3, 6, 7]


class Later(Actor):
    """Answers every message from `poll`, one each time it is asked how long it may sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.deferred: list[Envelope] = []
        self.polls = 0

    def on_receive(self, message: Any) -> Any:
        assert self.current is not None
        self.deferred.append(self.current)
        return DEFERRED

    def poll(self) -> float | None:
        self.polls += 1
        if self.deferred:
            envelope = self.deferred.pop(0)
            self.settle(envelope, f"{envelope.message}, later")
            self.flush()
        return 0.001 if self.deferred else None


async def test_a_deferred_reply_is_given_later() -> None:
    with running(Later()) as actor:
        assert await ask(actor.mailbox, "a") == "a, later"


async def test_poll_is_called_again_after_its_time_without_any_message() -> None:
    with running(Later()) as actor:
        futures = [submit(actor.mailbox, number) for number in range(5)]
        assert [await future for future in futures] == [f"{number}, later" for number in range(5)]


def test_a_poll_without_a_time_waits_for_messages() -> None:
    with running(Later()) as actor:
        assert actor.actor_ref.ask("a", timeout=PATIENCE_S) == "a, later"
        before = actor.polls
        assert actor.actor_ref.ask("b", timeout=PATIENCE_S) == "b, later"
        assert actor.polls - before <= 3


def test_busy_since_is_set_during_a_message_only() -> None:
    with running(Caller()) as actor:
        with held(actor):
            assert actor.busy_since is not None
        assert actor.actor_ref.ask(lambda: actor.busy_since, timeout=PATIENCE_S) is not None
        actor.mailbox.nudge()
    assert actor.busy_since is None


async def test_an_urgent_message_has_no_place_to_wait_for() -> None:
    with running(Caller(mailbox=Mailbox(1))) as actor, held(actor) as gate:
        tell(actor.mailbox, "fills it")
        urgent = submit(actor.mailbox, Urgent("hello"))
        gate.open()
        assert (await urgent).name == "hello"


def test_no_actor_of_these_tests_is_still_registered() -> None:
    with running(Caller()) as actor:
        assert actor.actor_ref in pykka.ActorRegistry.get_all()
    assert actor.actor_ref not in pykka.ActorRegistry.get_all()
    assert threading.current_thread() is threading.main_thread()
