"""Asking an actor from asyncio.

`submit`, `ask` and `tell` differ in what they do when the mailbox is full, and in how the reply comes:

========  ====================  ===================================
call      mailbox full          reply
========  ====================  ===================================
ask       waits its turn        awaited
submit    raises MailboxFull    an asyncio.Future, at once
tell      raises MailboxFull    none; a failure is logged
========  ====================  ===================================
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from typing import Any

from cudnn_actor.actors.bridge import LoopBridge
from cudnn_actor.actors.deadline import require_timeout
from cudnn_actor.actors.envelope import Envelope
from cudnn_actor.actors.event_loop import tolerating_closed
from cudnn_actor.actors.mailbox import Mailbox

__all__ = ["ask", "cancel", "submit", "tell"]


async def ask(
    mailbox: Mailbox,
    message: Any,
    *,
    timeout: float | None = None,
    discard: Callable[[Any], None] | None = None,
    found: Any = None,
) -> Any:
    """Send a message, queueing it even when the mailbox is full, and await the reply.

    Cancelling the wait withdraws a message that has not started. One that has started runs to its end, and
    its result is given to `discard`. `found` is the envelope's.

    Raises
    ------
    DeadlineExceeded
        No reply came within `timeout` seconds. A message that has not started is dropped and never runs.
    ActorStopped
        The actor has ended, or ends before it starts the message.
    Exception
        Whatever the handler raised.
    """
    bridge = LoopBridge.of_running_loop()
    envelope = _envelope(bridge, message, timeout, discard, found)
    future = envelope.future
    assert future is not None
    timer = None
    try:
        if found is None or not mailbox.admit_alone(envelope):
            mailbox.admit_awaited(envelope)
            needs_thread = mailbox.needs_thread
            if bridge.watch is None if needs_thread else bridge.posted:  # else `note_sent` does nothing
                bridge.note_sent(needs_thread=needs_thread)
        if timeout is not None and not future.done():
            timer = bridge.loop.call_later(timeout, envelope.expire)
        return await future
    except BaseException:
        # Cancelled, closed, or interrupted by a signal handler, perhaps after the message was sent: nobody
        # waits for it. An error that is the reply also arrives here; then `_stop_waiting` has nothing to
        # withdraw.
        _stop_waiting(envelope)
        raise
    finally:
        if timer is not None:
            timer.cancel()


def submit(
    mailbox: Mailbox,
    message: Any,
    *,
    timeout: float | None = None,
    discard: Callable[[Any], None] | None = None,
    found: Any = None,
) -> asyncio.Future[Any]:
    """Send a message and return the future of its reply at once. Cancelling the future withdraws the message.

    Raises `MailboxFull` or `ActorStopped`. The future raises what `ask` raises.
    """
    bridge = LoopBridge.of_running_loop()
    envelope = _envelope(bridge, message, timeout, discard, found)
    future = envelope.future
    assert future is not None
    try:
        if found is None or not mailbox.admit_alone(envelope):
            mailbox.admit(envelope, waits=False)
            bridge.note_sent(needs_thread=mailbox.needs_thread)
        if mailbox.starts_elsewhere:
            envelope.watch = functools.partial(_withdraw_cancelled, envelope)
            future.add_done_callback(envelope.watch)
        if timeout is not None:
            timer = bridge.loop.call_later(timeout, envelope.expire)
            future.add_done_callback(lambda _: timer.cancel())
    except BaseException:
        _stop_waiting(envelope)  # refused, or interrupted by a signal handler: nobody gets the future
        raise
    return future


def _withdraw_cancelled(envelope: Envelope, future: asyncio.Future[Any]) -> None:
    envelope.watch = None  # it refers to the envelope
    if future.cancelled():
        envelope.withdraw()


def tell(mailbox: Mailbox, message: Any, *, found: Any = None) -> None:
    """Send a message that nobody waits for. Any thread. Raises `MailboxFull` or `ActorStopped`."""
    mailbox.admit(Envelope(message, context=contextvars.copy_context(), found=found), waits=False)


def _envelope(
    bridge: LoopBridge,
    message: Any,
    timeout: float | None,
    discard: Callable[[Any], None] | None,
    found: Any,
) -> Envelope:
    if timeout is not None:
        require_timeout(timeout)
    return Envelope(
        message,
        future=bridge.loop.create_future(),
        bridge=bridge,
        timeout_s=timeout,
        context=contextvars.copy_context(),
        discard=discard,
        found=found,
    )


def _stop_waiting(envelope: Envelope) -> None:
    future = envelope.future
    assert future is not None
    if cancel(future):
        envelope.withdraw()
    envelope.discard_result()


def cancel(future: asyncio.Future[Any]) -> bool:
    """Cancel a future for which nobody waits, unless it is done or its loop has closed. Returns whether it is
    cancelled now."""
    loop = future.get_loop()
    # When the coroutine was closed, nothing else cancels the future. But if its loop has closed, the bridge
    # drops the reply. Cancelling would then free the task that waits for the future, and the task's end would
    # close this same coroutine again.
    if not loop.is_closed():
        with tolerating_closed(loop):  # it may close in this very moment
            future.cancel()
    return future.cancelled()
