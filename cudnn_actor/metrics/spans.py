"""Spans of requests for OpenTelemetry: `RequestSpans`, of `cudnn_actor.metrics.opentelemetry`."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import random
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, Self

import cudnn_actor
from cudnn_actor.actors import Envelope
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.actors.threads import start_thread
from cudnn_actor.attached.client.attached_service import AttachedService
from cudnn_actor.attached.client.link import Link
from cudnn_actor.broker.request_counts import RequestCounters
from cudnn_actor.extras import install_command
from cudnn_actor.protocol.errors import DeadlineExceeded, InvalidRequest, ServiceStopped
from cudnn_actor.protocol.messages.receipts import Receipt
from cudnn_actor.service.service import CudnnService

try:
    from opentelemetry import context as contexts
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ImportError(
        f"spans for OpenTelemetry need opentelemetry-api: {install_command('opentelemetry')}"
    ) from error

__all__ = ["RequestSpans"]

_MOST_WAITING = 2048
"""Answers that wait for their spans, as many as the SDK's batches of spans hold by default."""
_MOST_LETTERS = 500
_TRACE_CONTEXT = TraceContextTextMapPropagator()


class _Handle(Protocol):
    """A `CudnnRef` or a `cudnn_actor.blocking.BlockingRef`."""

    _service: Any


class _Answered(NamedTuple):
    """An answer, with all that its span says. Times are on `time.perf_counter_ns`'s clock."""

    begun: contexts.Context | trace.Span
    """The request's span, if it was made when the request was sent; else the context of the span's parent."""
    operation: str
    model: str | None
    number: int
    admitted_ns: int
    started_ns: int
    run_ns: int
    ended_ns: int
    receipt: Receipt | None
    error: BaseException | None
    restarts: tuple[tuple[int, str], ...]


class RequestSpans:
    """Makes a span of each request that is sent within a recorded span, and of some others.

        async with RequestSpans(gpu):       # of the global tracer provider, which the program has set
            with tracer.start_as_current_span("predict"):
                await gpu.run(model, image=image)

    A request's span is a child of the span in which it was sent, on any thread, by any client. It lasts from
    admission to the answer, and is made when the answer is there: so nothing goes to the worker. Its name is
    the message's, and of runs the model's too. It has the events "started" and "finished" (on the device),
    and one "restart" with its cause for each crash after which it ran again. The attributes
    `cudnn_actor.queue_us` and `cudnn_actor.run_us` have the times, `cudnn_actor.service` the service's name,
    and `cudnn_actor.plan` and `cudnn_actor.generation` what its receipt says. An error sets the status; so
    does the end of a request that is not run, because its caller has left or its time or the service is over.

    If a request has come from another process, from an attached client or a client of the inference server,
    its span's parent is the span that the client has sent with it, as W3C's Trace Context. Its kind is
    SERVER.

    With a handle of `connect`, there are spans for the requests of this process, from their sending to their
    answers' arrival. Their kind is CLIENT, and they are sent to the service's process: if it has a
    `RequestSpans`, too, its span of the request is a child of the one here. The times in the queue and in the
    run are from the receipt. There are no events, restarts and names of models, which only the service's
    process knows. A span begins where its request is sent, which takes the event loop some 10 µs.

    A thread of its own makes the spans, and calls the program's span processors. If more than
    2048 answers wait for it, further ones get no span, and are counted in `dropped`. `close`, or the end of a
    `with` or `async with`, waits for the spans of all earlier answers. A service has one `RequestSpans` at a
    time.

    Parameters
    ----------
    service
        A service, or a handle of one.
    tracer_provider
        The program's tracer provider; None for the global one. Its sampler is asked, too.
    ratio
        The share of requests that get a span, 0 to 1, among those that are sent within no span.

    Raises
    ------
    InvalidRequest
        `ratio` is out of its range; or the service, or the attachment to it, has a `RequestSpans`.
    """

    def __init__(
        self,
        service: CudnnService | _Handle,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        ratio: float = 0.0,
    ) -> None:
        if not 0.0 <= ratio <= 1.0:
            raise InvalidRequest(field="ratio", value=ratio, problem="is no share", fix="pass 0 to 1")
        owner: CudnnService | AttachedService = (
            service if isinstance(service, CudnnService) else service._service
        )
        self._link = owner.link if isinstance(owner, AttachedService) else None
        self._counters: RequestCounters = owner.state.counters
        self._observed: Link | RequestCounters = self._counters if self._link is None else self._link
        if self._observed.observer is not None:
            raise InvalidRequest(
                field="service",
                value=owner.name,
                problem="has spans of its requests already",
                fix="close the other RequestSpans first",
            )
        self.dropped = 0
        """How many answers got no span because too many waited."""
        self._name, self._ratio = owner.name, ratio
        self._tracer = trace.get_tracer("cudnn_actor", cudnn_actor.__version__, tracer_provider)
        self._answers: queue.SimpleQueue[_Answered | None] = queue.SimpleQueue()
        self._last = 0
        """The number of the request that was answered last."""
        self._restarts: dict[int, list[tuple[int, str]]] = {}
        """The number of a request that runs again → when and why. An entry is removed when its request is
        answered."""
        self._begun: dict[int, trace.Span | None] = {}
        """The spans of requests that another process has, by number; None where one is not sampled."""
        self._thread = threading.Thread(target=self._run, name="cudnn-actor-spans", daemon=True)
        start_thread(self._thread)
        self._observed.observer = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close, while the event loop goes on."""
        await in_own_thread(self.close)

    def close(self) -> None:
        """Make no more spans of later answers. Blocks until the spans of earlier answers are made.
        Idempotent."""
        if self._observed.observer is self:
            self._observed.observer = None
        self._answers.put(None)
        self._thread.join()

    # The thread that counts an answer calls these, one at a time.

    def answered(
        self, envelope: Envelope, value: Any, error: BaseException | None, started_ns: int, run_ns: int
    ) -> None:
        """Note an answer whose request is sampled. Never blocks."""
        if envelope.number == self._last:
            return  # its step was interrupted, and is repeated: no other was answered meanwhile
        self._last = envelope.number
        self._note(envelope, value, error, started_ns, run_ns)

    def not_run(self, envelope: Envelope, error: BaseException) -> None:
        """Note the end of a request that is not run, if it is sampled. Any thread; never blocks."""
        self._note(envelope, None, error, 0, 0)

    def _note(
        self, envelope: Envelope, value: Any, error: BaseException | None, started_ns: int, run_ns: int
    ) -> None:
        number = envelope.number
        restarts = tuple(self._restarts.pop(number, ()))
        begun = self._parent_or_span(envelope)
        if begun is None:
            return
        if self._answers.qsize() >= _MOST_WAITING:
            self.dropped += 1
            return
        message = envelope.message
        self._answers.put(
            _Answered(
                begun,
                type(message).__name__,
                None if self._link is not None else self._counters.tally(message).model,
                number,
                envelope.admitted_ns,
                started_ns,
                run_ns,
                time.perf_counter_ns(),
                value if isinstance(value, Receipt) else None,
                _error_for_caller(envelope, error),
                restarts,
            )
        )

    def _parent_or_span(self, envelope: Envelope) -> contexts.Context | trace.Span | None:
        """The span of a request that was sent to another process, else its parent's; None for no span."""
        if envelope.number in self._begun:
            return self._begun.pop(envelope.number)
        # One that the other process got before this was here may not have the time of its admission.
        return self._sample(envelope) if envelope.admitted_ns else None

    def replayed(self, envelope: Envelope, cause: str) -> None:
        """Note that a request runs again."""
        self._restarts.setdefault(envelope.number, []).append((time.perf_counter_ns(), cause))

    # Code that sends requests to another process, or receives them from there, calls these.

    def sent(self, envelope: Envelope) -> dict[str, str] | None:
        """Begin the span of a sampled request. Returns the headers that name the span for the other
        process."""
        self._begun[envelope.number] = None
        if (parent := self._sample(envelope)) is None:
            return None
        span = self._tracer.start_span(
            type(envelope.message).__name__,
            parent,
            kind=trace.SpanKind.CLIENT,
            start_time=envelope.admitted_ns + _offset_ns(),
        )
        if not span.is_recording():  # the provider's sampler has refused it
            return None
        self._begun[envelope.number] = span
        headers: dict[str, str] = {}
        _TRACE_CONTEXT.inject(headers, trace.set_span_in_context(span, parent))
        return headers

    def received(self, headers: Mapping[str, str]) -> contextvars.Context:
        """The present context, with the span that the headers name as the current one.

        The present span stays if the headers name no valid span, or if it is of the same trace: then it was
        made from the headers before.
        """
        context, present = contextvars.copy_context(), contexts.get_current()
        told = _TRACE_CONTEXT.extract(headers, present)
        if _span_of(told).trace_id != _span_of(present).trace_id:
            context.run(contexts.attach, told)
        return context

    def _sample(self, envelope: Envelope) -> contexts.Context | None:
        """The context of the span's parent; None for no span. Messages of the service's own have none."""
        if envelope.context is None:
            return None
        # A copy, which takes no time: nobody else can be inside of it.
        current = envelope.context.copy().run(contexts.get_current)
        parent = _span_of(current)
        if parent.is_valid:
            return current if parent.trace_flags.sampled else None
        return current if self._ratio and random.random() < self._ratio else None

    # The thread.

    def _run(self) -> None:
        while (answered := self._answers.get()) is not None:
            self._make(answered)

    def _make(self, answered: _Answered) -> None:
        offset = _offset_ns()
        model, started_ns = answered.model, answered.started_ns
        attributes: dict[str, Any] = {
            "cudnn_actor.service": self._name,
            "cudnn_actor.operation": answered.operation,
            "cudnn_actor.request_id": answered.number,
        }
        if model is not None:
            attributes["cudnn_actor.model"] = model
        if started_ns:
            attributes["cudnn_actor.queue_us"] = (started_ns - answered.admitted_ns) / 1e3
            attributes["cudnn_actor.run_us"] = answered.run_ns / 1e3
        elif answered.receipt is not None:
            attributes["cudnn_actor.queue_us"] = answered.receipt.queue_us
            attributes["cudnn_actor.run_us"] = answered.receipt.run_us
        if answered.receipt is not None:
            attributes["cudnn_actor.plan"] = answered.receipt.plan
            attributes["cudnn_actor.generation"] = answered.receipt.generation
        span = answered.begun
        if isinstance(span, trace.Span):
            span.set_attributes(attributes)
        else:
            span = self._tracer.start_span(
                answered.operation if model is None else f"{answered.operation} {model}",
                span,
                kind=trace.SpanKind.SERVER if _span_of(span).is_remote else trace.SpanKind.INTERNAL,
                start_time=answered.admitted_ns + offset,
                attributes=attributes,
            )
        for when_ns, cause in answered.restarts:
            span.add_event("restart", {"cause": cause[:_MOST_LETTERS]}, when_ns + offset)
        if started_ns:
            span.add_event("started", timestamp=started_ns + offset)
            span.add_event("finished", timestamp=started_ns + answered.run_ns + offset)
        if answered.error is not None:
            text = f"{type(answered.error).__name__}: {answered.error}"[:_MOST_LETTERS]
            span.set_attribute("error.type", type(answered.error).__name__)
            span.set_status(trace.Status(trace.StatusCode.ERROR, text))
        span.end(answered.ended_ns + offset)


def _span_of(context: contexts.Context) -> trace.SpanContext:
    return trace.get_current_span(context).get_span_context()


def _offset_ns() -> int:
    """Nanoseconds to add to a time on the clock of requests, for the same time on the clock of spans."""
    return time.time_ns() - time.perf_counter_ns()


def _error_for_caller(envelope: Envelope, error: BaseException | None) -> BaseException | None:
    """The error that the caller got, who may have left before it was made."""
    if isinstance(error, ServiceStopped) and envelope.timed_out:
        return DeadlineExceeded(timeout_s=envelope.timeout_s or 0.0, started=False)
    if isinstance(error, ServiceStopped) and envelope.is_unawaited:
        return asyncio.CancelledError("its caller has left")
    return error
