"""Load from many tasks while workers die, and a check of every answer and of every byte.

Each task has buffers of its own, and knows what must be in them: what it does is pure (a convolution, an
upload), or accumulates, or reads. All numbers are small and whole, so every result is exact. A request may
end in its right answer or, where it accumulates, in `OutcomeUnknown`; then its buffer is torn, and nothing
else is.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from cudnn_actor import BufferRef, ConvFwd, ConvSpec, CudnnRef, OutcomeUnknown, Receipt, StaleBufferError
from cudnn_actor.messages import Upload
from cudnn_actor.options import make_options
from cudnn_actor.protocol.errors import StaleReason
from cudnn_actor.service import Spawning
from cudnn_actor.service.service import CudnnService

from ..patience import PATIENCE_S
from .worker_faults import ILLEGAL, PREPARING, SPINNING, Ammunition, choice_of

__all__ = ["PATIENCE_S", "Load", "deadly_service", "strike"]

TASKS, ROUNDS_BETWEEN = 64, 3
CHANNELS, SIZE = 4, 6
ONE_BY_ONE = ConvSpec.symmetric(2)
DIMS = (1, CHANNELS, SIZE, SIZE)


@asynccontextmanager
async def deadly_service(device: str, folder: str, **options: Any) -> AsyncIterator[CudnnRef]:
    """A service whose workers do harm as long as there is ammunition in the folder."""
    given = {"device": device, "isolation": "process", "max_restarts": 1000, **options}
    choice = await asyncio.to_thread(choice_of, device, folder)  # the driver and files are looked at
    async with Spawning(CudnnService(make_options(given), engine=choice)) as gpu:
        victim = await gpu.empty((1, 1, 1, 1))
        await gpu.fill(victim, PREPARING)
        await gpu.free(victim)
        yield gpu


async def strike(gpu: CudnnRef, how: str, ammunition: Ammunition) -> None:
    """End the present worker, and wait for the answer of what did it, or of what was sent behind it."""
    generation = gpu.generation
    victim = await gpu.upload(np.zeros((1, 1, 1, 1), np.float32))
    async with asyncio.timeout(PATIENCE_S):
        if how == "SIGKILL":
            pid = gpu.worker_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while gpu.generation == generation:
                await gpu.ask(Upload(dst=victim, data=np.ones((1, 1, 1, 1), np.float32)))
        else:
            value = {"illegal access": ILLEGAL, "hang": SPINNING}[how]
            ammunition.load()
            await gpu.fill(victim, value)
            assert (await gpu.download(victim)).item() == value  # its second run did what was asked
    assert gpu.generation == generation + 1
    await gpu.free(victim)


class _Task:
    """One task's buffers, and what is in them."""

    def __init__(self, gpu: CudnnRef, load: Load, number: int) -> None:
        self._gpu = gpu
        self._load = load
        self._number = number
        self.rounds = 0

    async def run(self) -> None:
        """Everything, again and again, until the load is to end."""
        self._x = await self._gpu.upload(np.full(DIMS, float(self._number % 7), np.float32))
        self._y, self._z = await self._gpu.empty(DIMS), await self._gpu.empty(DIMS)
        await self._start_anew()
        while not self._load.ending.is_set():
            for deed in (self._compute, self._accumulate, self._replace):
                await deed()
                self._load.done[deed.__name__] += 1
            self.rounds += 1
            self._load.progress.set()
        await self._look()

    async def _start_anew(self) -> None:
        """A sum of nothing."""
        self._sum = await self._gpu.upload(np.zeros(DIMS, np.float32))
        self._added = 0

    @property
    def _product(self) -> float:
        return float(CHANNELS * (self._number % 7))

    def _convolution(self, into: BufferRef, beta: float = 0.0) -> ConvFwd:
        return ConvFwd(x=self._x, w=self._load.w, y=into, conv=ONE_BY_ONE, beta=beta)

    async def _compute(self) -> None:
        """Pure: it must be answered."""
        receipt = await self._gpu.ask(self._convolution(self._y))
        assert isinstance(receipt, Receipt)
        await self._expect(self._y, self._product)

    async def _accumulate(self) -> None:
        """Two at once. Either both have been added, or nobody knows, and the sum is torn."""
        sent = [self._gpu.submit(self._convolution(self._sum, beta=1.0)) for _ in range(2)]
        ends = await asyncio.gather(*sent, return_exceptions=True)
        if all(isinstance(end, Receipt) for end in ends):
            self._added += len(ends)
            await self._expect(self._sum, self._added * self._product)
            return
        for end in ends:
            self._load.ends[type(end).__name__] += 1
            torn = isinstance(end, StaleBufferError) and end.reason is StaleReason.TORN
            assert torn or isinstance(end, OutcomeUnknown | Receipt), repr(end)
        await self._expect_torn()
        await self._start_anew()

    async def _expect_torn(self) -> None:
        with contextlib.suppress(StaleBufferError):
            await self._gpu.download(self._sum)
            raise AssertionError("what a crash interrupted can be read")

    async def _replace(self) -> None:
        """Pure, too."""
        await self._gpu.write(self._z, np.full(DIMS, float(self.rounds), np.float32))
        await self._expect(self._z, float(self.rounds))

    async def _look(self) -> None:
        """What survived is what it was."""
        await self._expect(self._x, float(self._number % 7))
        await self._expect(self._y, self._product)
        await self._expect(self._sum, self._added * self._product)
        await self._expect(self._z, float(self.rounds - 1))

    async def _expect(self, ref: BufferRef, value: float) -> None:
        got = await self._gpu.download(ref)
        assert (got == value).all(), f"task {self._number}: {got.ravel()[:4]}…, not {value}"
        self._load.checked += 1


class Load:
    """All tasks; entered, they run until it is left, and an error of any is raised there.

    Parameters
    ----------
    gpu
        The service.
    """

    def __init__(self, gpu: CudnnRef) -> None:
        self._gpu = gpu
        self.ending = asyncio.Event()
        self.progress = asyncio.Event()
        """Set whenever a task has been through its round."""
        self.done: collections.Counter[str] = collections.Counter()
        self.ends: collections.Counter[str] = collections.Counter()
        """What interrupted requests ended in."""
        self.checked = 0
        self._tasks = [_Task(gpu, self, number) for number in range(TASKS)]

    async def __aenter__(self) -> Load:
        self.w = await self._gpu.upload(np.ones((CHANNELS, CHANNELS, 1, 1), np.float32))
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        for task in self._tasks:
            self._group.create_task(task.run())
        await self.flow()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self.ending.set()
        async with asyncio.timeout(PATIENCE_S):
            await self._group.__aexit__(*error)

    async def flow(self) -> None:
        """Until every task has been through some more rounds: nothing from before is under way then."""
        wanted = [task.rounds + ROUNDS_BETWEEN for task in self._tasks]
        async with asyncio.timeout(PATIENCE_S):
            while any(task.rounds < least for task, least in zip(self._tasks, wanted, strict=True)):
                self.progress.clear()
                await self.progress.wait()
