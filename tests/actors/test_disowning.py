"""A thread that cannot be ended is given up: what it held is answered once, and it may come back."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pykka
import pytest

from cudnn_actor.actors import Actor, ActorStopped, Envelope, LoopBridge, Mailbox, ask, submit

from .actor_fixtures import PATIENCE_S, Caller, Gate, Witness, ended, held, in_threads, running

GIVEN_UP = ActorStopped(reason="given up")


async def test_an_abandoned_actor_that_waits_on_the_event_ends_by_itself() -> None:
    actor = Caller()
    actor.watch(witness := Witness())
    actor.launch()
    begun = threading.Event()

    def wait() -> bool:
        begun.set()
        return actor.abandoned.wait(PATIENCE_S)

    waiting = submit(actor.mailbox, wait)
    assert begun.wait(PATIENCE_S)
    actor.abandon("no progress")
    assert await waiting is True
    assert witness.outcome().kind == "normal"
    assert not actor.disown(GIVEN_UP)


async def test_disowning_answers_what_runs_and_what_waits_although_the_thread_hangs() -> None:
    actor = Caller()
    actor.launch()
    with held(actor):
        queued = [submit(actor.mailbox, number) for number in range(100)]
        actor.abandon("no progress")
        assert actor.disown(GIVEN_UP)
        outcomes = await asyncio.wait_for(asyncio.gather(*queued, return_exceptions=True), PATIENCE_S)
    assert all(isinstance(outcome, ActorStopped) for outcome in outcomes)
    with pytest.raises(ActorStopped):
        await ask(actor.mailbox, "too late")


async def test_the_running_message_gets_the_error_and_its_late_result_is_discarded() -> None:
    discarded: list[str] = []
    gate = Gate("far too late")
    actor = Caller()
    actor.launch()
    future = submit(actor.mailbox, gate, discard=discarded.append)
    gate.await_entry()
    actor.abandon("no progress")
    actor.disown(GIVEN_UP)
    with pytest.raises(ActorStopped, match="given up"):
        await future
    gate.open()
    assert ended(actor)
    await asyncio.sleep(0)
    assert discarded == ["far too late"]


@pytest.mark.parametrize("late", ["a result", ValueError("an error")], ids=repr)
def test_a_thread_that_comes_back_touches_nothing(late: Any) -> None:
    class Fenced(Caller):
        fences = 0

        def on_batch_end(self) -> None:
            self.fences += 1

    mailbox, gate = Mailbox(), Gate(late)
    lost = Fenced(mailbox=mailbox)
    lost.watch(witness := Witness())
    lost.launch()
    asked = lost.actor_ref.ask(gate, block=False)
    gate.await_entry()
    lost.abandon("no progress")
    assert lost.disown(GIVEN_UP)
    counted = (lost.counters.finished, lost.counters.failed)
    with running(Caller(mailbox=mailbox)) as successor:
        gate.open()
        assert lost.join(PATIENCE_S)
        assert successor.actor_ref.ask("hello", timeout=PATIENCE_S) == "hello"
    assert (lost.counters.finished, lost.counters.failed) == counted
    assert lost.fences == 0
    assert not witness.exited.is_set()
    with pytest.raises(pykka.ActorDeadError):
        asked.get(timeout=0)


class Bequeathing(Caller):
    """Leaves everything to its successor, also what was running."""

    def on_crash(self, error: BaseException, current: Envelope | None, waiting: list[Envelope]) -> None:
        self.mailbox.restore(waiting)
        if current is not None:
            self.mailbox.restore([current])


def test_a_successor_runs_what_was_handed_on_in_order_and_the_lost_thread_answers_none_of_it() -> None:
    mailbox, gate = Mailbox(), Gate("whoever runs it")
    order: list[int] = []
    lost = Bequeathing(mailbox=mailbox)
    lost.launch()
    asked = lost.actor_ref.ask(gate, block=False)
    gate.await_entry()
    for number in range(10):
        lost.actor_ref.tell(lambda number=number: order.append(number))
    lost.abandon("no progress")
    lost.disown(GIVEN_UP)
    gate.entered.clear()
    with running(Caller(mailbox=mailbox)) as successor:
        gate.await_entry()  # the successor runs it again
        gate.open()
        assert lost.join(PATIENCE_S)
        assert asked.get(timeout=PATIENCE_S) == "whoever runs it"
        assert successor.actor_ref.ask("behind them", timeout=PATIENCE_S) == "behind them"
    assert order == list(range(10))


@pytest.mark.usefixtures("hasty_switching")
async def test_an_end_that_races_its_disowning_is_one_or_the_other() -> None:
    for _ in range(100):
        mailbox, gate = Mailbox(), Gate("done")
        actor = Caller(mailbox=mailbox)
        actor.watch(witness := Witness())
        actor.launch()
        running_one = submit(mailbox, gate)
        queued = submit(mailbox, "queued")
        gate.await_entry()
        actor.end("racing")
        disowned, _ = in_threads(partial(actor.disown, GIVEN_UP), gate.open)
        assert ended(actor)
        mailbox.close("over")
        first, second = await asyncio.wait_for(
            asyncio.gather(running_one, queued, return_exceptions=True), PATIENCE_S
        )
        assert first == "done" or isinstance(first, ActorStopped)
        assert isinstance(second, ActorStopped)
        assert witness.exited.is_set() is not disowned
        assert LoopBridge.of_running_loop().awaited == 0


def test_a_disowned_actor_that_only_waits_for_messages_ends() -> None:
    actor = Caller()
    actor.launch()
    assert actor.actor_ref.ask("it is up", timeout=PATIENCE_S)
    assert actor.disown(GIVEN_UP)
    assert actor.join(PATIENCE_S)


def test_what_a_disowned_thread_had_taken_goes_back_to_the_mailbox() -> None:
    class SlowToAccept(Actor):
        """Stands between taking a batch and accepting it."""

        def __init__(self, mailbox: Mailbox) -> None:
            super().__init__(mailbox=mailbox)
            self.gate = Gate()

        def _accept(self, taken: list[Envelope]) -> None:
            self.gate()
            super()._accept(taken)

    mailbox = Mailbox()
    lost = SlowToAccept(mailbox)
    asked = lost.actor_ref.ask("patient", block=False)
    lost.launch()
    lost.gate.await_entry()
    lost.disown(GIVEN_UP)
    lost.gate.open()
    assert lost.join(PATIENCE_S)
    with running(Caller(mailbox=mailbox)):
        assert asked.get(timeout=PATIENCE_S) == "patient"
