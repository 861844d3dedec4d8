"""`python -m benchmarks.two_gpus`: a service on each of two devices, in one event loop and on two threads.

Small convolutions, 64 in flight on each service, in process isolation: first each alone, then both at once.
Then one service's worker is killed, again and again, while both are under load: how long the other's slowest
request takes in the 300 ms after a kill, and in the 300 ms before it. Once as it is, and once with what is
there at the start kept from the interpreter's garbage collector (`gc.freeze`), whose longest pause is said.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cudnn_actor import ConvFwd, ConvSpec, CudnnRef, spawn
from cudnn_actor.trials.bench.record import machine, now, versions

_IN_FLIGHT = 64
_PACKAGES = ("numpy", "pykka", "msgspec", "cupy-cuda13x", "nvidia-cudnn-frontend")
_KILLED_AFTER_S, _LOOKED_AT_S, _PAUSE_S = 0.5, 0.3, 0.7


class Together(msgspec.Struct, kw_only=True):
    """Requests a second, a number a round: each device alone, and both at once."""

    alone: dict[str, list[float]] = {}
    both: dict[str, list[float]] = {}


class Kills(msgspec.Struct, kw_only=True):
    """Slowest requests of the service whose worker is not killed, a number a kill, in ms."""

    behind_ms: list[float] = []
    before_ms: list[float] = []
    collector_ms: float = 0.0
    """The longest pause of the garbage collector, all the while."""


class Report(msgspec.Struct, kw_only=True):
    """All of a run."""

    date: str
    devices: list[str]
    machine: dict[str, Any]
    versions: dict[str, str]
    one_loop: Together
    two_loops: Together
    kills: Kills
    kills_frozen: Kills


class Load:
    """64 senders of one convolution on one service.

    Parameters
    ----------
    gpu
        The service.
    message
        What is sent again and again.
    """

    def __init__(self, gpu: CudnnRef, message: ConvFwd) -> None:
        self.gpu = gpu
        self.message = message
        self.answered = 0
        self._slowest: dict[int, float] = {}
        """Hundredths of a second → the seconds of the slowest request that was answered in it. A list of all
        requests would grow until the collector's look through it were the slowest of them."""
        self._ends = False

    @classmethod
    async def on(cls, gpu: CudnnRef) -> Load:
        """Buffers for it, and its plan."""
        x = await gpu.upload(np.ones((1, 8, 16, 16), np.float32))
        w = await gpu.upload(np.ones((8, 8, 3, 3), np.float32))
        y = await gpu.empty((1, 8, 14, 14))
        message = ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))
        await gpu.ask(message)
        return cls(gpu, message)

    async def run(self, seconds: float) -> float:
        """Requests a second, over so many."""
        self._ends, before, began = False, self.answered, time.perf_counter()
        senders = [asyncio.create_task(self._send()) for _ in range(_IN_FLIGHT)]
        await asyncio.sleep(seconds)
        rate = (self.answered - before) / (time.perf_counter() - began)
        self._ends = True
        await asyncio.gather(*senders)
        return rate

    async def _send(self) -> None:
        ask, message = self.gpu.ask, self.message
        while not self._ends:
            began = time.perf_counter()
            await ask(message)
            ended = time.perf_counter()
            self.answered += 1
            hundredth = int(100 * ended)
            if ended - began > self._slowest.get(hundredth, 0.0):
                self._slowest[hundredth] = ended - began

    def slowest_ms(self, since: float, until: float) -> float:
        """The longest time of a request that was answered in between, in ms."""
        hundredths = range(int(100 * since), int(100 * until) + 1)
        return 1e3 * max(self._slowest.get(at, 0.0) for at in hundredths)


async def _in_one_loop(devices: list[str], seconds: float, rounds: int) -> Together:
    found = Together()
    async with (
        spawn(device=devices[0], isolation="process", name="left") as left,
        spawn(device=devices[1], isolation="process", name="right") as right,
    ):
        loads = dict(zip(("left", "right"), (await Load.on(left), await Load.on(right)), strict=True))
        for _ in range(rounds):
            for name, load in loads.items():
                found.alone.setdefault(name, []).append(await load.run(seconds))
            both = await asyncio.gather(*[load.run(seconds) for load in loads.values()])
            for name, rate in zip(loads, both, strict=True):
                found.both.setdefault(name, []).append(rate)
    return found


def _in_two_loops(devices: list[str], seconds: float, rounds: int) -> Together:
    found = Together()
    gate = threading.Barrier(2)

    async def work(name: str, device: str, turn: int) -> None:
        async with spawn(device=device, isolation="process", name=name) as gpu:
            load = await Load.on(gpu)
            for _ in range(rounds):
                for whose in (0, 1):
                    await asyncio.to_thread(gate.wait)
                    if whose == turn:
                        found.alone.setdefault(name, []).append(await load.run(seconds))
                await asyncio.to_thread(gate.wait)
                found.both.setdefault(name, []).append(await load.run(seconds))

    _on_threads([work(name, device, turn) for turn, (name, device) in enumerate(_named(devices))])
    return found


@contextlib.contextmanager
def _timed_collector(found: Kills) -> Iterator[None]:
    began = 0.0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            found.collector_ms = max(found.collector_ms, 1e3 * (time.perf_counter() - began))

    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)


async def _kills(devices: list[str], kills: int, *, freeze: bool) -> Kills:
    found = Kills()
    async with (
        spawn(device=devices[0], isolation="process", name="left", max_restarts=10 * kills) as left,
        spawn(device=devices[1], isolation="process", name="right") as right,
    ):
        killed_one, watched = await Load.on(left), await Load.on(right)
        seconds = kills * (_KILLED_AFTER_S + _LOOKED_AT_S + _PAUSE_S) + 1.0
        if freeze:
            gc.collect()
            gc.freeze()
        with _timed_collector(found):
            running = asyncio.gather(killed_one.run(seconds), watched.run(seconds))
            for _ in range(kills):
                await asyncio.sleep(_KILLED_AFTER_S)
                pid = left.worker_pid
                if pid is not None:
                    killed = time.perf_counter()
                    os.kill(pid, signal.SIGKILL)
                    await asyncio.sleep(_LOOKED_AT_S)
                    found.behind_ms.append(watched.slowest_ms(killed, killed + _LOOKED_AT_S))
                    found.before_ms.append(watched.slowest_ms(killed - _LOOKED_AT_S, killed))
                await asyncio.sleep(_PAUSE_S)
            await running
        gc.unfreeze()
    return found


def _named(devices: list[str]) -> list[tuple[str, str]]:
    return list(zip(("left", "right"), devices, strict=True))


def _on_threads(works: list[Coroutine[Any, Any, None]]) -> None:
    failures: list[BaseException] = []

    def run(work: Coroutine[Any, Any, None]) -> Callable[[], None]:
        def on_thread() -> None:
            try:
                asyncio.run(work)
            except BaseException as error:  # noqa: BLE001 - said by the main thread
                failures.append(error)

        return on_thread

    threads = [threading.Thread(target=run(work)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def main() -> None:
    """Measure, print, and write the numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_gpus", description=__doc__)
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"], metavar="DEVICE")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the numbers there, as JSON")
    args = parser.parse_args()
    report = Report(
        date=now(),
        devices=args.devices,
        machine=machine(),
        versions=versions(_PACKAGES),
        one_loop=asyncio.run(_in_one_loop(args.devices, args.seconds, args.rounds)),
        two_loops=_in_two_loops(args.devices, args.seconds, args.rounds),
        kills=asyncio.run(_kills(args.devices, args.kills, freeze=False)),
        kills_frozen=asyncio.run(_kills(args.devices, args.kills, freeze=True)),
    )
    for name, found in (("one loop", report.one_loop), ("two threads' loops", report.two_loops)):
        for kind, rates in (("alone", found.alone), ("both at once", found.both)):
            said = ", ".join(f"{who} {statistics.median(each):,.0f}/s" for who, each in rates.items())
            print(f"{name}, {kind}: {said}")
    for name, kills in (("as it is", report.kills), ("gc.freeze", report.kills_frozen)):
        print(f"slowest of the other, {name}:")
        for when, took in (("behind a kill", kills.behind_ms), ("before it", kills.before_ms)):
            print(f"  {when}: median {statistics.median(took):.1f} ms, at most {max(took):.1f} ms")
        print(f"  longest pause of the collector: {kills.collector_ms:.1f} ms")
    if args.out is not None:
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))


if __name__ == "__main__":
    main()
