"""A convolution that takes the device a few microseconds: what a request costs, beside a plain call."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import NamedTuple

import msgspec

from benchmarks.gpu.frontend import frontend_loops
from benchmarks.gpu.problems import Problem
from benchmarks.gpu.pytorch import eager
from benchmarks.gpu.rates import call_rate, loops, on_loop, one_call_at_a_time, submit_rate
from benchmarks.gpu.sampling import Sampled, sampled
from benchmarks.gpu.setting import Setting, actor_thread
from benchmarks.gpu.sheet import Sheet, median, number, ratio, verdict
from benchmarks.gpu.stage import Call, random_values, staged
from cudnn_actor import CudnnRef
from cudnn_actor.options import Isolation
from cudnn_actor.protocol.messages.messages import Compute
from cudnn_actor.trials.bench.cpu_time import worker_cpu_s
from cudnn_actor.trials.bench.record import ISOLATIONS
from cudnn_actor.trials.measure import Timing, one_by_one, rate

__all__ = ["Small", "measure", "placed", "sheets"]

IN_FLIGHT = (8, 64, 256)
PUBLIC, TORCH = "frontend: public execute", "PyTorch: eager conv2d"
_PROFILED = 64


class Requests(msgspec.Struct, kw_only=True):
    """Through the actor, on one kind of event loop; a number a round."""

    loop: str
    isolation: Isolation = "thread"
    one: list[Timing] = []
    ask_per_s: dict[int, list[float]] = {}
    submit_per_s: dict[int, list[float]] = {}
    loop_cpu_us: list[float] = []
    """CPU time of the loop's thread for each request, 64 asked at a time."""
    actor_cpu_us: list[float] = []
    """Of the actor's thread, or of the whole worker process."""


class Calls(msgspec.Struct, kw_only=True):
    """The times without the actor, on this thread; a number for each round."""

    name: str
    per_s: list[float] = []
    """In a loop that waits for the device at its end."""
    one: list[Timing] = []
    """Waiting for the device after each."""


class Small(msgspec.Struct, kw_only=True):
    """The record of this part."""

    requests: list[Requests]
    calls: list[Calls]
    profiles: dict[str, list[Sampled]] = {}
    """By thread, where it was asked for."""


class Rival(NamedTuple):
    """A call that a round makes in a loop."""

    row: Calls
    call: Call
    wait: Call


class Subject(NamedTuple):
    """A service, and what it is asked."""

    row: Requests
    gpu: CudnnRef
    message: Compute

    async def ask(self) -> None:
        """Send one request."""
        await self.gpu.ask(self.message)


async def placed(gpu: CudnnRef, problem: Problem) -> Compute:
    """The request, on buffers of random numbers."""
    x, w, y = [
        await gpu.upload(random_values(spec.size, problem.dtype).reshape(spec.dims), layout=problem.layout)
        for spec in (problem.x, problem.w, problem.y)
    ]
    return problem.message(x, w, y)


def measure(setting: Setting) -> Small:
    """Blocks for about half a minute."""
    with ExitStack() as stack:
        rivals = _rivals(setting, stack)
        found = Small(requests=[], calls=[rival.row for rival in rivals])
        for loop in loops():
            setting.say(f"small convolution, {loop}")
            on_loop(loop, _rounds(setting, found, rivals, loop))
    if setting.profile:
        setting.say("profile")
        found.profiles = on_loop("asyncio", _profile(setting))
    return found


def _rivals(setting: Setting, stack: ExitStack) -> list[Rival]:
    problem = setting.small
    stage = stack.enter_context(staged(setting, 1 << 23, problem.dtype))
    specs = {"x": problem.x, "w": problem.w, "y": problem.y}
    place = stage.place(problem.message, specs, problem.written)
    calls = [("this engine, without its actor", stage.call(stage.plan(place)[0], place), stage.wait)]
    if setting.on_gpu:
        frontend = stack.enter_context(frontend_loops(problem, setting.ordinal))
        torch = stack.enter_context(eager(setting.ordinal))
        calls += [
            (PUBLIC, frontend.public, frontend.wait),
            ("frontend: lowered graph", frontend.lowered, frontend.wait),
            ("CUDA graph replay", frontend.replayed, frontend.wait),
            (TORCH, torch.call(problem), torch.wait),
        ]
    return [Rival(Calls(name=name), call, wait) for name, call, wait in calls]


async def _rounds(setting: Setting, found: Small, rivals: list[Rival], loop: str) -> None:
    """Rounds of everything: the rivals too, each time, for the ratios."""
    seconds = setting.choose(0.2, 0.01)
    async with AsyncExitStack() as stack:
        sides = []
        for isolation in ISOLATIONS:
            gpu = await stack.enter_async_context(setting.service(isolation))
            sides.append(
                Subject(Requests(loop=loop, isolation=isolation), gpu, await placed(gpu, setting.small))
            )
            await rate(sides[-1].ask, max(IN_FLIGHT), seconds)
        found.requests += [side.row for side in sides]
        for number_of_round in range(setting.choose(5, 1)):
            step = -1 if number_of_round % 2 else 1
            _call_round(rivals[::step], seconds)
            for side in sides[::step]:
                await _request_round(side, seconds)


def _call_round(rivals: list[Rival], seconds: float) -> None:
    for row, call, wait in rivals:
        row.per_s.append(call_rate(call, wait, seconds))
        row.one.append(one_call_at_a_time(call, wait, seconds))


async def _request_round(side: Subject, seconds: float) -> None:
    row, gpu, message = side
    row.one.append(await one_by_one(side.ask, 2 * seconds))
    for in_flight in IN_FLIGHT:
        mine, theirs = time.thread_time(), worker_cpu_s(gpu)
        per_s, timing = await rate(side.ask, in_flight, seconds)
        if in_flight == _PROFILED:
            row.loop_cpu_us.append(1e6 * (time.thread_time() - mine) / timing.count)
            row.actor_cpu_us.append(1e6 * (worker_cpu_s(gpu) - theirs) / timing.count)
        row.ask_per_s.setdefault(in_flight, []).append(per_s)
        row.submit_per_s.setdefault(in_flight, []).append(await submit_rate(gpu, message, in_flight, seconds))


async def _profile(setting: Setting) -> dict[str, list[Sampled]]:
    async with setting.service() as gpu:
        message = await placed(gpu, setting.small)
        seconds = setting.choose(5.0, 0.2)
        await rate(lambda: gpu.ask(message), _PROFILED, 0.2 * seconds)
        with sampled({"actor": actor_thread()}) as found:
            await rate(lambda: gpu.ask(message), _PROFILED, seconds)
    return found


# Tables.


def sheets(small: Small) -> Iterator[Sheet]:
    """Requests, calls, what was reached, profiles."""
    columns = ("requests", "p50 µs", "p99 µs", *(f"{n}: k/s" for n in IN_FLIGHT), "CPU µs: loop", "actor")
    yield Sheet(
        "Small convolution, through the actor",
        columns,
        tuple(cells for row in small.requests for cells in _request_rows(row)),
        "p50 and p99: the latency of one request at a time. k/s: thousands of requests a second, by requests "
        "in flight. CPU: the time of each thread that a request takes, with 64 in flight."
        f"{_WORKER_NOTE if _in(small, 'process') else ''}",
    )
    yield Sheet(
        "The same convolution, called on this thread",
        ("calls", "p50 µs", "p99 µs", "in a loop: k/s"),
        tuple(_call_row(row) for row in small.calls),
        "Latencies of a call that waits for the device each time; the loop waits at its end only.",
    )
    if any(row.name == TORCH for row in small.calls):
        yield _reached(small)
    if _in(small, "process"):
        yield _reached_apart(small)
    for thread, samples in small.profiles.items():
        yield Sheet(
            f"The {thread}'s thread, 64 in flight: samples by function",
            ("function", "% of samples", "hottest line"),
            tuple((s.function, f"{s.percent:.1f}", str(s.line)) for s in samples),
        )


def _request_rows(row: Requests) -> Iterator[tuple[str, ...]]:
    p50, p99 = median(t.p50_us for t in row.one), median(t.p99_us for t in row.one)
    for name, per_s, cpu in (
        ("ask", row.ask_per_s, (median(row.loop_cpu_us), median(row.actor_cpu_us))),
        ("submit", row.submit_per_s, (None, None)),
    ):
        latency = (p50, p99) if name == "ask" else (None, None)
        rates = (number((median(per_s[n]) or 0.0) / 1e3) for n in IN_FLIGHT)
        where = "" if row.isolation == "thread" else f", {row.isolation}"
        yield (f"{name}, {row.loop}{where}", *(number(t) for t in latency), *rates, *(number(c) for c in cpu))


def _call_row(row: Calls) -> tuple[str, ...]:
    p50, p99 = median(t.p50_us for t in row.one), median(t.p99_us for t in row.one)
    return (row.name, number(p50), number(p99), number((median(row.per_s) or 0.0) / 1e3))


def _in(small: Small, isolation: str) -> list[Requests]:
    return [row for row in small.requests if row.isolation == isolation]


def _rounds_by_loop(small: Small) -> dict[str, slice]:
    """Which of the rivals' figures are of a loop's own rounds: they went on from loop to loop."""
    found: dict[str, slice] = {}
    before = 0
    for loop, rows in itertools.groupby(small.requests, key=lambda row: row.loop):
        found[loop] = slice(before, before + len(next(rows).one))
        before = found[loop].stop
    return found


def _reached(small: Small) -> Sheet:
    public, torch = (next(row for row in small.calls if row.name == name) for name in (PUBLIC, TORCH))
    lines: dict[str, list[str]] = {
        f"{how}, 64 in flight / {rival}: at least {aim}": []
        for rival, aim in (("public execute in a loop", 2.0), ("PyTorch in a loop", 0.9))
        for how in ("ask", "submit")
    }
    lines["one at a time, p50 / PyTorch + synchronize: at most 2.5"] = []
    rows, rounds = _in(small, "thread"), _rounds_by_loop(small)
    for row in rows:
        values = [
            verdict(ratio(per_s[64], rival.per_s[rounds[row.loop]]), aim)
            for rival, aim in ((public, 2.0), (torch, 0.9))
            for per_s in (row.ask_per_s, row.submit_per_s)
        ]
        slower = ratio(_p50(row.one), _p50(torch.one[rounds[row.loop]]))
        values.append(verdict(slower, 2.5, at_least=False))
        for line, value in zip(lines.values(), values, strict=True):
            line.append(value)
    return Sheet(
        "What was aimed at",
        ("ratio", *(row.loop for row in rows)),
        tuple((name, *values) for name, values in lines.items()),
    )


def _reached_apart(small: Small) -> Sheet:
    """The aims of process isolation. Rivals that were not measured are left out."""
    rows, rounds = _in(small, "process"), _rounds_by_loop(small)
    threads = {row.loop: row for row in _in(small, "thread")}
    calls = {row.name: row for row in small.calls}
    lines: list[tuple[str, ...]] = []
    for name, rival, aim in ((PUBLIC, "public execute in a loop", 2.0), (TORCH, "PyTorch in a loop", 1.0)):
        if name in calls:
            theirs = {loop: calls[name].per_s[those] for loop, those in rounds.items()}
            lines += [
                (
                    f"{how}, 64 in flight / {rival}: at least {aim}",
                    *(verdict(ratio(per_s(row)[64], theirs[row.loop]), aim) for row in rows),
                )
                for how, per_s in _WAYS
            ]
    for how, per_s in _WAYS:
        ratios = (ratio(per_s(row)[64], per_s(threads[row.loop])[64]) for row in rows)
        lines.append((f"{how}, 64 in flight / thread isolation", *(number(value, 2) for value in ratios)))
    ratios = (ratio(_p50(row.one), _p50(threads[row.loop].one)) for row in rows)
    lines.append(("one at a time, p50 / thread isolation", *(number(value, 2) for value in ratios)))
    if TORCH in calls:
        waits = {loop: _p50(calls[TORCH].one[those]) for loop, those in rounds.items()}
        ratios = (ratio(_p50(row.one), waits[row.loop]) for row in rows)
        lines.append(("one at a time, p50 / PyTorch + synchronize", *(number(value, 2) for value in ratios)))
    columns = ("ratio", *(row.loop for row in rows))
    return Sheet("What was aimed at of process isolation", columns, tuple(lines))


def _p50(timings: list[Timing]) -> list[float]:
    return [timing.p50_us for timing in timings]


_WORKER_NOTE = " In process isolation, the second time is that of the whole worker process."
_WAYS: tuple[tuple[str, Callable[[Requests], dict[int, list[float]]]], ...] = (
    ("ask", lambda row: row.ask_per_s),
    ("submit", lambda row: row.submit_per_s),
)
