"""A process that owns a service and serves its socket, until it is killed."""

from __future__ import annotations

import asyncio
import signal
import sys

from cudnn_actor import spawn
from cudnn_actor.attached import serve_socket

from ..patience import PATIENCE_S


async def serve(path: str) -> None:
    """Serve, and say so."""
    async with spawn(device="cpu", isolation="thread") as gpu, serve_socket(gpu, path):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    signal.alarm(PATIENCE_S)
    asyncio.run(serve(sys.argv[1]))
