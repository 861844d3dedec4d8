"""What a run of the support matrix found, as it is kept in `benchmarks/results/`."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import importlib.metadata
import platform
import tempfile
from pathlib import Path
from typing import Any

import msgspec

import cudnn_actor
from cudnn_actor.engines.cuda.library.versions import version_text

__all__ = ["RESULTS", "Found", "Outcome", "Record", "Setting", "latest", "read", "write"]

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


class Outcome(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One cell.

    Parameters
    ----------
    ran
        False where it was refused as `UnsupportedGraph`.
    error
        Largest error in terms of its bound; 0 for what is exact or was refused.
    plan
        What the plan's tag says of the library's own choice; why it was refused, where it was.
    """

    ran: bool
    error: float
    plan: str

    @property
    def split(self) -> bool:
        """Whether the work took more than one plan of the library's."""
        return self.ran and "+" in self.plan


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Where and with what it ran."""

    device: str
    driver: str
    cudnn: str
    packages: dict[str, str]
    python: str
    date: str
    seed: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    setting: Setting
    cells: dict[str, Outcome]


class Found:
    """Collects outcomes while a run goes on."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._cells: dict[str, Outcome] = {}

    def note(self, cell: str, outcome: Outcome) -> None:
        self._cells[cell] = outcome

    def record(self) -> Record:
        return Record(setting=_setting(self._seed), cells=self._cells)


def write(record: Record, folder: Path, run: str = "") -> Path:
    """Write a record to a file of its own in `folder`: one line a cell, so that two can be compared.

    The processes of one run, which `run` names, share a file. Raises `ValueError` if their seeds differ: a
    test that repeats a claim of the record draws by its seed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stamp = record.setting.date.replace("-", "").replace(":", "")[:15]
    with contextlib.ExitStack() as stack:
        path = folder / f"support-{stamp}.json"
        if run:
            lock = stack.enter_context((Path(tempfile.gettempdir()) / f"support-{run}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = next(folder.glob(f"support-*-{run}.json"), folder / f"support-{stamp}-{run}.json")
            if path.exists():
                before = read(path)
                if before.setting.seed != record.setting.seed:
                    raise ValueError(
                        f"the processes of one run drew by {before.setting.seed} and by {record.setting.seed}"
                    )
                record = Record(setting=before.setting, cells=before.cells | record.cells)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(_lines(record)), indent=1) + b"\n")
    return path


def _lines(record: Record) -> dict[str, Any]:
    """A record with each cell's outcome as one text, which the format keeps on its line."""
    cells = {name: msgspec.json.encode(outcome).decode() for name, outcome in record.cells.items()}
    return {"setting": record.setting, "cells": cells}


def read(path: Path) -> Record:
    """The record in a file."""
    data = msgspec.json.decode(path.read_bytes())
    cells = {name: msgspec.json.decode(text, type=Outcome) for name, text in data["cells"].items()}
    return Record(setting=msgspec.convert(data["setting"], Setting), cells=cells)


def latest(folder: Path = RESULTS) -> Record | None:
    """The newest record in a folder, by its name; None where there is none."""
    paths = sorted(folder.glob("support-*.json"))
    return read(paths[-1]) if paths else None


def _setting(seed: int) -> Setting:
    device, driver, cudnn = _gpu()
    return Setting(
        device=device,
        driver=driver,
        cudnn=cudnn,
        packages=_versions("cupy", "nvidia-cudnn-frontend", "cuda-bindings", "numpy")
        | {"cudnn-actor": cudnn_actor.__version__},
        python=platform.python_version(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seed=seed,
    )


def _gpu() -> tuple[str, str, str]:
    """The GPU's name, the driver's own version, and cuDNN's."""
    import cudnn
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    kernel = Path("/proc/driver/nvidia/version")
    words = kernel.read_text().split() if kernel.exists() else []
    driver = next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), "unknown")
    return name, driver, version_text(cudnn.backend_version())


def _versions(*wanted: str) -> dict[str, str]:
    """Versions of installed packages; of CuPy under whatever name its wheel has."""
    installed = {dist.metadata["Name"].lower(): dist.version for dist in importlib.metadata.distributions()}
    found = {}
    for name in wanted:
        known = (
            name if name in installed else next((n for n in installed if n.startswith(f"{name}-cuda")), None)
        )
        if known is not None:
            found[name] = installed[known]
    return found
