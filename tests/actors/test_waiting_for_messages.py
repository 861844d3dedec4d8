"""The actor's sleep: no message is slept through, no wake-up is left over, a timeout is kept."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pykka
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_actor.actors import Envelope, Mailbox

from ..patience import PATIENCE_S
from ..whole import more, some
from .actor_fixtures import Caller, in_threads, running

SENDERS, EACH = 4, some(50_000)
SHORT_S = 0.02


def sleeps_its_time_out(mailbox: Mailbox) -> bool:
    began = time.monotonic()
    return mailbox.take(1, SHORT_S) == [] and time.monotonic() - began >= SHORT_S


@pytest.mark.parametrize("seed", [1, 2])
def test_no_message_is_lost_or_slept_through_whatever_the_timing(seed: int) -> None:
    mailbox, chance = Mailbox(), random.Random(seed)
    received: list[list[int]] = [[] for _ in range(SENDERS)]

    def send(sender: int) -> None:
        for number in range(EACH):
            mailbox.admit(Envelope((sender, number)))
            if number % 1_000 == 0:
                mailbox.nudge()

    def receive() -> None:
        for _ in range(SENDERS * EACH * 10):
            timeout = chance.choice((None, 0.0, 1e-6, 1e-4))
            for envelope in mailbox.take(chance.randint(1, 100), timeout):
                sender, number = envelope.message
                received[sender].append(number)
            if sum(map(len, received)) == SENDERS * EACH:
                return

    jobs = [lambda sender=sender: send(sender) for sender in range(SENDERS)]
    assert in_threads(receive, *jobs) == [None] * (SENDERS + 1), f"seed {seed}"
    assert all(numbers == list(range(EACH)) for numbers in received), f"seed {seed}"
    mailbox.take(1, 0.0)  # a nudge may still be kept
    assert sleeps_its_time_out(mailbox), f"seed {seed}"


@pytest.mark.usefixtures("hasty_switching")
def test_no_ring_is_left_over_when_a_message_meets_a_timeout() -> None:
    mailbox = Mailbox()
    taken = 0
    for _ in range(300):
        sender = threading.Thread(target=mailbox.admit, args=(Envelope("just now"),))
        sender.start()
        while not (batch := mailbox.take(1, 1e-5)):
            pass
        taken += len(batch)
        sender.join()
    assert taken == 300
    assert sleeps_its_time_out(mailbox)


class Window:
    """A lock that does something once, at the worst moment: just let go of, or just not got."""

    def __init__(self, lock: Any, then: Callable[[], None]) -> None:
        self._lock, self._then = lock, [then]

    def _open(self) -> None:
        while self._then:
            self._then.pop()()

    def __enter__(self) -> None:
        self._lock.acquire()

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._open()

    def acquire(self, timeout: float = -1.0) -> bool:
        got: bool = self._lock.acquire(timeout=timeout)
        if not got:
            self._open()
        return got

    def release(self) -> None:
        self._lock.release()


def test_a_message_between_the_look_and_the_sleep_is_not_slept_through() -> None:
    mailbox = Mailbox()
    window = Window(mailbox._lock, lambda: mailbox.admit(Envelope("in between")))
    mailbox._lock = window
    assert [envelope.message for envelope in mailbox.take(1, PATIENCE_S / 10)] == ["in between"]
    assert sleeps_its_time_out(mailbox)


@pytest.mark.parametrize("what", ["message", "nudge"])
def test_the_ring_that_crosses_a_timeout_is_not_left_over(what: str) -> None:
    mailbox = Mailbox()
    act = mailbox.nudge if what == "nudge" else lambda: mailbox.admit(Envelope("just now"))
    mailbox._wakeup = Window(mailbox._wakeup, act)  # type: ignore[assignment]
    assert len(mailbox.take(1, 1e-6)) == (what == "message")
    assert sleeps_its_time_out(mailbox)


def test_a_message_ends_a_sleep_without_a_timeout() -> None:
    mailbox = Mailbox()
    taken, _ = in_threads(lambda: mailbox.take(1), lambda: mailbox.admit(Envelope("wake up")))
    assert isinstance(taken, list)
    assert [envelope.message for envelope in taken] == ["wake up"]


def test_a_nudge_ends_a_sleep_without_a_message() -> None:
    mailbox = Mailbox()
    assert in_threads(lambda: mailbox.take(1), mailbox.nudge)[0] == []


def test_a_nudge_that_comes_before_the_sleep_is_kept_for_it() -> None:
    mailbox = Mailbox()
    mailbox.nudge()
    assert mailbox.take(1, PATIENCE_S) == []
    assert sleeps_its_time_out(mailbox)


@settings(max_examples=more(60))
@given(st.lists(st.sampled_from(["admit", "nudge", "take one", "take all", "time out"]), max_size=30))
def test_any_sequence_leaves_no_wake_up_over(steps: list[str]) -> None:
    mailbox = Mailbox()
    sent = received = 0
    for step in steps:
        match step:
            case "admit":
                mailbox.admit(Envelope(sent))
                sent += 1
            case "nudge":
                mailbox.nudge()
            case _:
                timeout = 1e-4 if step == "time out" else 0.0
                for envelope in mailbox.take(1 if step == "take one" else 100, timeout):
                    assert envelope.message == received
                    received += 1
    assert len(mailbox) == sent - received
    mailbox.take(100, 0.0)
    assert sleeps_its_time_out(mailbox)


def test_what_is_handed_back_wakes_a_successor_that_sleeps() -> None:
    mailbox = Mailbox()
    with running(Caller(mailbox=mailbox)) as successor:
        assert successor.actor_ref.ask("awake", timeout=PATIENCE_S) == "awake"
        future: pykka.Future[str] = pykka.ThreadingFuture()
        mailbox.restore([Envelope("handed back", reply_to=future)])
        assert future.get(timeout=PATIENCE_S) == "handed back"


def test_only_the_declared_reader_gets_messages() -> None:
    mailbox = Mailbox()
    with running(Caller(mailbox=mailbox)) as actor:
        assert actor.actor_ref.ask("ready", timeout=PATIENCE_S) == "ready"
        assert mailbox.take(10, None) == []  # this thread is not the reader: it does not even sleep
        assert actor.actor_ref.ask("still served", timeout=PATIENCE_S) == "still served"
