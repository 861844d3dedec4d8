"""The processes that the chaos harness kills: a client of its service, and a server with one of its own.

Both say `READY` in a line once they may be killed, and run until that happens. A client says in other lines
what is wrong.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import numpy as np

from cudnn_actor.attached import connect, serve_socket
from cudnn_actor.protocol import CudnnActorError, ServiceStopped
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.service.spawning import spawn

__all__ = ["READY", "main"]

READY = "ready"
_LONGEST_S = 600
"""No harness leaves it for so long."""
_HELD = (1, 1, 512, 512)


def main() -> None:
    """Be one of the two: the arguments of the program are "client" or "server", and the socket's path."""
    signal.alarm(_LONGEST_S)
    role, path = sys.argv[1:]
    asyncio.run(_serve(path) if role == "server" else _use(path))


async def _serve(path: str) -> None:
    async with spawn(device="cpu", isolation="thread") as gpu, serve_socket(gpu, path):
        print(READY, flush=True)
        await asyncio.Event().wait()


async def _use(path: str) -> None:
    """Hold buffers, and compare the results of convolutions, until the service ends."""
    values = np.random.default_rng(0).integers(-3, 4, (2, 3, 8, 8)).astype(np.float32)
    weight = np.ones((4, 3, 1, 1), np.float32)
    expected = np.repeat(values.sum(axis=1, keepdims=True), 4, axis=1)
    said = False
    async with connect(path, name="chaos client") as gpu:
        while True:
            try:
                found = await _convolve(gpu, values, weight)
            except ServiceStopped:
                return await _stay()
            except CudnnActorError:  # an injected fault: it is typed, and the next turn begins again
                continue
            if not np.array_equal(found, expected):
                print("another result:", repr(found).replace("\n", " "), flush=True)
            if not said:
                said = True
                print(READY, flush=True)


async def _convolve(gpu: CudnnRef, values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The result, with requests in flight and buffers held whenever the process is killed."""
    async with gpu.scope() as scope:
        await scope.upload(np.zeros(_HELD, np.float32))
        x, w = await scope.upload(values), await scope.upload(weight)
        results = await asyncio.gather(*[scope.conv_fwd(x, w) for _ in range(8)])
        return await scope.download(results[-1])


async def _stay() -> None:
    """Wait to be killed: the harness takes an end of its own for a mistake."""
    await asyncio.Event().wait()
