"""Spans of requests that cross processes: each side makes its own, and the server's are children."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudnn_actor import ConvSpec, CudnnActorError, Fault, FaultPlan, InvalidRequest, connect
from cudnn_actor.attached import serve_socket, served_model
from cudnn_actor.messages import Fill
from cudnn_actor.protocol.messages.messages import Ping
from tests.onnx.small_models import image_model
from tests.service.rigs import spawn

pytest.importorskip("opentelemetry.sdk", reason="it is in the group `test`")

from opentelemetry.trace import SpanKind, StatusCode

from cudnn_actor.metrics.opentelemetry import RequestSpans
from tests.tracing import Tracing, recording

from ..inside import service_behind


@pytest.fixture
def servers() -> Iterator[Tracing]:
    """What the process of the service has. `tracing` is what its clients have."""
    with recording() as found:
        yield found


async def test_requests_of_an_attached_handle_have_spans_where_they_are_sent(
    tracing: Tracing, tmp_path: Path
) -> None:
    provider, exporter = tracing
    path = tmp_path / "gpu.sock"
    faults = FaultPlan().at(2, Fault.FAIL_EXECUTION, of=Fill)
    async with spawn(isolation="thread", faults=faults) as gpu, serve_socket(gpu, path):
        async with connect(path) as attached, RequestSpans(attached, tracer_provider=provider):
            with provider.get_tracer("program").start_as_current_span("caller") as caller:
                x = await attached.empty((1, 1, 8, 8))
                receipt = await attached.fill(x, 2.0)
                with pytest.raises(CudnnActorError):
                    await attached.fill(x, 3.0)
                left = attached.submit(Fill(dst=x, value=4.0))
                left.cancel()
                with pytest.raises(InvalidRequest, match="already"):
                    RequestSpans(attached)
            await attached.drain()  # outside of a span; what was sent before it is answered
        await gpu.ask(Ping())
    spans: list[Any] = [span for span in exporter.get_finished_spans() if span.name != "caller"]
    assert [span.name for span in spans] == ["Allocate", "Fill", "Fill", "Fill"]
    assert {span.parent.span_id for span in spans} == {caller.get_span_context().span_id}
    _, filled, failed, withdrawn = spans
    assert filled.attributes["cudnn_actor.queue_us"] == receipt.queue_us
    assert filled.attributes["cudnn_actor.run_us"] == receipt.run_us
    assert filled.attributes["cudnn_actor.plan"] == receipt.plan
    assert filled.attributes["cudnn_actor.service"] == service_behind(gpu).name
    assert failed.status.status_code is StatusCode.ERROR
    # The service may have run it before it heard that the caller had left.
    assert withdrawn.attributes.get("error.type") in {None, "CancelledError"}
    assert all(span.start_time <= span.end_time for span in spans)


async def test_the_servers_span_is_a_child_of_the_clients(
    tracing: Tracing, servers: Tracing, tmp_path: Path
) -> None:
    async with (
        spawn(isolation="thread") as gpu,
        await gpu.load(image_model().SerializeToString(), dims={"N": 1}) as own,
        serve_socket(gpu, tmp_path / "gpu.sock", models={"images": own}) as served,
        connect(served.path) as client,
    ):
        x = await client.upload(np.ones((1, 1, 4, 4), np.float32))
        w = await client.upload(np.ones((1, 1, 3, 3), np.float32))
        images = served_model(client, "images")
        async with (
            RequestSpans(gpu, tracer_provider=servers.provider),
            RequestSpans(client, tracer_provider=tracing.provider),
        ):
            with tracing.provider.get_tracer("program").start_as_current_span("caller") as caller:
                for _ in range(2):  # the second one finds what the first one has found out
                    await client.conv_fwd(x, w, conv=ConvSpec.symmetric(2))
                await images.run(image=np.ones((1, 3, 8, 8), np.float32))
            await client.fill(x, 1.0)  # outside of a span
    sent: dict[int, Any] = {
        span.context.span_id: span for span in tracing.exporter.get_finished_spans() if span.name != "caller"
    }
    assert [span.name for span in sent.values()] == [*["Allocate", "ConvFwd"] * 2, "RunModel"]
    assert {span.parent.span_id for span in sent.values()} == {caller.get_span_context().span_id}
    assert {span.kind for span in sent.values()} == {SpanKind.CLIENT}
    around: Any = next(span for span in tracing.exporter.get_finished_spans() if span.name == "caller")
    assert all(around.start_time - 1_000_000 <= span.start_time <= span.end_time for span in sent.values())
    served_spans: list[Any] = list(servers.exporter.get_finished_spans())
    names = [span.name.partition(" ")[0] for span in served_spans]
    assert sorted(names) == sorted(span.name for span in sent.values())
    for span, name in zip(served_spans, names, strict=True):
        parent = sent[span.parent.span_id]
        assert (parent.name, parent.context.trace_id) == (name, span.context.trace_id)
        assert span.kind is SpanKind.SERVER
        assert [event.name for event in span.events] == ["started", "finished"]


async def test_nothing_of_spans_is_sent_while_the_client_makes_none(
    tracing: Tracing, servers: Tracing, tmp_path: Path
) -> None:
    async with (
        spawn(isolation="thread") as gpu,
        serve_socket(gpu, tmp_path / "s") as served,
        connect(served.path) as client,
        RequestSpans(gpu, tracer_provider=servers.provider, ratio=1.0),
    ):
        with tracing.provider.get_tracer("program").start_as_current_span("caller"):
            await client.empty((1, 1, 8, 8))
    (span,) = [each for each in servers.exporter.get_finished_spans() if each.name == "Allocate"]
    assert span.parent is None  # the server's own choice, by its ratio


async def test_of_requests_that_a_client_does_not_sample_the_server_makes_no_span(
    servers: Tracing, tracing: Tracing, tmp_path: Path
) -> None:
    async with (
        spawn(isolation="thread") as gpu,
        serve_socket(gpu, tmp_path / "s") as served,
        connect(served.path) as client,
        RequestSpans(gpu, tracer_provider=servers.provider),
    ):
        x = await client.empty((1, 1, 8, 8))
        for ratio, least, most in ((0.0, 0, 0), (0.5, 0, 40), (1.0, 40, 80)):
            async with RequestSpans(client, tracer_provider=tracing.provider, ratio=ratio):
                for _ in range(40):
                    await client.fill(x, 1.0)
            assert least <= len(tracing.exporter.get_finished_spans()) <= most
        await gpu.ask(Ping())
    sent: list[Any] = list(tracing.exporter.get_finished_spans())
    made: list[Any] = list(servers.exporter.get_finished_spans())
    assert [span.parent.span_id for span in made] == [span.context.span_id for span in sent]
