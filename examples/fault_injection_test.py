"""Test your own retry logic against a GPU that fails on command.

    pip install pytest pytest-asyncio
    pytest examples/fault_injection_test.py

`Averager` is the code under test, a small service of yours. A `FaultPlan` scripts the failures below it.
Nothing is mocked: a real service computes, its worker is really replaced, and the results are checked.
"""

from __future__ import annotations

import numpy as np
import pytest

from cudnn_actor import (
    BufferRef,
    ConvFwd,
    ConvSpec,
    CudnnActorError,
    CudnnRef,
    Fault,
    FaultPlan,
    OutcomeUnknown,
    OutOfMemory,
    StaleBufferError,
    TensorSpec,
    spawn,
)
from cudnn_actor.messages import Allocate

pytestmark = pytest.mark.asyncio
ONE = np.ones((1, 1, 1, 1), dtype=np.float32)
IMAGE = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)


class Averager:
    """The code under test: a running sum of filtered images, kept on the device.

    Every error says whether the same request may be sent again (`retry_safe`), so there is one rule
    for all of them. What can't be sent again is a sum that a crash has torn: it is uploaded afresh
    from the last copy on the host.
    """

    def __init__(self, gpu: CudnnRef, attempts: int = 3) -> None:
        self.gpu = gpu
        self.attempts = attempts
        self.retries = 0
        self.saved = np.zeros_like(IMAGE)

    async def open(self) -> None:
        """Put the filter and an empty sum on the device."""
        self.w = await self.upload(ONE)
        self.sum = await self.upload(self.saved)

    async def upload(self, array: np.ndarray) -> BufferRef:
        """Upload, and try again if the device is full: it may have room a moment later."""
        message = Allocate(spec=TensorSpec.packed(array.shape, "float32"), data=array)
        for _ in range(self.attempts - 1):
            try:
                return await self.gpu.ask(message)
            except CudnnActorError as error:
                if not error.retry_safe:
                    raise
                self.retries += 1
        return await self.gpu.ask(message)

    async def add(self, image: np.ndarray) -> np.ndarray:
        """Add an image to the sum, and return the sum."""
        x = await self.upload(image)
        try:
            await self.gpu.ask(self.addition(x))
        except OutcomeUnknown:
            self.retries += 1
            self.sum = await self.upload(self.saved)  # it is unknown what the old one holds
            await self.gpu.ask(self.addition(x))
        await self.gpu.free(x)
        self.saved = await self.gpu.download(self.sum)
        return self.saved

    def addition(self, x: BufferRef) -> ConvFwd:
        """With beta=1 the convolution adds to what its output holds, so it can't be run twice."""
        return ConvFwd(x=x, w=self.w, y=self.sum, conv=ConvSpec.symmetric(2), beta=1.0)


async def test_a_full_device_is_tried_again() -> None:
    full_for_a_moment = FaultPlan().at(3, Fault.OUT_OF_MEMORY, of=Allocate, times=2)
    async with spawn(device="cpu", faults=full_for_a_moment) as gpu:
        averager = Averager(gpu)
        await averager.open()  # allocations 1 and 2
        assert np.array_equal(await averager.add(IMAGE), IMAGE)
        assert averager.retries == 2


async def test_a_device_that_stays_full_is_reported() -> None:
    async with spawn(
        device="cpu", faults=FaultPlan().at(1, Fault.OUT_OF_MEMORY, of=Allocate, times=10)
    ) as gpu:
        with pytest.raises(OutOfMemory):
            await Averager(gpu).open()


async def test_a_dead_context_is_latency_and_not_an_error() -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(1, Fault.STICKY, of=ConvFwd)) as gpu:
        x, w = await gpu.upload(IMAGE), await gpu.upload(ONE)
        y = await gpu.conv_fwd(x, w, conv=ConvSpec.symmetric(2))  # no try: nothing is raised
        assert np.array_equal(await gpu.download(y), IMAGE)
        assert gpu.generation == 2  # but a second worker has answered


async def test_a_sum_that_a_crash_has_torn_is_uploaded_again() -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(2, Fault.STICKY, of=ConvFwd)) as gpu:
        averager = Averager(gpu)
        await averager.open()
        await averager.add(IMAGE)
        torn = averager.sum
        assert np.array_equal(await averager.add(IMAGE), 2 * IMAGE)  # added exactly once
        assert averager.retries == 1
        with pytest.raises(StaleBufferError, match="torn"):
            await gpu.download(torn)


@pytest.mark.parametrize("seed", range(3))
async def test_sums_are_right_whatever_strikes(seed: int) -> None:
    weather = (
        FaultPlan(seed=seed)
        .chance(0.1, Fault.STICKY, of=ConvFwd)
        .chance(0.1, Fault.OUT_OF_MEMORY, of=Allocate)
    )
    async with spawn(device="cpu", faults=weather, max_restarts=100) as gpu:
        averager = Averager(gpu, attempts=10)
        await averager.open()
        for _ in range(12):
            total = await averager.add(IMAGE)
        assert np.array_equal(total, 12 * IMAGE)
