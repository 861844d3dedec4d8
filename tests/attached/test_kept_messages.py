"""The numbers of messages that a client may send again: no other message ever gets one of them by mistake."""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import Any

import pytest

from cudnn_actor import OutOfMemory, Receipt, ServiceStopped
from cudnn_actor.attached.client import kept_messages
from cudnn_actor.attached.client.kept_messages import KeptMessages
from cudnn_actor.attached.wire import ForgetMessages, Request
from cudnn_actor.broker.message_cache import Bound, CachedMessage
from cudnn_actor.processes.channel import Channel

from ..inside import requests_cannot_be_noted, service_behind
from ..service.injection_program import Injected, Injector
from ..service.rigs import in_thread, outcome
from .test_asking_again import WINDOW, Frames, Rig, kept, reported, rig, turns

__all__ = ["kept", "reported", "rig"]


def record(message: Any) -> CachedMessage:
    """The record of a message whose buffers are there."""
    lowered: Any = None  # nothing reads it
    return CachedMessage(message, lowered, bound=Bound(1, [], []))


class Message:
    """A message, as far as its number goes."""


def noted(numbers: KeptMessages, cached: CachedMessage) -> Request:
    """A request for which a message has got its number."""
    request = numbers.request_by_number(Request(b"message"), cached)
    assert request is not None
    numbers.note(request, cached, 1, numbers.times)
    return request


def test_a_number_that_could_not_be_dropped_is_that_of_no_other_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a signal handler raises in the callback of a weak reference: nobody gets that exception."""
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: lost.append(each.exc_type))
    injector = Injector("/client/kept_messages.py")
    for at in itertools.count(1):
        numbers, cached = KeptMessages(), record(Message())
        assert noted(numbers, cached).keep is not None
        with injector.armed(at):
            del cached
        others = [record(Message()) for _ in range(100)]  # the first takes the memory of the one before
        assert not numbers.again.keys() & {id(each.message) for each in others}
        assert all(noted(numbers, each).keep is not None for each in others)
        if not injector.where:
            break
    assert lost == [Injected] * (at - 1)
    assert at > 3


def test_while_numbers_are_taken_back_no_message_gets_one() -> None:
    """A finalizer may take them back, too, meanwhile."""
    numbers, cached = KeptMessages(), record(Message())
    with numbers.none_kept():
        with numbers.none_kept():
            assert noted(numbers, cached).keep is None
        assert noted(numbers, cached).keep is None
    assert noted(numbers, cached).keep is not None


@pytest.mark.parametrize("error", [MemoryError, asyncio.CancelledError])
async def test_if_the_server_cannot_be_told_that_numbers_are_taken_back_it_is_told_later(
    rig: Rig, kept: list[int], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    monkeypatch.setattr(kept_messages, "_MOST", 4)
    send, errors = Channel.send, [error()]

    def failing(channel: Channel, frame: Any, descriptors: tuple[int, ...] = ()) -> None:
        if errors and isinstance(frame, ForgetMessages):
            raise errors.pop()
        send(channel, frame, descriptors)

    monkeypatch.setattr(Channel, "send", failing)
    messages = [rig.one.product() for _ in range(4)]
    outcomes = [await outcome(asyncio.ensure_future(rig.client.ask(message))) for message in messages]
    assert [isinstance(each, Receipt) for each in outcomes].count(False) == 1
    frames = Frames(monkeypatch)
    for message in messages[-1:] * 3:
        await rig.client.ask(message)
    assert [type(body) for body in frames.bodies()][-2:] == [int, int]
    assert max(kept) == 4
    assert service_behind(rig.client).state.mailbox.waiting == 0


@pytest.mark.parametrize("error", [MemoryError, Injected])
async def test_if_a_message_can_be_given_no_number_those_behind_it_are_sent(
    rig: Rig, reported: list[Any], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """They have waited in the mailbox, since the window was full."""
    request_by_number, errors = KeptMessages.request_by_number, [error()]

    def failing(numbers: KeptMessages, request: Request, cached: CachedMessage) -> Request | None:
        if errors:
            raise errors.pop()
        return request_by_number(numbers, request, cached)

    with rig.gate.closed():
        sent = [rig.client.submit(rig.product) for _ in range(WINDOW)]
        await in_thread(rig.gate.wait_for_arrival)
        waiting = [asyncio.ensure_future(rig.client.ask(message)) for message in [rig.total] * 4]
        await turns()
        monkeypatch.setattr(KeptMessages, "request_by_number", failing)
    failed, *others = [await outcome(future) for future in waiting]
    assert isinstance(failed, OutOfMemory if error is MemoryError else Injected)
    assert [type(each) for each in [*others, *await asyncio.gather(*sent)]] == [Receipt] * (3 + WINDOW)
    assert not reported


async def test_a_request_that_cannot_be_noted_leaves_nobody_waiting(rig: Rig, reported: list[Any]) -> None:
    """Neither those behind it, which have waited in the mailbox."""
    with rig.gate.closed():
        sent = [rig.client.submit(rig.product) for _ in range(WINDOW)]
        await in_thread(rig.gate.wait_for_arrival)
        waiting = [asyncio.ensure_future(rig.client.ask(message)) for message in [rig.total] * 4]
        await turns()
        requests_cannot_be_noted(rig.client)
    outcomes = [await outcome(future) for future in waiting]
    assert all(isinstance(each, ServiceStopped) for each in outcomes), outcomes
    assert {type(each) for each in reported} == {MemoryError}
    await asyncio.gather(*sent, return_exceptions=True)
