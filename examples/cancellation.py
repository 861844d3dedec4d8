"""Requests that are cancelled or late: what has not started never runs, and no buffer is left.

    python examples/cancellation.py

It runs on a GPU if there is one, else on the CPU.
"""

from __future__ import annotations

import asyncio

import numpy as np

from cudnn_actor import ConvFwd, ConvSpec, CudnnRef, DeadlineExceeded, spawn

DIMS = (1, 16, 128, 128)


async def main() -> None:
    """Cancel futures, let a deadline pass, and cancel a task in the middle of its work."""
    async with spawn(device="auto", isolation="process") as gpu, gpu.scope() as scope:
        x = await scope.upload(np.ones(DIMS, np.float32))
        w = await scope.upload(np.ones((16, 16, 3, 3), np.float32))
        outputs = [await scope.upload(np.zeros(DIMS, np.float32)) for _ in range(64)]
        requests = [ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2, pad=1)) for y in outputs]

        futures = [gpu.submit(request) for request in requests]
        await futures[0]
        cancelled = sum(future.cancel() for future in futures)
        await gpu.drain()  # a request that had started runs to its end
        ran = [bool((await gpu.download(y)).any()) for y in outputs]
        withdrawn = (await gpu.statistics()).withdrawn
        print(f"cancelled: {cancelled}; never ran: {ran.count(False)}; withdrawn: {withdrawn}")

        futures = [gpu.submit(request) for request in requests]
        try:
            await gpu.ask(requests[0], timeout=0.0001)  # waits behind the others
        except DeadlineExceeded as error:
            print(f"late: had started: {error.started}; may be sent again: {error.retry_safe}")
        await asyncio.gather(*futures)  # nobody else is disturbed

        before = (await gpu.statistics()).live_buffers
        begun = asyncio.Event()
        task = asyncio.create_task(work(gpu, begun))
        await begun.wait()
        task.cancel()
        await asyncio.wait([task])
        await gpu.drain()
        left = (await gpu.statistics()).live_buffers - before
        print(f"task cancelled: {task.cancelled()}; buffers left: {left}")


async def work(gpu: CudnnRef, begun: asyncio.Event) -> None:
    """Work whose buffers the scope frees, whenever it is cancelled."""
    async with gpu.scope() as scope:
        while True:
            await scope.upload(np.ones(DIMS, np.float32))
            begun.set()


if __name__ == "__main__":
    asyncio.run(main())
