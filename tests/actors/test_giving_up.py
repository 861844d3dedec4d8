"""A thread that does not end is given up: what it held is answered once, and it may come back."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pykka
import pytest

from cudnn_actor.actors import ActorStopped, Envelope, LoopBridge, Mailbox, ask, submit

from ..patience import PATIENCE_S
from .actor_fixtures import Caller, Gate, Witness, ended, held, in_threads, running

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
    assert not actor.give_up(GIVEN_UP)


async def test_what_runs_and_what_waits_is_answered_although_the_thread_hangs() -> None:
    actor = Caller()
    actor.launch()
    with held(actor):
        queued = [submit(actor.mailbox, number) for number in range(100)]
        actor.abandon("no progress")
        assert actor.give_up(GIVEN_UP)
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
    actor.give_up(GIVEN_UP)
    with pytest.raises(ActorStopped, match="given up"):
        await future
    gate.open()
    assert ended(actor)
    await asyncio.sleep(0)
    assert discarded == ["far too late"]


@pytest.mark.parametrize("late", ["a result", ValueError("an error")], ids=repr)
def test_a_thread_that_comes_back_answers_nothing_and_closes_what_it_has(late: Any) -> None:
    class Fenced(Caller):
        fences = closed = 0

        def on_batch_end(self) -> None:
            self.fences += 1

        def on_late_end(self) -> None:
            self.closed += 1

    mailbox, gate = Mailbox(), Gate(late)
    lost = Fenced(mailbox=mailbox)
    lost.watch(witness := Witness())
    lost.launch()
    asked = lost.actor_ref.ask(gate, block=False)
    gate.await_entry()
    lost.abandon("no progress")
    assert lost.give_up(GIVEN_UP)
    assert lost.lost
    counted = (lost.counters.finished, lost.counters.failed)
    gate.open()
    assert lost.join(PATIENCE_S)
    assert (lost.counters.finished, lost.counters.failed) == counted
    assert (lost.fences, lost.closed) == (0, 1)
    assert not witness.exited.is_set()
    with pytest.raises(pykka.ActorDeadError):
        asked.get(timeout=0)


@pytest.mark.usefixtures("hasty_switching")
async def test_an_end_that_races_a_giving_up_is_one_or_the_other() -> None:
    for _ in range(100):
        mailbox, gate = Mailbox(), Gate("done")
        actor = Caller(mailbox=mailbox)
        actor.watch(witness := Witness())
        actor.launch()
        running_one = submit(mailbox, gate)
        queued = submit(mailbox, "queued")
        gate.await_entry()
        actor.end("racing")
        given_up, _ = in_threads(partial(actor.give_up, GIVEN_UP), gate.open)
        assert ended(actor)
        mailbox.close("over")
        first, second = await asyncio.wait_for(
            asyncio.gather(running_one, queued, return_exceptions=True), PATIENCE_S
        )
        assert first == "done" or isinstance(first, ActorStopped)
        assert isinstance(second, ActorStopped)
        assert witness.exited.is_set() is not given_up
        assert LoopBridge.of_running_loop().awaited == 0


def test_one_that_is_given_up_and_only_waits_for_messages_ends() -> None:
    actor = Caller()
    actor.launch()
    assert actor.actor_ref.ask("it is up", timeout=PATIENCE_S)
    assert actor.give_up(GIVEN_UP)
    assert actor.join(PATIENCE_S)


def test_what_it_was_taking_when_it_was_given_up_goes_back_to_the_mailbox() -> None:
    class SlowToTake(Mailbox):
        """Stands between taking a batch and handing it over."""

        def take(self, most: int, timeout: float | None = None) -> list[Envelope]:
            taken = super().take(most, timeout)
            if taken:
                gate()
            return taken

    mailbox, gate = SlowToTake(), Gate()
    lost = Caller(mailbox=mailbox)
    asked = lost.actor_ref.ask("patient", block=False)
    lost.launch()
    gate.await_entry()
    lost.give_up(GIVEN_UP)
    gate.open()
    assert lost.join(PATIENCE_S)
    with running(Caller(mailbox=mailbox)):
        assert asked.get(timeout=PATIENCE_S) == "patient"
