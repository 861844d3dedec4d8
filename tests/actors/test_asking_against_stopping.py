"""Admission and closing are two moments in one order: no reply falls between."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial

import pykka
import pytest

from cudnn_actor.actors import Crash, ask

from ..patience import PATIENCE_S
from .actor_fixtures import Caller, Witness, in_threads

ROUNDS = 150
ASKERS = 3


def asks(actor: Caller) -> Callable[[], str]:
    def job() -> str:
        try:
            return str(actor.actor_ref.ask("hello", timeout=PATIENCE_S))
        except pykka.ActorDeadError:
            return "refused"

    return job


def stops(actor: Caller) -> Callable[[], bool]:
    return lambda: actor.actor_ref.stop(block=True, timeout=PATIENCE_S)


@pytest.mark.usefixtures("hasty_switching")
def test_an_ask_that_races_a_stop_is_answered_or_refused() -> None:
    for _ in range(ROUNDS):
        actor = Caller()
        actor.launch()
        *answers, stopped = in_threads(*[asks(actor)] * ASKERS, stops(actor))
        assert set(answers) <= {"hello", "refused"}, answers
        assert stopped is True
        assert actor.join(PATIENCE_S)


@pytest.mark.usefixtures("hasty_switching")
def test_of_two_stops_that_race_neither_waits_for_ever_or_raises() -> None:
    for _ in range(ROUNDS):
        actor = Caller()
        actor.launch()
        stopped = in_threads(*[stops(actor)] * ASKERS)
        assert all(isinstance(result, bool) for result in stopped), stopped
        assert True in stopped


@pytest.mark.usefixtures("hasty_switching")
def test_an_ask_that_races_a_crash_is_answered_or_refused() -> None:
    def crash() -> None:
        raise Crash("in the middle")

    for _ in range(ROUNDS):
        actor = Caller()
        actor.launch()
        answers = in_threads(*[asks(actor)] * ASKERS, partial(actor.actor_ref.tell, crash))[:-1]
        assert set(answers) <= {"hello", "refused"}, answers


@pytest.mark.usefixtures("hasty_switching")
async def test_an_asyncio_ask_that_races_a_stop_is_answered_or_refused() -> None:
    for _ in range(ROUNDS):
        actor = Caller()
        actor.launch()
        barrier = threading.Barrier(2)

        def stop(actor: Caller = actor, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(PATIENCE_S)
            actor.actor_ref.stop(block=False)

        thread = threading.Thread(target=stop)
        thread.start()
        barrier.wait(PATIENCE_S)
        asked = asyncio.gather(*(ask(actor.mailbox, n) for n in range(20)), return_exceptions=True)
        answers = await asyncio.wait_for(asked, PATIENCE_S)
        thread.join()
        assert all(
            answer == n or isinstance(answer, pykka.ActorDeadError) for n, answer in enumerate(answers)
        )


@pytest.mark.usefixtures("hasty_switching")
def test_an_end_is_never_slept_through() -> None:
    for _ in range(ROUNDS):
        actor = Caller()
        actor.watch(witness := Witness())
        actor.launch()
        actor.mailbox.nudge()
        actor.end("at any moment")
        assert witness.outcome().kind == "normal"


async def test_an_ask_after_the_end_is_refused_at_once() -> None:
    actor = Caller()
    actor.launch()
    actor.actor_ref.stop(timeout=PATIENCE_S)
    assert await asyncio.to_thread(actor.join, PATIENCE_S)  # its thread may live a moment longer
    with pytest.raises(pykka.ActorDeadError):
        await ask(actor.mailbox, "too late")
    with pytest.raises(pykka.ActorDeadError):
        actor.actor_ref.ask("too late", timeout=0)
    with contextlib.suppress(pykka.ActorDeadError):
        assert actor.actor_ref.stop(timeout=0) is False


def test_a_stop_between_the_pykka_check_and_the_close_is_not_an_error() -> None:
    """Pykka looks whether the actor is alive, then puts: the close may come between the two."""
    actor = Caller()
    actor.mailbox.close("in between")
    assert actor.actor_ref.is_alive()
    assert actor.actor_ref.stop(timeout=0) is False
    future = actor.actor_ref.ask("too late", block=False)
    with pytest.raises(pykka.ActorDeadError):
        future.get(timeout=0)
    with pytest.raises(pykka.ActorDeadError):
        actor.actor_ref.tell("too late")
