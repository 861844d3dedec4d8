"""A service of another process beside one of this process, and the least that one more process costs.

    python -m benchmarks.attached --devices cpu cuda:0 --out benchmarks/results

A small convolution, on the CPU the smallest (1×1×1×1), in process isolation; the socket is served by a
process of its own. On a GPU also a product that takes it some 0.3 ms. All ways in turn in each round. Rows
have microseconds a request, the median of the rounds:

- `one at a time` (of each round, p50): in process; attached; attached to a server whose loop sleeps whenever
  it may, which is all the same where it never stays awake. Beside them the floor (`benchmarks.relayed`): a
  process that only answers, asked directly, and by a relay that passes the bytes on, on an event loop that
  sleeps, and on one that stays awake. The process that answers waits as the worker of the device does.
- `above`: of each round, the difference to the same without the process on the way; and how many per cent of
  it the floor is, with a relay that sleeps or stays awake as the server does.
- `64 in flight`, and what this process's event loop spends on each, by its thread's own clock. The part
  `flight` has only this, by `ask` and by `submit`, beside the least: `floor: a callback` asks nobody. A
  callback of the loop sets the results of the futures that callers await.
- `CPU`, one at a time: of this process's event loop, and of the process on the way.
- `stages`: when a request reaches each stage, one at a time, in microseconds since it was asked: medians.
  Stamps take a microsecond each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from cudnn_actor import ConvFwd, ConvSpec, CudnnRef, connect, spawn
from cudnn_actor.attached import serve_socket
from cudnn_actor.isolation.process.cores import may_keep_one_busy
from cudnn_actor.service import Spawning

from .recording import Row, attempted, keep
from .relayed import Relayed
from .stages import stages_of
from .stages_side import STAMPS, stamped_caller, stamped_server, stamped_service

__all__ = ["main"]

IN_FLIGHT = 64
_WARM = 64
_ONE, _ABOVE = "one at a time", "above"
_DIRECT, _RELAY, _AWAKE = "floor: direct", "floor: relay", "floor: relay, awake"
_CALLBACK = "floor: a callback"
_OWN, _ATTACHED, _ASLEEP = "in process", "attached", "attached, asleep"
_BELOW = {_RELAY: _DIRECT, _AWAKE: _DIRECT, _ATTACHED: _OWN, _ASLEEP: _OWN}
_FLOOR_OF = {_ATTACHED: _AWAKE if may_keep_one_busy() else _RELAY, _ASLEEP: _RELAY}
Ask = Callable[[], Awaitable[object]]
Make = Callable[[CudnnRef], Awaitable[ConvFwd]]
Found = defaultdict[tuple[str, str, str], list[float]]
"""Seconds by request, way and what was measured."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", nargs="+", default=["cpu"])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--count", type=int, default=2048, help="requests of a way in a round")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=["requests", "stages"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs=3, metavar=("DEVICE", "PATH", "STAMPS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(*args.serve))
        return

    def rows() -> Iterator[Row]:
        for device in args.devices:
            for part in args.parts:
                run = functools.partial(asyncio.run, _PARTS[part](device, args.rounds, args.count))
                yield from attempted(f"{device}, {part}", run)

    known = {"python": platform.python_version(), "cores": os.cpu_count(), "rounds": args.rounds}
    known["awake"] = may_keep_one_busy()
    keep(rows(), table, args.out, "attached", **known, count=args.count)


async def serve(device: str, path: str, stamps: str) -> None:
    """Serve a service until standard input ends. Lines on it say whether loops may stay awake from there on.

    If `stamps` is not empty, it is the folder for the stamps.
    """
    async with contextlib.AsyncExitStack() as ends:
        if stamps:
            ends.enter_context(stamped_server(Path(stamps)))
            service = stamped_service(device, Path(stamps))
            gpu = await ends.enter_async_context(Spawning(service))
        else:
            gpu = await ends.enter_async_context(spawn(device=device, isolation="process"))
        await ends.enter_async_context(serve_socket(gpu, path))
        mailbox = gpu._service.state.mailbox
        may_stay_awake = mailbox.loops_may_stay_awake
        print("serving", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            mailbox.loops_may_stay_awake = may_stay_awake and line != "asleep\n"
            print("so", flush=True)


@contextlib.asynccontextmanager
async def served(device: str, path: str, stamps: str = "") -> AsyncIterator[subprocess.Popen[str]]:
    """A process that serves."""
    command = [sys.executable, "-m", "benchmarks.attached", "--serve", device, path, stamps]
    with subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        try:
            yield server
        finally:
            server.communicate()


def let(server: subprocess.Popen[str], be: str) -> None:
    """See `Sides.let_server`."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(f"{be}\n")
    server.stdin.flush()
    server.stdout.readline()


@dataclass
class Sides:
    """The handles and the processes that are compared."""

    own: CudnnRef
    attached: CudnnRef
    server: subprocess.Popen[str]
    relayed: dict[str, Relayed]

    @property
    def between(self) -> dict[str, int]:
        """The process id of the process on the way, for each way with one."""
        relays = {way: each.relay_pid for way, each in self.relayed.items() if each.relay_pid}
        return {**relays, _ATTACHED: self.server.pid, _ASLEEP: self.server.pid}

    def let_server(self, be: str) -> None:
        """Have the loop of the server sleep whenever it may ("asleep"), or behave as it does ("awake")."""
        let(self.server, be)

    async def ways(self, make: Make, *, floor: bool) -> dict[str, Ask]:
        """What sends a request, for each way."""
        ways: dict[str, Ask] = {way: each.ask for way, each in self.relayed.items()} if floor else {}
        ways[_OWN] = asking(self.own, await make(self.own))
        ways[_ATTACHED] = ways[_ASLEEP] = asking(self.attached, await make(self.attached))
        return ways


async def measured(device: str, rounds: int, count: int) -> list[Row]:
    """The rows of a device, but for the stages."""
    looks = device != "cpu" and may_keep_one_busy()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/s"
        async with (
            served(device, path) as server,
            spawn(device=device, isolation="process") as own,
            connect(path) as attached,
        ):
            relayed = {
                way: Relayed(kind, looks=looks)
                for way, kind in ((_DIRECT, "direct"), (_RELAY, "relay"), (_AWAKE, "awake"))
            }
            try:
                return await compared(device, Sides(own, attached, server, relayed), rounds, count)
            finally:
                for each in relayed.values():
                    each.close()


async def compared(device: str, sides: Sides, rounds: int, count: int) -> list[Row]:
    """The rows of these handles and processes."""
    found: Found = defaultdict(list)
    for what, make in messages_for(device).items():
        ways = await sides.ways(make, floor=what == "small")
        for number in range(rounds + 1):
            round_found: Found = defaultdict(list)
            for way, ask in ways.items():
                sides.let_server("asleep" if way == _ASLEEP else "awake")
                await one_by_one(ask, sides.between.get(way), count // 4, round_found, (what, way))
            for way, below in _BELOW.items():
                if way in ways:
                    above = round_found[what, way, _ONE][0] - round_found[what, below, _ONE][0]
                    round_found[what, way, _ABOVE].append(above)
            for way in (_OWN, _ATTACHED) if what == "small" else ():
                await many(ways[way], count, round_found, (what, way))
            for key, seconds in round_found.items() if number else ():  # the first warms
                found[key] += seconds
    rows = rows_of(device, found)
    return [*rows, *shares(rows)]


def rows_of(device: str, found: Found) -> list[Row]:
    """Rows with the medians of rounds, and with all rounds."""
    return [
        {
            "device": device,
            "request": what,
            "way": way,
            "what": name,
            "us": round(statistics.median(seconds) * 1e6, 1),
            "rounds_us": [round(each * 1e6, 1) for each in seconds],
        }
        for (what, way, name), seconds in found.items()
    ]


def shares(rows: list[Row]) -> list[Row]:
    """Rows with the floor's per cent of what an attached process takes above."""
    above = {row["way"]: row for row in rows if row["what"] == _ABOVE and row["request"] == "small"}
    return [
        {
            "device": above[way]["device"],
            "request": "small",
            "way": way,
            "what": "the floor's share of above, %",
            "percent": round(100 * above[relay]["us"] / above[way]["us"], 1),
        }
        for way, relay in _FLOOR_OF.items()
    ]


def messages_for(device: str) -> dict[str, Make]:
    """What is asked of a device."""
    return {"small": trivial} if device == "cpu" else {"small": few_channels, "long": product}


def asking(gpu: CudnnRef, message: ConvFwd) -> Ask:
    """Sends the message."""
    return lambda: gpu.ask(message)


async def trivial(gpu: CudnnRef) -> ConvFwd:
    """A 1×1×1×1 convolution: all costs of a request except arithmetic."""
    x, w, y = [await gpu.upload(np.ones((1, 1, 1, 1), "float32")) for _ in range(3)]
    return ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))


async def few_channels(gpu: CudnnRef) -> ConvFwd:
    """A 3×3 convolution of 8 channels, which takes a GPU some microseconds."""
    x = await gpu.upload(np.ones((1, 8, 16, 16), "float32"))
    w = await gpu.upload(np.ones((8, 8, 3, 3), "float32"))
    return ConvFwd(x=x, w=w, y=await gpu.empty((1, 8, 14, 14)), conv=ConvSpec.symmetric(2))


async def product(gpu: CudnnRef) -> ConvFwd:
    """A product of 2,048 × 2,048 values each."""
    x = await gpu.upload(np.ones((1, 2048, 32, 64), "float32"))
    w = await gpu.upload(np.ones((2048, 2048, 1, 1), "float32"))
    return ConvFwd(x=x, w=w, y=await gpu.empty((1, 2048, 32, 64)), conv=ConvSpec.symmetric(2))


async def one_by_one(ask: Ask, between: int | None, count: int, found: Found, of: tuple[str, str]) -> None:
    """Seconds of a request that is awaited before the next is sent, the median; and of each, the mean: CPU of
    this thread, and of the process between."""
    clock = (
        None if between is None else (~between << 3) | 2
    )  # Linux: the CPU time of all threads of a process
    taken = []
    for _ in range(_WARM):
        await ask()
    cpu, other = time.thread_time(), 0.0 if clock is None else time.clock_gettime(clock)
    for _ in range(count):
        begun = time.perf_counter()
        await ask()
        taken.append(time.perf_counter() - begun)
    found[(*of, "CPU of the caller's loop")].append((time.thread_time() - cpu) / count)
    if clock is not None:
        found[(*of, "CPU of the process between")].append((time.clock_gettime(clock) - other) / count)
    found[(*of, _ONE)].append(statistics.median(taken))


async def many(ask: Ask, count: int, found: Found, of: tuple[str, str]) -> None:
    """Seconds of a request among many, and of this thread's CPU for it."""

    async def worker() -> None:
        for _ in range(count // IN_FLIGHT):
            await ask()

    begun, cpu = time.perf_counter(), time.thread_time()
    await asyncio.gather(*[worker() for _ in range(IN_FLIGHT)])
    found[(*of, f"{IN_FLIGHT} in flight")].append((time.perf_counter() - begun) / count)
    found[(*of, f"loop's CPU, {IN_FLIGHT} in flight")].append((time.thread_time() - cpu) / count)


def asking_nobody() -> Ask:
    """A coroutine function whose results a callback of the loop sets, for all callers that wait then."""
    loop = asyncio.get_running_loop()
    waiting: list[asyncio.Future[None]] = []

    def answer() -> None:
        answered, waiting[:] = tuple(waiting), ()
        for future in answered:
            future.set_result(None)

    async def ask() -> None:
        if not waiting:
            loop.call_soon(answer)
        future: asyncio.Future[None] = asyncio.Future(loop=loop)
        waiting.append(future)
        await future

    return ask


async def in_flight(device: str, rounds: int, count: int) -> list[Row]:
    """The rows of many requests in flight, by `ask` and by `submit`."""
    found: Found = defaultdict(list)
    make = messages_for(device)["small"]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/s"
        async with (
            served(device, path),
            spawn(device=device, isolation="process") as own,
            connect(path) as attached,
        ):
            messages = [(way, gpu, await make(gpu)) for way, gpu in ((_OWN, own), (_ATTACHED, attached))]
            ask_nobody = asking_nobody()
            for number in range(rounds + 1):
                for way, gpu, message in messages:
                    into: Found = defaultdict(list) if number == 0 else found  # the first warms
                    await many(asking(gpu, message), count, into, ("small", way))
                    await many(functools.partial(gpu.submit, message), count, into, ("small, by submit", way))
                await many(ask_nobody, count, into, ("small", _CALLBACK))
    return rows_of(device, found)


# Stages.


async def staged(device: str, _rounds: int, count: int) -> list[Row]:
    """A row for each way, with its stages."""
    make = messages_for(device)["small"]
    looks = device != "cpu" and may_keep_one_busy()
    found = []
    for way, kind in ((_DIRECT, "direct"), (_RELAY, "relay")):
        with tempfile.TemporaryDirectory() as name:
            relayed = Relayed(kind, looks=looks, folder=Path(name))
            for _ in range(count):
                await relayed.ask()
            relayed.close()
            found.append(stages_row(device, way, relayed.stamps, Path(name)))
    with stamped_caller():
        with tempfile.TemporaryDirectory() as name:
            async with Spawning(stamped_service(device, Path(name))) as own:
                stamps = await stamps_of(own, make, count)
            found.append(stages_row(device, _OWN, stamps, Path(name)))
        for way, be in ((_ATTACHED, "awake"), (_ASLEEP, "asleep")):
            with tempfile.TemporaryDirectory() as name:
                path = f"{name}/s"
                async with served(device, path, name) as server, connect(path) as attached:
                    let(server, be)
                    stamps = await stamps_of(attached, make, count)
                found.append(stages_row(device, way, stamps, Path(name)))
    return found


async def stamps_of(gpu: CudnnRef, make: Make, count: int) -> list[tuple[int, str]]:
    """The stamps of requests, of this process."""
    message = await make(gpu)
    for _ in range(_WARM):
        await gpu.ask(message)
    STAMPS.clear()
    for _ in range(count):
        await gpu.ask(message)
        STAMPS.append((time.perf_counter_ns(), "answered"))
    return list(STAMPS)


_PARTS: dict[str, Callable[[str, int, int], Coroutine[Any, Any, list[Row]]]] = {
    "requests": measured,
    "flight": in_flight,
    "stages": staged,
}


def stages_row(device: str, way: str, stamps: list[tuple[int, str]], folder: Path) -> Row:
    """A row with the stages, by these stamps and those in the folder."""
    others: list[Any] = [each for one in folder.glob("*.json") for each in json.loads(one.read_text())]
    return {"device": device, "way": way, "what": "stages", "stages_us": stages_of([*stamps, *others])}


# The table.


def table(found: list[Row]) -> Table:
    """µs a request, by what and way."""
    ways = (_DIRECT, _RELAY, _AWAKE, _CALLBACK, _OWN, _ATTACHED, _ASLEEP)
    shown = Table("device", "request", "what", *ways, title="A request, us")
    by_what: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    for row in found:
        if "us" in row or "percent" in row:
            cells = by_what[row["device"], row["request"], row["what"]]
            cells[row["way"]] = f"{row.get('us', row.get('percent')):.1f}"
    for what, us in by_what.items():
        shown.add_row(*what, *(us.get(way, "-") for way in ways))
    for row in found:
        if "stages_us" in row:
            stages = list(row["stages_us"].items())
            befores = [0.0, *(at for _, at in stages)]
            steps = itertools.starmap(
                lambda stage, before: f"{stage[0]} +{stage[1] - before:.1f}",
                zip(stages, befores, strict=False),
            )
            shown.caption = (
                f"{shown.caption or ''}\n{row['device']}, {row['way']}: {'; '.join(steps)}".strip()
            )
    return shown


if __name__ == "__main__":
    main()
