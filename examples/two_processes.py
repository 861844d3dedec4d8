"""Two processes, one service: this one owns it, and another one attaches and uses it.

python examples/two_processes.py
"""

from __future__ import annotations

import asyncio
import sys
import tempfile

import numpy as np

from cudnn_actor import connect, spawn
from cudnn_actor.attached import serve_socket


async def owner() -> None:
    """Own a service, and let another process use it."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"unix:{folder}/gpu.sock"
        async with spawn(device="auto") as gpu, serve_socket(gpu, path):
            other = await asyncio.create_subprocess_exec(sys.executable, __file__, path)
            await other.wait()
            await gpu.drain()  # what the other process held is freed, though it has freed nothing itself
            print(f"the owner's service has {(await gpu.statistics()).live_buffers} buffers left")


async def user(path: str) -> None:
    """Use the service of another process."""
    async with connect(path) as gpu:
        image = await gpu.upload(np.ones((1, 3, 32, 32), np.float32))
        kernel = await gpu.upload(np.ones((8, 3, 3, 3), np.float32))
        values = await gpu.download(await gpu.conv_fwd(image, kernel))
        print(f"the user got {values.shape}, each value {values.flat[0]:.0f}, from {gpu.device}", flush=True)


if __name__ == "__main__":
    asyncio.run(user(sys.argv[1]) if len(sys.argv) > 1 else owner())
