"""Workers that all die soon: each of them brings what waits further, so everything is answered."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cudnn_actor import CudnnRef, Model
from cudnn_actor.messages import Fill
from tests.onnx.small_models import FLOAT, model_of, node

from ..patience import PATIENCE_S
from ..whole import WHOLE
from .rigs import Gate, Trio, in_thread, spawn_gated, spawn_mortal

COUNT = 12


def scaling() -> object:
    """y = x w, of rows of 3."""
    return model_of(
        [node("Mul", "x w", "y")],
        {"x": (FLOAT, ["N", 3])},
        {"y": (FLOAT, ["N", 3])},
        {"w": np.ones(3, np.float32)},
    )


async def plain(gpu: CudnnRef, value: float) -> None:
    ref = await gpu.upload(np.full(3, value, np.float32))
    np.testing.assert_array_equal(await gpu.download(ref), np.full(3, value))
    await gpu.free(ref)


async def run(model: Model, rows: int) -> None:
    y = (await model.run({"x": np.ones((rows, 3), np.float32)}))["y"]
    assert y.shape == (rows, 3)
    assert set(y.flat) in ({1.0}, {2.0}), "of the old weights or of the new"


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize("first", ["execute", "build"])
async def test_what_came_before_a_first_run_is_answered_before_it_runs(first: str) -> None:
    gate = Gate()
    async with spawn_gated(gate, at=first) as gpu:
        trio, other = await Trio.on(gpu), await gpu.empty((1, 1, 1, 1))
        gate.catch_one()
        held = gpu.submit(trio.product())
        await in_thread(gate.wait_for_arrival)
        filled = gpu.submit(Fill(dst=other, value=3.0))  # in one batch with the next
        first_run = gpu.submit(trio.sum())
        gate.release_caught()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(held, filled)
        assert not first_run.done()
        gate.open()
        await first_run
        assert await trio.result() == 12.0


@pytest.mark.parametrize(("calls", "standby"), [(5, 0), (6, 1), *([(5, 1), (6, 0)] if WHOLE else [])])
async def test_workers_that_make_a_few_calls_each_answer_everything_together(
    calls: int, standby: int
) -> None:
    async with (
        spawn_mortal(calls, standby=standby, max_restarts=2000) as gpu,
        await gpu.load(scaling()) as model,
        await gpu.load(scaling(), swappable=True) as swapped,
    ):
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            for number in range(COUNT):
                tasks.create_task(plain(gpu, number))
                tasks.create_task(run(model, 1 + number % 3))
                tasks.create_task(run(swapped, 1 + number % 3))
            tasks.create_task(swapped.write({"w": np.full(3, 2, np.float32)}))
        y = (await swapped.run({"x": np.ones((1, 3), np.float32)}))["y"]
        np.testing.assert_array_equal(y, [[2, 2, 2]])
        assert gpu.generation > COUNT
