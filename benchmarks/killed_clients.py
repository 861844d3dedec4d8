"""How soon what a killed client had is freed.

    python -m benchmarks.killed_clients --out benchmarks/results

A process attaches to a service of this one, uploads arrays, and keeps requests in flight. It gets SIGKILL.
Then this process asks the service for its statistics, one time after the other, until it has no buffer and
the server no client. A row has these times in milliseconds, from just before the kill: each, their median and
the longest. They include the end of the process and one request for the statistics.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from cudnn_actor import ConvFwd, ConvSpec, connect, spawn
from cudnn_actor.attached import serve_socket

from .recording import Row, attempted, keep, table_of

__all__ = ["main"]

_ISOLATIONS: list[Literal["process", "thread"]] = ["process", "thread"]
_ARRAYS, _ARRAY_BYTES, _IN_FLIGHT = 64, 1 << 20, 64


async def hold(path: str) -> None:
    """Have buffers, and requests in flight, until this process is killed. Says when it has both."""
    async with connect(path) as gpu:
        _buffers = [await gpu.upload(np.ones(_ARRAY_BYTES // 4, np.float32)) for _ in range(_ARRAYS)]
        x = await gpu.upload(np.ones((1, 8, 16, 16), np.float32))
        w = await gpu.upload(np.ones((8, 8, 3, 3), np.float32))
        message = ConvFwd(x=x, w=w, y=await gpu.empty((1, 8, 14, 14)), conv=ConvSpec.symmetric(2))
        await gpu.ask(message)

        async def ask() -> None:
            while True:
                await gpu.ask(message)

        asking = [asyncio.ensure_future(ask()) for _ in range(_IN_FLIGHT)]
        await gpu.ask(message)
        print("ready", flush=True)
        await asyncio.gather(*asking)


async def measured(device: str, isolation: Literal["process", "thread"], kills: int) -> list[Row]:
    """The row of an isolation."""
    taken_ms, most_bytes = list[float](), 0
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/s"
        async with spawn(device=device, isolation=isolation) as gpu, serve_socket(gpu, path) as served:
            for _ in range(kills):
                command = [sys.executable, "-m", "benchmarks.killed_clients", "--hold", path]
                with subprocess.Popen(  # noqa: ASYNC220 - it is waited for on a thread
                    command, stdout=subprocess.PIPE, text=True
                ) as client:
                    try:
                        assert client.stdout is not None
                        assert await asyncio.to_thread(client.stdout.readline) == "ready\n"
                        most_bytes = max(most_bytes, (await gpu.statistics()).live_bytes)
                        begun = time.perf_counter()
                        client.send_signal(signal.SIGKILL)
                        while (await gpu.statistics()).live_buffers or served.clients:
                            pass
                        taken_ms.append(1e3 * (time.perf_counter() - begun))
                    finally:
                        client.kill()
    return [
        {
            "device": device,
            "isolation": isolation,
            "kills": kills,
            "buffers": _ARRAYS + 3,
            "live_bytes": most_bytes,
            "in_flight": _IN_FLIGHT,
            "median_ms": round(statistics.median(taken_ms), 2),
            "longest_ms": round(max(taken_ms), 2),
            "each_ms": [round(each, 2) for each in taken_ms],
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.killed_clients", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--isolations", nargs="+", choices=_ISOLATIONS, default=_ISOLATIONS)
    parser.add_argument("--kills", type=int, default=10, help="in each isolation")
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    parser.add_argument("--hold", metavar="PATH", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hold is not None:
        asyncio.run(hold(args.hold))
        return

    def rows() -> Iterator[Row]:
        for isolation in args.isolations:
            run = functools.partial(asyncio.run, measured(args.device, isolation, args.kills))
            yield from attempted(isolation, run)

    keep(
        rows(),
        lambda found: table_of("Until a killed client has nothing, ms", found),
        args.out,
        "killed_clients",
        python=platform.python_version(),
        machine=platform.machine(),
        cores=os.cpu_count(),
        load=[round(each, 1) for each in os.getloadavg()],
    )


if __name__ == "__main__":
    main()
