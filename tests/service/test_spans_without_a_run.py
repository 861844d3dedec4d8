"""Spans of requests that are not run: `metrics.opentelemetry.RequestSpans`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cudnn_actor import DeadlineExceeded
from cudnn_actor.messages import Fill

from ..patience import PATIENCE_S
from .rigs import Gate, Trio, in_thread, outcome, spawn_gated

pytest.importorskip("opentelemetry.sdk", reason="it is in the group `test`")

from cudnn_actor.metrics.opentelemetry import RequestSpans

from ..tracing import InMemorySpanExporter, Tracing

pytestmark = pytest.mark.usefixtures("isolation")


def fills(exporter: InMemorySpanExporter) -> list[Any]:
    """Spans of `Fill`, in the order of their requests."""
    spans: list[Any] = [span for span in exporter.get_finished_spans() if span.name == "Fill"]
    return sorted(spans, key=lambda span: span.attributes["cudnn_actor.request_id"])


async def test_they_say_what_the_callers_of_requests_that_end_before_their_start_got(
    tracing: Tracing,
) -> None:
    provider, exporter = tracing
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        async with RequestSpans(gpu, tracer_provider=provider):
            with gate.closed():
                first = gpu.submit(trio.product())
                await in_thread(gate.wait_for_arrival)
                with provider.get_tracer("program").start_as_current_span("caller") as caller:
                    late = gpu.submit(Fill(dst=trio.y, value=1.0), timeout=0.0)
                    left = gpu.submit(Fill(dst=trio.y, value=2.0))
                    left.cancel()
                    followed = gpu.submit(Fill(dst=trio.y, value=3.0), timeout=PATIENCE_S)
                assert isinstance(await outcome(late), DeadlineExceeded)
            await asyncio.gather(first, followed)
            await gpu.drain()
    expired, withdrawn, run = fills(exporter)
    for span, kind in ((expired, "DeadlineExceeded"), (withdrawn, "CancelledError")):
        assert span.attributes["error.type"] == kind
        assert span.status.description.startswith(kind)
        assert span.parent.span_id == caller.get_span_context().span_id
        assert span.events == ()
        assert "cudnn_actor.queue_us" not in span.attributes
        assert span.start_time <= span.end_time
    assert [event.name for event in run.events] == ["started", "finished"]
