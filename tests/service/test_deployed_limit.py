"""How many bytes the buffers of idle sets of a model's dims may take: `deployed_limit`."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from cudnn_actor import CudnnRef, Fault, FaultPlan, InvalidRequest, Model, OutOfMemory
from cudnn_actor.messages import Fill, RunModel

from ..onnx.small_models import FLOAT, model_of, node
from .rigs import spawn

pytestmark = pytest.mark.usefixtures("isolation")

WIDTH = 1024
ROW = 2 * 4 * WIDTH
"""Bytes of a row's input and output."""


def doubling() -> Any:
    return model_of([node("Add", "x x", "y")], {"x": (FLOAT, ["N", WIDTH])}, {"y": (FLOAT, ["N", WIDTH])}, {})


async def check(gpu: CudnnRef, model: Model, rows: int) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, WIDTH)).astype(np.float32)
    np.testing.assert_array_equal((await gpu.run(model, x=x))["y"], x + x)


async def live_bytes(gpu: CudnnRef) -> int:
    await gpu.drain()
    return (await gpu.statistics()).live_bytes


async def test_the_set_that_was_used_longest_ago_goes_first() -> None:
    async with spawn(deployed_limit=6 * ROW) as gpu, await gpu.load(doubling()) as model:
        for rows in (1, 2, 3):
            await check(gpu, model, rows)
        assert await live_bytes(gpu) == 6 * ROW
        await check(gpu, model, 1)  # so that 2 is the oldest
        await check(gpu, model, 2 + 2)  # more than the oldest's room: 3 goes, too
        assert await live_bytes(gpu) == (1 + 4) * ROW
        for rows in (1, 4, 3, 2, 4):
            await check(gpu, model, rows)
            assert await live_bytes(gpu) <= 6 * ROW


async def test_the_limit_is_one_for_all_models() -> None:
    async with spawn(deployed_limit=4 * ROW) as gpu:
        models = [await gpu.load(doubling()) for _ in range(6)]
        for _ in range(2):
            for model in models:
                await check(gpu, model, 1)
                assert await live_bytes(gpu) <= 4 * ROW
        assert await live_bytes(gpu) == 4 * ROW
        for model in models[:-1]:
            await model.close()
        await check(gpu, models[-1], 4)
        assert await live_bytes(gpu) == 4 * ROW
        await models[-1].close()
        assert await live_bytes(gpu) == 0


async def test_a_set_with_runs_in_flight_keeps_its_buffers() -> None:
    """With a limit of nothing, each is given back after its last run; many run at a time, all at the end."""
    faults = FaultPlan().at(1, Fault.SLOW, of=RunModel, seconds=0.3)
    async with spawn(deployed_limit=0, faults=faults) as gpu, await gpu.load(doubling()) as model:
        first = asyncio.ensure_future(check(gpu, model, 7))
        await asyncio.gather(first, *(check(gpu, model, rows) for rows in range(1, 9) for _ in range(8)))
        assert await live_bytes(gpu) == 0


async def test_a_batched_model_keeps_all_its_sizes() -> None:
    async with spawn(deployed_limit=0) as gpu, await gpu.load(doubling()) as model:
        async with gpu.batched(model, max_batch=4) as endpoint:
            sizes = (1 + 2 + 4) * ROW
            x = np.ones((1, WIDTH), np.float32)
            for _ in range(3):
                await asyncio.gather(*(endpoint(x=x) for _ in range(9)))
                assert await live_bytes(gpu) == sizes
                await check(gpu, model, 3)
        assert await live_bytes(gpu) == 0


async def test_a_set_that_finds_no_memory_gets_that_of_idle_ones() -> None:
    rows = (2 << 20) // ROW  # a set takes 2 MiB
    async with (
        spawn(memory_limit=8 << 20, deployed_limit=1 << 30) as gpu,
        await gpu.load(doubling()) as model,
    ):
        for count in (rows, rows - 1, rows - 2, rows - 3, rows - 4, rows - 5):
            await check(gpu, model, count)
        with pytest.raises(OutOfMemory):
            await check(gpu, model, 5 * rows)
        await check(gpu, model, rows)


async def test_sets_come_and_go_amid_crashes() -> None:
    # A run that is sent again counts once more. So two faults of runs could meet the same run, which would
    # then be quarantined.
    faults = FaultPlan().at(5, Fault.STICKY, of=RunModel).at(1, Fault.STICKY, of=Fill)
    async with (
        spawn(deployed_limit=10 * ROW, faults=faults, max_restarts=9) as gpu,
        await gpu.load(doubling()) as model,
    ):
        other = await gpu.upload(np.ones(4, np.float32))
        runs = [check(gpu, model, 1 + number % 12) for number in range(60)]
        await asyncio.gather(*runs[:30], gpu.ask(Fill(dst=other, value=2.0)), *runs[30:])
        await gpu.free(other)
        assert await live_bytes(gpu) <= 10 * ROW
        assert gpu.generation == 3


async def test_deployed_limit_is_a_whole_number_of_bytes() -> None:
    with pytest.raises(InvalidRequest, match="deployed_limit"):
        spawn(deployed_limit=-1)
