"""`metrics.opentelemetry.RequestSpans`: spans by the SDK's exporter in memory."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Literal

import numpy as np
import pytest

from cudnn_actor import (
    CudnnActorError,
    Fault,
    FaultPlan,
    InvalidRequest,
    MailboxFull,
    ServiceStopped,
)
from cudnn_actor.blocking import spawn as blocking_spawn
from cudnn_actor.messages import Fill
from cudnn_actor.protocol.messages.messages import Ping
from cudnn_actor.service.service import start
from tests.service.rigs import Gate, Trio, in_thread, outcome, spawn, spawn_gated

pytest.importorskip("opentelemetry.sdk", reason="it is in the group `test`")

from opentelemetry.trace import StatusCode

from cudnn_actor.metrics.opentelemetry import RequestSpans
from tests.tracing import InMemorySpanExporter, Tracing

from ..inside import service_behind


def named(exporter: InMemorySpanExporter) -> dict[str, Any]:
    spans = exporter.get_finished_spans()
    assert len({span.name for span in spans}) == len(spans), [span.name for span in spans]
    return {span.name: span for span in spans}


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_a_request_is_a_child_of_the_span_that_it_is_sent_in(
    tracing: Tracing, isolation: Literal["thread", "process"]
) -> None:
    provider, exporter = tracing
    tracer = provider.get_tracer("program")
    async with spawn(isolation=isolation) as gpu:
        x = await gpu.upload(np.ones((1, 1, 8, 8), np.float32))
        async with RequestSpans(gpu, tracer_provider=provider):
            await gpu.download(x)  # outside of a span
            with tracer.start_as_current_span("caller"):
                receipt = await asyncio.create_task(gpu.fill(x, 2.0))
                await gpu.free(x)
            with pytest.raises(InvalidRequest, match="already"):
                RequestSpans(gpu)
        with tracer.start_as_current_span("after"):
            await gpu.ask(Ping())
    spans = named(exporter)
    assert set(spans) == {"Fill", "Free", "caller", "after"}
    fill, caller = spans["Fill"], spans["caller"]
    assert fill.parent.span_id == caller.context.span_id
    assert fill.context.trace_id == caller.context.trace_id
    assert fill.attributes["cudnn_actor.queue_us"] == pytest.approx(receipt.queue_us, abs=0.01)
    assert fill.attributes["cudnn_actor.request_id"] == receipt.request_id
    assert fill.attributes["cudnn_actor.plan"] == receipt.plan
    assert fill.status.status_code is StatusCode.UNSET
    assert [event.name for event in fill.events] == ["started", "finished"]
    times = [fill.start_time, *[event.timestamp for event in fill.events], fill.end_time]
    assert times == sorted(times)
    assert caller.start_time <= fill.end_time + 1_000_000


async def test_errors_and_restarts_are_in_the_span(tracing: Tracing) -> None:
    provider, exporter = tracing
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill).at(3, Fault.FAIL_EXECUTION, of=Fill)
    async with spawn(isolation="process", faults=faults) as gpu:
        x = await gpu.upload(np.ones((1, 1, 8, 8), np.float32))
        tracer = provider.get_tracer("program")
        async with RequestSpans(gpu, tracer_provider=provider):
            with tracer.start_as_current_span("root"):
                await gpu.fill(x, 1.0)
                with pytest.raises(CudnnActorError):
                    await gpu.fill(x, 2.0)
    spans: list[Any] = [span for span in exporter.get_finished_spans() if span.name == "Fill"]
    replayed, failed = spans
    assert [event.name for event in replayed.events] == ["restart", "started", "finished"]
    assert replayed.events[0].attributes["cause"]
    assert replayed.status.status_code is StatusCode.UNSET
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description.startswith(failed.attributes["error.type"])


def test_the_blocking_client_and_pykka_are_followed_too(tracing: Tracing) -> None:
    provider, exporter = tracing
    with (
        blocking_spawn(device="cpu", isolation="thread") as gpu,
        RequestSpans(gpu, tracer_provider=provider),
        provider.get_tracer("program").start_as_current_span("caller"),
    ):
        gpu.empty((1, 1, 1, 1))
        gpu.actor_ref.ask(Ping())
    spans = named(exporter)
    assert {span.parent.span_id for name, span in spans.items() if name != "caller"} == {
        spans["caller"].context.span_id
    }
    assert set(spans) == {"Allocate", "Ping", "caller"}


async def test_requests_that_are_dropped_to_make_room_or_wait_at_the_end_have_spans_too(
    tracing: Tracing,
) -> None:
    provider, exporter = tracing
    gate = Gate()
    async with spawn_gated(gate, isolation="thread", mailbox=4) as gpu:
        trio = await Trio.on(gpu)
        async with RequestSpans(gpu, tracer_provider=provider, ratio=1.0):
            with gate.closed():
                running = gpu.submit(trio.product())
                await in_thread(gate.wait_for_arrival)
                futures = []
                with contextlib.suppress(MailboxFull):
                    while True:
                        futures.append(gpu.submit(Fill(dst=trio.y, value=1.0)))
                futures[-1].cancel()
                await asyncio.sleep(0)
                mailbox = service_behind(gpu).state.mailbox
                mailbox.note_withdrawn()
                futures.append(gpu.submit(Fill(dst=trio.y, value=2.0)))
                mailbox.close("a test has closed it")
            waiting = [await outcome(future) for future in futures if not future.cancelled()]
            await outcome(running)
    spans: list[Any] = [span for span in exporter.get_finished_spans() if span.name == "Fill"]
    kinds = [span.attributes.get("error.type") for span in spans]
    assert all(isinstance(each, ServiceStopped) for each in waiting)
    assert sorted(kinds) == ["CancelledError", *["ServiceStopped"] * len(waiting)]


def test_ratio_is_the_share_of_requests_without_a_span(tracing: Tracing) -> None:
    provider, exporter = tracing
    with start(device="cpu", isolation="thread") as service:
        for ratio, count in ((0.0, 0), (1.0, 5)):
            with RequestSpans(service, tracer_provider=provider, ratio=ratio):
                for _ in range(5):
                    service.actor_ref.ask(Ping())
            assert len(exporter.get_finished_spans()) == count
        with pytest.raises(InvalidRequest, match="ratio"):
            RequestSpans(service, ratio=1.5)
