"""`metrics()`: counts and latencies of what was answered, read without a message."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from cudnn_actor import CudnnActorError, CudnnRef, Fault, FaultPlan, InvalidRequest, Metrics
from cudnn_actor.messages import Fill, Free, Ping
from cudnn_actor.service import RequestCounts, StandbyState
from cudnn_actor.supervision import Restarted
from tests.onnx.small_models import FLOAT, model_of, node

from ..patience import PATIENCE_S
from .rigs import Gate, Trio, gated_service, in_thread, seen, single, spawn, spawn_gated

pytestmark = pytest.mark.usefixtures("isolation")


def of(metrics: Metrics, operation: str, model: str | None = None) -> RequestCounts:
    """The counts of a message type or a model."""
    (found,) = [each for each in metrics.requests if (each.operation, each.model) == (operation, model)]
    return found


async def becomes(gpu: CudnnRef, what: Callable[[Metrics], Any]) -> Metrics:
    """Wait, without a message, until the metrics say something."""

    def wait() -> Metrics:
        deadline = time.monotonic() + PATIENCE_S
        while not what(metrics := gpu.metrics()):
            assert time.monotonic() < deadline, metrics
            threading.Event().wait(0.001)
        return metrics

    found: Metrics = await in_thread(wait)
    return found


async def test_every_answer_is_counted_once_with_its_times() -> None:
    async with spawn() as gpu:
        trio = await Trio.on(gpu)
        for _ in range(4):
            await gpu.ask(trio.product())
        assert await trio.result() == 6.0
        spare = await gpu.empty((64, 1024), dtype="float32")  # large enough to take another way
        await gpu.write(spare, np.ones((64, 1024), np.float32))
        await gpu.download(spare)
        await gpu.free(spare)
        await gpu.ping()
        with pytest.raises(CudnnActorError):
            await gpu.free(spare)
        with pytest.raises(CudnnActorError):
            await gpu.download(spare)
        told = await gpu.statistics()
        metrics = gpu.metrics()
    counted = {each.operation: each.finished for each in metrics.requests}
    assert counted == {
        "Allocate": 4, "ConvFwd": 4, "Download": 2, "Upload": 1, "Free": 1, "Ping": 1, "GetStatistics": 1,
    }  # fmt: skip
    assert metrics.finished == sum(counted.values()) == told.finished + 1  # with that of `statistics` itself
    assert metrics.failed == sum(each.failed for each in metrics.requests) == told.failed
    for each in metrics.requests:
        assert each.queue.count == each.run.count == each.total.count
        assert 0 <= each.queue.sum <= each.total.sum
        assert 0 <= each.run.sum <= each.total.sum


async def test_the_times_of_requests_are_those_of_their_receipts() -> None:
    async with spawn() as gpu:
        trio = await Trio.on(gpu)
        receipts = [await gpu.ask(trio.product()) for _ in range(5)]
        counts = of(gpu.metrics(), "ConvFwd")
    assert counts.queue.sum == pytest.approx(sum(each.queue_us for each in receipts) / 1e6, abs=1e-7)
    assert counts.run.sum >= sum(each.run_us for each in receipts) / 1e6 - 1e-7


async def test_so_are_those_of_a_request_whose_buffer_was_freed_meanwhile() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            running = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            freeing = gpu.submit(Free(buffer=trio.x))
        receipt = await running
        await freeing
        counts = of(gpu.metrics(), "ConvFwd")
    assert counts.queue.sum == pytest.approx(receipt.queue_us / 1e6, abs=1e-7)
    assert receipt.run_us / 1e6 - 1e-7 <= counts.run.sum <= counts.total.sum - counts.queue.sum + 1e-7


async def test_bytes_are_counted_by_where_they_go() -> None:
    array = np.ones((3, 5, 7), np.float32)
    async with spawn() as gpu:
        x = await gpu.upload(array)
        await gpu.write(x, array)
        await gpu.write(x, array)
        await gpu.download(x)
        metrics = gpu.metrics()
    moved = {each.operation: (each.uploaded_bytes, each.downloaded_bytes) for each in metrics.requests}
    assert moved == {"Allocate": (420, 0), "Upload": (840, 0), "Download": (0, 420)}


def doubling(folder: Path, name: str) -> Path:
    """A file of y = 2 x."""
    model = model_of([node("Add", "x x", "y")], {"x": (FLOAT, ["N", 3])}, {"y": (FLOAT, ["N", 3])})
    onnx.save(model, folder / f"{name}.onnx")
    return folder / f"{name}.onnx"


async def test_runs_of_models_are_counted_by_the_names_of_their_files(tmp_path: Path) -> None:
    rows = np.ones((2, 3), np.float32)
    async with (
        spawn() as gpu,
        await gpu.load(doubling(tmp_path, "twice")) as twice,
        await gpu.load(doubling(tmp_path, "other")) as other,
        await gpu.load(doubling(tmp_path, "twice")) as again,
    ):
        for model in (twice, twice, other, again):
            await gpu.run(model, x=rows)
        metrics = gpu.metrics()
    assert [of(metrics, "RunModel", name).finished for name in ("twice", "other")] == [3, 1]
    assert of(metrics, "RunModel", "twice").uploaded_bytes == 3 * rows.nbytes
    assert of(metrics, "RunModel", "twice").downloaded_bytes == 3 * rows.nbytes


async def test_sizes_of_batches_are_counted(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        spawn_gated(gate) as gpu,
        await gpu.load(doubling(tmp_path, "twice")) as model,
        gpu.batched(model, max_batch=4, max_delay_us=0, in_flight=1) as endpoint,
    ):
        gate.forget_arrivals()
        with gate.closed():
            first = endpoint.submit(x=np.ones((1, 3), np.float32))
            await in_thread(gate.wait_for_arrival)
            later = [endpoint.submit(x=np.ones((1, 3), np.float32)) for _ in range(3)]
        await asyncio.gather(first, *later)
        batches = of(gpu.metrics(), "RunModel", "twice").batches
    assert batches is not None
    assert batches.bounds[:3] == (1, 2, 4)
    assert (batches.counts[:3], batches.sum) == ((1, 0, 1), 4)


async def test_they_are_read_while_nothing_answers() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            running = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            metrics = gpu.metrics()
            assert (metrics.in_flight, metrics.finished) == (1, 3)
        await running
        await becomes(gpu, lambda metrics: metrics.in_flight == 0)
        assert gpu.metrics().finished == 4


async def test_restarts_are_counted_by_cause_and_nothing_starts_anew() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill)
    async with spawn(faults=faults) as gpu:
        trio = await Trio.on(gpu)
        before = gpu.metrics()
        assert set(before.restarts_by_cause.values()) == {0}
        await gpu.fill(trio.x, 5.0)
        await seen(gpu, Restarted)
        metrics = gpu.metrics()
        told = await gpu.statistics()
    assert metrics.restarts_by_cause == before.restarts_by_cause | {"crash": 1}
    assert (metrics.replayed, metrics.generation) == (told.replayed, 2) == (1, 2)
    assert of(metrics, "Allocate") == of(before, "Allocate")
    assert of(metrics, "Fill").finished == 1


async def test_the_plan_cache_and_the_memory_are_known_without_a_message() -> None:
    async with spawn() as gpu:
        trio = await Trio.on(gpu)
        await gpu.ask(trio.product())
        await gpu.ask(trio.product())
        metrics = await becomes(gpu, lambda metrics: metrics.plans.size and metrics.plans.misses)
        told = await gpu.statistics()
        in_process = gpu.worker_pid is not None
    assert (metrics.plans.size, metrics.plans.misses) == (told.plans.size, told.plans.misses) == (1, 1)
    assert (metrics.live_buffers, metrics.live_bytes, metrics.arena_bytes) == (
        told.live_buffers,
        told.live_bytes,
        told.arena_bytes,
    )
    assert (metrics.worker_host_bytes > 0) is in_process
    assert metrics.standby is StandbyState.NONE


async def test_any_thread_reads_them_while_others_write() -> None:
    """Each snapshot is whole: its three histograms have the same requests, and none has fewer than before."""
    wrong: list[RequestCounts | Metrics] = []
    ended, reads = threading.Event(), 0

    def read() -> None:
        nonlocal reads
        last = 0
        while not ended.is_set():
            metrics = gpu.metrics()
            wrong.extend(r for r in metrics.requests if not r.queue.count == r.run.count == r.total.count)
            if metrics.finished < last:
                wrong.append(metrics)
            last = metrics.finished
            reads += 1

    async with spawn() as gpu:
        trio = await Trio.on(gpu)
        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(20):
            await asyncio.gather(*(gpu.ask(trio.product()) for _ in range(20)))
        ended.set()
        await in_thread(reader.join)
        assert of(gpu.metrics(), "ConvFwd").finished == 400
    assert not wrong
    assert reads


async def test_what_is_no_message_is_counted_together() -> None:
    class Nonsense:
        control = False

    async with spawn() as gpu:
        await gpu.upload(single(1.0))
        for _ in range(2):
            with pytest.raises((TypeError, InvalidRequest)):
                await in_thread(lambda: gpu.actor_ref.ask(type("Nonsense", (Nonsense,), {})()))
        metrics = gpu.metrics()
    assert {each.operation for each in metrics.requests} <= {"Allocate", "other"}
    assert metrics.failed == sum(each.failed for each in metrics.requests)


async def test_another_life_of_the_service_goes_on_counting() -> None:
    service = gated_service(Gate())

    def live() -> Metrics:
        service.launch()
        service.started.result(PATIENCE_S)
        service.actor_ref.ask(Ping())
        found = service.metrics()
        service.stop(PATIENCE_S)
        return found

    first, second = [await in_thread(live) for _ in range(2)]
    assert (of(first, "Ping").finished, of(second, "Ping").finished) == (1, 2)
    assert (first.finished, second.finished, service.metrics().finished) == (1, 2, 2)
    assert service.metrics().state == "stopped"
