"""Whether a message has started or expired is decided once, and its caller can rely on the answer."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cudnn_actor.actors import Envelope, LoopBridge
from cudnn_actor.protocol.errors import DeadlineExceeded


def _envelope() -> Envelope:
    bridge = LoopBridge.of_running_loop()
    return Envelope("message", future=bridge.loop.create_future(), bridge=bridge, timeout_s=60.0)


async def test_a_message_that_expired_first_cannot_begin() -> None:
    envelope = _envelope()
    envelope.expire()
    assert not envelope.begin()
    assert envelope.future is not None
    with pytest.raises(DeadlineExceeded) as caught:
        await envelope.future
    assert (caught.value.started, caught.value.ran, caught.value.retry_safe) == (False, False, True)


async def test_a_message_that_began_first_expires_as_started() -> None:
    envelope = _envelope()
    assert envelope.begin()
    envelope.expire()
    assert envelope.future is not None
    with pytest.raises(DeadlineExceeded) as caught:
        await envelope.future
    assert (caught.value.started, caught.value.ran, caught.value.retry_safe) == (True, None, False)


async def test_a_message_that_began_before_a_crash_begins_again() -> None:
    envelope = _envelope()
    assert envelope.begin()
    assert envelope.begin()


async def test_of_beginning_and_expiring_at_once_exactly_one_wins() -> None:
    for _ in range(300):
        envelope, barrier = _envelope(), threading.Barrier(2)
        began: list[bool] = []
        actor = threading.Thread(target=_begin_at, args=(barrier, envelope, began))
        actor.start()
        await asyncio.to_thread(barrier.wait)
        envelope.expire()
        await asyncio.to_thread(actor.join)
        assert envelope.future is not None
        error = envelope.future.exception()
        assert isinstance(error, DeadlineExceeded)
        assert began == [error.started]


def _begin_at(barrier: threading.Barrier, envelope: Envelope, began: list[bool]) -> None:
    barrier.wait()
    began.append(envelope.begin())
