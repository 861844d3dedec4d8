"""Spans of requests for OpenTelemetry: `RequestSpans`, of `cudnn_actor.metrics.opentelemetry`."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from typing import Any, NamedTuple, Protocol, Self

import cudnn_actor
from cudnn_actor.actors import Envelope
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.actors.threads import start_thread
from cudnn_actor.attached.client.attached_service import AttachedService
from cudnn_actor.broker.request_counts import RequestCounters
from cudnn_actor.extras import install_command
from cudnn_actor.protocol.errors import DeadlineExceeded, InvalidRequest, ServiceStopped
from cudnn_actor.protocol.messages.receipts import Receipt
from cudnn_actor.service.service import CudnnService

try:
    from opentelemetry import context as contexts
    from opentelemetry import trace
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ImportError(
        f"spans for OpenTelemetry need opentelemetry-api: {install_command('opentelemetry')}"
    ) from error

__all__ = ["RequestSpans"]

_MOST_WAITING = 2048
"""Answers that wait for their spans, as many as the SDK's batches of spans hold by default."""
_MOST_LETTERS = 500


class _Handle(Protocol):
    """A `CudnnRef` or a `cudnn_actor.blocking.BlockingRef`."""

    _service: Any


class _Answered(NamedTuple):
    """An answer, with all that its span says. Times are on `time.perf_counter_ns`'s clock."""

    parent: contexts.Context
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

    Of a handle that `connect` gave, the spans are those of the requests of this process, from when they were
    sent until their answers were here. The times in the queue and in the run are those that a receipt says,
    and there are no events, no restarts, and no names of models: the service's process alone knows them.

    Spans are made, and the program's span processors called, on a thread of its own. If more than 2048
    answers wait for it, further ones get no span, and are counted in `dropped`. `close`, or the end of a
    `with` or `async with`, waits for the spans of all earlier answers. A service has one
    `RequestSpans` at a time.

    Parameters
    ----------
    service
        A service, or a handle of one.
    tracer_provider
        Of the program; None for the global one. Its sampler is asked too.
    ratio
        Of the requests that are sent within no span, the share that gets a span: 0 to 1.

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
        self._is_attached = isinstance(owner, AttachedService)
        self._counters: RequestCounters = owner.state.counters
        if self._counters.observer is not None:
            raise InvalidRequest(
                field="service",
                value=owner.name,
                problem="has spans of its requests already",
                fix="close the other RequestSpans first",
            )
        self.dropped = 0
        """Answers that got no span because too many waited."""
        self._name, self._ratio = owner.name, ratio
        self._tracer = trace.get_tracer("cudnn_actor", cudnn_actor.__version__, tracer_provider)
        self._answers: queue.SimpleQueue[_Answered | None] = queue.SimpleQueue()
        self._last = 0
        """The number of the request that was answered last."""
        self._restarts: dict[int, list[tuple[int, str]]] = {}
        """The number of a request that runs again → when and why. Each is taken out when it is answered."""
        self._thread = threading.Thread(target=self._run, name="cudnn-actor-spans", daemon=True)
        start_thread(self._thread)
        self._counters.observer = self

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
        """End: later answers get no spans. Blocks until those of earlier ones are made. Idempotent."""
        if self._counters.observer is self:
            self._counters.observer = None
        self._answers.put(None)
        self._thread.join()

    # Told by whoever counts an answer, one at a time.

    def answered(
        self, envelope: Envelope, value: Any, error: BaseException | None, started_ns: int, run_ns: int
    ) -> None:
        """Note an answer whose request is sampled. Never blocks."""
        if envelope.number == self._last:
            return  # its step was interrupted, and is repeated: no other was answered meanwhile
        self._last = envelope.number
        self._note(envelope, value, error, started_ns, run_ns)

    def left(self, envelope: Envelope, error: BaseException) -> None:
        """Note the end of a request that is not run, if it is sampled. Any thread; never blocks."""
        self._note(envelope, None, error, 0, 0)

    def _note(
        self, envelope: Envelope, value: Any, error: BaseException | None, started_ns: int, run_ns: int
    ) -> None:
        number = envelope.number
        restarts = tuple(self._restarts.pop(number, ()))
        parent = self._sampled(envelope)
        if parent is None:
            return
        if self._answers.qsize() >= _MOST_WAITING:
            self.dropped += 1
            return
        message = envelope.message
        self._answers.put(
            _Answered(
                parent,
                type(message).__name__,
                None if self._is_attached else self._counters.tally(message).model,
                number,
                envelope.admitted_ns,
                started_ns,
                run_ns,
                time.perf_counter_ns(),
                value if isinstance(value, Receipt) else None,
                _told(envelope, error),
                restarts,
            )
        )

    def replayed(self, envelope: Envelope, cause: str) -> None:
        """Note that a request runs again."""
        self._restarts.setdefault(envelope.number, []).append((time.perf_counter_ns(), cause))

    def _sampled(self, envelope: Envelope) -> contexts.Context | None:
        """The context of the span's parent; None for no span. Messages of the service's own have none."""
        if envelope.context is None:
            return None
        # A copy, which takes no time: nobody else can be inside of it.
        current = envelope.context.copy().run(contexts.get_current)
        parent = trace.get_current_span(current).get_span_context()
        if parent.is_valid:
            return current if parent.trace_flags.sampled else None
        return current if self._ratio and random.random() < self._ratio else None

    # The thread.

    def _run(self) -> None:
        while (answered := self._answers.get()) is not None:
            self._make(answered)

    def _make(self, answered: _Answered) -> None:
        offset = time.time_ns() - time.perf_counter_ns()  # from this clock to that of spans
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
        span = self._tracer.start_span(
            answered.operation if model is None else f"{answered.operation} {model}",
            answered.parent,
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


def _told(envelope: Envelope, error: BaseException | None) -> BaseException | None:
    """The error that the caller got, who may have left before it was made."""
    if isinstance(error, ServiceStopped) and envelope.timed_out:
        return DeadlineExceeded(timeout_s=envelope.timeout_s or 0.0, started=False)
    if isinstance(error, ServiceStopped) and envelope.withdrawn:
        return asyncio.CancelledError("its caller has left")
    return error
