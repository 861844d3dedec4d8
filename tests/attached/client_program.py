"""A client process for tests: attaches, uploads, says so, and then does what it is told."""

from __future__ import annotations

import asyncio
import signal
import sys

import numpy as np

from cudnn_actor import ConvFwd, ConvSpec, connect

from ..patience import PATIENCE_S

X = np.arange(2 * 3 * 8 * 8, dtype=np.float32).reshape(2, 3, 8, 8)
W = np.ones((4, 3, 3, 3), np.float32)


async def hold(path: str) -> None:
    """Hold buffers and requests until it is killed."""
    gpu = await connect(path, name="held")
    x, w = await gpu.upload(X), await gpu.upload(W)
    await gpu.upload(np.zeros((256, 1024), np.float32))
    print("ready", flush=True)
    while True:
        await gpu.conv_fwd(x, w)


async def work(path: str, turns: int) -> None:
    """Run convolutions, and compare each result."""
    async with connect(path, name="working") as gpu:
        x, w = await gpu.upload(X), await gpu.upload(W)
        y = await gpu.empty((2, 4, 6, 6))
        expected = None
        print("ready", flush=True)
        for turn in range(turns):
            await gpu.fill(y, turn)
            await asyncio.gather(
                *[gpu.ask(ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))) for _ in range(8)]
            )
            values = await gpu.download(y)
            assert expected is None or np.array_equal(values, expected)
            expected = values
    print("done", flush=True)


if __name__ == "__main__":
    signal.alarm(PATIENCE_S)
    kind, where, *rest = sys.argv[1:]
    asyncio.run(hold(where) if kind == "hold" else work(where, int(rest[0])))
