"""`python -m benchmarks.floor`: what a request to another process costs on asyncio at least.

The least that any such design needs, with nothing else: 64 tasks, a future for each request, a number that
finds it again, requests and answers as frames of packed numbers on a socket pair, so many in a frame as ours
has, and a process that sends each frame back. Then a ping and a convolution of a service in process
isolation, in turns with it. CPU time of the loop's thread for each request, and of the other process.

Then, in a measurement of its own, the functions of the loop's thread by their share of it. At the end pings,
one and 64 in flight, while the loop owns the worker's socket, and again after a pykka caller has asked, so
that it is shared.

On the CPU engine the other process computes the convolution too. With `--device cuda:0` it launches it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np

from cudnn_actor import ConvFwd, ConvSpec, spawn
from cudnn_actor.messages import Ping
from cudnn_actor.trials.bench.record import machine, now, versions

_IN_FLIGHT, _GATHERED = 64, 21
_FRAME = 65536
_SAMPLED_S = 0.0007
_NAMES = ("floor", "ping", "convolution", "ping, one", "ping, 64", "ping, one, shared", "ping, 64, shared")
_PACKAGES = ("numpy", "pykka", "msgspec")
_ECHO = """
import socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
while frame := connection.recv(65536):
    connection.send(frame)
"""


class Cost(msgspec.Struct, kw_only=True):
    """The cost of one kind of request, a number for each round."""

    per_s: list[float] = []
    loop_us: list[float] = []
    """CPU time of the event loop's thread for each request, in microseconds."""
    other_us: list[float] = []
    """The same of the other process."""


class Report(msgspec.Struct, kw_only=True):
    """The record of a run."""

    date: str
    device: str
    machine: dict[str, Any]
    versions: dict[str, str]
    costs: dict[str, Cost]
    functions: dict[str, float]
    """Of the loop's thread, under convolutions: per cent of its CPU time, by a signal every 0.7 ms of it."""


class Echo:
    """Asks a process that sends every frame back. On one event loop; close it when all is answered."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptor = other.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ECHO, str(descriptor)], pass_fds=(descriptor,)
        )
        other.close()
        self.pid = self._process.pid
        self._loop = asyncio.get_running_loop()
        self._futures: dict[int, asyncio.Future[None]] = {}
        self._unsent: list[int] = []
        self._number = 0
        self._loop.add_reader(self._socket.fileno(), self._read)

    async def ask(self) -> None:
        """Send one request, and wait for its answer."""
        self._number = number = self._number + 1
        self._futures[number] = future = self._loop.create_future()
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(number)
        if len(self._unsent) >= _GATHERED:
            self._send()
        await future

    def _send(self) -> None:
        numbers, self._unsent = self._unsent, []
        if numbers:
            self._socket.send(struct.pack(f"{len(numbers)}Q", *numbers))

    def _read(self) -> None:
        frame = self._socket.recv(_FRAME)
        for number in struct.unpack(f"{len(frame) // 8}Q", frame):
            self._futures.pop(number).set_result(None)

    def close(self) -> None:
        """End the process."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._process.wait()


async def _measured(
    ask: Callable[[], Awaitable[object]], pid: int, seconds: float, cost: Cost, in_flight: int = _IN_FLIGHT
) -> None:
    """Measure so many seconds of tasks, one for each request in flight, that ask one at a time."""
    clock = (~pid << 3) | 2  # Linux: the CPU time of all threads of a process
    until, asked = time.perf_counter() + seconds, 0

    async def sender() -> None:
        nonlocal asked
        while time.perf_counter() < until:
            await ask()
            asked += 1

    began, mine, other = time.perf_counter(), time.thread_time(), time.clock_gettime(clock)
    await asyncio.gather(*[sender() for _ in range(in_flight)])
    cost.per_s.append(asked / (time.perf_counter() - began))
    cost.loop_us.append(1e6 * (time.thread_time() - mine) / asked)
    cost.other_us.append(1e6 * (time.clock_gettime(clock) - other) / asked)


async def measure(device: str, seconds: float, rounds: int) -> tuple[dict[str, Cost], dict[str, float]]:
    """The floor, a ping and a convolution, in turns; then what the loop's thread does under convolutions."""
    costs = {name: Cost() for name in _NAMES}
    async with spawn(device=device, isolation="process") as gpu:
        x = await gpu.upload(np.ones((1, 8, 16, 16), np.float32))
        w = await gpu.upload(np.ones((8, 8, 3, 3), np.float32))
        message = ConvFwd(x=x, w=w, y=await gpu.empty((1, 8, 14, 14)), conv=ConvSpec.symmetric(2))
        ping = Ping()
        await gpu.ask(message)
        echo, worker = Echo(), gpu.worker_pid
        assert worker is not None
        for _ in range(rounds):
            await _measured(echo.ask, echo.pid, seconds, costs["floor"])
            await _measured(lambda: gpu.ask(ping), worker, seconds, costs["ping"])
            await _measured(lambda: gpu.ask(message), worker, seconds, costs["convolution"])
        echo.close()
        with _sampled() as functions:
            await _measured(lambda: gpu.ask(message), worker, 12 * seconds, Cost())
        for owner in ("", ", shared"):
            if owner:
                await asyncio.to_thread(gpu.actor_ref.ask, ping)  # from here on the monitor owns the socket
            for _ in range(rounds):
                one, many = costs[f"ping, one{owner}"], costs[f"ping, 64{owner}"]
                await _measured(lambda: gpu.ask(ping), worker, seconds, one, 1)
                await _measured(lambda: gpu.ask(ping), worker, seconds, many)
    return costs, {name: 100 * count / functions.total() for name, count in functions.most_common()}


@contextlib.contextmanager
def _sampled() -> Iterator[Counter[str]]:
    functions: Counter[str] = Counter()

    def note(_number: int, frame: FrameType | None) -> None:
        assert frame is not None
        code = frame.f_code
        functions[f"{Path(code.co_filename).name} {code.co_qualname}"] += 1

    before = signal.signal(signal.SIGPROF, note)
    signal.setitimer(signal.ITIMER_PROF, _SAMPLED_S, _SAMPLED_S)
    try:
        yield functions
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def main() -> None:
    """Measure, print, and write the numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floor", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the numbers there, as JSON")
    args = parser.parse_args()
    costs, functions = asyncio.run(measure(args.device, args.seconds, args.rounds))
    for name, cost in costs.items():
        rate, loop, other = (statistics.median(each) for each in (cost.per_s, cost.loop_us, cost.other_us))
        print(f"{name:17} {rate:9,.0f}/s  loop's thread {loop:5.1f} us, the other process {other:5.1f} us")
    for name, percent in list(functions.items())[:24]:
        print(f"{percent:5.1f} %  {name}")
    if args.out is not None:
        report = Report(
            date=now(),
            device=args.device,
            machine=machine(),
            versions=versions(_PACKAGES),
            costs=costs,
            functions=functions,
        )
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))


if __name__ == "__main__":
    main()
