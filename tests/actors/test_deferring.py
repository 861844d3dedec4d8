"""Messages that are deferred before they start, and resumed or handed back: each is answered once."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from cudnn_actor.actors import Actor, ActorStopped, Crash, Envelope, Mailbox, ask, submit
from cudnn_actor.protocol.errors import ServiceStopped

from ..patience import PATIENCE_S
from .actor_fixtures import Gate, running


class Shelf(Actor):
    """Sets strings aside until it is told to resume them; calls what can be called."""

    def __init__(self, mailbox: Mailbox | None = None) -> None:
        super().__init__(mailbox=mailbox)
        self.shelf: deque[Envelope] = deque()
        self.started: list[str] = []
        self.resumes = threading.Event()

    def defers(self, envelope: Envelope) -> Callable[[], None] | None:
        return (lambda: self.put(envelope)) if isinstance(envelope.message, str) else None

    def put(self, envelope: Envelope) -> None:
        self.shelf.append(envelope)
        self.mailbox.deferred = len(self.shelf)

    def take(self) -> Envelope | None:
        return self.shelf.popleft() if self.shelf else None

    def take_deferred(self) -> list[Envelope]:
        back, self.shelf = list(self.shelf), deque()
        return back

    def poll(self) -> float | None:
        while self.resumes.is_set() and self.resume(self.take):
            pass
        self.flush()
        return None

    def resume_all(self) -> None:
        self.resumes.set()
        self.mailbox.nudge()

    def on_receive(self, message: Any) -> Any:
        if callable(message):
            return message()
        self.started.append(message)
        return f"{message}, later"


async def looked_at(actor: Actor) -> None:
    """Until the actor has taken up what was sent before, and looked after what it had deferred."""
    for _ in range(2):
        await ask(actor.mailbox, lambda: None)


async def test_a_stop_answers_what_is_set_aside() -> None:
    with running(Shelf()) as actor:
        future = submit(actor.mailbox, "a")
        await looked_at(actor)
        actor.actor_ref.stop(block=False)
        with pytest.raises(ServiceStopped):
            await asyncio.wait_for(future, PATIENCE_S)


def fail() -> None:
    raise Crash("the test says so")


class Heir(Shelf):
    """Hands what it had taken back to the mailbox, for a successor."""

    def on_crash(self, error: BaseException, current: Envelope | None, waiting: list[Envelope]) -> None:
        self.mailbox.restore(waiting)


async def test_a_crash_hands_it_to_the_successor_in_order_before_what_was_taken_later() -> None:
    mailbox = Mailbox()
    with running(Heir(mailbox)) as actor:
        futures = [submit(mailbox, name) for name in "ab"]
        await looked_at(actor)
        gate = Gate()
        holding = submit(mailbox, gate)
        await gate.entry()
        crashing = submit(mailbox, fail)
        futures.append(submit(mailbox, "c"))
        gate.open()
        await holding
        assert await asyncio.to_thread(actor.join, PATIENCE_S)
    with running(Shelf(mailbox)) as successor:
        successor.resume_all()
        assert await asyncio.gather(*futures) == ["a, later", "b, later", "c, later"]
        assert successor.started == ["a", "b", "c"]
    assert not crashing.done()


async def test_a_supervisor_that_gives_a_hanging_thread_up_answers_it() -> None:
    actor = Shelf(Mailbox())
    actor.launch()
    future = submit(actor.mailbox, "a")
    await looked_at(actor)
    gate = Gate()
    hanging = submit(actor.mailbox, gate)
    await gate.entry()
    actor.abandon("hangs")
    assert await asyncio.to_thread(actor.give_up, Crash("given up"))
    with pytest.raises(ActorStopped, match="given up"):
        await future
    with pytest.raises(Crash, match="given up"):
        await hanging
    gate.open()
    assert await asyncio.to_thread(actor.join, PATIENCE_S)
    assert actor.started == []
