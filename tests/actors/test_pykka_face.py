"""To pykka code an actor is a pykka actor, and a mailbox's reference a pykka reference."""

from __future__ import annotations

import threading

import pykka
import pytest

from cudnn_actor.actors import Actor, Crash, Mailbox, MailboxRef
from cudnn_actor.protocol.errors import InvalidRequest

from ..patience import PATIENCE_S
from .actor_fixtures import Caller, ref_of, running


class Account(Actor):
    """Talked to through a proxy."""

    def __init__(self) -> None:
        super().__init__()
        self.balance = 0

    def deposit(self, amount: int) -> int:
        self.balance += amount
        return self.balance


def test_start_ask_tell_and_stop_work_as_in_pykka() -> None:
    ref = Caller.start()
    assert ref.is_alive()
    assert ref.ask("hello", timeout=PATIENCE_S) == "hello"
    ref.tell("nobody listens")
    assert ref.stop(timeout=PATIENCE_S) is True
    assert not ref.is_alive()
    assert ref.stop(timeout=PATIENCE_S) is False


def test_a_proxy_calls_reads_and_writes() -> None:
    proxy = Account.start().proxy()
    assert proxy.deposit(3).get(timeout=PATIENCE_S) == 3
    proxy.balance = 10
    assert proxy.balance.get(timeout=PATIENCE_S) == 10
    proxy.stop().get(timeout=PATIENCE_S)


def test_a_proxys_error_is_the_callers() -> None:
    proxy = Account.start().proxy()
    with pytest.raises(TypeError):
        proxy.deposit("much").get(timeout=PATIENCE_S)
    assert proxy.deposit(1).get(timeout=PATIENCE_S) == 1
    proxy.stop().get(timeout=PATIENCE_S)


def test_messages_before_a_stop_are_answered_and_those_after_it_are_refused() -> None:
    actor = Caller()
    before = [actor.actor_ref.ask(number, block=False) for number in range(100)]
    stopping = actor.actor_ref.stop(block=False)
    after = [actor.actor_ref.ask(number, block=False) for number in range(100)]
    actor.launch()
    assert pykka.get_all(before, timeout=PATIENCE_S) == list(range(100))
    assert stopping.get(timeout=PATIENCE_S) is True
    for future in after:
        with pytest.raises(pykka.ActorDeadError):
            future.get(timeout=PATIENCE_S)


def test_a_plain_pykka_actor_talks_to_ours() -> None:
    class Plain(pykka.ThreadingActor):
        use_daemon_thread = True

        def on_receive(self, message: pykka.ActorRef[Caller]) -> object:
            return message.ask("from a pykka actor", timeout=PATIENCE_S)

    plain = Plain.start()
    with running(Caller()) as actor:
        assert plain.ask(actor.actor_ref, timeout=PATIENCE_S) == "from a pykka actor"
    plain.stop()


def test_an_actor_may_stop_itself() -> None:
    actors = list[Caller]()

    class Noted(Caller):
        def on_start(self) -> None:
            actors.append(self)

    ref = Noted.start()
    assert ref.ask("first") == "first"  # it has started
    (actor,) = actors
    assert ref.ask(actor.stop, timeout=PATIENCE_S) is None
    assert actor.join(PATIENCE_S)


# References to a mailbox.


def test_a_mailbox_reference_works_as_an_actors_own() -> None:
    with running(Caller()) as actor:
        ref = ref_of(actor.mailbox)
        assert ref.is_alive()
        assert ref.ask("hello", timeout=PATIENCE_S) == "hello"
        assert ref.ask("later", block=False).get(timeout=PATIENCE_S) == "later"
        seen = threading.Event()
        ref.tell(seen.set)
        assert seen.wait(PATIENCE_S)
        assert ref.stop(timeout=PATIENCE_S) is True
        assert actor.join(PATIENCE_S)


def test_a_mailbox_reference_stays_good_when_the_actor_is_replaced() -> None:
    mailbox = Mailbox()
    ref = ref_of(mailbox)

    def crash() -> None:
        raise Crash("first")

    for _ in range(3):
        actor = Caller(mailbox=mailbox)
        actor.launch()
        assert ref.ask("hello", timeout=PATIENCE_S) == "hello"
        with pytest.raises(Crash):
            ref.ask(crash, timeout=PATIENCE_S)
        assert actor.join(PATIENCE_S)


def test_a_mailbox_reference_is_dead_once_it_is_told_so() -> None:
    gone = threading.Event()
    ref = MailboxRef(Mailbox(), Caller, gone)
    gone.set()
    assert not ref.is_alive()
    with pytest.raises(pykka.ActorDeadError):
        ref.ask("hello", timeout=0)
    with pytest.raises(pykka.ActorDeadError):
        ref.tell("hello")
    assert ref.stop(timeout=0) is False


def test_a_mailbox_reference_has_no_proxy_and_says_so() -> None:
    ref = ref_of(Mailbox())
    assert ref.is_alive()
    with pytest.raises(InvalidRequest, match="is not supported"):
        ref.proxy()
    ref.actor_stopped.set()
    with pytest.raises(pykka.ActorDeadError):
        ref.proxy()


def test_two_mailbox_references_are_told_apart() -> None:
    first, second = ref_of(Mailbox()), ref_of(Mailbox())
    assert first != second
    assert "Caller" in str(first)
