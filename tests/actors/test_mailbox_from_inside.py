"""A finalizer may send while its own thread is in the middle of a step of the same mailbox."""

from __future__ import annotations

import gc
import threading
from typing import Any

from cudnn_actor.actors import Envelope, Mailbox

from ..patience import PATIENCE_S


class Sends:
    """A future that sends a message when it is asked whether it is done, as a finalizer might."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox: Mailbox | None = mailbox

    def done(self) -> bool:
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            mailbox.admit(Envelope("from inside"))
        return True


def test_what_is_sent_from_inside_is_admitted_on_the_way_out() -> None:
    mailbox = Mailbox(capacity=1)
    mailbox.admit(Envelope("gone", future=Sends(mailbox)))  # type: ignore[arg-type]
    sender = threading.Thread(
        target=mailbox.admit, args=(Envelope("second"),), kwargs={"waits": False}, daemon=True
    )
    sender.start()
    sender.join(PATIENCE_S)
    assert not sender.is_alive(), "waits for itself"
    assert [e.message for e in mailbox.take(8, 0.0)] == ["second", "from inside"]


class Cycle:
    """Garbage that sends when it is collected."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.me = self
        self._mailbox = mailbox

    def __del__(self) -> None:
        self._mailbox.admit(Envelope("collected"))


def test_a_take_that_the_collector_interrupts_ends_and_sleeps_through_nothing() -> None:
    mailbox = Mailbox()
    taken: list[Any] = []
    thresholds = gc.get_threshold()

    def take(after: int) -> None:
        gc.set_threshold(gc.get_count()[0] + after, 1000, 1000)
        gc.enable()
        taken.extend(mailbox.take(64, PATIENCE_S))
        gc.disable()

    gc.disable()
    try:
        for after in range(12):
            Cycle(mailbox)
            taker = threading.Thread(target=take, args=(after,), daemon=True)
            taker.start()
            taker.join(0.2)
            gc.collect()
            mailbox.admit(Envelope("wake"))
            taker.join(PATIENCE_S)
            assert not taker.is_alive(), "waits for itself"
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
