"""OpenTelemetry's SDK for tests: a tracer provider, and the spans that it has kept in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

__all__ = ["InMemorySpanExporter", "Tracing", "recording"]


class Tracing(NamedTuple):
    provider: TracerProvider
    exporter: InMemorySpanExporter


@contextlib.contextmanager
def recording() -> Iterator[Tracing]:
    """A provider that keeps all spans which have ended."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield Tracing(provider, exporter)
    provider.shutdown()
