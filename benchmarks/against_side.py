"""One side of `against`: measures slices on request, with what every release has."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any, TextIO

import numpy as np

from cudnn_actor import ConvFwd, ConvSpec, CudnnRef, Ping, spawn


async def requests_of(gpu: CudnnRef) -> dict[str, Any]:
    one = np.ones((1, 1, 1, 1), "float32")
    x, w, y = await gpu.upload(one), await gpu.upload(one), await gpu.empty((1, 1, 1, 1))
    return {"ping": Ping(), "convolution": ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))}


async def rate(gpu: CudnnRef, message: Any, in_flight: int, seconds: float) -> float:
    """Requests that were answered per second."""
    began = time.perf_counter()
    until, count = began + seconds, 0

    async def sender() -> None:
        nonlocal count
        while time.perf_counter() < until:
            await gpu.ask(message)
            count += 1

    await asyncio.gather(*(sender() for _ in range(in_flight)))
    return count / (time.perf_counter() - began)


async def main(answers: TextIO) -> None:
    async with (
        spawn(device="cpu", isolation="thread") as thread,
        spawn(device="cpu", isolation="process") as process,
    ):
        services = {
            "thread": (thread, await requests_of(thread)),
            "process": (process, await requests_of(process)),
        }
        while line := await asyncio.to_thread(sys.stdin.readline):
            isolation, request, in_flight, seconds = line.split()
            gpu, requests = services[isolation]
            per_s = await rate(gpu, requests[request], int(in_flight), float(seconds))
            print(per_s, file=answers, flush=True)


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # where some releases print log lines
    if sys.argv[1] == "uvloop":
        import uvloop

        uvloop.run(main(answers))
    else:
        asyncio.run(main(answers))
