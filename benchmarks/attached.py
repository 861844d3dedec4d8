"""A service of another process beside one of this process: one request at a time, and many.

    python -m benchmarks.attached --out benchmarks/results

On the CPU engine, whose trivial convolution (1×1×1×1) costs nearly nothing, in process isolation; the socket
is served by a process of its own. In each round both ways in turn. Rows have microseconds a request, the
median of the rounds: of one request at a time (of each round, p50), and with 64 in flight; of these also what
this process's event loop spends on each, by its thread's own clock. Beside them 200 bytes that the event loop
of another process sends back by a Unix socket: what one more process on the way costs without any work.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.table import Table

from cudnn_actor import ConvFwd, ConvSpec, CudnnRef, connect, spawn
from cudnn_actor.attached import serve_socket

from .recording import Row, attempted, keep

__all__ = ["main"]

IN_FLIGHT = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--count", type=int, default=2048, help="requests of a way in a round")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", metavar="PATH", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve))
        return

    def rows() -> Iterator[Row]:
        yield from attempted("both", lambda: asyncio.run(measured(args.rounds, args.count)))

    known = {"python": platform.python_version(), "cores": os.cpu_count(), "rounds": args.rounds}
    keep(rows(), table, args.out, "attached", **known, count=args.count)


async def serve(path: str) -> None:
    """Serve a service until standard input ends."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.echo")
        listener.listen()
        async with spawn(device="cpu", isolation="process") as gpu, serve_socket(gpu, path):
            print("serving", flush=True)
            with (await asyncio.to_thread(listener.accept))[0] as echo:
                echo.setblocking(False)
                loop.add_reader(echo.fileno(), send_back, loop, echo)
                await asyncio.to_thread(sys.stdin.read)


def send_back(loop: asyncio.AbstractEventLoop, echo: socket.socket) -> None:
    """Send back what has come, until the other side ends."""
    if data := echo.recv(1024):
        echo.send(data)
    else:
        loop.remove_reader(echo.fileno())


async def measured(rounds: int, count: int) -> list[Row]:
    """The rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/s"
        command = [sys.executable, "-m", "benchmarks.attached", "--serve", path]
        with subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as server:
            assert server.stdout is not None
            server.stdout.readline()
            async with spawn(device="cpu", isolation="process") as own, connect(path) as attached:
                with socket.socket(socket.AF_UNIX) as echo:
                    echo.connect(f"{path}.echo")
                    echo.setblocking(False)
                    found = await compared({"in process": own, "attached": attached}, echo, rounds, count)
            server.communicate()
    return found


async def compared(handles: dict[str, CudnnRef], echo: socket.socket, rounds: int, count: int) -> list[Row]:
    """The rows of these handles."""
    messages = {way: await trivial(gpu) for way, gpu in handles.items()}
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in handles}
    echoes = []
    for number in range(rounds + 1):
        echoes.append(await echoed(echo, count // 4))
        for way, gpu in handles.items():
            one = await one_by_one(gpu, messages[way], count // 4)
            each, cpu = await many(gpu, messages[way], count)
            if number:  # the first warms
                found[way].append((one, each, cpu))
    names = ("one at a time", f"{IN_FLIGHT} in flight", f"loop's CPU, {IN_FLIGHT} in flight")
    us = [round(seconds * 1e6, 1) for seconds in echoes[1:]]
    hop: Row = {"way": "echo", "what": names[0], "us": statistics.median(us), "rounds_us": us}
    return [hop] + [
        {
            "way": way,
            "what": name,
            "us": round(statistics.median(row[place] for row in rows) * 1e6, 1),
            "rounds_us": [round(row[place] * 1e6, 1) for row in rows],
        }
        for way, rows in found.items()
        for place, name in enumerate(names)
    ]


async def trivial(gpu: CudnnRef) -> ConvFwd:
    """A 1×1×1×1 convolution: all costs of a request except arithmetic."""
    x, w, y = [await gpu.upload(np.ones((1, 1, 1, 1), "float32")) for _ in range(3)]
    return ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))


async def echoed(echo: socket.socket, count: int) -> float:
    """Seconds until 200 bytes are back: the median."""
    loop, taken = asyncio.get_running_loop(), []
    back: asyncio.Future[bytes]
    loop.add_reader(echo.fileno(), lambda: back.set_result(echo.recv(1024)))
    for _ in range(count):
        begun, back = time.perf_counter(), loop.create_future()
        echo.send(bytes(200))
        await back
        taken.append(time.perf_counter() - begun)
    loop.remove_reader(echo.fileno())
    return statistics.median(taken)


async def one_by_one(gpu: CudnnRef, message: ConvFwd, count: int) -> float:
    """Seconds of a request that is awaited before the next is sent: the median."""
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        await gpu.ask(message)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


async def many(gpu: CudnnRef, message: ConvFwd, count: int) -> tuple[float, float]:
    """Seconds of a request among many, and of this thread's CPU for it."""

    async def worker() -> None:
        for _ in range(count // IN_FLIGHT):
            await gpu.ask(message)

    begun, cpu = time.perf_counter(), time.thread_time()
    await asyncio.gather(*[worker() for _ in range(IN_FLIGHT)])
    return (time.perf_counter() - begun) / count, (time.thread_time() - cpu) / count


def table(found: list[Row]) -> Table:
    """µs a request, by what and way."""
    ways = ("in process", "attached", "echo")
    shown = Table("what", *(f"{way}, us" for way in ways), title="A request")
    by_what: dict[str, dict[str, str]] = {}
    for row in found:
        by_what.setdefault(row["what"], {})[row["way"]] = f"{row['us']:.1f}"
    for what, us in by_what.items():
        shown.add_row(what, *(us.get(way, "-") for way in ways))
    return shown


if __name__ == "__main__":
    main()
