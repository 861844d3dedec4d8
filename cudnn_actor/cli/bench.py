"""`cudnn-actor bench`: latencies and throughput in thread isolation on the CPU engine.

Asserts nothing: it prints tables and, with `--out`, writes every raw number as JSON.
What is compared is measured in the same run, in turns, round after round; a ratio is the
median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib
import itertools
import platform
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import metadata, util
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from cudnn_actor import ConvBwdData, ConvBwdFilter, ConvFwd, ConvSpec, CudnnRef, Fault, FaultPlan, Ping, spawn
from cudnn_actor.actors import LoopBridge
from cudnn_actor.cli.measure import BareHop, PykkaWay, Request, Timing, median_ratio, one_by_one, rate
from cudnn_actor.cli.placement import PLACEMENTS, cores, last_cores, others_cpu, place

__all__ = ["Report", "add_arguments", "run"]

SUBJECTS = ("bare hop", "ping", "trivial convolution", "pykka ask + to_thread")
IN_FLIGHT = (8, 64, 512)
LOADS = ("idle", "sleep(0) in a loop", "50 us callbacks")
_DIRECTIONS = ("forward", "gradient by input", "gradient by filter")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long to measure."""

    rounds: int
    slice_s: float
    """Seconds of each measurement of a round."""
    starving_s: float
    repeats: int


FULL = Plan(rounds=7, slice_s=0.15, starving_s=1.5, repeats=15)
QUICK = Plan(rounds=1, slice_s=0.003, starving_s=0.02, repeats=2)


class Hop(msgspec.Struct, kw_only=True):
    """One subject in one loop and placement; a number a round."""

    loop: str
    placement: str
    subject: str
    one: list[Timing] = []
    """One request in flight."""
    per_s: dict[int, list[float]] = {}
    """Requests a second, by requests in flight."""
    shared_core: list[bool] = []
    """Samples, with one in flight: whether the loop's and the other thread had run on the same core."""


class Starving(msgspec.Struct, frozen=True, kw_only=True):
    """Pings to an actor from a loop that is busy with something else."""

    loop: str
    placement: str
    load: str
    in_flight: int
    lets_go: bool
    timing: Timing
    per_s: float
    callbacks_per_s: float
    let_go: int


class Report(msgspec.Struct, kw_only=True):
    """All that was measured."""

    date: str
    quick: bool
    machine: dict[str, Any]
    versions: dict[str, str]
    hops: list[Hop]
    convolutions_ms: dict[str, list[float]]
    crash_to_next_reply_ms: list[float]
    starvation: list[Starving]
    others_cpu: dict[str, float]
    """By section, the share of this process's cores that other processes used: over 0.05, distrust it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--out", metavar="DIR", type=Path, help="also write the numbers to DIR, as JSON")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it works")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    console = Console()
    plan = QUICK if args.quick else FULL
    with console.status("measuring") as status:
        report = _measure(plan, args.quick, lambda text: status.update(f"measuring {text}"))
    for table in _tables(report):
        console.print(table)
    if args.out is not None:
        console.print(f"written to {_write(report, args.out)}")
    return 0


def _measure(plan: Plan, quick: bool, say: Callable[[str], None]) -> Report:
    report = Report(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        quick=quick,
        machine=_machine(),
        versions=_versions(),
        hops=[],
        convolutions_ms={},
        crash_to_next_reply_ms=[],
        starvation=[],
        others_cpu={},
    )

    @contextmanager
    def section(name: str) -> Iterator[None]:
        say(name)
        with others_cpu() as share:
            yield
        report.others_cpu[name] = share[0]

    for loop, placement in itertools.product(_loops(), PLACEMENTS):
        with section(f"round trips, {loop}, {placement}"):
            report.hops += _on(loop, _hops(plan, loop, placement))
    with section("convolutions"):
        report.convolutions_ms = _on("asyncio", _convolutions(plan))
    with section("recovery"):
        report.crash_to_next_reply_ms = [_on("asyncio", _crash()) for _ in range(plan.repeats)]
    for loop, placement in itertools.product(_loops(), PLACEMENTS[1:]):
        with section(f"busy loop, {loop}, {placement}"):
            report.starvation += _on(loop, _starvation(plan, loop, placement))
    return report


def _loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if util.find_spec("uvloop") is not None:
        loops["uvloop"] = importlib.import_module("uvloop").new_event_loop
    return loops


def _on(loop: str, measurement: Coroutine[Any, Any, Any]) -> Any:
    try:
        with asyncio.Runner(loop_factory=_loops()[loop]) as runner:
            return runner.run(measurement)
    finally:
        place("free")


# Round trips.


async def _hops(plan: Plan, loop: str, placement: str) -> list[Hop]:
    rows = {name: Hop(loop=loop, placement=placement, subject=name) for name in SUBJECTS}
    async with spawn(device="cpu") as gpu:
        with _subjects(gpu, await trivial_convolution(gpu)) as subjects:
            for request, _ in subjects.values():
                await rate(request, max(IN_FLIGHT), plan.slice_s)  # warm, and with all its threads started
            place(placement)
            for _ in range(plan.rounds):
                for name, (request, thread) in subjects.items():
                    await _one_round(plan, rows[name], request, thread)
    return list(rows.values())


async def _one_round(plan: Plan, row: Hop, request: Request, thread: int | None) -> None:
    def look() -> None:
        where = last_cores(thread)
        if where is not None:
            row.shared_core.append(where[0] == where[1])

    row.one.append(await one_by_one(request, plan.slice_s, look))
    for in_flight in IN_FLIGHT:
        per_s, _ = await rate(request, in_flight, plan.slice_s)
        row.per_s.setdefault(in_flight, []).append(per_s)


@contextmanager
def _subjects(gpu: CudnnRef, trivial: ConvFwd) -> Iterator[dict[str, tuple[Request, int | None]]]:
    actor = next(thread for thread in threading.enumerate() if thread.name.startswith("CudnnActor-"))
    hop, plain, ping = BareHop(), PykkaWay(), Ping()
    threads = (hop.thread.native_id, actor.native_id, actor.native_id, plain.native_id())
    requests: tuple[Request, ...] = (hop, lambda: gpu.ask(ping), lambda: gpu.ask(trivial), plain)
    try:
        yield dict(zip(SUBJECTS, zip(requests, threads, strict=True), strict=True))
    finally:
        hop.close()
        plain.close()


async def trivial_convolution(gpu: CudnnRef) -> ConvFwd:
    one = np.ones((1, 1, 1, 1), "float32")
    x, w, y = await gpu.upload(one), await gpu.upload(one), await gpu.empty((1, 1, 1, 1))
    return ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))


# Work.


async def _convolutions(plan: Plan) -> dict[str, list[float]]:
    generator = np.random.default_rng(0)
    conv = ConvSpec.symmetric(2, pad=1)
    async with spawn(device="cpu") as gpu:
        x = await gpu.upload(generator.normal(size=(1, 64, 56, 56)).astype("float32"))
        w = await gpu.upload(generator.normal(size=(64, 64, 3, 3)).astype("float32"))
        y = await gpu.conv_fwd(x, w, conv=conv)
        dx, dw = await gpu.empty(x.spec.dims), await gpu.empty(w.spec.dims)
        messages = (
            ConvFwd(x=x, w=w, y=y, conv=conv),
            ConvBwdData(dy=y, w=w, dx=dx, conv=conv),
            ConvBwdFilter(x=x, dy=y, dw=dw, conv=conv),
        )
        await gpu.warm(messages)
        return {
            name: await _milliseconds(lambda message=message: gpu.ask(message), plan.repeats)  # type: ignore[misc]
            for name, message in zip(_DIRECTIONS, messages, strict=True)
        }


async def _milliseconds(request: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    await request()
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        await request()
        taken.append(1e3 * (time.perf_counter() - began))
    return taken


async def _crash() -> float:
    """Milliseconds from sending the request that a sticky error strikes to the reply of its second run."""
    async with spawn(device="cpu", faults=FaultPlan().at(2, Fault.STICKY, of=ConvFwd)) as gpu:
        trivial = await trivial_convolution(gpu)
        await gpu.ask(trivial)
        began = time.perf_counter()
        await gpu.ask(trivial)
        return 1e3 * (time.perf_counter() - began)


# Busy loops.


async def _starvation(plan: Plan, loop: str, placement: str) -> list[Starving]:
    rows = []
    async with spawn(device="cpu") as gpu:
        place(placement)
        bridge = LoopBridge.of_running_loop()
        for load, in_flight, lets_go in itertools.product(LOADS, (1, 64), (False, True)):
            bridge.lets_go, before = lets_go, bridge.let_go
            async with _busy_with(load) as turns:
                began = time.perf_counter()
                per_s, timing = await rate(gpu.ping, in_flight, plan.starving_s)
                took_s = time.perf_counter() - began  # the last reply may have starved
            rows.append(
                Starving(
                    loop=loop,
                    placement=placement,
                    load=load,
                    in_flight=in_flight,
                    lets_go=lets_go,
                    timing=timing,
                    per_s=per_s,
                    callbacks_per_s=turns[0] / took_s,
                    let_go=bridge.let_go - before,
                )
            )
        bridge.lets_go = True
    return rows


@asynccontextmanager
async def _busy_with(load: str) -> Any:
    """Keep the loop from idling for as long as the block runs; gives a count of its turns."""
    turns = [0]

    async def turn() -> None:
        while True:
            if load == "50 us callbacks":
                end = time.perf_counter() + 50e-6
                while time.perf_counter() < end:
                    pass
            turns[0] += 1
            await asyncio.sleep(0)

    if load == "idle":
        yield turns
        return
    task = asyncio.create_task(turn())
    yield turns
    task.cancel()
    await asyncio.wait([task])


# What it ran on.


def _machine() -> dict[str, Any]:
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


def _versions() -> dict[str, str]:
    known = {"python": platform.python_version()}
    for name in ("cudnn-actor", "numpy", "pykka", "msgspec", "uvloop"):
        try:
            known[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return known


def _write(report: Report, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    stamp = report.date.replace(":", "").replace("-", "")[:15]
    path = folder / f"cpu-thread-{stamp}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return path


# Tables.


def _tables(report: Report) -> Iterator[Table]:
    for _, hops in itertools.groupby(report.hops, key=lambda hop: (hop.loop, hop.placement)):
        yield _hop_table(list(hops))
    yield _work_table(report)
    for _, rows in itertools.groupby(report.starvation, key=lambda row: (row.loop, row.placement)):
        yield _starvation_table(list(rows))
    yield _others_table(report.others_cpu)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", pad_edge=False)
    for column, name in enumerate(columns):
        table.add_column(name, justify="right" if column else "left", no_wrap=True)
    return table


def _hop_table(hops: list[Hop]) -> Table:
    bare, theirs = hops[0], hops[-1]
    title = f"Round trips: {bare.loop}, threads on {bare.placement}"
    rates = [f"{n}: k/s" for n in IN_FLIGHT]
    table = _table(title, "request", "1: p50 us", "p99", "x hop", *rates, "x pykka", "shared core")
    for hop in hops:
        p50 = [timing.p50_us for timing in hop.one]
        table.add_row(
            hop.subject,
            f"{statistics.median(p50):.1f}",
            f"{statistics.median(timing.p99_us for timing in hop.one):.0f}",
            f"{median_ratio(p50, [timing.p50_us for timing in bare.one]):.2f}",
            *(f"{statistics.median(hop.per_s[n]) / 1e3:.1f}" for n in IN_FLIGHT),
            f"{median_ratio(hop.per_s[64], theirs.per_s[64]):.2f}",
            f"{statistics.fmean(hop.shared_core):.0%}" if hop.shared_core else "?",
        )
    table.caption = "k/s: thousand requests a second by requests in flight; x pykka: at 64"
    return table


def _work_table(report: Report) -> Table:
    table = _table("Work", "ms", "median", "least", "most")
    rows = {f"3x3, 64 filters, 1x64x56x56: {name}": ms for name, ms in report.convolutions_ms.items()}
    rows["sticky error, request to reply"] = report.crash_to_next_reply_ms
    for name, ms in rows.items():
        table.add_row(name, f"{statistics.median(ms):.2f}", f"{min(ms):.2f}", f"{max(ms):.2f}")
    return table


def _starvation_table(rows: list[Starving]) -> Table:
    title = f"Pings from a busy loop: {rows[0].loop}, threads on {rows[0].placement}"
    table = _table(
        title, "the loop's load", "in flight", "lets go", "p50 ms", "p99", "max", "k/s", "loads k/s"
    )
    for row in rows:
        times = (row.timing.p50_us, row.timing.p99_us, row.timing.max_us)
        table.add_row(
            row.load,
            str(row.in_flight),
            f"{row.let_go:,}x" if row.lets_go else "never",
            *(f"{us / 1e3:.2f}" for us in times),
            f"{row.per_s / 1e3:.2f}",
            f"{row.callbacks_per_s / 1e3:.1f}",
        )
    return table


def _others_table(shares: dict[str, float]) -> Table:
    table = _table("CPU that other processes used meanwhile", "section", "% of the cores")
    for section, share in shares.items():
        table.add_row(section, f"{100 * share:.1f}")
    return table


if __name__ == "__main__":
    from cudnn_actor.cli import main

    sys.exit(main(["bench", *sys.argv[1:]]))
