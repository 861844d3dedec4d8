"""Arrays to the device and back, in both isolations, beside PyTorch's ways in the same rounds.

    python -m benchmarks.uploads --out benchmarks/results

Needs PyTorch on a GPU; with `--device cpu` only the service's own ways are timed. Rows have GB/s, the median
of the rounds. "Pageable" is memory as NumPy allocates it. "Pipelined" rounds have many copies. Of ours, from
`gpu.staging`, four are in flight at any time. PyTorch's, from pinned memory, are all enqueued at once: that
is the bandwidth of the link.

In process isolation, "floor" is what the least design with a second process takes to overwrite an
array: a plain process is woken up, has its device copy the array, part by part, as this process copies it to
memory that both map, and answers (`second_process`). In "floor, polls" that process is awake already.

With `--stages`, it also says when an upload of the smallest size reaches each stage in process isolation, in
microseconds since it was asked, for "new" and "again". The worker has nothing to do for a few milliseconds
before each "new", and an "again" follows. The stamps make both slower.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table

from cudnn_actor import CudnnRef, spawn
from cudnn_actor.messages import Upload
from cudnn_actor.models import Feature
from cudnn_actor.protocol import DType
from cudnn_actor.service import Spawning

from .gpu.setting import gpu_versions, torch
from .recording import Row, attempted, keep
from .second_process import Other, other_process
from .second_process_side import POLLS, SLEEPS
from .stages_side import STAMPS, stages_of, stamped_caller, stamped_service

__all__ = ["RATIOS", "main"]

_SIZES_MIB = (1, 16, 256)
_IN_FLIGHT = 4
_PIPELINED_MIB = 1024
"""About how much all copies of a pipelined round move together."""
_MOST_PIPELINED = 64
_SECONDS = 1.5
"""For how long rounds of one size are repeated."""
_LEAST_ROUNDS = 3
_STAMPED = 200
_PAUSE_S = 5e-3
Isolation = Literal["thread", "process"]
Way = Callable[[], Awaitable[object]]

RATIOS = {
    "up": ("upload", "pageable up"),
    "up again": ("upload again", "pageable up again"),
    "staging": ("staging, pipelined", "pinned, pipelined"),
    "down": ("download", "pageable down"),
    "floor": ("floor", "pageable up again"),
    "floor, polls": ("floor, polls", "pageable up again"),
}
"""Ratio → our way, or the least design's, and PyTorch's way, which it compares."""


def _each(nbytes: int) -> int:
    """How many copies each of those in flight makes in a pipelined round."""
    return max(1, min(_MOST_PIPELINED, (_PIPELINED_MIB << 20) // nbytes) // _IN_FLIGHT)


class _Ours:
    """The service's ways with arrays of one size."""

    def __init__(self, gpu: CudnnRef, values: np.ndarray) -> None:
        self._gpu = gpu
        self._values = values

    async def prepare(self) -> Mapping[str, tuple[Way, int]]:
        """The ways, and how many arrays each moves."""
        gpu, values = self._gpu, self._values
        feature = Feature(name="x", dtype=DType.FLOAT32, dims=("N",))
        lent = [await gpu.staging(feature, N=values.size) for _ in range(_IN_FLIGHT)]
        for array in lent:
            array[...] = values
        buffers = [await gpu.upload(values) for _ in range(_IN_FLIGHT)]
        again = Upload(dst=buffers[0], data=values)
        staged = [Upload(dst=ref, data=array) for ref, array in zip(buffers, lent, strict=True)]
        new = []
        each = _each(values.nbytes)

        async def upload() -> None:
            new.append(await gpu.upload(values))

        async def again_and_again(message: Upload) -> None:
            for _ in range(each):
                await gpu.ask(message)

        async def pipelined() -> None:
            await asyncio.gather(*map(again_and_again, staged))

        async def free() -> None:
            while new:
                await gpu.free(new.pop())

        self.free = free
        return {
            "upload": (upload, 1),
            "upload again": (lambda: gpu.ask(again), 1),
            "staging": (lambda: gpu.ask(staged[0]), 1),
            "staging, pipelined": (pipelined, _IN_FLIGHT * each),
            "download": (lambda: gpu.download(buffers[0]), 1),
        }


class _Theirs:
    """PyTorch's ways with the same values."""

    def __init__(self, values: np.ndarray) -> None:
        self._torch = library = torch()
        self._host = library.from_numpy(values)
        self._each = _each(values.nbytes)
        self._pinned = [self._host.pin_memory() for _ in range(_IN_FLIGHT)]
        self._there = [self._host.cuda() for _ in range(_IN_FLIGHT)]

    def ways(self) -> Mapping[str, tuple[Way, int]]:
        """The ways, and how many arrays each moves."""
        return {
            "pageable up": (self._waited(self._host.cuda), 1),
            "pageable up again": (self._waited(lambda: self._there[0].copy_(self._host)), 1),
            "pinned": (self._waited(lambda: self._there[0].copy_(self._pinned[0], non_blocking=True)), 1),
            "pinned, pipelined": (self._waited(self._pipelined), _IN_FLIGHT * self._each),
            "pageable down": (self._waited(lambda: self._there[0].cpu().numpy()), 1),
        }

    def _pipelined(self) -> None:
        for _ in range(self._each):
            for there, pinned in zip(self._there, self._pinned, strict=True):
                there.copy_(pinned, non_blocking=True)

    def _waited(self, call: Callable[[], object]) -> Way:
        async def way() -> None:
            call()
            self._torch.cuda.synchronize()

        return way


async def _timed(way: Way) -> float:
    begin = time.perf_counter()
    await way()
    return time.perf_counter() - begin


async def _nothing() -> None:
    """Before a round, and behind it, in ways that need nothing."""


class _Least:
    """The ways of the least design with a second process."""

    def __init__(self, other: Other, values: np.ndarray) -> None:
        self._other, self._values = other, values

    def ways(self) -> Mapping[str, tuple[Way, int]]:
        """The ways, and how many arrays each moves."""
        return dict.fromkeys(("floor", "floor, polls"), (lambda: self._other.upload(self._values), 1))

    def before(self) -> Mapping[str, Way]:
        """What goes before each way: how the process waits for the request."""
        tell = self._other.ask["sleeps"]
        return {"floor": lambda: tell(SLEEPS), "floor, polls": lambda: tell(POLLS)}

    async def sleep(self) -> None:
        """Let the process sleep, so that it takes no time from other ways."""
        await self._other.ask["sleeps"](SLEEPS)


async def _measured(
    ways: Mapping[str, tuple[Way, int]],
    nbytes: int,
    seconds: float,
    before: Mapping[str, Way],
    behind: Sequence[Way],
) -> dict[str, float]:
    """GB/s of each way: the median of the rounds, each of which goes through all ways.

    `before` goes before some ways, and `behind` behind each round. Neither is timed.
    """
    took: dict[str, list[float]] = {name: [] for name in ways}
    for way, _ in ways.values():  # a first time, which is not counted
        await way()
    end = time.monotonic() + seconds
    rounds = 0
    while rounds < _LEAST_ROUNDS or time.monotonic() < end:
        rounds += 1
        for name, (way, count) in ways.items():
            await before.get(name, _nothing)()
            took[name].append(nbytes * count / 1e9 / await _timed(way))
        for call in behind:
            await call()
    return {name: round(statistics.median(each), 3) for name, each in took.items()}


async def _found(device: str, isolation: Isolation, mebibytes: int, seconds: float) -> Row:
    values = np.random.default_rng(0).standard_normal(mebibytes << 18, dtype=np.float32)
    async with contextlib.AsyncExitStack() as ends:
        ours = _Ours(await ends.enter_async_context(spawn(device=device, isolation=isolation)), values)
        ways = {**await ours.prepare(), **(_Theirs(values).ways() if device != "cpu" else {})}
        before, behind = dict[str, Way](), [ours.free]
        if isolation == "process":
            other = await ends.enter_async_context(other_process(device, nbytes=values.nbytes))
            least = _Least(other, values)
            ways.update(least.ways())
            before.update(least.before())
            behind.append(least.sleep)
        gb_per_s = await _measured(ways, values.nbytes, seconds, before, behind)
    return {
        "isolation": isolation,
        "MiB": mebibytes,
        "gb_per_s": gb_per_s,
        "ratios": ratios_of(gb_per_s),
    }


def ratios_of(gb_per_s: dict[str, float]) -> dict[str, float]:
    """Returns the ratios of `RATIOS` whose both ways were timed."""
    return {
        name: round(gb_per_s[ours] / gb_per_s[theirs], 3)
        for name, (ours, theirs) in RATIOS.items()
        if ours in gb_per_s and theirs in gb_per_s
    }


async def _stamped(device: str, mebibytes: int, folder: Path) -> dict[str, list[tuple[int, int]]]:
    """When uploads to new buffers, and those that overwrite one, began and ended.

    Their stamps are in `STAMPS` and, once this has returned, in the folder.
    """
    values = np.random.default_rng(0).standard_normal(mebibytes << 18, dtype=np.float32)
    windows: dict[str, list[tuple[int, int]]] = {"new": [], "again": []}
    with stamped_caller():
        async with Spawning(stamped_service(device, folder)) as gpu:
            again = Upload(dst=await gpu.upload(values), data=values)
            for _ in range(_STAMPED):
                await asyncio.sleep(_PAUSE_S)
                begin = time.perf_counter_ns()
                new = await gpu.upload(values)
                middle = time.perf_counter_ns()
                await gpu.ask(again)
                windows["new"].append((begin, middle))
                windows["again"].append((middle, time.perf_counter_ns()))
                await gpu.free(new)
    return windows


def _stages_in(stamps: Sequence[Any], windows: Sequence[tuple[int, int]]) -> dict[str, float]:
    """The stages that most requests reach in these spans of time."""
    chosen = []
    for begin, end in windows:
        reached = [(at, what) for at, what in stamps if begin <= at < end and what != "asked"]
        chosen += [(begin, "asked"), *reached, (end, "done")]
    stages = stages_of(chosen)
    del stages["next asked"]
    return stages


def _one(device: str, isolation: Isolation, mebibytes: int, seconds: float) -> Iterator[Row]:
    yield asyncio.run(_found(device, isolation, mebibytes, seconds))


def rows(device: str, isolations: Iterable[Isolation], sizes: Iterable[int], seconds: float) -> Iterator[Row]:
    """Yields a row for each size, in mebibytes, and isolation."""
    for isolation in isolations:
        for mebibytes in sizes:
            part = functools.partial(_one, device, isolation, mebibytes, seconds)
            yield from attempted(f"{isolation}, {mebibytes} MiB", part)


def _stage_rows(device: str, mebibytes: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        windows = asyncio.run(_stamped(device, mebibytes, Path(folder)))
        files = [json.loads(one.read_text()) for one in Path(folder).glob("*.json")]
        stamps = [*STAMPS, *itertools.chain.from_iterable(files)]
        stages_us = {way: _stages_in(stamps, each) for way, each in windows.items()}
        yield {"isolation": "process", "MiB": mebibytes, "gb_per_s": {}, "ratios": {}, "stages_us": stages_us}


def sheet(found: list[Row]) -> Table:
    """The table for a terminal."""
    table = Table(title="Arrays to the device and back, GB/s")
    table.add_column("isolation")
    table.add_column("MiB", justify="right")
    names = list(dict.fromkeys(name for row in found for name in row["gb_per_s"]))
    for name in (*names, *(f"{name}, ×" for name in RATIOS)):
        table.add_column(name, justify="right")
    for row in found:
        rates = (f"{row['gb_per_s'][name]:.2f}" if name in row["gb_per_s"] else "" for name in names)
        ratios: Iterator[Any] = (row["ratios"].get(name, "") for name in RATIOS)
        table.add_row(row["isolation"], str(row["MiB"]), *rates, *map(str, ratios))
        for way, stages in row.get("stages_us", {}).items():
            print(f"{way}:", "; ".join(f"{at:,.0f} {name}" for name, at in stages.items()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.uploads", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--isolations", nargs="+", default=["process", "thread"], choices=["process", "thread"]
    )
    parser.add_argument("--mebibytes", nargs="+", type=int, default=_SIZES_MIB)
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="for how long, each size")
    parser.add_argument("--stages", action="store_true", help="also stamp uploads of the smallest size")
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = parser.parse_args()
    versions = {} if given.device == "cpu" else gpu_versions()
    found = rows(given.device, given.isolations, given.mebibytes, given.seconds)
    if given.stages:
        found = itertools.chain(found, _stage_rows(given.device, min(given.mebibytes)))
    keep(found, sheet, given.out, "uploads", versions=versions)


if __name__ == "__main__":
    main()
