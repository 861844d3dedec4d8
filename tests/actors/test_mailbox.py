"""Bounds, order, and who holds a place."""

from __future__ import annotations

from typing import Any

import pytest
from pykka import ActorDeadError

from cudnn_actor.actors import ActorStopped, Envelope, Mailbox, ask, submit, tell
from cudnn_actor.protocol.errors import MailboxFull, ReentrantAsk

from .actor_fixtures import Caller, Urgent, ref_of, running


def messages(mailbox: Mailbox, most: int = 100) -> list[Any]:
    return [envelope.message for envelope in mailbox.take(most, 0.0)]


def filled(capacity: int) -> Mailbox:
    mailbox = Mailbox(capacity)
    for number in range(capacity):
        tell(mailbox, number)
    return mailbox


def test_messages_come_out_in_the_order_they_went_in() -> None:
    mailbox = filled(5)
    assert messages(mailbox) == [0, 1, 2, 3, 4]


def test_a_take_gives_no_more_than_was_asked_for() -> None:
    mailbox = filled(5)
    assert [messages(mailbox, 2), messages(mailbox, 2), messages(mailbox, 2)] == [[0, 1], [2, 3], [4]]


def test_a_stop_gets_into_a_full_mailbox() -> None:
    mailbox = filled(2)
    ref_of(mailbox).stop(block=False)
    assert len(mailbox) == 3


def test_control_overtakes_what_waits_in_order_among_itself() -> None:
    mailbox = filled(2)
    tell(mailbox, first := Urgent("first"))
    tell(mailbox, second := Urgent("second"))
    assert messages(mailbox, 3) == [first, second, 0]


def test_the_first_message_is_a_control_message_if_there_is_one() -> None:
    mailbox = filled(2)
    tell(mailbox, urgent := Urgent("first"))
    fronts = []
    while (first := mailbox.first) is not None:
        fronts.append(first.message)
        assert messages(mailbox, 1) == [first.message]
    assert fronts == [urgent, 0, 1]


async def test_withdrawn_messages_give_their_places_back_when_the_mailbox_is_full() -> None:
    mailbox = Mailbox(3)
    futures = [submit(mailbox, number) for number in range(3)]
    futures[1].cancel()
    futures[2].cancel()
    tell(mailbox, "a")
    tell(mailbox, "b")
    with pytest.raises(MailboxFull):
        tell(mailbox, "c")
    assert mailbox.withdrawn == 2
    assert messages(mailbox) == [0, "a", "b"]


def test_what_is_restored_comes_first_and_in_order() -> None:
    mailbox = filled(5)
    taken = mailbox.take(3, 0.0)
    mailbox.restore(taken)
    assert messages(mailbox) == [0, 1, 2, 3, 4]


def test_what_is_restored_twice_over_keeps_its_order() -> None:
    mailbox = filled(4)
    current, *waiting = mailbox.take(3, 0.0)
    mailbox.restore(waiting)
    mailbox.restore([current])
    assert messages(mailbox) == [0, 1, 2, 3]


def test_what_is_restored_after_the_close_is_refused() -> None:
    mailbox = Mailbox()
    asked = ref_of(mailbox).ask("late", block=False)
    taken = mailbox.take(1, 0.0)
    mailbox.close("over")
    mailbox.restore(taken)
    with pytest.raises(ActorStopped, match="over"):
        asked.get(timeout=0)


async def test_closing_answers_everybody_who_waits() -> None:
    mailbox = Mailbox()
    future = submit(mailbox, "asyncio")
    asked = ref_of(mailbox).ask("pykka", block=False)
    stopping = ref_of(mailbox).stop(block=False)
    mailbox.close("over")
    with pytest.raises(ActorStopped, match="over"):
        await future
    with pytest.raises(ActorDeadError):
        asked.get(timeout=0)
    assert stopping.get(timeout=0) is True


def test_a_closed_mailbox_refuses_and_says_why() -> None:
    mailbox = Mailbox()
    mailbox.close("the first reason")
    mailbox.close("another")
    assert mailbox.closed == "the first reason"
    with pytest.raises(ActorStopped, match="the first reason"):
        tell(mailbox, "late")


def test_a_reopened_mailbox_takes_messages_again() -> None:
    mailbox = Mailbox()
    mailbox.close("for now")
    mailbox.reopen()
    tell(mailbox, "again")
    assert messages(mailbox) == ["again"]


async def test_an_actor_that_asks_itself_is_told_so_at_once() -> None:
    with running(Caller()) as actor:
        with pytest.raises(ReentrantAsk):
            await ask(actor.mailbox, lambda: actor.actor_ref.ask("hello me"))
        tell_itself = await ask(actor.mailbox, lambda: actor.actor_ref.tell("later"))
        assert tell_itself is None


def test_messages_are_numbered_in_the_order_of_admission() -> None:
    mailbox = filled(3)
    assert [envelope.number for envelope in mailbox.take(3, 0.0)] == [1, 2, 3]


def test_an_envelope_without_an_address_wants_no_reply() -> None:
    assert not Envelope("tell").wants_reply
