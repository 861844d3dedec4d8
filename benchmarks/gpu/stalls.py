"""How long requests whose plan is ready wait while workers are killed and cold shapes are built.

    python -m benchmarks.gpu.stalls --standby --seconds 60 --out DIR

Two tasks accumulate (beta = 1), one request at a time; a third one brings a new shape all the time; a fourth
sends SIGKILL to the worker every 0.6 to 3.4 s. What the two have accumulated is compared with what they were
told: a request that ends in `OutcomeUnknown` begins its sum anew, and any other difference is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from benchmarks.gpu.setting import gpu_versions
from benchmarks.gpu.sheet import Sheet, as_text, number
from cudnn_actor import BufferRef, ConvFwd, ConvSpec, CudnnActorError, CudnnRef, OutcomeUnknown, spawn

__all__ = ["Stalls", "measure", "sheet"]

_POINT, _SAME = ConvSpec.symmetric(2), ConvSpec.symmetric(2, pad=1)
_PAUSE_S = (0.6, 3.4)
_CHANNELS = 8
_KEPT = 10


class Stalls(msgspec.Struct, kw_only=True):
    """The record of one run.

    Parameters
    ----------
    kills
        Workers that were killed.
    accumulated, cold
        Requests that were answered, of the tasks that accumulate and of new shapes.
    unknown
        Requests that ended in `OutcomeUnknown`.
    wrong
        Sums that were not what had been acknowledged.
    errors
        Of new shapes: how many of which kind.
    longest_s
        The longest waits of the tasks that accumulate, in seconds.
    """

    device: str
    standby: bool
    seed: int
    seconds: float
    date: str
    versions: dict[str, str]
    kills: int = 0
    accumulated: int = 0
    cold: int = 0
    unknown: int = 0
    wrong: int = 0
    errors: dict[str, int] = {}
    longest_s: list[float] = []


async def measure(device: str, *, standby: bool, seconds: float, seed: int) -> Stalls:
    """Run it. Takes `seconds`, and the start and the end of a service."""
    found = Stalls(
        device=device,
        standby=standby,
        seed=seed,
        seconds=seconds,
        date=time.strftime("%Y-%m-%d"),
        versions=gpu_versions() if device.startswith("cuda") else {},
    )
    spawning = spawn(device=device, isolation="process", standby=int(standby), max_restarts=1000)
    async with spawning as gpu:
        sums = [await _Sum.on(gpu, found) for _ in range(2)]
        until = time.monotonic() + seconds
        others = [
            asyncio.create_task(_bring_new_shapes(gpu, found, until)),
            asyncio.create_task(_kill(gpu, found, random.Random(seed), until)),
        ]
        await asyncio.gather(*(one.accumulate(until) for one in sums), *others)
    found.longest_s = sorted(found.longest_s, reverse=True)[:_KEPT]
    return found


class _Sum:
    """The buffers of one task, and what they should hold."""

    def __init__(self, gpu: CudnnRef, found: Stalls, request: ConvFwd) -> None:
        self._gpu, self._found, self._request = gpu, found, request
        self._zeros = np.zeros(request.y.spec.dims, "float32")
        self._acknowledged = 0

    @classmethod
    async def on(cls, gpu: CudnnRef, found: Stalls) -> _Sum:
        x = await gpu.upload(np.ones((1, 1, 4, 4), "float32"))
        w = await gpu.upload(np.ones((1, 1, 1, 1), "float32"))
        y = await gpu.upload(np.zeros((1, 1, 4, 4), "float32"))
        one = cls(gpu, found, ConvFwd(x=x, w=w, y=y, conv=_POINT, beta=1.0))
        await one._add()
        return one

    async def accumulate(self, until: float) -> None:
        while time.monotonic() < until:
            began = time.monotonic()
            await self._add()
            self._found.accumulated += 1
            self._note(time.monotonic() - began)
        await self._check()

    def _note(self, waited_s: float) -> None:
        longest = self._found.longest_s
        longest.append(round(waited_s, 3))
        if len(longest) > 100 * _KEPT:
            longest.sort(reverse=True)
            del longest[_KEPT:]

    async def _add(self) -> None:
        try:
            await self._gpu.ask(self._request)
            self._acknowledged += 1
        except OutcomeUnknown:
            self._found.unknown += 1
            await self._begin_anew()
        if self._acknowledged >= 1000:
            await self._check()

    async def _check(self) -> None:
        values = await self._gpu.download(self._request.y)
        self._found.wrong += not np.all(values == self._acknowledged)
        await self._begin_anew()

    async def _begin_anew(self) -> None:
        """Begin anew in another buffer: that of an unknown outcome is torn."""
        with contextlib.suppress(CudnnActorError):
            await self._gpu.free(self._request.y)
        y = await self._gpu.upload(self._zeros)
        self._request = msgspec.structs.replace(self._request, y=y)
        self._acknowledged = 0


async def _bring_new_shapes(gpu: CudnnRef, found: Stalls, until: float) -> None:
    w = await gpu.upload(np.ones((_CHANNELS, _CHANNELS, 3, 3), "float32"))
    side = 8
    while time.monotonic() < until:
        side += 1
        refs: list[BufferRef] = []
        try:
            dims = (1, _CHANNELS, 8 + side % 97, side)
            refs.append(await gpu.empty(dims))
            refs.append(await gpu.empty(dims))
            await gpu.ask(ConvFwd(x=refs[0], w=w, y=refs[1], conv=_SAME))
            found.cold += 1
        except CudnnActorError as error:
            kind = type(error).__name__
            found.errors[kind] = found.errors.get(kind, 0) + 1
        for ref in refs:
            with contextlib.suppress(CudnnActorError):  # torn
                await gpu.free(ref)


async def _kill(gpu: CudnnRef, found: Stalls, chance: random.Random, until: float) -> None:
    while (pause_s := chance.uniform(*_PAUSE_S)) < until - time.monotonic():
        await asyncio.sleep(pause_s)
        if (pid := gpu.worker_pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                found.kills += 1


def sheet(runs: list[Stalls]) -> Sheet:
    """A row for each run."""
    titles = ("standby", "kills", "accumulated", "new shapes", "unknown", "wrong", "longest waits, s")
    rows = tuple(
        (
            "yes" if run.standby else "no",
            number(run.kills, 0),
            number(run.accumulated, 0),
            number(run.cold, 0),
            number(run.unknown, 0),
            number(run.wrong, 0),
            ", ".join(f"{waited:.2f}" for waited in run.longest_s[:3]),
        )
        for run in runs
    )
    return Sheet("Requests whose plan is ready, behind SIGKILLs", titles, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.stalls", description=__doc__)
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the numbers to DIR, as JSON")
    given: Any = parser.parse_args()
    measuring = measure(given.device, standby=given.standby, seconds=given.seconds, seed=given.seed)
    found = asyncio.run(measuring)
    Console(width=120).print(as_text(sheet([found])))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        behind = "with-standby" if given.standby else "without-standby"
        text = msgspec.json.format(msgspec.json.encode(found), indent=1)
        (given.out / f"stalls-{behind}-{given.seed}.json").write_bytes(text + b"\n")


if __name__ == "__main__":
    main()
