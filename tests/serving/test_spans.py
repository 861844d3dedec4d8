"""Spans of inferences: they are children of the span that a client says by W3C's Trace Context."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio as triton

from cudnn_actor import CudnnRef, InvalidRequest
from cudnn_actor.serving.server import InferenceServer, ServerOptions, serve_with

from ..service.rigs import spawn
from .servers import PLAIN, write_square

pytest.importorskip("opentelemetry.sdk", reason="it is in the group `test`")

from opentelemetry.trace import SpanKind

from cudnn_actor.metrics.opentelemetry import RequestSpans

from ..tracing import Tracing

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
ROWS = np.ones((2, 3), np.float32)
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 3], "data": ROWS.tolist()}]}


@pytest.fixture
async def gpu() -> AsyncIterator[CudnnRef]:
    async with spawn(isolation="thread") as gpu:
        yield gpu


def options_for(folder: Path, **options: Any) -> ServerOptions:
    return ServerOptions(models={"square": write_square(folder)}, http=0, grpc=0, **options)


async def posted(server: InferenceServer, *headers: dict[str, str]) -> None:
    url = f"http://127.0.0.1:{server.http_port}/v2/models/square/infer"
    async with httpx.AsyncClient(**PLAIN) as client:
        for each in headers:
            assert (await client.post(url, json=BODY, headers=each)).status_code == 200


async def test_the_callers_span_is_taken_of_http_of_grpc_and_of_streams(
    gpu: CudnnRef, tracing: Tracing, tmp_path: Path
) -> None:
    given = triton.InferInput("x", ROWS.shape, "FP32").set_data_from_numpy(ROWS)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "square", "inputs": [given]}

    async with (
        serve_with(gpu, options_for(tmp_path)) as server,
        RequestSpans(gpu, tracer_provider=tracing.provider),
        triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        await posted(server, HEADERS, {"traceparent": "00-nothing", "tracestate": "=,="}, {})
        await client.infer("square", [given], headers=HEADERS)
        await client.infer("square", [given])
        async for result, error in client.stream_infer(requests(), headers=HEADERS):
            assert error is None
            np.testing.assert_array_equal(result.as_numpy("y"), ROWS)
    spans: list[Any] = list(tracing.exporter.get_finished_spans())  # the first run allocates, too
    made = [span for span in spans if span.name == "RunModel square"]
    assert [f"{span.context.trace_id:032x}" for span in made] == [TRACE] * 3
    assert [f"{span.parent.span_id:016x}" for span in made] == [SPAN] * 3
    assert {span.kind for span in made} == {SpanKind.SERVER}
    assert {span.context.trace_state.get("vendor") for span in made} == {"1"}


async def test_a_span_that_the_servers_framework_has_made_of_the_request_stays_the_parent(
    gpu: CudnnRef, tracing: Tracing
) -> None:
    tracer = tracing.provider.get_tracer("framework")
    async with RequestSpans(gpu, tracer_provider=tracing.provider) as spans:
        with tracer.start_as_current_span("request") as present:
            here = present.get_span_context()
            ours = {"traceparent": f"00-{here.trace_id:032x}-{SPAN}-01"}
            for headers, trace_id in ((ours, here.trace_id), (HEADERS, int(TRACE, 16)), ({}, here.trace_id)):
                spans.received(headers).run(tracer.start_span, "child").end()
                child: Any = tracing.exporter.get_finished_spans()[-1]
                assert child.context.trace_id == trace_id
                if headers is not HEADERS:
                    assert child.parent.span_id == here.span_id


async def test_the_option_spans_makes_them_by_the_global_provider(gpu: CudnnRef, tmp_path: Path) -> None:
    async with serve_with(gpu, options_for(tmp_path, spans=0.5)) as server:
        await posted(server, HEADERS, {})
        with pytest.raises(InvalidRequest, match="already"):
            RequestSpans(gpu)
    with pytest.raises(InvalidRequest, match="ratio"):
        async with serve_with(gpu, options_for(tmp_path, spans=2.0)):
            pass
