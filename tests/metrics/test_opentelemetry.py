"""`metrics.opentelemetry`: what a collection says, by the SDK's own reader."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cudnn_actor import InvalidRequest, Metrics
from cudnn_actor.service.service import start
from tests.service.rigs import spawn

pytest.importorskip("opentelemetry.sdk", reason="it is in the group `test`")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from cudnn_actor.metrics.metric_table import FAMILIES, Kind, cumulative
from cudnn_actor.metrics.opentelemetry import ServiceMetrics

Numbers = dict[tuple[str, frozenset[tuple[str, Any]]], float]


@pytest.fixture
def reader() -> Iterator[tuple[MeterProvider, InMemoryMetricReader]]:
    """A provider with a reader in memory. The SDK leaves a cycle that has its loggers."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    yield provider, reader
    provider.shutdown()
    gc.collect()


def collected(reader: InMemoryMetricReader) -> Numbers:
    data: Any = reader.get_metrics_data()  # None without an observation
    scopes = [] if data is None else [scope for of in data.resource_metrics for scope in of.scope_metrics]
    found: Numbers = {}
    for metric in [metric for scope in scopes for metric in scope.metrics]:
        for point in metric.data.data_points:
            key = metric.name, frozenset(point.attributes.items())
            assert key not in found, key
            found[key] = point.value
    return found


async def test_a_collection_says_what_metrics_say(reader: tuple[MeterProvider, InMemoryMetricReader]) -> None:
    provider, memory = reader
    async with spawn(isolation="thread") as gpu:
        ServiceMetrics(gpu, meter_provider=provider)
        x = await gpu.upload(np.ones((1, 1, 8, 8), np.float32))
        await gpu.download(x)
        found, metrics = collected(memory), gpu.metrics()
        check(found, metrics)
        await gpu.download(x)  # the next collection reads anew
        found, metrics = collected(memory), gpu.metrics()
        check(found, metrics)
    assert {name for name, _ in found} <= {
        family.name + part
        for family in FAMILIES
        for part in (("_bucket", "_count", "_sum") if family.kind is Kind.HISTOGRAM else ("",))
    }


def check(found: Numbers, metrics: Metrics) -> None:
    def value(name: str, **labels: str) -> float:
        return found[name, frozenset({"service": metrics.service, **labels}.items())]

    assert metrics.requests
    for each in metrics.requests:
        labels = {"operation": each.operation, "model": each.model or ""}
        for kind, histogram in {"_queue": each.queue, "_run": each.run, "": each.total}.items():
            name = f"cudnn_actor_request{kind}_seconds"
            assert value(f"{name}_count", **labels) == histogram.count
            assert value(f"{name}_sum", **labels) == pytest.approx(histogram.sum)
            for bound, count in cumulative(histogram):
                assert value(f"{name}_bucket", le=bound, **labels) == count
        assert value("cudnn_actor_downloaded_bytes", **labels) == each.downloaded_bytes
    assert value("cudnn_actor_state", state="ready") == 1
    assert value("cudnn_actor_state", state="stopped") == 0
    assert value("cudnn_actor_arena_bytes", device="cpu") == metrics.arena_bytes


def test_each_service_is_read_once_for_a_collection(
    reader: tuple[MeterProvider, InMemoryMetricReader],
) -> None:
    provider, memory = reader
    with start(device="cpu", isolation="thread", name="one") as service:
        read = Counted(service)
        publisher = ServiceMetrics(read, meter_provider=provider)
        with pytest.raises(InvalidRequest, match="name of another"):
            publisher.add(service)
        read.count = 0
        for turn in (1, 2, 3):
            collected(memory)
            assert read.count == turn
        publisher.remove(read)
        assert not collected(memory)


class Counted:
    """A handle that counts how often it is read."""

    def __init__(self, service: Any) -> None:
        self.service, self.count = service, 0

    def metrics(self) -> Metrics:
        self.count += 1
        read: Metrics = self.service.metrics()
        return read


def test_units_follow_from_names() -> None:
    units = {family.name: family.unit for family in FAMILIES}
    assert units["cudnn_actor_request_seconds"] == "s"
    assert units["cudnn_actor_uploaded_bytes"] == "By"
    assert units["cudnn_actor_restarts"] == ""


def test_nothing_else_imports_opentelemetry() -> None:
    program = "import sys, cudnn_actor.blocking, cudnn_actor.cli; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
