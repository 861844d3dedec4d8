"""The memory of a GPU by NVML, whose package is stood in for: there is no GPU here."""

from __future__ import annotations

import sys
import types
from typing import Any

import msgspec
import pytest

from cudnn_actor.engines.cuda.diagnosis.device_memory import DeviceMemory, DeviceMemoryReader


class NVMLError(Exception):
    pass


def nvml(**functions: Any) -> types.ModuleType:
    """A stand-in for `pynvml`, with the functions of it that are called."""

    def handle_of(bus_id: str) -> str:
        if bus_id != "0000:01:00.0":
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


def second_reading(monkeypatch: pytest.MonkeyPatch, module: Any, bus_id: str) -> DeviceMemory | None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    reader = DeviceMemoryReader(bus_id)
    assert reader.read() is None  # it only begins to load
    assert reader.loaded.wait(60)
    return reader.read()


def test_it_reads_what_nvml_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found = second_reading(monkeypatch, nvml(), "0000:01:00.0")
    assert found == DeviceMemory(uuid="GPU-handle", used_bytes=3, total_bytes=8)


def lost(*_: Any) -> Any:
    raise NVMLError("the GPU is lost")


@pytest.mark.parametrize(
    ("module", "bus_id"),
    [
        (None, "0000:01:00.0"),  # the package is not installed
        (nvml(nvmlInit=lost), "0000:01:00.0"),
        (nvml(), "0000:02:00.0"),
        (nvml(nvmlDeviceGetMemoryInfo=lost), "0000:01:00.0"),
    ],
)
def test_without_nvml_or_the_device_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, module: Any, bus_id: str
) -> None:
    assert second_reading(monkeypatch, module, bus_id) is None


def test_a_device_without_a_bus_loads_nothing() -> None:
    reader = DeviceMemoryReader("")
    assert reader.read() is None
    assert not reader.loaded.is_set()


def test_what_is_scraped_has_it_too() -> None:
    pytest.importorskip("prometheus_client", reason="it is in the group `test`")
    from prometheus_client import CollectorRegistry, generate_latest

    from cudnn_actor.metrics.prometheus import ServiceCollector
    from cudnn_actor.metrics.scraped import metrics_of
    from cudnn_actor.service.service import start

    with start(device="cpu", isolation="thread") as service:
        memory = DeviceMemory(uuid="GPU-1", used_bytes=3, total_bytes=8)
        record = msgspec.structs.replace(service.metrics(), device_memory=memory, standby_host_bytes=7)
    registry = CollectorRegistry()
    registry.register(ServiceCollector(types.SimpleNamespace(metrics=lambda: record)))
    text = generate_latest(registry).decode()
    assert 'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1",service="cudnn"} 3.0' in text
    assert metrics_of(text) == (record,)
