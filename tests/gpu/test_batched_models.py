"""Requests that share batches on a GPU: of every size, with several batches in flight, and amid kills."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from cudnn_actor import BatchedModel, CudnnRef, Fault, FaultPlan, Model, spawn
from cudnn_actor.messages import RunModel

from ..onnx.small_models import image_model


def images(seed: int, count: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3, 8, 8)).astype(np.float32)


async def check(gpu: CudnnRef, model: Model, endpoint: BatchedModel, seeds: range) -> None:
    """Many at a time give what each gives by itself."""
    given = [images(seed, 1 + seed % 3) for seed in seeds]
    together = await asyncio.gather(*(endpoint(image=image) for image in given))
    for image, answer in zip(given, together, strict=True):
        wanted = await gpu.run(model, image=image)
        for name, value in wanted.items():
            np.testing.assert_allclose(answer[name], value, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_batched_answers_are_those_of_single_runs(isolation: Any) -> None:
    async with (
        spawn(device="cuda", isolation=isolation) as gpu,
        await gpu.load(image_model()) as model,
        gpu.batched(model, max_batch=16) as endpoint,
    ):
        for begin in (0, 100):
            await check(gpu, model, endpoint, range(begin, begin + 100))
        assert endpoint.statistics().mean_batch > 8


@pytest.mark.parametrize("standby", [0, 1])
async def test_no_batched_request_is_lost_or_wrong_amid_crashes(standby: int) -> None:
    faults = FaultPlan().at(10, Fault.KILL, of=RunModel).at(60, Fault.STICKY, of=RunModel)
    async with (
        spawn(device="cuda", isolation="process", standby=standby, faults=faults) as gpu,
        await gpu.load(image_model()) as model,
        gpu.batched(model, max_batch=8) as endpoint,
    ):
        await check(gpu, model, endpoint, range(600))
        assert gpu.generation == 3
        assert endpoint.statistics().divided >= 2
