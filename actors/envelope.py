"""A message in transit, with the address for its reply.

A reply goes to one of two addresses: an asyncio future, which only its own
event loop ever touches, or a pykka future, which any thread may wait on.
Both keep the first result and ignore later ones. So any thread may answer a
message, even if another thread may have answered it already.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import pykka

from cudnn_actor.actors.bridge import LoopBridge
from cudnn_actor.actors.pykka_seam import answer
from cudnn_actor.protocol.errors import DeadlineExceeded

if TYPE_CHECKING:
    from cudnn_actor.actors.mailbox import Mailbox

__all__ = ["Elsewhere", "Envelope"]

_WORD_S = 0.1
"""How long a caller whose timeout has passed waits for another process's word whether its message started."""


class Elsewhere(Protocol):
    """A message that was handed to another process."""

    def withdraw(self) -> bool | None:
        """Ask the process not to start the message. Any thread; never blocks.

        Returns whether the message certainly never starts. None: the process will say so, by
        `Envelope.end_expired`, if the caller's timeout has passed.
        """


class Envelope(msgspec.Struct, eq=False):
    """One message, its reply address, its deadline and the context of its sender.

    Parameters
    ----------
    message
        The request.
    future, bridge
        The reply address of an asyncio caller.
    reply_to
        The reply address of a pykka caller.
    timeout_s
        Seconds from now after which a message that has not started is dropped; None for never.
    context
        The sender's context variables, for the handler's log lines.
    discard
        Called with a result that nobody receives any more. On any thread; must not block.
    found
        What its sender found out about the message, for the handler; None for nothing. The sender writes it
        before the message is admitted, and from then on only whoever handles the message.
    """

    message: Any
    future: asyncio.Future[Any] | None = None
    bridge: LoopBridge | None = None
    reply_to: pykka.Future[Any] | None = None
    timeout_s: float | None = None
    context: contextvars.Context | None = None
    discard: Callable[[Any], None] | None = None
    found: Any = None
    mailbox: Mailbox | None = None
    number: int = 0
    crashes: int = 0
    admitted_ns: int = 0
    started_ns: int = 0
    timed_out: bool = False
    """Whether the timeout of an asyncio caller has passed. It is told so, or an answer comes first."""
    elsewhere: Elsewhere | None = None
    """The other process's side, if another process is to start the message; else None."""
    watch: Callable[[asyncio.Future[Any]], object] | None = None
    """The future's callback that withdraws the message when it is cancelled; None for none. It is removed
    before an answer, because a loop takes a microsecond to run it."""
    deadline: float | None = None
    claim: list[None] = msgspec.field(default_factory=[None].copy)
    """Decides the race between starting and expiring: the side that takes out its one element wins. Taking it
    out is atomic under the GIL, so of two threads that try, one succeeds."""

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            self.deadline = time.monotonic() + self.timeout_s

    @property
    def wants_reply(self) -> bool:
        """Whether there is a reply address."""
        return self.future is not None or self.reply_to is not None

    @property
    def is_unawaited(self) -> bool:
        """Whether no asyncio caller waits any more: it was cancelled, has timed out, or has its answer.

        False for a pykka caller. Safe to read on any thread.

        A future's state only ever goes from pending to done, and reading it is one atomic load under
        the GIL: the worst that a stale read costs is a run whose result is dropped.
        """
        return self.future is not None and self.future.done()

    @property
    def expired(self) -> bool:
        """Whether its deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def begin(self) -> bool:
        """Start the message, unless its caller has been told that it never starts. Called by the actor.

        A message that started before a crash, and runs again, may always start.
        """
        if not self.started_ns:
            try:
                self.claim.pop()  # `_claim`, inlined
            except IndexError:
                return False
        self.started_ns = time.perf_counter_ns()
        return True

    def hand_over(self, elsewhere: Elsewhere) -> bool:
        """Give the message to another process to start, unless its caller was told that it never starts.

        From here on, that process decides whether the message has started. `elsewhere` is set before the
        claim: so an `expire` that finds the claim taken also finds the process to ask.
        """
        self.elsewhere = elsewhere
        if self.started_ns or self._claim():
            return True
        self.elsewhere = None
        return False

    def hand_back(self, *, begun: bool) -> None:
        """Take a message back from a process that has ended; `begun`: it had started there.

        An `expire` that runs before this reports the message as started: it could not be ruled out then.
        """
        self.elsewhere = None
        if begun:
            self.started_ns = self.started_ns or time.perf_counter_ns()
        elif not self.started_ns:
            self.claim = [None]

    def withdraw(self) -> None:
        """Note that nobody waits for the message any more. Any thread; never blocks.

        This removes nothing. Whoever takes the message up skips it since its future is done: the actor
        (`Actor._take_up`), or a full mailbox that makes room. A process that has it is told, and skips it
        likewise.
        """
        if (mailbox := self.mailbox) is not None:
            mailbox.note_withdrawn()
        if (elsewhere := self.elsewhere) is not None:
            elsewhere.withdraw()

    def _claim(self) -> bool:
        """Decide the race between starting and expiring: True for the first caller."""
        try:
            self.claim.pop()
        except IndexError:
            return False
        return True

    def settle(self, value: Any = None, error: BaseException | None = None) -> LoopBridge | None:
        """Give the reply; the first one counts. Any thread.

        Returns the bridge to wake, so that an asyncio caller sees the reply; a batch of replies then costs
        one wake-up. Returns None for a pykka caller, who sees the reply at once.
        """
        if (bridge := self.bridge) is not None:
            bridge.posted.append((self, value, error))
            return bridge
        if self.reply_to is not None:
            try:
                LoopBridge.drop_closed()
            finally:
                answer(self.reply_to, value, error)
        return None

    def unwatch(self) -> None:
        """Remove `watch` from the future. Only on the future's own loop."""
        watch, self.watch = self.watch, None
        if watch is not None and self.future is not None:
            self.future.remove_done_callback(watch)

    def deliver(self, value: Any, error: BaseException | None) -> None:
        """Put the reply into the asyncio future. Only on the future's own loop.

        A caller that was interrupted in it, and does not know whether it took effect, may repeat it.
        """
        assert self.future is not None
        if self.future.done():
            if error is None and self.discard is not None and not self._has_received(value):
                self.discard(value)
        elif error is None:
            self.future.set_result(value)
        elif isinstance(error, StopIteration):  # futures refuse it; generators convert it to RuntimeError too
            self.future.set_exception(RuntimeError(f"the handler raised {error!r}"))
        else:
            self.future.set_exception(error)

    def _has_received(self, value: Any) -> bool:
        future = self.future
        assert future is not None
        return not future.cancelled() and future.exception() is None and future.result() is value

    def discard_result(self) -> None:
        """Discard a result that was delivered to a task that was cancelled before it could read it."""
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

    def rule_out(self) -> bool | None:
        """Prevent the message from starting, if it has not started. Any thread; never blocks.

        Returns whether it certainly never starts; None as `Elsewhere.withdraw`.
        """
        if self.mailbox is not None:
            self.mailbox.note_withdrawn()
        if self._claim():
            return True
        if self.started_ns or (elsewhere := self.elsewhere) is None:
            return False
        return elsewhere.withdraw()

    def expire(self) -> None:
        """Tell an asyncio caller that its timeout has passed. Only on the future's own loop.

        A message that has not started never starts. One that has started runs to its end, wherever that is,
        and its result is discarded. If a process has the message, this asks the process which of both it is:
        a worker's status page says so at once. Else the caller is told once the process has answered, or
        after `_WORD_S` seconds.
        """
        assert self.future is not None
        if not self.future.done():
            self.timed_out = True
            if (never := self.rule_out()) is None:
                self.future.get_loop().call_later(_WORD_S, self.end_expired, True)
            else:
                self.end_expired(not never)

    def end_expired(self, started: bool) -> None:
        """Tell the caller whether its message may have started; the first word counts. Only on the future's
        own loop."""
        assert self.future is not None
        assert self.timeout_s is not None
        if not self.future.done():
            self.future.set_exception(DeadlineExceeded(timeout_s=self.timeout_s, started=started))
