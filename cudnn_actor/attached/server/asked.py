"""A client's request on its way through the service."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from cudnn_actor.actors import Envelope, LoopBridge
from cudnn_actor.attached.wire import Place
from cudnn_actor.broker.message_cache import CachedMessage
from cudnn_actor.broker.request_counts import RequestObserver
from cudnn_actor.broker.service_state import ServiceState
from cudnn_actor.protocol.messages.messages import COMPUTE, Allocate, DeployModel
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Asked", "Known", "Takes"]


def _nothing() -> None:
    return None


class Known:
    """A decoded message, the buffers and models that it names, and its cost; kept for the next time that the
    same bytes come."""

    __slots__ = ("average", "checked", "control", "cost_us", "found", "message", "named", "runs_plan")

    def __init__(self, message: Any, named: tuple[Any, ...]) -> None:
        self.message, self.named = message, named
        self.runs_plan = type(message) in COMPUTE
        self.control: bool = getattr(message, "control", False)
        self.checked = -1
        """The epoch of the client's holdings in which everything that the message names was found there."""
        self.cost_us: float | None = None
        """The average device time of the message's latest runs, in microseconds; None before the first."""
        self.found: Callable[[], CachedMessage | None] = _nothing
        """The service's record of a message that runs a plan, as long as the service keeps it. Once its slots
        are of an earlier epoch, the message is checked anew."""
        self.average: Any = None
        """The average cost of messages of this kind: see `Costs`."""


class Takes(Protocol):
    """The receiver of the answers: the client's session."""

    def answered(self, asked: Asked, value: Any, error: BaseException | None) -> None:
        """Take an answer, once for each request. On the server's loop."""

    def answered_wrongly(self, asked: Asked, value: Any, problem: BaseException) -> None:
        """Take note that `answered` has raised an exception."""


class Asked(msgspec.Struct, eq=False):
    """A client's request. It is in a queue first, and has an envelope once the service has it.

    It stands for the future in its envelope, so that an answer is passed on at once, without the event loop.
    `done()` is true once the request is withdrawn: then the service does not start it. Unlike a cancelled
    future, an object of this class still gets the answer, which says that nothing reads the client's memory
    any more.

    Attributes
    ----------
    session, number, known, room, room_bytes, timeout_s, headers
        The client's session, and what it has sent: see `Request`.
    digest
        The digest and spec of an `Allocate` whose buffer other clients may share; None for a buffer of its
        own.
    envelope
        Its envelope, while the service has it.
    withdrawn, answered
        Whether the client has withdrawn it, and whether it has its answer.
    cost_us
        The estimate of its time in microseconds, while fair share counts the request as one that the service
        has; else 0.
    sent_ns
        When the service was sent it, by `time.perf_counter_ns`; 0 before that, and if it never is.
    copied
        The bytes of values that were copied for the request: see `Copies`.
    reserved
        The bytes that the client's holdings have reserved for the request.
    imports
        Whether the request counts as a buffer of another service: see `Holdings.begin_import`.
    work
        The task or future that runs a model of the server's process for the request.
    results
        The arrays of the answer, while they wait for room.
    """

    session: Takes
    number: int
    known: Known
    room: Place | None
    room_bytes: int
    timeout_s: float | None
    headers: dict[str, str] | None = None
    digest: tuple[str, TensorSpec] | None = None
    envelope: Envelope | None = None
    withdrawn: bool = False
    answered: bool = False
    cost_us: float = 0.0
    sent_ns: int = 0
    copied: int = 0
    reserved: int = 0
    imports: bool = False
    work: asyncio.Future[Any] | None = None
    results: Any = None

    def send(self, state: ServiceState, bridge: LoopBridge, found: Any) -> None:
        """Send the service the request: straight to its worker if nothing else is in work, else by the
        mailbox. Raises `ActorStopped`."""
        known, observer, mailbox = self.known, state.counters.observer, state.mailbox
        message, discard, runs_plan = known.message, None, known.runs_plan
        if not runs_plan and type(message) in (Allocate, DeployModel):
            discard = state.discard
        self.envelope = envelope = _Envelope(
            message,
            future=self,  # type: ignore[arg-type]  # it has what envelopes and bridges use of a future
            bridge=bridge,
            timeout_s=self.timeout_s,
            context=None if observer is None else self.context(observer),
            discard=discard,
            found=found,
        )
        if runs_plan and mailbox.admit_alone(envelope):
            return
        mailbox.admit(envelope)
        needs_thread = mailbox.needs_thread
        if bridge.watch is None if needs_thread else bridge.posted:  # else `note_sent` does nothing
            bridge.note_sent(needs_thread=needs_thread)

    def context(self, observer: RequestObserver) -> contextvars.Context:
        """The context for the request's spans: it has the client's span, and nothing of this process."""
        return contextvars.Context().run(observer.received, self.headers or {})

    @property
    def is_in_work(self) -> bool:
        """Whether the service has it, or a model of the server's process runs for it. So its answer comes."""
        envelope = self.envelope
        return self.work is not None or (envelope is not None and envelope.mailbox is not None)

    def withdraw(self) -> bool:
        """Prevent the start of the request, unless it has started. It is answered in any case.

        Returns whether it is certain that it never starts.
        """
        self.withdrawn = True
        if self.work is not None:
            self.work.cancel()
            return False
        if self.envelope is None:
            return not self.answered
        return bool(self.envelope.rule_out())

    def deliver(self, value: Any, error: BaseException | None) -> None:
        """Give the answer to the session. Only the first answer counts."""
        if not self.answered:
            self.answered = True
            self.envelope = None  # it refers to this object: without a cycle, both are freed at once
            try:
                self.session.answered(self, value, error)
            except BaseException as problem:  # noqa: BLE001 - the session logs it
                self._fail(value, problem)

    def _fail(self, value: Any, problem: BaseException) -> None:
        self.session.answered_wrongly(self, value, problem)
        if not isinstance(problem, Exception):  # of a signal handler
            raise problem

    # As the future of its envelope.

    def done(self) -> bool:
        """Whether the service need not start the request."""
        return self.withdrawn or self.answered

    def set_result(self, value: Any) -> None:
        """Give the answer to the session."""
        if not self.answered:  # `deliver`, inlined
            self.answered = True
            self.envelope = None
            try:
                self.session.answered(self, value, None)
            except BaseException as problem:  # noqa: BLE001 - the session logs it
                self._fail(value, problem)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The server's loop."""
        return asyncio.get_running_loop()


class _Envelope(Envelope, eq=False):
    def deliver(self, value: Any, error: BaseException | None) -> None:
        """Give the answer to the session, also if the request was withdrawn."""
        asked: Any = self.future
        asked.deliver(value, error)
