"""The memory of a GPU by NVML, whose package is stood in for: there is no GPU here."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import types
from typing import Any

import msgspec
import pytest

from cudnn_actor.engines.cuda.diagnosis import device_memory
from cudnn_actor.engines.cuda.diagnosis.device_memory import DeviceMemory, DeviceMemoryReader

from ....patience import PATIENCE_S

BUS_ID = "0000:01:00.0"


class NVMLError(Exception):
    pass


def nvml(**functions: Any) -> types.ModuleType:
    """A stand-in for `pynvml`, with the functions of it that are called."""

    def handle_of(bus_id: str) -> str:
        if bus_id != BUS_ID:
            raise NVMLError("no such device")
        return "handle"

    module = types.ModuleType("pynvml")
    module.NVMLError = NVMLError  # type: ignore[attr-defined]
    module.__dict__.update(
        {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByPciBusId": handle_of,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
            "nvmlDeviceGetMemoryInfo": lambda _: types.SimpleNamespace(used=3, total=8, free=5),
            **functions,
        }
    )
    return module


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the machine takes, what answers has answered in time."""
    monkeypatch.setattr(device_memory, "MOST_WAIT_S", 60.0)


def reader_of(monkeypatch: pytest.MonkeyPatch, module: Any, bus_id: str = BUS_ID) -> DeviceMemoryReader:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return DeviceMemoryReader(bus_id)


def test_it_reads_what_nvml_says_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    used = itertools.count(3)
    module = nvml(nvmlDeviceGetMemoryInfo=lambda _: types.SimpleNamespace(used=next(used), total=8))
    reader = reader_of(monkeypatch, module)
    assert reader.read() == DeviceMemory(uuid="GPU-handle", used_bytes=3, total_bytes=8)
    assert reader.read() == DeviceMemory(uuid="GPU-handle", used_bytes=4, total_bytes=8)


def test_a_driver_that_hangs_keeps_one_thread_and_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, calls = threading.Event(), itertools.count(1)

    def hang(_: Any) -> Any:
        call = next(calls)
        assert call == 1 or opened.wait(PATIENCE_S)
        return types.SimpleNamespace(used=call, total=8)

    reader = reader_of(monkeypatch, nvml(nvmlDeviceGetMemoryInfo=hang))
    first = reader.read()
    assert first is not None
    monkeypatch.setattr(device_memory, "MOST_WAIT_S", 0.001)
    try:
        aged = [reader.read() for _ in range(3)]
        assert sum(thread.name == "cudnn-actor-nvml" for thread in threading.enumerate()) == 1
    finally:
        opened.set()
    ages = [each.age_s for each in aged if each is not None and each.used_bytes == 1]
    assert len(ages) == 3
    assert ages == sorted(ages)
    assert ages[0] > 0
    monkeypatch.setattr(device_memory, "MOST_WAIT_S", 60.0)
    assert reader.wait_for_driver(PATIENCE_S)
    assert reader.read() == DeviceMemory(uuid="GPU-handle", used_bytes=3, total_bytes=8)


async def test_an_event_loop_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, calls = threading.Semaphore(0), itertools.count(3)

    def slow(_: Any) -> Any:
        assert answers.acquire(timeout=PATIENCE_S)
        return types.SimpleNamespace(used=next(calls), total=8)

    reader = reader_of(monkeypatch, nvml(nvmlDeviceGetMemoryInfo=slow))
    assert reader.read() is None
    for used in (3, 4):
        answers.release()
        assert await asyncio.to_thread(reader.wait_for_driver, PATIENCE_S)
        aged = reader.read()
        assert aged is not None
        assert aged.used_bytes == used
        assert aged.age_s > 0
    answers.release()
    assert await asyncio.to_thread(reader.wait_for_driver, PATIENCE_S)


def lost(*_: Any) -> Any:
    raise NVMLError("the GPU is lost")


@pytest.mark.parametrize(
    ("module", "bus_id"),
    [
        (None, BUS_ID),  # the package is not installed
        (nvml(nvmlInit=lost), BUS_ID),
        (nvml(), "0000:02:00.0"),
        (nvml(nvmlDeviceGetMemoryInfo=lost), BUS_ID),
    ],
)
def test_without_nvml_or_the_device_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, module: Any, bus_id: str
) -> None:
    reader = reader_of(monkeypatch, module, bus_id)
    assert [reader.read(), reader.read()] == [None, None]


def test_a_device_without_a_bus_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reader_of(monkeypatch, nvml(nvmlInit=pytest.fail), "").read() is None


def test_what_is_scraped_has_it_too() -> None:
    pytest.importorskip("prometheus_client", reason="it is in the group `test`")
    from prometheus_client import CollectorRegistry, generate_latest

    from cudnn_actor.metrics.prometheus import ServiceCollector
    from cudnn_actor.metrics.scraped import metrics_of
    from cudnn_actor.service.service import start

    with start(device="cpu", isolation="thread") as service:
        memory = DeviceMemory(uuid="GPU-1", used_bytes=3, total_bytes=8, age_s=2.5)
        record = msgspec.structs.replace(service.metrics(), device_memory=memory, standby_host_bytes=7)
    registry = CollectorRegistry()
    registry.register(ServiceCollector(types.SimpleNamespace(metrics=lambda: record)))
    text = generate_latest(registry).decode()
    assert 'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1",service="cudnn"} 3.0' in text
    assert metrics_of(text) == (record,)
