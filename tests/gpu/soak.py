"""Mixed traffic for a while, then everything freed: what is wrong, and what has grown.

    python -m tests.gpu.soak --seconds 180          prints a line, and ends with 1 if anything is wrong
    python -m tests.gpu.soak --device cpu --largest 4

The time is spent in two halves. At the end of each everything is freed and measured: what the first half
leaves behind (plans, kernels, pools) is working memory, what the second adds to it is growth. The second half
brings the first one's shapes again: what cuDNN keeps of a new kind of graph is for `benchmarks.gpu.growth`,
and how many there are in a half depends on the machine. A device's memory is that of all its processes, so
`--beside-others` does not judge how it grows.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import ctypes
import gc
import itertools
import math
import random
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cudnn_actor.logging
from cudnn_actor import (
    BufferRef,
    ConvFwd,
    ConvSpec,
    CudnnRef,
    Statistics,
    TensorSpec,
    UnsupportedGraph,
    spawn,
)
from cudnn_actor.messages import Allocate, Copy, Fill
from cudnn_actor.options import Isolation

from ..engines.refusals import may_refuse
from .bounds import error_over_bound
from .cases import RESULT, Case, arrays, message
from .drawing import draw
from .oracle import truth

__all__ = ["Report", "soak"]

TASKS, MIB = 12, 1 << 20
WORKSPACE_BYTES = 256 * MIB
LARGEST_GROWTH_MIB = 192
"""Of host and of device memory in the second half: for pools, and what is made at its first use."""


@dataclass
class Level:
    """What is in use once everything has been freed, in MiB; `device` without the arena that is kept."""

    host: float
    device: float


@dataclass
class Report:
    """What a soak found."""

    seed: int
    seconds: float
    done: collections.Counter[str] = field(default_factory=collections.Counter)
    moved_mib: float = 0.0
    wrong: list[str] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)

    @property
    def growth(self) -> Level:
        """What the second half added, in MiB."""
        first, second = self.levels
        return Level(second.host - first.host, second.device - first.device)

    def __str__(self) -> str:
        done = ", ".join(f"{count} {what}" for what, count in sorted(self.done.items()))
        grown = f"host {self.growth.host:+.0f} MiB, device {self.growth.device:+.0f} MiB in the second half"
        line = f"soak {self.seconds:.0f} s, seed {self.seed}: {done}; {self.moved_mib / 1024:.1f} GiB moved"
        return "\n".join([f"{line}; {grown}; {len(self.wrong)} wrong", *self.wrong])


async def soak(
    seconds: float,
    *,
    device: str,
    isolation: Isolation,
    largest_mib: int,
    seed: int,
    beside_others: bool = False,
) -> Report:
    """Run traffic against a service of its own for `seconds`. Memory of a device that others use may grow."""
    report = Report(seed, seconds)
    async with spawn(device=device, isolation=isolation, workspace_limit=WORKSPACE_BYTES) as gpu:
        traffic = _Traffic(gpu, report, largest_mib)
        for half in range(2):
            await traffic.flow(seconds / 2, random.Random(f"{seed}/{half}"))
            report.levels.append(await _settle(gpu, report))
            traffic.repeat_shapes()
    limit = LARGEST_GROWTH_MIB
    grown = report.growth.host if beside_others else max(report.growth.host, report.growth.device)
    if grown > limit:
        report.wrong.append(f"memory has grown by more than {limit} MiB in the second half")
    return report


async def _settle(gpu: CudnnRef, report: Report) -> Level:
    """Measure, once nothing is in use any more."""
    await gpu.drain()
    statistics = await gpu.statistics()
    report.wrong += _inconsistencies(statistics, report)
    kept = statistics.arena_bytes / MIB
    return Level(_host_mib(gpu.worker_pid), _device_mib() - kept if gpu.device.startswith("cuda") else 0.0)


def _inconsistencies(statistics: Statistics, report: Report) -> list[str]:
    wanted = {
        "live_buffers": 0,
        "live_bytes": 0,
        "queued": 0,
        "restarts": 0,
        "replayed": 0,
        "dropped_replies": 0,
        "generation": 1,
        "failed": report.done["refused"],
        "expired": 0,
    }
    got = {name: getattr(statistics, name) for name in wanted}
    return [f"{name} is {got[name]}, not {wanted[name]}" for name in wanted if got[name] != wanted[name]]


def _host_mib(worker: int | None) -> float:
    """Memory of this process, and of its worker where it has one, that is no file's.

    What the two share, for arrays on their way, is a file's: it is kept for the next array, and no growth.
    The process that builds plans is not counted: it is replaced when it has built its share.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free and kept for the next allocation is no growth
    processes = ("self",) if worker is None else ("self", str(worker))
    return sum(map(_anonymous_kib, processes)) / 1024


def _give_freed_memory_back() -> None:
    """Have malloc return what threads free to the system.

    Otherwise it may keep 64 MiB in the heap of each thread, and `malloc_trim` trims the main heap's end only:
    with a thread pool of 36 that is more than everything that is measured here.
    """
    m_trim_threshold = -1
    ctypes.CDLL(None).mallopt(m_trim_threshold, MIB)


def _anonymous_kib(process: str) -> int:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def _device_mib() -> float:
    """Memory in use on the GPU, whoever uses it."""
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return float(total - free) / MIB


class _Traffic:
    """Tasks that do one thing after another, each leaving no buffer behind."""

    def __init__(self, gpu: CudnnRef, report: Report, largest_mib: int) -> None:
        self._gpu = gpu
        self._report = report
        self._largest_mib = largest_mib
        self._big = asyncio.Semaphore(2)
        self._shapes: Iterator[int] = itertools.count()
        self._deeds: dict[str, tuple[int, Callable[[random.Random], Awaitable[None]]]] = {
            "shapes": (6, self._shape),
            "hot runs": (6, self._accumulate),
            "copies": (3, self._copy),
            "cancels": (3, self._cancel),
            "big uploads": (1, self._big_upload),
        }

    async def flow(self, seconds: float, chance: random.Random) -> None:
        """Everything at once for a while."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(TASKS):
                group.create_task(self._work(random.Random(chance.random()), until))

    def repeat_shapes(self) -> None:
        """From here on bring the shapes again that have come."""
        self._shapes = itertools.cycle(range(max(1, next(self._shapes))))

    async def _work(self, chance: random.Random, until: float) -> None:
        names = list(self._deeds)
        weights = [weight for weight, _ in self._deeds.values()]
        while time.monotonic() < until:
            (name,) = chance.choices(names, weights)
            await self._deeds[name][1](chance)
            self._report.done[name] += 1

    def _check(self, right: bool, what: str) -> None:
        self._report.done["checked"] += 1
        if not right:
            self._report.wrong.append(what)

    async def _shape(self, chance: random.Random) -> None:
        """A random convolution; one in three is compared with the CPU engine."""
        number = next(self._shapes)
        case = draw(self._report.seed, number)
        given = arrays(case)
        refs: dict[str, BufferRef | None] = {"bias": None}
        for name, spec in {"x": case.x, "w": case.w, "y": case.y, "bias": case.bias}.items():
            if spec is not None:
                refs[name] = await self._gpu.ask(Allocate(spec=spec, data=given.get(name)))
        try:
            await self._gpu.ask(message(case, refs))
            if chance.random() < 0.3:
                await self._compare(case, number, refs)
        except UnsupportedGraph as refusal:
            self._report.done["refused"] += 1
            self._check(may_refuse(self._engine, case.graph()) is not None, f"shape {number}: {refusal}")
        await self._free(filter(None, refs.values()))

    @property
    def _engine(self) -> str:
        return self._gpu.device.split(":")[0]

    async def _compare(self, case: Case, number: int, refs: dict[str, BufferRef | None]) -> None:
        result = refs[RESULT[case.kind]]
        assert result is not None
        got, wanted = await self._gpu.download(result), await asyncio.to_thread(truth, case)
        error = error_over_bound(case, got, wanted)
        again = f"python -m tests.gpu.fuzz --seed {self._report.seed} --only {number}"
        self._check(error <= 1.0, f"shape {number}: {error:.3g} times its bound\n  to repeat it: {again}")

    async def _accumulate(self, chance: random.Random) -> None:
        """y += x * w, again and again, all at once: each of them has to count."""
        times, value = chance.randrange(1, 60), float(chance.randrange(1, 4))
        x, w, y = trio = await self._trio(value)
        add = ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2), beta=1.0)
        await asyncio.gather(*(self._gpu.ask(add) for _ in range(times)))
        got = (await self._gpu.download(y)).item()
        self._check(got == times * 16 * value, f"{times} times {16 * value} added up to {got}")
        await self._free(trio)

    async def _trio(self, value: float) -> tuple[BufferRef, BufferRef, BufferRef]:
        """16 channels of one pixel with this value, a filter of ones over them, and a 0 for their sum."""
        pixel = np.full((1, 16, 1, 1), value, np.float32)
        x, w = await self._gpu.upload(pixel), await self._gpu.upload(np.ones_like(pixel))
        return x, w, await self._gpu.upload(np.zeros((1, 1, 1, 1), np.float32))

    async def _free(self, buffers: Iterable[BufferRef]) -> None:
        for ref in buffers:
            await self._gpu.free(ref)

    async def _copy(self, chance: random.Random) -> None:
        """A buffer filled, and copied into another layout."""
        dims = (2, chance.randrange(1, 40), chance.randrange(1, 60), 17)
        value = float(chance.randrange(100))
        src = await self._gpu.empty(dims, layout="NHWC")
        dst = await self._gpu.empty(dims)
        await self._gpu.ask(Fill(dst=src, value=value))
        await self._gpu.ask(Copy(src=src, dst=dst))
        self._check(
            bool((await self._gpu.download(dst) == value).all()), f"a copy of {value} is something else"
        )
        await self._free((src, dst))

    async def _cancel(self, chance: random.Random) -> None:
        """Asks that are cancelled before, while and after they run; a buffer that nobody gets is freed."""
        x, w, y = trio = await self._trio(1.0)
        asks: list[asyncio.Task[Any]] = []
        for _ in range(chance.randrange(1, 20)):
            conv = ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))
            asks.append(asyncio.create_task(self._gpu.ask(conv)))
        asks.append(asyncio.create_task(self._gpu.ask(Allocate(spec=TensorSpec.packed((1, 2, 300, 300))))))
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        for ask in asks:
            ask.cancel()
        for ask in asks:
            with contextlib.suppress(asyncio.CancelledError):
                answer = await ask
                if isinstance(answer, BufferRef):
                    await self._gpu.free(answer)
        await self._free(trio)

    async def _big_upload(self, chance: random.Random) -> None:
        """Up to the largest size there and back."""
        async with self._big:
            mib = math.exp(chance.uniform(0, math.log(self._largest_mib)))
            values = await asyncio.to_thread(_numbers, int(mib * MIB) // 4, chance.randrange(1 << 31))
            ref = await self._gpu.upload(values)
            got = await self._gpu.download(ref)
            same = await asyncio.to_thread(np.array_equal, got, values)
            self._check(same, f"{values.nbytes} bytes came back changed")
            self._report.moved_mib += 2 * values.nbytes / MIB
            await self._gpu.free(ref)


def _numbers(count: int, first: int) -> np.ndarray:
    return np.arange(first, first + max(count, 1), dtype=np.int64).astype(np.int32)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--isolation", choices=("thread", "process"), default="thread")
    parser.add_argument("--largest", type=int, default=512, metavar="MIB", help="of an upload")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--beside-others", action="store_true", help="other processes use the device, too")
    given = parser.parse_args(arguments)
    cudnn_actor.logging.configure()
    _give_freed_memory_back()
    how: dict[str, Any] = {"device": given.device, "isolation": given.isolation, "seed": given.seed}
    how |= {"largest_mib": given.largest, "beside_others": given.beside_others}
    report = asyncio.run(soak(given.seconds, **how))
    print(report)  # noqa: T201 - a command line
    return bool(report.wrong)


if __name__ == "__main__":
    sys.exit(main())
