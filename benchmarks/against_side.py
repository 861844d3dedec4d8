"""One side of `against`: measures slices on request, with what every release has."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from typing import Any, TextIO

import numpy as np

from cudnn_actor import ConvFwd, ConvSpec, CudnnRef, spawn

try:
    from cudnn_actor.messages import Ping
except ModuleNotFoundError:  # checkouts of before 27 November 2026
    from cudnn_actor import Ping  # type: ignore[attr-defined, no-redef]


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


def pin(threads: str, worker: int | None) -> None:
    """Keep the loop's thread on one core, and all others, the worker's too, there or on another ("two")."""
    cores = sorted(os.sched_getaffinity(0))
    other = {cores[-1] if threads == "two" else cores[0]}
    here = threading.get_native_id()
    for process in filter(None, (os.getpid(), worker)):
        for name in os.listdir(f"/proc/{process}/task"):
            os.sched_setaffinity(int(name), {cores[0]} if int(name) == here else other)


async def main(answers: TextIO, threads: str) -> None:
    async with (
        spawn(device="cpu", isolation="thread") as thread,
        spawn(device="cpu", isolation="process") as process,
    ):
        services = {
            "thread": (thread, await requests_of(thread)),
            "process": (process, await requests_of(process)),
        }
        if threads != "free":
            pin(threads, process.worker_pid)
        while line := await asyncio.to_thread(sys.stdin.readline):
            isolation, request, in_flight, seconds = line.split()
            gpu, requests = services[isolation]
            per_s = await rate(gpu, requests[request], int(in_flight), float(seconds))
            print(per_s, file=answers, flush=True)


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # where some releases print log lines
    if sys.argv[1] == "uvloop":
        import uvloop

        uvloop.run(main(answers, sys.argv[2]))
    else:
        asyncio.run(main(answers, sys.argv[2]))
