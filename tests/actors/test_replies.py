"""Every message is answered exactly once, to whoever is still there to hear it."""

from __future__ import annotations

import asyncio
import contextvars
from functools import partial
from typing import Any

import pykka
import pytest

from cudnn_actor.actors import Actor, Crash, Envelope, ask, submit, tell
from cudnn_actor.protocol.errors import DeadlineExceeded

from ..loop_clock import LONG_S, pass_time
from ..patience import PATIENCE_S
from .actor_fixtures import Caller, Gate, held, in_threads, running

# The first reply counts.


class Stutterer(Actor):
    """Answers everything twice, the second time with an error."""

    def on_receive(self, message: Any) -> Any:
        assert self.current is not None
        self.settle(self.current, message)
        self.settle(self.current, None, ValueError("a second answer"))
        return "a third"


async def test_a_second_completion_is_ignored_and_harmless() -> None:
    with running(Stutterer()) as actor:
        for number in range(20):
            assert await ask(actor.mailbox, number) == number
            assert actor.actor_ref.ask(number, timeout=PATIENCE_S) == number
        assert actor.actor_ref.is_alive()


def test_of_many_threads_that_answer_at_once_one_is_heard() -> None:
    future: pykka.ThreadingFuture[int] = pykka.ThreadingFuture()
    envelope = Envelope("message", reply_to=future)
    in_threads(*[lambda n=n: envelope.settle(n) for n in range(8)])
    assert future.get(timeout=0) in range(8)


# Senders who have gone.


async def test_cancelling_an_ask_that_has_started_lets_it_finish_and_discards_its_result() -> None:
    discarded: list[str] = []
    gate = Gate("the result")
    with running(Caller()) as actor:
        asked = asyncio.ensure_future(ask(actor.mailbox, gate, discard=discarded.append))
        await gate.entry()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        gate.open()
        await ask(actor.mailbox, "behind it")
    assert discarded == ["the result"]


async def test_a_result_that_was_delivered_to_a_task_cancelled_in_the_same_breath_is_discarded() -> None:
    discarded: list[str] = []
    with running(Caller()) as actor:
        asked = asyncio.ensure_future(ask(actor.mailbox, "the result", discard=discarded.append))
        await asyncio.sleep(0)
        # The loop stands still until the reply is on its way: delivery first, then this, then the task.
        assert actor.actor_ref.ask("behind it", timeout=PATIENCE_S) == "behind it"
        asyncio.get_running_loop().call_soon(asked.cancel)
        with pytest.raises(asyncio.CancelledError):
            await asked
    assert discarded == ["the result"]


async def test_a_result_that_is_received_is_not_discarded() -> None:
    discarded: list[str] = []
    with running(Caller()) as actor:
        assert await ask(actor.mailbox, "wanted", discard=discarded.append) == "wanted"
    assert discarded == []


async def test_an_error_is_never_discarded() -> None:
    discarded: list[Any] = []
    gate = Gate(ValueError("no result"))
    with running(Caller()) as actor:
        future = submit(actor.mailbox, gate, discard=discarded.append)
        await gate.entry()
        future.cancel()
        gate.open()
        await ask(actor.mailbox, "behind it")
    assert discarded == []


async def test_a_discard_that_raises_holds_up_no_other_reply() -> None:
    def raising(_: Any) -> None:
        raise RuntimeError("cannot discard")

    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    gate = Gate("unwanted")
    with running(Caller()) as actor:
        unwanted = submit(actor.mailbox, gate, discard=raising)
        await gate.entry()
        others = [submit(actor.mailbox, number) for number in range(5)]
        unwanted.cancel()
        gate.open()
        assert await asyncio.wait_for(asyncio.gather(*others), PATIENCE_S) == list(range(5))
    assert [str(complaint["exception"]) for complaint in complaints] == ["cannot discard"]


# Errors that no future takes.


async def test_a_stop_iteration_reaches_its_asker_and_holds_up_no_other_reply() -> None:
    with running(Caller()) as actor:
        with held(actor):
            exhausted = submit(actor.mailbox, iter(()).__next__)
            others = [submit(actor.mailbox, number) for number in range(5)]
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(exhausted, PATIENCE_S)
        assert await asyncio.wait_for(asyncio.gather(*others), PATIENCE_S) == list(range(5))


# Deadlines.


async def test_a_deadline_that_passes_during_the_run_says_that_it_had_started() -> None:
    gate = Gate()
    discarded: list[str] = []
    with running(Caller()) as actor:
        future = submit(actor.mailbox, gate, timeout=LONG_S, discard=discarded.append)
        await gate.entry()
        pass_time()
        with pytest.raises(DeadlineExceeded) as raised:
            await future
        assert raised.value.started
        gate.open()
        await ask(actor.mailbox, "behind it")
    assert discarded == ["opened"]


async def test_a_reply_in_time_needs_no_deadline_any_more() -> None:
    with running(Caller()) as actor:
        assert await ask(actor.mailbox, "in time", timeout=PATIENCE_S) == "in time"
        assert await submit(actor.mailbox, "in time", timeout=PATIENCE_S) == "in time"


# Context.

request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")


async def test_context_variables_reach_the_handler_and_do_not_leak_into_the_next() -> None:
    def rename() -> str:
        seen = request.get()
        request.set("changed by the handler")
        return seen

    with running(Caller()) as actor:
        request.set("first")
        assert await ask(actor.mailbox, rename) == "first"
        assert request.get() == "first"
        request.set("second")
        assert await ask(actor.mailbox, rename) == "second"
        assert actor.actor_ref.ask(request.get, timeout=PATIENCE_S) == "second"


async def test_a_tell_carries_its_context_too() -> None:
    seen: list[str] = []
    with running(Caller()) as actor:
        request.set("told")
        tell(actor.mailbox, lambda: seen.append(request.get()))
        await ask(actor.mailbox, "behind it")
    assert seen == ["told"]


# Many senders.


async def test_a_crash_with_one_running_and_many_queued_settles_each_once_and_in_order() -> None:
    settled: list[int] = []

    def note(number: int, _: object) -> None:
        settled.append(number)

    actor = Caller()
    actor.launch()
    gate = Gate(Crash("in the middle"))
    running_one = submit(actor.mailbox, gate)
    queued = [submit(actor.mailbox, number) for number in range(200)]
    for number, future in enumerate(queued):
        future.add_done_callback(partial(note, number))
    gate.await_entry()
    gate.open()
    outcomes = await asyncio.gather(running_one, *queued, return_exceptions=True)
    assert isinstance(outcomes[0], Crash)
    assert all(isinstance(outcome, pykka.ActorDeadError) for outcome in outcomes[1:])
    assert settled == list(range(200))
