"""A run as one record: what it ran on, what its parts found, what failed."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.gpu import building, cold, polling, recovery, resnet, resnet_sheets, small, transfers
from benchmarks.gpu.setting import Setting, cudnn, cupy, torch
from benchmarks.gpu.sheet import Sheet
from cudnn_actor.engines.cuda.library.versions import version_text
from cudnn_actor.trials.bench.record import machine, versions

__all__ = ["PARTS", "Part", "Platform", "Report", "new_report", "platform_of", "sheets", "write"]

_PACKAGES = (
    "cudnn-actor",
    "numpy",
    "pykka",
    "uvloop",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "nvidia-cudnn-frontend",
    "cuda-bindings",
)


class Part(NamedTuple):
    """A part of the run.

    Parameters
    ----------
    measure
        Runs it: `measure(setting)` gives the record.
    sheets
        The record's tables.
    record
        The record's type.
    budget_s
        See `Setting`.
    """

    measure: Any
    sheets: Any
    record: Any
    budget_s: float


PARTS: dict[str, Part] = {
    "small": Part(small.measure, small.sheets, small.Small, 80.0),
    "building": Part(building.measure, building.sheets, building.Building, 30.0),
    "cold": Part(cold.measure, cold.sheets, cold.Cold, 50.0),
    "transfers": Part(transfers.measure, transfers.sheets, transfers.Transfers, 40.0),
    "recovery": Part(recovery.measure, recovery.sheets, recovery.Recovery, 130.0),
    "polling": Part(polling.measure, polling.sheets, polling.Polling, 20.0),
    "resnet": Part(resnet.measure, resnet_sheets.sheets, resnet.Resnet, 220.0),
}
"""The longest one last: what it leaves out is what there was no time for."""


class Platform(msgspec.Struct, kw_only=True):
    """The hardware and the software."""

    device: str
    name: str = ""
    driver: str = ""
    capability: str = ""
    multiprocessors: int = 0
    memory_mib: int = 0
    machine: dict[str, Any] = {}
    versions: dict[str, str] = {}


class Report(msgspec.Struct, kw_only=True):
    """The record of all that was measured."""

    date: str
    quick: bool
    platform: Platform | None = None
    small: small.Small | None = None
    building: building.Building | None = None
    cold: cold.Cold | None = None
    transfers: transfers.Transfers | None = None
    recovery: recovery.Recovery | None = None
    polling: polling.Polling | None = None
    resnet: resnet.Resnet | None = None
    took_s: dict[str, float] = {}
    errors: dict[str, str] = {}
    """Of parts that failed."""


def new_report(*, quick: bool) -> Report:
    """A report with nothing in it yet."""
    return Report(date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), quick=quick)


def sheets(report: Report) -> Iterator[Sheet]:
    """All tables of a report, part by part."""
    for name, part in PARTS.items():
        record = getattr(report, name)
        if record is not None:
            yield from part.sheets(record)
    if report.errors:
        rows = tuple((name, text.splitlines()[-1][:80]) for name, text in report.errors.items())
        yield Sheet("Parts that failed", ("part", "error"), rows)


def write(report: Report, path: Path) -> None:
    """Write, or write anew."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))


# What it runs on.


def platform_of(setting: Setting) -> Platform:
    """Ask the libraries. Makes a CUDA context where there is a GPU."""
    found = Platform(device=setting.device, machine=machine(), versions=versions(_PACKAGES))
    return _gpu(setting, found) if setting.on_gpu else found


def _gpu(setting: Setting, found: Platform) -> Platform:
    runtime = cupy().cuda.runtime
    properties = runtime.getDeviceProperties(setting.ordinal)
    found.name = properties["name"].decode()
    found.capability = f"{properties['major']}.{properties['minor']}"
    found.multiprocessors = properties["multiProcessorCount"]
    found.memory_mib = properties["totalGlobalMem"] >> 20
    found.driver = _driver()
    found.versions["CUDA driver"], found.versions["CUDA runtime"] = (
        f"{version // 1000}.{version % 1000 // 10}"
        for version in (runtime.driverGetVersion(), runtime.runtimeGetVersion())
    )
    found.versions["cuDNN"] = version_text(cudnn().backend_version())
    library = torch()
    found.versions["PyTorch"] = str(library.__version__)
    found.versions["cuDNN of PyTorch"] = version_text(library.backends.cudnn.version())
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.splitlines()[0].strip()
