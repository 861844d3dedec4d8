"""`metrics.prometheus`: what a scrape says, by the parsers of prometheus_client itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from cudnn_actor import CudnnActorError, Fault, FaultPlan, InvalidRequest, Metrics
from cudnn_actor.messages import Fill
from cudnn_actor.service.service import start
from cudnn_actor.supervision import Restarted
from tests.onnx.small_models import FLOAT, model_of, node
from tests.service.rigs import seen, spawn

from .. import forked_programs

pytest.importorskip("prometheus_client", reason="it is in the group `test`")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families as parsed_text

from cudnn_actor.metrics.prometheus import ServiceCollector

in_openmetrics: Any = exposition.generate_latest  # these have no types
parsed_openmetrics: Any = openmetrics_parser.text_string_to_metric_families
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(families: Iterable[Any]) -> Samples:
    found: Samples = {}
    for family in families:
        for each in family.samples:
            key = each.name, frozenset(each.labels.items())
            assert key not in found, key
            found[key] = each.value
    return found


def scrape(*services: Any) -> Samples:
    """What Prometheus reads, in its old format; and OpenMetrics says the same."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(ServiceCollector(*services))
    old = samples(parsed_text(generate_latest(registry).decode()))
    new = samples(parsed_openmetrics(in_openmetrics(registry).decode()))
    assert {name for name, _ in old} == {name for name, _ in new}
    return old


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset({"service": "cudnn", **labels}.items())]


async def test_a_scrape_says_what_metrics_say(tmp_path: Path) -> None:
    graph = model_of([node("Add", "x x", "y")], {"x": (FLOAT, ["N", 3])}, {"y": (FLOAT, ["N", 3])})
    onnx.save(graph, tmp_path / 'a "strange"\nname.onnx')
    name = 'a "strange"\nname'
    async with spawn(isolation="thread", faults=FaultPlan().at(1, Fault.STICKY, of=Fill)) as gpu:
        x = await gpu.upload(np.ones((1, 1, 8, 8), np.float32))
        await gpu.fill(x, 2.0)
        await seen(gpu, Restarted)
        await gpu.download(x)
        async with (
            await gpu.load(tmp_path / f"{name}.onnx") as model,
            gpu.batched(model, max_batch=2) as endpoint,
        ):
            await gpu.run(model, x=np.ones((1, 3), np.float32))
            await endpoint(x=np.ones((1, 3), np.float32))
        await gpu.free(x)
        with pytest.raises(CudnnActorError):
            await gpu.free(x)
        found, metrics = scrape(gpu), gpu.metrics()
    check(found, metrics)
    assert value(found, "cudnn_actor_restarts_total", cause="crash") == 1
    assert value(found, "cudnn_actor_restarts_total", cause="hung") == 0
    assert value(found, "cudnn_actor_downloaded_bytes_total", operation="Download", model="") == 256
    assert value(found, "cudnn_actor_batch_samples_sum", model=name) == 1
    assert value(found, "nv_inference_exec_count", model=name) >= 2
    assert value(found, "cudnn_actor_state", cudnn_actor_state="ready") == 1
    assert value(found, "cudnn_actor_state", cudnn_actor_state="stopped") == 0
    assert value(found, "cudnn_actor_standby", cudnn_actor_standby="none") == 1
    assert value(found, "cudnn_actor_arena_bytes", device="cpu") == metrics.arena_bytes


def check(found: Samples, metrics: Metrics) -> None:
    """Every histogram of the record is in the scrape, with each of its counts."""
    assert metrics.requests
    for each in metrics.requests:
        labels = {"operation": each.operation, "model": each.model or ""}
        for kind, histogram in {"_queue": each.queue, "_run": each.run, "": each.total}.items():
            name, total = f"cudnn_actor_request{kind}_seconds", 0
            for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
                total += count
                assert value(found, f"{name}_bucket", le=str(bound), **labels) == total
            assert value(found, f"{name}_count", **labels) == total == each.finished
            assert value(found, f"{name}_sum", **labels) == pytest.approx(histogram.sum)
        assert value(found, "cudnn_actor_requests_failed_total", **labels) == each.failed
        assert value(found, "cudnn_actor_uploaded_bytes_total", **labels) == each.uploaded_bytes


def test_several_services_are_told_apart_by_their_names() -> None:
    with (
        start(device="cpu", isolation="thread", name="one") as one,
        start(device="cpu", isolation="thread", name="two") as two,
        start(device="cpu", isolation="thread", name="two") as again,
    ):
        collector = ServiceCollector(one, two)
        with pytest.raises(InvalidRequest, match="name of another"):
            collector.add(again)
        collector.add(one)  # once more changes nothing
        registry = CollectorRegistry()
        registry.register(collector)
        ready = {"cudnn_actor_state": "ready"}
        for stopped, states in ((None, (1, 1)), (two, (1, 0))):
            if stopped is not None:
                stopped.stop()
            for name, state in zip(("one", "two"), states, strict=True):
                assert registry.get_sample_value("cudnn_actor_state", {"service": name, **ready}) == state
        collector.remove(two)
        collector.remove(again)
        collector.add(again)
        assert registry.get_sample_value("cudnn_actor_state", {"service": "two", **ready}) == 1


def test_a_forked_child_leaves_out_the_services_of_its_parent() -> None:
    program = """
import os
from prometheus_client import CollectorRegistry, generate_latest
from cudnn_actor import start
from cudnn_actor.metrics.prometheus import ServiceCollector

with start(device="cpu", isolation="thread", name="parents") as service:
    registry = CollectorRegistry()
    collector = ServiceCollector(service)
    registry.register(collector)
    child = os.fork()
    if not child:
        says = generate_latest(registry)
        collector.remove(service)
        os._exit(b"cudnn_actor_state" not in says or b"parents" in says)
    status = os.waitpid(child, 0)[1]
    print(status, b"parents" in generate_latest(registry))
"""
    done = forked_programs.run(["-c", program], check=True)
    assert done.stdout.strip() == "0 True"


def test_nothing_else_imports_prometheus_client() -> None:
    program = "import sys, cudnn_actor.blocking, cudnn_actor.cli; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
