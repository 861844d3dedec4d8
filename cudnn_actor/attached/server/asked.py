"""A client's request on its way through the service."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any, Protocol

from cudnn_actor.actors import Envelope, LoopBridge
from cudnn_actor.attached.wire import Place
from cudnn_actor.broker.request_counts import RequestObserver
from cudnn_actor.broker.service_state import ServiceState
from cudnn_actor.protocol.messages.messages import COMPUTE, Allocate, DeployModel
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Asked", "Known", "Takes"]


class Known:
    """A decoded message, the buffers and models that it names, and its cost; kept for the next time that the
    same bytes come."""

    __slots__ = ("average", "checked", "control", "cost_us", "message", "named", "runs_plan")

    def __init__(self, message: Any, named: tuple[Any, ...]) -> None:
        self.message, self.named = message, named
        self.runs_plan = type(message) in COMPUTE
        self.control: bool = getattr(message, "control", False)
        self.checked = -1
        """The epoch of the client's holdings in which everything that the message names was found there."""
        self.cost_us: float | None = None
        """The average device time of the message's latest runs, in microseconds; None before the first."""
        self.average: Any = None
        """The average cost of messages of this kind: see `Costs`."""


class Takes(Protocol):
    """The receiver of the answers: the client's session."""

    def answered(self, asked: Asked, value: Any, error: BaseException | None) -> None:
        """Take an answer, once for each request. On the server's loop."""


class Asked:
    """A client's request. It is in a queue first, and has an envelope once the service has it."""

    __slots__ = (
        "answered",
        "copied",
        "cost_us",
        "digest",
        "envelope",
        "headers",
        "imports",
        "known",
        "number",
        "reserved",
        "results",
        "room",
        "room_bytes",
        "sent_ns",
        "session",
        "timeout_s",
        "withdrawn",
        "work",
    )

    def __init__(
        self, session: Takes, number: int, known: Known, room: Place | None, room_bytes: int
    ) -> None:
        self.session, self.number, self.known = session, number, known
        self.room, self.room_bytes = room, room_bytes
        self.timeout_s: float | None = None
        self.headers: dict[str, str] | None = None
        self.digest: tuple[str, TensorSpec] | None = None
        """The digest and spec of an `Allocate` whose buffer other clients may share; None for a buffer of its
        own."""
        self.envelope: Envelope | None = None
        self.withdrawn = self.answered = False
        self.cost_us = 0.0
        self.sent_ns = 0
        """When the service was sent it, by `time.perf_counter_ns`; 0 before that, and if it never is."""
        self.copied = 0
        """The bytes of values that were copied for the request: see `Copies`."""
        self.reserved = 0
        """The bytes that the client's holdings have reserved for the request."""
        self.imports = False
        """Whether the request counts as a buffer of another service: see `Holdings.begin_import`."""
        self.work: asyncio.Future[Any] | None = None
        """The task or future that runs a model of the server's process for the request."""
        self.results: Any = None
        """The arrays of the answer, while they wait for room."""

    def send(self, state: ServiceState, bridge: LoopBridge, found: Any) -> None:
        """Put the request into the service's mailbox. Raises `ActorStopped`."""
        discard = state.discard if type(self.known.message) in (Allocate, DeployModel) else None
        observer = state.counters.observer
        self.envelope = envelope = _Envelope(
            self.known.message,
            future=_Reply(self),  # type: ignore[arg-type]  # it has what envelopes and bridges use of a future
            bridge=bridge,
            timeout_s=self.timeout_s,
            context=None if observer is None else self.context(observer),
            discard=discard,
            found=found,
        )
        state.mailbox.admit(envelope)
        needs_thread = state.mailbox.needs_thread
        if bridge.watch is None if needs_thread else bridge.posted:  # else `sent` does nothing
            bridge.sent(needs_thread=needs_thread)

    def context(self, observer: RequestObserver) -> contextvars.Context:
        """The context for the request's spans: it has the client's span, and nothing of this process."""
        return contextvars.Context().run(observer.received, self.headers or {})

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
            self.session.answered(self, value, error)


class _Reply:
    """The stand-in for the future in an envelope. It passes an answer on at once, without the event loop.

    It is "done" once the request is withdrawn, which tells the service not to start the request. Unlike a
    cancelled future, it still gets the answer. The answer says that nothing reads the client's memory any
    more.
    """

    __slots__ = ("_asked",)

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def done(self) -> bool:
        return self._asked.withdrawn or self._asked.answered

    def set_result(self, value: Any) -> None:
        self._asked.deliver(value, None)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()


class _Envelope(Envelope):
    __slots__ = ()

    def deliver(self, value: Any, error: BaseException | None) -> None:
        """Give the answer to the session, also if the request was withdrawn."""
        reply: Any = self.future
        reply._asked.deliver(value, error)
