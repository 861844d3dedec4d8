"""The record of a benchmark run: every raw number, so that its tables can be made again."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from cudnn_actor.cli.user_error import UserError
from cudnn_actor.options import Isolation
from cudnn_actor.trials.measure import Timing
from cudnn_actor.trials.placement import cores

__all__ = [
    "APART",
    "IN_FLIGHT",
    "ISOLATIONS",
    "LOADS",
    "SIDES_IN_FLIGHT",
    "SIDE_SUBJECTS",
    "SUBJECTS",
    "Hop",
    "Moves",
    "Report",
    "Side",
    "Starving",
    "machine",
    "now",
    "target",
    "versions",
    "write",
]

SUBJECTS = ("bare hop", "ping", "trivial convolution", "pykka ask + to_thread")
IN_FLIGHT = (8, 64, 512)
ISOLATIONS: tuple[Isolation, ...] = ("thread", "process")
SIDE_SUBJECTS = ("ping", "trivial convolution")
SIDES_IN_FLIGHT = (8, 64, 256)
APART = "isolation: "
"""Prefix of the names of sections that compare isolations."""
LOADS = ("idle", "sleep(0) in a loop", "50 us callbacks")


class Hop(msgspec.Struct, kw_only=True):
    """One subject with one loop and placement; one number per round."""

    loop: str
    placement: str
    subject: str
    one: list[Timing] = []
    """One request in flight."""
    per_s: dict[int, list[float]] = {}
    """Requests a second, by requests in flight."""
    shared_core: list[bool] = []
    """Samples, with one request in flight: whether the loop's and the other thread last ran on one core."""


class Starving(msgspec.Struct, frozen=True, kw_only=True):
    """Pings to an actor from a loop that is busy with other work."""

    loop: str
    placement: str
    load: str
    in_flight: int
    lets_go: bool
    timing: Timing
    per_s: float
    callbacks_per_s: float
    let_go: int


class Side(msgspec.Struct, kw_only=True):
    """One subject with one loop and isolation; one number per round."""

    loop: str
    isolation: str
    subject: str
    one: list[Timing] = []
    """One request in flight."""
    per_s: dict[int, list[float]] = {}
    """Requests a second, by requests in flight."""
    loop_cpu_us: list[float] = []
    """CPU time of the loop's thread per request, 64 in flight."""
    worker_cpu_us: list[float] = []
    """CPU time of the actor's thread, or of the whole worker process, per request, 64 in flight."""


class Moves(msgspec.Struct, kw_only=True):
    """An array of 64 MiB, seconds per round: copied by NumPy; uploaded and downloaded, by isolation."""

    nbytes: int
    copy_s: list[float] = []
    up_s: dict[str, list[float]] = {}
    down_s: dict[str, list[float]] = {}


class Report(msgspec.Struct, kw_only=True):
    """Everything that was measured."""

    date: str
    quick: bool
    machine: dict[str, Any]
    versions: dict[str, str]
    hops: list[Hop]
    convolutions_ms: dict[str, list[float]]
    crash_to_next_reply_ms: list[float]
    starvation: list[Starving]
    sides: list[Side] = []
    moves: Moves | None = None
    recovery_ms: dict[str, list[float]] = {}
    """Milliseconds from a worker's end to the next finished request, by what ended it."""
    idle: dict[str, list[float]] = {}
    """Percent of one core, by isolation and process."""
    others_cpu: dict[str, float]
    """The share of all cores that other processes used, by section. Distrust a section with over 0.05."""


def machine() -> dict[str, Any]:
    """The machine's processor and system, and the number of cores that this process may use."""
    return {
        "cpu": _cpu_model(),
        "cores": len(cores()),
        "system": platform.system(),
        "arch": platform.machine(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of those packages among `names` that are installed."""
    known = {"python": platform.python_version()}
    for name in names:
        try:
            known[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return known


def now() -> str:
    """The current time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def target(folder: Path, date: str) -> Path:
    """The path of a run's file. The file is made and removed now, so that a bad path fails before the run.

    Raises `UserError`.
    """
    path = folder / f"cpu-{date.replace(':', '').replace('-', '')[:15]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
        path.unlink()
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}; choose another --out") from None
    return path


def write(report: msgspec.Struct, path: Path) -> None:
    """Write a record as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
