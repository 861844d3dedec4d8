"""How fast a worker is replaced, by what ended it; what a worker takes of the device; how fast one starts.

The ends are real: a signal, a kernel that writes to an address that nobody has mapped, a kernel that never
ends. They happen in worker processes, so this one never notices but as callers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from benchmarks.gpu.device_memory import gauge
from benchmarks.gpu.rates import on_loop
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.sheet import Sheet, median, number
from benchmarks.gpu.small import placed
from benchmarks.gpu.stage import staged
from cudnn_actor import CudnnRef
from cudnn_actor.messages import Fill
from cudnn_actor.options import make_options
from cudnn_actor.processes.launching import close_launchers
from cudnn_actor.service import Spawning
from cudnn_actor.service.service import CudnnService
from cudnn_actor.supervision import Restarting
from cudnn_actor.trials.bench.crashes import FOR_EVER, after_kills, standby_ready
from cudnn_actor.trials.bench.isolation_sheets import recovery_row
from tests.gpu.worker_faults import ILLEGAL, PREPARING, SPINNING, Ammunition, choice_of

__all__ = ["Recovery", "measure", "sheets"]

_MIB = 1 << 20
_HANG_S = 1.0
_DRY_HANG_S = 3.0
"""A dry run takes place on machines that do other work, too, where a worker that is only slow must not count
as hung."""
_STAGE_BYTES = 1 << 23
_WITHIN_MS = {
    "SIGKILL, with standby": 300.0,
    "SIGKILL, without": 800.0,
    "illegal access reported, with standby": 50.0,
    "illegal access reported, without": 600.0,
}


class Recovery(msgspec.Struct, kw_only=True):
    """Milliseconds to the next finished request; MiB; seconds."""

    ms: dict[str, list[float]] = {}
    """By what ended the worker, and whether another stood by."""
    free_mib: dict[str, float] = {}
    """Of the device's memory, by what was there then; in order."""
    start_s: dict[str, list[float]] = {}
    """From asking for a service to its first finished convolution, by how much was there before."""
    errors: dict[str, str] = {}
    """Of what failed; the rest was measured all the same."""


def measure(setting: Setting) -> Recovery:
    """Blocks for a minute or two."""
    found = Recovery()
    _attempt(found, "start", lambda: _starts(setting, found))
    for standby, name in ((1, "with standby"), (0, "without")):
        for what, one in (
            ("SIGKILL", _kills),
            ("illegal access", _strikes),
            ("illegal access reported", _reports),
            ("hang", _hangs),
        ):
            key = f"{what}, {name}"
            setting.say(f"recovery, {key}")
            _attempt(found, key, partial(_into, found, key, one, setting, standby))
    if setting.on_gpu:
        setting.say("the device's memory")
        _attempt(found, "memory", lambda: _memory(setting, found))
    return found


def _attempt(found: Recovery, name: str, measure: Callable[[], object]) -> None:
    try:
        measure()
    except Exception as error:  # noqa: BLE001 - noted, and shown; the others are worth having
        found.errors[name] = f"{type(error).__name__}: {error}"


def _into(found: Recovery, key: str, one: Any, setting: Setting, standby: int) -> None:
    with tempfile.TemporaryDirectory(prefix="cudnn-actor-ammunition-") as folder:
        found.ms[key] = on_loop("asyncio", one(setting, standby, Ammunition(folder), folder))


# What ends a worker.


@asynccontextmanager
async def _faulty(setting: Setting, standby: int, folder: str, **options: Any) -> Any:
    """A service whose workers can be asked to do harm."""
    given = {"isolation": "process", "standby": standby, "max_restarts": FOR_EVER, **options}
    service = CudnnService(
        make_options({"device": setting.device, **given}), engine=choice_of(setting.device, folder)
    )
    async with Spawning(service) as gpu:
        yield gpu


async def _kills(setting: Setting, standby: int, _ammunition: Ammunition, folder: str) -> list[float]:
    async with _faulty(setting, standby, folder) as gpu:
        message = await placed(gpu, setting.small)
        return await after_kills(gpu, message, setting.choose(10, 2))


async def _strikes(
    setting: Setting, standby: int, ammunition: Ammunition, folder: str, *, reported: bool = False
) -> list[float]:
    async with _faulty(setting, standby, folder) as gpu:
        return await _harmed(setting, gpu, ammunition, ILLEGAL, setting.choose(10, 2), reported=reported)


async def _reports(setting: Setting, standby: int, ammunition: Ammunition, folder: str) -> list[float]:
    return await _strikes(setting, standby, ammunition, folder, reported=True)


async def _hangs(setting: Setting, standby: int, ammunition: Ammunition, folder: str) -> list[float]:
    limit_s = setting.choose(_HANG_S, _DRY_HANG_S)
    async with _faulty(setting, standby, folder, hang_after_s=limit_s) as gpu:
        return await _harmed(setting, gpu, ammunition, SPINNING, setting.choose(3, 1))


async def _harmed(
    setting: Setting,
    gpu: CudnnRef,
    ammunition: Ammunition,
    value: float,
    count: int,
    *,
    reported: bool = False,
) -> list[float]:
    """Milliseconds from sending what does harm to the receipts of it, run again, and of what is behind it.

    `reported`: from the moment when the parent has been told of the error, to the first receipt.
    """
    message, victim = await placed(gpu, setting.small), await gpu.empty((1, 1, 1, 1))
    taken: list[float] = []
    told = _Told(gpu)
    for _ in range(count):
        await gpu.ask(message)
        await standby_ready(gpu)
        await gpu.fill(victim, PREPARING)
        generation, ended = gpu.generation, 0.0
        ammunition.load()
        began = time.perf_counter()
        both = gpu.submit(Fill(dst=victim, value=value)), gpu.submit(message)
        if reported:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            ended = time.perf_counter()
            began = await told.when(generation)
        await asyncio.gather(*both)
        taken.append(1e3 * ((ended if reported else time.perf_counter()) - began))
        if gpu.generation != generation + 1:
            raise RuntimeError(f"{gpu.generation - generation} workers ended, and one was to")
    await told.stop()
    return taken


class _Told:
    """The time at which this process was told that a worker has ended."""

    def __init__(self, gpu: CudnnRef) -> None:
        self._at: dict[int, float] = {}
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._follow(gpu))

    async def _follow(self, gpu: CudnnRef) -> None:
        async for event in gpu.events():
            if isinstance(event, Restarting):
                self._at[event.generation] = time.perf_counter()
                self._news.set()

    async def when(self, generation: int) -> float:
        """The time of this generation's end."""
        while generation not in self._at:
            self._news.clear()
            await self._news.wait()
        return self._at[generation]

    async def stop(self) -> None:
        """Follow no more."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


# Starting.


def _starts(setting: Setting, found: Recovery) -> None:
    setting.say("the start of a service in a process")
    cold, warm = "forkserver not there yet", "forkserver there"
    found.start_s = {cold: [], warm: []}
    for _ in range(setting.choose(5, 1)):
        close_launchers()
        for name in (cold, warm):
            found.start_s[name].append(on_loop("asyncio", _start(setting)))


async def _start(setting: Setting) -> float:
    began = time.perf_counter()
    async with setting.service("process") as gpu:
        await gpu.ask(await placed(gpu, setting.small))
        return time.perf_counter() - began


# Memory.


def _memory(setting: Setting, found: Recovery) -> None:
    """The memory of a worker, of a worker and its standby, and of the process that builds plans."""
    with gauge(setting.ordinal) as look:

        def note(name: str) -> None:
            found.free_mib[name] = look.free_bytes() / _MIB

        on_loop("asyncio", _service_memory(setting, note))
        with staged(setting, _STAGE_BYTES, setting.small.dtype) as stage:
            problem = setting.small
            specs = {"x": problem.x, "w": problem.w, "y": problem.y}
            place = stage.place(problem.message, specs, problem.written)
            stage.plan(place)
            note("an engine in this process, with a plan")
            stage.built_elsewhere(place)
            note("the same, and a process that builds")


async def _service_memory(setting: Setting, note: Callable[[str], None]) -> None:
    note("nothing")
    for standby, name in ((0, "a worker"), (1, "a worker and its standby")):
        async with setting.service("process", standby=standby) as gpu:
            message = await placed(gpu, setting.small)
            await gpu.ask(message)
            await standby_ready(gpu)
            note(name)
        note(f"nothing, after {name}")


# Tables.


def sheets(found: Recovery) -> Iterator[Sheet]:
    """Recovery, starts, memory, and what failed."""
    if found.ms:
        rows = (recovery_row(name, ms, _WITHIN_MS.get(name)) for name, ms in found.ms.items())
        yield Sheet(
            "From a worker's end to the next finished request",
            ("", "times", "p50 ms", "p90", "max", "aimed at: p50 ms"),
            tuple(rows),
            "SIGKILL: from the signal to the receipt of a convolution that is sent at once. Illegal access, "
            "hang: from when the request is sent whose kernel does this, to the receipts of a convolution "
            "behind it, and of its own second run. Reported: from the event Restarting, which follows the "
            f"worker's last message, to the first of these two receipts. hang_after_s={_HANG_S:.0f}.",
        )
    if found.start_s:
        starts = (
            (
                name,
                number(median(took), 2),
                number(min(took, default=None), 2),
                number(max(took, default=None), 2),
            )
            for name, took in found.start_s.items()
        )
        yield Sheet(
            "From asking for a service in a process to its first finished convolution",
            ("", "median s", "least", "most"),
            tuple(starts),
        )
    if found.free_mib:
        yield _memory_sheet(found.free_mib)
    if found.errors:
        lines = tuple((name, text[:70]) for name, text in found.errors.items())
        yield Sheet("Recoveries that failed", ("", "error"), lines)


def _memory_sheet(free: dict[str, float]) -> Sheet:
    """Differences of what is free, as far as both sides of each were measured."""

    def taken(before: str, after: str) -> str:
        both = before in free and after in free
        return number(free[before] - free[after], 0) if both else number(None)

    engine = "an engine in this process, with a plan"
    rows = (
        ("a worker, with an arena and a plan", taken("nothing", "a worker")),
        ("its standby", taken("a worker", "a worker and its standby")),
        ("a process that builds plans", taken(engine, "the same, and a process that builds")),
        ("left behind by both services", taken("nothing", "nothing, after a worker and its standby")),
    )
    return Sheet("Device memory, MiB", ("", "taken"), rows)
