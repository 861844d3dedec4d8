"""Whether a request costs more on some cores than on others, and in which of its stages.

    python -m benchmarks.placement --folder FOLDER --opset 23 --networks resnet50 --out benchmarks/results

Several services are measured, one after the other. Each serves requests for one sample, one at a time. The
system chooses the processors of the caller's thread and of the worker's, twice. Then both are pinned: to two
threads of one core, to two cores of one node of memory, and to two nodes, as far as the machine has them.
With the first service, the worker is then pinned to each processor in turn, and the caller to the one that is
half of all processors further. Each placement has a row:

- `request_us`, `numpy_us`: with inputs and outputs on the device, and from NumPy to NumPy.
- `caller`, `worker`: the thread that sends, and the worker's main thread. `cpus`: a processor → after how
  many requests the thread was on it. `waited`, `yielded`, `faults`: for each request on the device, how often
  the thread was switched off because it waited, and because it had to, and how many pages it had to map.
- `pace_us` of the caller: how long a loop of a fixed length takes just after an answer.
- `stages_us`: of the requests on the device, as in `benchmarks.stages`. All of them have stamps.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import ctypes
import functools
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from rich.table import Table

from cudnn_actor import CudnnRef
from cudnn_actor.models import Model
from cudnn_actor.service import Spawning
from tests.onnx.networks.recipes import inputs_of, read

from .gpu.setting import gpu_versions
from .recording import Row, attempted, keep
from .stages import NETWORKS, on_device, request_us, stages_of
from .stages_side import STAMPS, stamped_caller, stamped_service

__all__ = ["main", "placements", "sweep"]

_CPUS, _NODES = Path("/sys/devices/system/cpu"), Path("/sys/devices/system/node")
_PACE = 200
_FAULTS, _PROCESSOR = 9, 38
"""Fields of /proc/PID/stat, from 0."""
_FREE, _SWEEP = "free", "sweep"
_MOST_SWEPT = 16
_FEWER = 4
"""By how much fewer requests each processor gets."""
Pair = tuple[int, int]


def placements(cpus: Sequence[int], cores: Mapping[int, int], nodes: Mapping[int, int]) -> dict[str, Pair]:
    """Processors for the caller and for the worker, by what they have in common.

    `cores` and `nodes`: of each processor. The first of `cpus` is one of each pair.
    """
    first, *others = cpus
    found: dict[str, Pair] = {}
    for other in others:
        if nodes[other] != nodes[first]:
            what = "two nodes"
        else:
            what = "one core" if cores[other] == cores[first] else "two cores"
        found.setdefault(what, (first, other))
    if "two nodes" in found:
        found["two nodes, exchanged"] = (found["two nodes"][1], found["two nodes"][0])
    return found


def sweep(cpus: Sequence[int]) -> list[Pair]:
    """Pairs of processors for the caller and for the worker. The worker gets each processor once, or
    `_MOST_SWEPT` of them."""
    count = len(cpus)
    step = -(-count // _MOST_SWEPT)
    return [(cpus[(at + count // 2) % count], cpus[at]) for at in range(0, count, step) if count > 1]


def _machine() -> dict[str, Pair]:
    """The placements that this machine has."""
    cpus = sorted(os.sched_getaffinity(0))
    cores: dict[int, int] = {}
    for cpu in cpus:
        siblings = _processors((_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text())
        cores[cpu] = min(siblings)
    nodes = dict.fromkeys(cpus, 0)
    for folder in _NODES.glob("node[0-9]*"):
        for cpu in _processors((folder / "cpulist").read_text()):
            nodes[cpu] = int(folder.name[4:])
    return placements(cpus, cores, nodes)


def _processors(text: str) -> list[int]:
    """The numbers in a list such as "0-3,8"."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


class _Thread:
    """Counts of the system about the main thread of a process."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}/task/{pid}")
        self.cpus: Counter[int] = Counter()
        self._before = self._counts()

    def note(self, cpu: int | None = None) -> None:
        """Note on which processor it is."""
        self.cpus[int(self._fields()[_PROCESSOR]) if cpu is None else cpu] += 1

    def _fields(self) -> list[str]:
        text = (self._folder / "stat").read_text()
        return ["", *text[text.rindex(")") :].split()]

    def _counts(self) -> dict[str, int]:
        lines = (self._folder / "status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        return {
            "waited": int(status["voluntary_ctxt_switches"]),
            "yielded": int(status["nonvoluntary_ctxt_switches"]),
            "faults": int(self._fields()[_FAULTS]),
        }

    def row(self, runs: int) -> Row:
        """The events since this object was made, for each request."""
        now = self._counts()
        each = {name: round((now[name] - before) / runs, 2) for name, before in self._before.items()}
        return {"cpus": {str(cpu): count for cpu, count in sorted(self.cpus.items())}, **each}


def _pace() -> float:
    begin = time.perf_counter_ns()
    for _ in range(_PACE):
        pass
    return (time.perf_counter_ns() - begin) / 1e3


async def _phase(gpu: CudnnRef, model: Model, inputs: Any, message: Any, runs: int) -> tuple[Row, Pair]:
    """Requests where the threads are. Returns the row, and the time between which those on the device were
    sent."""
    assert gpu.worker_pid is not None
    host = await request_us(lambda: gpu.run(model, inputs), runs)
    where: ctypes._NamedFuncPointer = ctypes.CDLL(None).sched_getcpu
    caller, worker = _Thread(os.getpid()), _Thread(gpu.worker_pid)
    begin = time.perf_counter_ns()
    request = await request_us(lambda: gpu.ask(message), runs)
    end = time.perf_counter_ns()
    told = {"caller": caller.row(runs), "worker": worker.row(runs)}
    pace = []
    for _ in range(2 * runs):
        await gpu.ask(message)
        caller.note(where())
        worker.note()
        pace.append(_pace())
    told["caller"]["cpus"], told["worker"]["cpus"] = (
        {str(cpu): count for cpu, count in sorted(each.cpus.items())} for each in (caller, worker)
    )
    told["caller"]["pace_us"] = round(statistics.median(pace), 1)
    return {"request_us": request, "numpy_us": host, **told}, (begin, end)


async def _served(
    path: str, given: argparse.Namespace, store: Path, folder: Path, *, sweeps: bool
) -> tuple[list[Row], list[Pair]]:
    """The rows of one service, and when the requests of each were sent."""
    free = os.sched_getaffinity(0)
    found, times = list[Row](), list[Pair]()
    async with Spawning(stamped_service(given.device, folder, plan_store=store)) as gpu:
        model = await gpu.load(path)
        inputs = inputs_of(onnx.load(path), 1)
        message = await on_device(gpu, model, inputs)
        worker = gpu.worker_pid
        assert worker is not None
        try:
            swept = [(_SWEEP, pair) for pair in sweep(sorted(free)) if sweeps]
            for name, pair in [(_FREE, None), (_FREE, None), *_machine().items(), *swept]:
                if pair is not None:
                    os.sched_setaffinity(0, {pair[0]})
                    os.sched_setaffinity(worker, {pair[1]})
                runs = -(-given.runs // _FEWER) if name == _SWEEP else given.runs
                row, between = await _phase(gpu, model, inputs, message, runs)
                found.append({"placement": name, "pinned": pair, **row})
                times.append(between)
        finally:
            os.sched_setaffinity(0, free)
    return found, times


def _of(path: Path, number: int, given: argparse.Namespace, store: Path) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name, stamped_caller():
        folder, file = Path(name), str(Path(name) / path.name)
        onnx.save(read(path), file)
        STAMPS.clear()
        found, times = asyncio.run(_served(file, given, store, folder, sweeps=number == 1))
        of_worker = [each for one in folder.glob("*.json") for each in json.loads(one.read_text())]
        stamps = sorted((*map(tuple, of_worker), *STAMPS))
        for row, (begin, end) in zip(found, times, strict=True):
            some = stamps[bisect.bisect(stamps, (begin,)) : bisect.bisect(stamps, (end,))]
            network = path.stem.split(".")[0]
            yield {"network": network, "service": number, **row, "stages_us": stages_of(some)}


def rows(paths: Sequence[Path], given: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each network, service and placement."""
    with tempfile.TemporaryDirectory() as name:
        for path in paths:
            for number in range(1, given.services + 1):
                part = functools.partial(_of, path, number, given, Path(name))
                yield from attempted(f"{path.name}, service {number}", part)


def sheet(found: list[Row]) -> Table:
    """The table for a terminal."""
    names = (
        "network",
        "service",
        "placement",
        "request",
        "NumPy",
        "pace",
        "caller on",
        "worker on",
        "stages",
    )
    table = Table(*names, title="us")
    for row in found:
        stages = "; ".join(f"{name} {at:,.0f}" for name, at in row["stages_us"].items())
        on = (",".join(row[each]["cpus"]) for each in ("caller", "worker"))
        costs = (f"{row[each]['p50']:,.0f}" for each in ("request_us", "numpy_us"))
        pace = f"{row['caller']['pace_us']:,.1f}"
        table.add_row(row["network"], str(row["service"]), row["placement"], *costs, pace, *on, stages)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("--folder", type=Path, default=NETWORKS, help="with NETWORK.OPSET.onnx")
    parser.add_argument("--networks", nargs="+", default=["resnet50"])
    parser.add_argument("--opset", type=int, default=20)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--services", type=int, default=4)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = parser.parse_args()
    paths = [given.folder / f"{name}.{given.opset}.onnx" for name in given.networks]
    versions: dict[str, Any] = {} if given.device == "cpu" else gpu_versions()
    keep(rows(paths, given), sheet, given.out, "placement", versions=versions)


if __name__ == "__main__":
    main()
