"""Test what your own service does when its GPU worker is killed, at exactly the request that you choose.

    pip install pytest pytest-asyncio
    pytest examples/kill_injection_test.py

`Detector` is the code under test. `Fault.KILL` ends the worker process by SIGKILL when the message that the
plan names is about to run. Nothing is mocked: a process dies, another one takes over the same buffers.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cudnn_actor import ConvFwd, ConvSpec, CudnnRef, Fault, FaultPlan, QuarantinedRequest, spawn
from cudnn_actor.messages import Allocate

pytestmark = pytest.mark.asyncio
PATTERN = np.array([[0, 1, 0], [1, -4, 1], [0, 1, 0]], dtype=np.float32)[None, None]
RNG = np.random.default_rng(5)
FRAMES = [RNG.integers(0, 9, (1, 1, 12, 12)).astype(np.float32) for _ in range(16)]


class Detector:
    """The code under test: how strongly frames show a pattern; None for a frame that is given up."""

    def __init__(self, gpu: CudnnRef) -> None:
        self.gpu = gpu
        self.given_up = 0

    async def open(self) -> None:
        """Put the pattern on the device. Once is enough, even if workers die."""
        self.pattern = await self.gpu.upload(PATTERN)

    async def detect(self, frame: np.ndarray) -> float | None:
        """The strongest response. A killed worker is not an error, so there is no `except` for it."""
        x = await self.gpu.upload(frame)
        try:
            y = await self.gpu.conv_fwd(x, self.pattern, conv=ConvSpec.symmetric(2))
        except QuarantinedRequest:  # it has killed two workers, and must not kill a third
            self.given_up += 1
            return None
        finally:
            await self.gpu.free(x)
        response = await self.gpu.download(y)
        await self.gpu.free(y)
        return float(np.abs(response).max())


def expected(frame: np.ndarray) -> float:
    """The same, computed with NumPy only: the pattern is a Laplacian."""
    f = frame[0, 0]
    laplacian = f[:-2, 1:-1] + f[2:, 1:-1] + f[1:-1, :-2] + f[1:-1, 2:] - 4 * f[1:-1, 1:-1]
    return float(np.abs(laplacian).max())


async def detect_all(gpu: CudnnRef) -> tuple[Detector, list[float | None]]:
    """All frames at once, as a loaded service would have them."""
    detector = Detector(gpu)
    await detector.open()
    return detector, await asyncio.gather(*(detector.detect(frame) for frame in FRAMES))


async def test_a_killed_worker_is_latency_and_not_an_error() -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(5, Fault.KILL, of=ConvFwd)) as gpu:
        before = gpu.worker_pid
        detector, found = await detect_all(gpu)
        assert found == [expected(frame) for frame in FRAMES]
        assert detector.given_up == 0
        assert gpu.generation == 2
        assert gpu.worker_pid != before


async def test_a_kill_in_an_upload_leaves_no_half_buffer() -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(2, Fault.KILL, of=Allocate)) as gpu:
        _, found = await detect_all(gpu)
        assert found == [expected(frame) for frame in FRAMES]
        assert (await gpu.statistics()).live_buffers == 1  # the pattern


async def test_a_frame_that_kills_two_workers_is_given_up_and_the_service_lives() -> None:
    poison = FaultPlan().at(1, Fault.KILL, of=ConvFwd, times=2)
    async with spawn(device="cpu", faults=poison) as gpu:
        detector = Detector(gpu)
        await detector.open()
        assert await detector.detect(FRAMES[0]) is None
        assert detector.given_up == 1
        assert await detector.detect(np.ones((1, 1, 20, 20), np.float32)) == 0.0  # another plan


async def test_with_a_standby_the_successor_was_there_before_the_kill() -> None:
    async with spawn(device="cpu", standby=1, faults=FaultPlan().at(5, Fault.KILL, of=ConvFwd)) as gpu:
        _, found = await detect_all(gpu)
        assert found == [expected(frame) for frame in FRAMES]


@pytest.mark.parametrize("seed", range(3))
async def test_answers_are_right_however_often_workers_are_killed(seed: int) -> None:
    weather = FaultPlan(seed=seed).chance(0.2, Fault.KILL, of=ConvFwd)
    async with spawn(device="cpu", faults=weather, max_restarts=1000) as gpu:
        detector, found = await detect_all(gpu)
        right = [expected(frame) for frame in FRAMES]
        assert all(one in (None, other) for one, other in zip(found, right, strict=True))
        assert found.count(None) == detector.given_up
        assert gpu.generation > 1
