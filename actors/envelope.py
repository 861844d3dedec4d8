"""A message on its way, with the address for its reply.

A reply goes to one of two addresses: an asyncio future, which only its own
event loop ever touches, or a pykka future, which any thread may wait on.
Either takes the first result and ignores later ones, so an answer may safely
be given by whoever is alive to give it.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import pykka

from cudnn_actor.actors.pykka_seam import answer
from cudnn_actor.protocol.errors import DeadlineExceeded

if TYPE_CHECKING:
    from cudnn_actor.actors.bridge import LoopBridge
    from cudnn_actor.actors.mailbox import Mailbox

__all__ = ["Elsewhere", "Envelope"]


class Elsewhere(Protocol):
    """Another process's hold on a message."""

    def withdraw(self) -> bool:
        """Ask for the message not to be started; whether it certainly never is. Any thread; never blocks."""


class Envelope:
    """One message, its reply address, its deadline and the context of its sender.

    Parameters
    ----------
    message
        What is asked.
    future, bridge
        The reply address of an asyncio caller.
    reply_to
        The reply address of a pykka caller.
    timeout_s
        Seconds from now after which the message is dropped unrun; None for never.
    context
        The sender's context variables, for the handler's log lines.
    discard
        Called with a result that nobody is left to receive, on any thread; must not block.
    """

    __slots__ = (
        "admitted_ns",
        "bridge",
        "claim",
        "context",
        "crashes",
        "deadline",
        "discard",
        "elsewhere",
        "future",
        "mailbox",
        "message",
        "number",
        "reply_to",
        "started_ns",
        "timed_out",
        "timeout_s",
    )

    def __init__(
        self,
        message: Any,
        *,
        future: asyncio.Future[Any] | None = None,
        bridge: LoopBridge | None = None,
        reply_to: pykka.Future[Any] | None = None,
        timeout_s: float | None = None,
        context: contextvars.Context | None = None,
        discard: Callable[[Any], None] | None = None,
    ) -> None:
        self.message = message
        self.future = future
        self.bridge = bridge
        self.reply_to = reply_to
        self.timeout_s = timeout_s
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.context = context
        self.discard = discard
        self.mailbox: Mailbox | None = None
        self.number = 0
        self.crashes = 0
        self.admitted_ns = 0
        self.started_ns = 0
        self.timed_out = False
        """Whether an asyncio caller has been told that its time is up."""
        self.elsewhere: Elsewhere | None = None
        """Who has it, when another process is to start it."""
        self.claim = [None]
        """Whoever takes its one element out decides what becomes of the message: it starts, or its time is
        up. Taking it out is a single step under the GIL, so of two who try one succeeds."""

    @property
    def wants_reply(self) -> bool:
        """Whether anybody gave an address."""
        return self.future is not None or self.reply_to is not None

    @property
    def withdrawn(self) -> bool:
        """Whether an asyncio caller has gone (cancelled, or timed out). Safe to read on any thread.

        A future's state only ever goes from pending to done, and reading it is one atomic load under
        the GIL: the worst that a stale read costs is a run whose result is dropped.
        """
        return self.future is not None and self.future.done()

    @property
    def expired(self) -> bool:
        """Whether its deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def begin(self) -> bool:
        """Start the message, unless its caller has been told that it never will be. The actor's side.

        One that has started before, and runs again after a crash, may always begin.
        """
        if not self.started_ns and not self._claim():
            return False
        self.started_ns = time.perf_counter_ns()
        return True

    def hand_over(self, elsewhere: Elsewhere) -> bool:
        """Give the message to another process to start, unless its caller was told that it never will be.

        From here on it is decided there whether it has started. `elsewhere` is set first: an `expire` that
        finds the claim taken finds whom to ask, too.
        """
        self.elsewhere = elsewhere
        if self.started_ns or self._claim():
            return True
        self.elsewhere = None
        return False

    def hand_back(self, *, begun: bool) -> None:
        """Take a message back from a process that has gone; `begun`: it had started there.

        An `expire` in between says that it has started, which nobody could rule out at that moment.
        """
        self.elsewhere = None
        if begun:
            self.started_ns = self.started_ns or time.perf_counter_ns()
        elif not self.started_ns:
            self.claim = [None]

    def withdraw(self) -> None:
        """Tell another process that has the message that nobody waits for it any more. Any thread."""
        if (mailbox := self.mailbox) is not None:
            mailbox.note_left()
        if (elsewhere := self.elsewhere) is not None:
            elsewhere.withdraw()

    def _claim(self) -> bool:
        """Decide the race between starting and expiring: true for the first who asks."""
        try:
            self.claim.pop()
        except IndexError:
            return False
        return True

    def settle(self, value: Any = None, error: BaseException | None = None) -> LoopBridge | None:
        """Give the reply; the first one counts. Any thread.

        Returns the bridge that must be woken for an asyncio caller to see it, so that a batch of
        replies costs one wake-up; None for a pykka caller, who sees it at once.
        """
        if self.bridge is not None:
            self.bridge.post(self, value, error)
            return self.bridge
        if self.reply_to is not None:
            answer(self.reply_to, value, error)
        return None

    def deliver(self, value: Any, error: BaseException | None) -> None:
        """Put the reply into the asyncio future. Only on the future's own loop.

        May be repeated by whoever cannot know whether it was done: one who was interrupted in it.
        """
        assert self.future is not None
        if self.future.done():
            if error is None and self.discard is not None and not self._has_received(value):
                self.discard(value)
        elif error is None:
            self.future.set_result(value)
        elif isinstance(error, StopIteration):  # which no future takes; Python says so of generators, too
            self.future.set_exception(RuntimeError(f"the handler raised {error!r}"))
        else:
            self.future.set_exception(error)

    def _has_received(self, value: Any) -> bool:
        future = self.future
        assert future is not None
        return not future.cancelled() and future.exception() is None and future.result() is value

    def unclaimed(self) -> None:
        """Discard a result that was delivered, but to a task that was cancelled before it could look."""
        future = self.future
        assert future is not None
        if (
            future.done()
            and not future.cancelled()
            and future.exception() is None
            and self.discard is not None
        ):
            self.discard(future.result())

    def undeliverable(self) -> None:
        """Count a reply whose event loop had closed before it could be delivered."""
        if self.mailbox is not None:
            self.mailbox.dropped += 1

    def expire(self) -> None:
        """Tell an asyncio caller that its time is up. Only on the future's own loop."""
        assert self.future is not None
        assert self.timeout_s is not None
        if not self.future.done():
            self.timed_out = True
            if self.mailbox is not None:
                self.mailbox.note_left()
            started = not self._claim()
            if started and not self.started_ns and (elsewhere := self.elsewhere) is not None:
                started = not elsewhere.withdraw()
            self.future.set_exception(DeadlineExceeded(timeout_s=self.timeout_s, started=started))
