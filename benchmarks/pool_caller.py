"""A process that sends small convolutions to the members of a pool, by their sockets, for `benchmarks.pool`.

    python -m benchmarks.pool_caller SECONDS IN_FLIGHT SOCKET [SOCKET ...]

It prints "ready", begins when it is sent a line, and prints how many were answered in a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

import numpy as np

from cudnn_actor import ConvFwd, ConvSpec, CudnnRef
from cudnn_actor.attached import connect

__all__ = ["main"]


async def _message(gpu: CudnnRef) -> ConvFwd:
    x, w, y = [
        await gpu.upload(np.ones(dims, np.float32)) for dims in ((1, 8, 16, 16), (8, 8, 3, 3), (1, 8, 14, 14))
    ]
    message = ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))
    await gpu.ask(message)
    return message


async def _send(sockets: list[str], seconds: float, in_flight: int) -> float:
    async with contextlib.AsyncExitStack() as stack:
        members = [await stack.enter_async_context(connect(path, name="caller")) for path in sockets]
        messages = [await _message(gpu) for gpu in members]
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        began, answered = time.perf_counter(), 0

        async def caller(number: int) -> None:
            nonlocal answered
            gpu, message = members[number % len(members)], messages[number % len(members)]
            while time.perf_counter() < began + seconds:
                await gpu.ask(message)
                answered += 1

        await asyncio.gather(*(caller(number) for number in range(in_flight)))
        return answered / (time.perf_counter() - began)


def main() -> None:
    seconds, in_flight, *sockets = sys.argv[1:]
    print(asyncio.run(_send(sockets, float(seconds), int(in_flight))), flush=True)


if __name__ == "__main__":
    main()
