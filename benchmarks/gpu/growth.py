"""How memory grows with the number of shapes that a service has seen: by process, and on the device.

    python -m benchmarks.gpu.growth --isolation process --shapes 1500 --out DIR
    python -m benchmarks.gpu.growth --plot FIGURE.png RUN.json RUN.json

Every shape is one that nobody has asked for before (`tests.gpu.drawing`). It runs once, and never again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.gpu.device_memory import gauge
from benchmarks.gpu.setting import gpu_versions
from benchmarks.gpu.sheet import Sheet, as_text, number
from cudnn_actor import BufferRef, CudnnRef, UnsupportedGraph, spawn
from cudnn_actor.messages import Allocate
from cudnn_actor.service import Spawning
from tests.gpu.cases import arrays, message
from tests.gpu.drawing import draw

__all__ = ["Growth", "Sample", "measure", "plot"]

_MIB = 1 << 20
_SAMPLES = 40


class Sample(msgspec.Struct, kw_only=True):
    """The numbers of one look.

    Parameters
    ----------
    shapes
        How many different ones have run so far.
    seconds
        Since the start.
    private_mib
        Memory that a process alone has and that is no file's, by what the process is for.
    device_mib
        In use on the device, by whomever.
    """

    shapes: int
    seconds: float
    private_mib: dict[str, float]
    device_mib: float


class Growth(msgspec.Struct, kw_only=True):
    """The record of one run."""

    isolation: str
    device: str
    seed: int
    date: str
    versions: dict[str, str]
    samples: list[Sample] = []


def processes(worker: int | None) -> Iterator[tuple[str, int]]:
    """What each process of a service is for, and its number; this one first."""
    yield "service", os.getpid()
    names: dict[str, int] = {}
    waiting = [os.getpid()]
    while waiting:
        parent = waiting.pop()
        for child in _children(parent):
            waiting.append(child)
            name = _role(parent, child, worker)
            if not name:
                continue
            names[name] = names.get(name, 0) + 1
            yield (name if names[name] == 1 else f"{name} {names[name]}"), child


def _children(parent: int) -> list[int]:
    found: list[int] = []
    for file in Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            found += map(int, file.read_text().split())
        except OSError:  # the thread has ended
            continue
    return found


def _role(parent: int, child: int, worker: int | None) -> str:
    """A builder is a child of whoever has it build: of the worker, or of this process. Empty for others."""
    command = Path(f"/proc/{child}/cmdline").read_bytes()
    if child == worker:
        return "worker"
    if parent == worker or b"remote.child" in command:
        return "builder"
    return "forkserver" if b"forkserver" in command else ""


def _private_mib(pid: int) -> float:
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        found[name] = int(value)
    return (found["Private_Dirty:"] + found.get("Swap:", 0)) / 1024


def _look(gpu: CudnnRef, shapes: int, began: float, used_mib: float) -> Sample:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free and kept for the next allocation is no growth
    private = {}
    for name, pid in processes(gpu.worker_pid):
        try:
            private[name] = round(_private_mib(pid), 1)
        except OSError:  # it has just ended
            continue
    seconds = round(time.monotonic() - began, 1)
    return Sample(shapes=shapes, seconds=seconds, private_mib=private, device_mib=round(used_mib, 1))


@contextlib.contextmanager
def _used_mib(device: str) -> Iterator[Callable[[], float]]:
    """How much more of the device is in use than when this began, as another process sees it."""
    if not device.startswith("cuda"):
        yield lambda: 0.0
        return
    with gauge(int(device.partition(":")[2] or 0)) as found:
        before = found.free_bytes()
        yield lambda: (before - found.free_bytes()) / _MIB


async def measure(isolation: str, shapes: int, seconds: float, *, device: str, seed: int) -> Growth:
    """A service that sees so many shapes, or as many as it can within `seconds`. Blocks for minutes."""
    found = Growth(
        isolation=isolation,
        device=device,
        seed=seed,
        date=time.strftime("%Y-%m-%d"),
        versions=gpu_versions() if device.startswith("cuda") else {},
    )
    options: Any = {"isolation": isolation}
    with _used_mib(device) as used_mib:
        await _feed(found, spawn(device=device, **options), shapes, seconds, used_mib)
    return found


async def _feed(
    found: Growth, spawning: Spawning, shapes: int, seconds: float, used_mib: Callable[[], float]
) -> None:
    """Run shape after shape, looking now and then."""
    async with spawning as gpu:
        began, step = time.monotonic(), max(1, shapes // _SAMPLES)
        for done in range(shapes + 1):
            late = time.monotonic() - began > seconds
            if done % step == 0 or late or done == shapes:
                arenas_mib = (await gpu.statistics()).arena_bytes / _MIB
                found.samples.append(_look(gpu, done, began, used_mib() - arenas_mib))
            if late or done == shapes:
                return
            await _run(gpu, found.seed, done)


async def _run(gpu: CudnnRef, seed: int, number: int) -> None:
    case = draw(seed, number)
    given = arrays(case)
    refs: dict[str, BufferRef | None] = {"bias": None}
    for name, spec in {"x": case.x, "w": case.w, "y": case.y, "bias": case.bias}.items():
        if spec is not None:
            refs[name] = await gpu.ask(Allocate(spec=spec, data=given.get(name)))
    with contextlib.suppress(UnsupportedGraph):  # it has been tried in every way, which is what counts here
        await gpu.ask(message(case, refs))
    for ref in refs.values():
        if ref is not None:
            await gpu.free(ref)


def sheet(found: Growth) -> Sheet:
    """What each process had after how many shapes, and what a shape cost in each half of the run."""
    names = sorted({name for sample in found.samples for name in sample.private_mib})
    chosen = found.samples[:: max(1, len(found.samples) // 10)]
    if chosen[-1] is not found.samples[-1]:
        chosen.append(found.samples[-1])
    rows = [
        (
            f"{sample.shapes:,}",
            *(number(sample.private_mib.get(name), 0) for name in names),
            number(sample.device_mib, 0),
        )
        for sample in chosen
    ]
    title = f"Private memory in MiB after so many shapes, {found.isolation} isolation"
    return Sheet(title, ("shapes", *names, "device"), tuple(rows))


def plot(runs: list[Growth], file: Path) -> None:
    """Host memory by process above, the device's below, a column for each run."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(2, len(runs), squeeze=False, figsize=(6 * len(runs), 7), sharex="col")
    for run, (host, device) in zip(runs, axes.T, strict=True):
        shapes = [sample.shapes for sample in run.samples]
        for name in sorted({name for sample in run.samples for name in sample.private_mib}):
            host.plot(shapes, [sample.private_mib.get(name) for sample in run.samples], label=name)
        total = [sum(sample.private_mib.values()) for sample in run.samples]
        host.plot(shapes, total, color="black", label="all")
        device.plot(shapes, [sample.device_mib for sample in run.samples], color="tab:green")
        host.set(
            title=f"{run.isolation} isolation, {run.versions.get('GPU', run.device)}", ylabel="private MiB"
        )
        device.set(xlabel="different shapes so far", ylabel="device MiB", ylim=(0, None))
        host.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.growth", description=__doc__)
    parser.add_argument("--isolation", choices=("thread", "process"), default="process")
    parser.add_argument("--shapes", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=500.0, help="stop after so long")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the numbers to DIR, as JSON")
    parser.add_argument("--plot", nargs="+", type=Path, metavar="FILE", help="a figure, then the runs for it")
    given = parser.parse_args()
    if given.plot:
        runs = [msgspec.json.decode(file.read_bytes(), type=Growth) for file in given.plot[1:]]
        plot(runs, given.plot[0])
        return
    measuring = measure(given.isolation, given.shapes, given.seconds, device=given.device, seed=given.seed)
    found = asyncio.run(measuring)
    Console(width=120).print(as_text(sheet(found)))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        name = f"growth-{given.isolation}-{given.seed}.json"
        text = json.dumps(msgspec.to_builtins(found), indent=1)
        (given.out / name).write_text(text)


if __name__ == "__main__":
    main()
