"""A service beside a framework that captures CUDA graphs of its own, and forbids most to others meanwhile."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cudnn_actor import ConvSpec, spawn
from cudnn_actor.options import Isolation

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_traffic_goes_on_while_another_thread_captures_and_spoils_nothing(isolation: Isolation) -> None:
    async def traffic() -> None:
        async with spawn(device="cuda:0", isolation=isolation) as gpu:
            x = await gpu.upload(np.ones((1, 4, 8, 8), np.float32))
            w = await gpu.upload(np.ones((4, 4, 1, 1), np.float32))
            await gpu.conv_fwd(x, w, conv=ConvSpec.symmetric(2))
            for _ in range(5):
                captured = asyncio.create_task(asyncio.to_thread(_capture_and_replay))
                while not captured.done():
                    y = await gpu.conv_fwd(x, w, conv=ConvSpec.symmetric(2))
                    assert (await gpu.download(y) == 4.0).all()
                    await gpu.free(y)
                assert await captured == 2.0**1000

    asyncio.run(traffic())


def _capture_and_replay() -> float:
    values = torch.ones(1024, device="cuda", dtype=torch.float64)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(1000):
            values.mul_(2.0)
    graph.replay()
    torch.cuda.synchronize()
    return float(values[0])
