"""Supervisors with children that note what becomes of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pykka

from cudnn_actor.actors import Actor, Crash, Envelope, Mailbox, MailboxRef
from cudnn_actor.supervision import (
    Backoff,
    ChildPolicy,
    ChildSpec,
    LifecycleEvent,
    Supervisor,
)

from ..patience import PATIENCE_S

__all__ = ["AT_ONCE", "Child", "Diary", "Hang", "House", "ParentWitness", "crash", "up"]


AT_ONCE = Backoff(initial_s=0.0)


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
