"""Actors that do what their messages say, and gates to hold them with."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from cudnn_actor.actors import Actor, ActorExit, Envelope, Mailbox, MailboxRef

from ..patience import PATIENCE_S

A = TypeVar("A", bound=Actor)


class Caller(Actor):
    """Calls messages that can be called and answers with the result; echoes the others."""

    def on_receive(self, message: Any) -> Any:
        return message() if callable(message) else message


class Gate:
    """A message that holds its actor until the test opens it."""

    def __init__(self, result: Any = "opened") -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.result = result

    def __call__(self) -> Any:
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    def await_entry(self) -> None:
        assert self.entered.wait(PATIENCE_S)

    async def entry(self) -> None:
        """Wait for the entry in an event loop, which goes on meanwhile and never idles."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.entered.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0)

    def open(self) -> None:
        self.opened.set()


class Urgent:
    """A control message."""

    control = True

    def __init__(self, name: str = "") -> None:
        self.name = name


class Witness:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.exited = threading.Event()
        self.exit: ActorExit | None = None

    def actor_ready(self) -> None:
        self.ready.set()

    def actor_exited(self, exit: ActorExit) -> None:
        self.exit = exit
        self.exited.set()

    def outcome(self) -> ActorExit:
        assert self.exited.wait(PATIENCE_S)
        assert self.exit is not None
        return self.exit


def ended(actor: Actor) -> bool:
    """`actor.join`, for a test's event loop: one of users' must not call what blocks."""
    assert actor.thread is not None
    actor.thread.join(PATIENCE_S)
    return not actor.thread.is_alive()


@contextmanager
def running(actor: A) -> Iterator[A]:
    actor.launch()
    try:
        yield actor
    finally:
        actor.abandon("the test is over")
        assert ended(actor)


@contextmanager
def held(actor: Actor) -> Iterator[Gate]:
    """The actor stays in one message for as long as the block lasts."""
    gate = Gate()
    actor.mailbox.admit(Envelope(gate))
    gate.await_entry()
    try:
        yield gate
    finally:
        gate.open()


def ref_of(mailbox: Mailbox) -> MailboxRef:
    return MailboxRef(mailbox, Caller, threading.Event())


def in_threads(*jobs: Callable[[], object]) -> list[object]:
    """Run the jobs at once, each in a thread of its own; their results, or the errors they raised."""
    start = threading.Barrier(len(jobs))
    results: list[object] = [None] * len(jobs)

    def run(place: int) -> None:
        start.wait(PATIENCE_S)
        try:
            results[place] = jobs[place]()
        except BaseException as error:  # noqa: BLE001
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "somebody waits for ever"
    return results
