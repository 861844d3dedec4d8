"""Kill the worker while requests are in flight. Their callers only see a longer wait.

    python examples/surviving_a_kill.py

SIGKILL ends a process without any cleanup. The buffers survive because the worker does not own them: this
process holds the memory by file descriptors, and the next worker maps the same memory.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter

import numpy as np

from cudnn_actor import ConvFwd, ConvSpec, CudnnRef, logging, spawn
from cudnn_actor.supervision import Restarted

FRAMES = 64


async def main() -> None:
    """Send 64 convolutions, kill the worker that runs them, and collect 64 answers."""
    rng = np.random.default_rng(0)
    frames = rng.integers(-2, 3, (FRAMES, 1, 16, 128, 128)).astype(np.float32)  # whole numbers: exact sums
    kernel = rng.integers(-2, 3, (16, 16, 3, 3)).astype(np.float32)
    conv = ConvSpec.symmetric(2, pad=1)

    async with spawn(device="auto", isolation="process") as gpu:
        w = await gpu.upload(kernel)
        inputs = [await gpu.upload(frame) for frame in frames]
        outputs = [await gpu.empty(x.spec.dims) for x in inputs]

        # The futures are there at once; nothing has been computed yet.
        requests = [ConvFwd(x=x, w=w, y=y, conv=conv) for x, y in zip(inputs, outputs, strict=True)]
        futures = [gpu.submit(request) for request in requests]
        await futures[0]  # the worker computes the others now

        pid, killed = gpu.worker_pid, time.perf_counter()
        assert pid is not None  # it has just answered
        waiting = sum(not future.done() for future in futures)
        os.kill(pid, signal.SIGKILL)
        print(f"worker {pid} killed, with {waiting} of {FRAMES} requests in flight")

        receipts = await asyncio.gather(*futures)  # no try: nothing is raised
        print(f"all {len(receipts)} answered {1e3 * (time.perf_counter() - killed):.0f} ms after the kill")
        counts = Counter(receipt.generation for receipt in receipts)
        print(f"answered by generation 1: {counts[1]}, by generation 2: {counts[2]}")
        await tell(gpu)

        # The same again, from the same buffers: nothing was uploaded twice.
        for request, y in zip(requests, outputs, strict=True):
            before = await gpu.download(y)
            await gpu.ask(request)
            assert np.array_equal(before, await gpu.download(y))
        print("every output is what the second worker finds once more, from the same buffers")


async def tell(gpu: CudnnRef) -> None:
    """Print which worker serves now, how long none did, and what was interrupted."""
    async for event in gpu.events():
        if isinstance(event, Restarted):
            print(f"worker {gpu.worker_pid} served after {1e3 * event.downtime_s:.0f} ms")
            break
    print(f"requests interrupted, and run again: {(await gpu.statistics()).replayed}")


if __name__ == "__main__":
    logging.configure()  # the services' log lines, on stderr
    asyncio.run(main())
