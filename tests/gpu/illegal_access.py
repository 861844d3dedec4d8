"""A kernel that writes to an illegal address while a service is busy, and what became of everybody.

Run as a program, because nothing on this GPU works in the process that did it:

    python -m tests.gpu.illegal_access

It prints its verdict as one line of JSON, and ends by itself.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
from typing import Any

import numpy as np

import cudnn_actor.logging
from cudnn_actor import BufferRef, ConvFwd, ConvSpec, CudnnRef, Receipt, ServiceStopped, StaleBufferError
from cudnn_actor.messages import Upload
from cudnn_actor.options import make_options
from cudnn_actor.service import Spawning
from cudnn_actor.service.service import CudnnService

TASKS, BEFORE, WITHIN_S = 64, 500, 30.0
SAME = ConvSpec.symmetric(2, pad=1)


class Traffic:
    """Tasks that ask one thing after another until they get an error; what each got, in the order it came."""

    def __init__(self, gpu: CudnnRef) -> None:
        self._gpu = gpu
        self.ends: list[str] = []
        self.flowing = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        self.buffers: list[BufferRef] = []

    async def start(self) -> None:
        x = await self._gpu.upload(np.ones((4, 32, 24, 20), np.float32))
        w = await self._gpu.upload(np.ones((32, 32, 3, 3), np.float32))
        outputs = [await self._gpu.empty((4, 32, 24, 20)) for _ in range(TASKS)]
        self.buffers = [x, w, *outputs]
        self.tasks = [asyncio.create_task(self._ask(x, w, y)) for y in outputs]

    async def _ask(self, x: BufferRef, w: BufferRef, y: BufferRef) -> None:
        for turn in itertools.count():
            small = Upload(dst=w, data=np.ones((32, 32, 3, 3), np.float32))
            conv = ConvFwd(x=x, w=w, y=y, conv=SAME, beta=float(turn % 2))
            try:
                answer = await self._gpu.ask(small if turn % 8 == 7 else conv)
            except Exception as error:  # noqa: BLE001 - every end of a request is noted
                self.ends.append(type(error).__name__)
                return
            self.ends.append(type(answer).__name__)
            if len(self.ends) >= BEFORE:
                self.flowing.set()


def write_where_nothing_is() -> None:
    """Launch a kernel on the service's device that writes to an address that nobody has mapped."""
    import cupy

    source = 'extern "C" __global__ void stray(unsigned long long a) { *(volatile int *)a = 1; }'
    with cupy.cuda.Device(0):
        cupy.RawKernel(source, "stray")((1,), (1,), (np.uint64(0x10),))


async def verdict() -> dict[str, Any]:
    """Everything that the test wants to know."""
    service = CudnnService(make_options({"device": "cuda:0", "isolation": "thread"}))
    raised, traffic = "nothing", None
    try:
        async with Spawning(service) as gpu:
            traffic = Traffic(gpu)
            await traffic.start()
            await traffic.flowing.wait()
            await asyncio.to_thread(write_where_nothing_is)
            async with asyncio.timeout(WITHIN_S):
                await asyncio.Event().wait()  # cancelled by the service's end
    except ServiceStopped as stopped:
        raised = f"{type(stopped).__name__}: {stopped}"
    assert traffic is not None
    _, left = await asyncio.wait(traffic.tasks, timeout=WITHIN_S)
    ends = traffic.ends
    first = next((n for n, end in enumerate(ends) if end != Receipt.__name__), len(ends))
    return {
        "raised": raised,
        "unanswered": len(left),
        "receipts_before": first,
        "after": dict(collections.Counter(ends[first:])),
        "buffers": dict(collections.Counter(_state_of(service, ref) for ref in traffic.buffers)),
        "asked_afterwards": await _ask_again(gpu),
        "restarts": service.state.restarts,
        "escalated": service.failure() is not None,
    }


def _state_of(service: CudnnService, ref: BufferRef) -> str:
    try:
        service.state.memory.resolve(ref)
    except StaleBufferError as stale:
        return str(stale.reason)
    return "there"


async def _ask_again(gpu: CudnnRef) -> str:
    try:
        await gpu.upload(np.ones((1, 1, 1, 1), np.float32))
    except ServiceStopped as error:
        return type(error).__name__
    return "an answer"


def main() -> None:
    """Print the verdict."""
    cudnn_actor.logging.configure()
    found = asyncio.run(verdict())
    print(json.dumps(found), flush=True)  # noqa: T201 - the parent reads it


if __name__ == "__main__":
    main()
