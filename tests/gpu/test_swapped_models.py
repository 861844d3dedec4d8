"""Weights that are overwritten, and files that are replaced, while a model runs on a GPU amid crashes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import onnx
import pytest

from cudnn_actor import CudnnRef, ExecutionFailed, Fault, FaultPlan, Model, QuarantinedRequest, spawn
from cudnn_actor.messages import RunModel, WriteWeights

from ..onnx.small_models import image_model
from ..onnx.test_swapping import drawn, expected, network, rescaled, rows, with_weights

VERSIONS = 5


async def check(gpu: CudnnRef, model: Model, file: onnx.ModelProto, *counts: int) -> None:
    for count in counts:
        found = (await gpu.run(model, x=rows(count)))["y"]
        np.testing.assert_allclose(found, expected(file, rows(count)), rtol=1e-3, atol=1e-4)


class Swapped:
    """The image model's answers for each of some versions of its weights, and who runs it."""

    def __init__(self) -> None:
        self.weights = [drawn(seed) for seed in range(VERSIONS)]
        self.files = [with_weights(image_model(), each) for each in self.weights]
        self.x = np.random.default_rng(1).standard_normal((4, 3, 8, 8)).astype(np.float32)
        self.wanted = [
            [expected(each, self.x[:count], "image") for each in self.files] for count in range(1, 5)
        ]
        self.written = 0
        self.done = False
        self.answers = 0

    async def run(self, gpu: CudnnRef, model: Model, count: int) -> None:
        while not self.done:
            since = self.written
            found = (await gpu.run(model, image=self.x[:count]))["scores"]
            near = [
                number
                for number, each in enumerate(self.wanted[count - 1])
                if np.allclose(found, each, rtol=1e-3, atol=1e-3)
            ]
            possible = {number % VERSIONS for number in range(max(0, since - 1), self.written + 1)}
            assert len(near) == 1, "of no version"
            assert near[0] in possible, "of a version that was not there"
            self.answers += 1

    async def swap(self, model: Model, times: int) -> None:
        for self.written in range(1, times + 1):
            await model.write(self.weights[self.written % VERSIONS])
            before = self.answers
            async with asyncio.timeout(60):
                while self.answers < before + 8 and self.written < times:  # noqa: ASYNC110 - runs go on
                    await asyncio.sleep(0.001)
        self.done = True


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_written_weights_serve_all_dims(isolation: Any) -> None:
    file, new = network(), {"w": rows(2, 5), "positions": rows(16, 6)[:, :2], "bias": rows(1)[0, :1]}
    async with (
        spawn(device="cuda", isolation=isolation) as gpu,
        await gpu.load(file, swappable=True) as model,
    ):
        for _ in range(3):  # the third run is one that was captured
            await check(gpu, model, file, 1, 4)
        await model.write(new)
        for _ in range(3):
            await check(gpu, model, with_weights(file, new), 4, 1, 9)


@pytest.mark.parametrize("of", [None, RunModel, WriteWeights])
@pytest.mark.parametrize("standby", [0, 1])
async def test_each_answer_is_of_one_version(of: type | None, standby: int) -> None:
    faults = FaultPlan()
    if of is not None:
        faults = faults.at(9, Fault.STICKY, of=of).at(25, Fault.KILL, of=of)
    swapped = Swapped()
    async with (
        spawn(device="cuda", isolation="process", standby=standby, faults=faults) as gpu,
        await gpu.load(swapped.files[0], swappable=True) as model,
    ):
        runs = (swapped.run(gpu, model, count) for count in (1, 2, 3, 4, 1, 4))
        await asyncio.gather(swapped.swap(model, 40), *runs)
        assert gpu.generation == (1 if of is None else 3)


@pytest.mark.parametrize("second", [Fault.STICKY, Fault.FAIL_EXECUTION])
async def test_a_write_that_does_not_end_well_leaves_the_old_weights(second: Fault) -> None:
    file, new = network(), {"w": rows(2, 4), "positions": rows(16, 6)[:, :2]}
    faults = FaultPlan().at(1, Fault.STICKY, of=WriteWeights).at(2, second, of=WriteWeights)
    async with (
        spawn(device="cuda", isolation="process", faults=faults, max_restarts=9) as gpu,
        await gpu.load(file, swappable=True) as model,
    ):
        await check(gpu, model, file, 1, 4)
        writing = asyncio.ensure_future(model.write(new))
        running = [asyncio.ensure_future(check(gpu, model, file, 1, 4, 5)) for _ in range(3)]
        with pytest.raises((QuarantinedRequest, ExecutionFailed)):
            await writing
        await asyncio.gather(*running)
        await model.write(new)
        await check(gpu, model, with_weights(file, new), 1, 4, 7)


async def test_a_model_is_replaced_while_it_serves() -> None:
    files = [rescaled(version) for version in range(1, 4)]
    x = np.random.default_rng(1).standard_normal((3, 3, 8, 8)).astype(np.float32)
    wanted = [expected(each, x, "image") for each in files]
    ending = False
    async with spawn(device="cuda", isolation="process") as gpu:
        model = await gpu.load(files[0], dims={"N": 3})

        async def run() -> None:
            while not ending:
                found = (await gpu.run(model, image=x))["scores"]
                assert sum(np.allclose(found, each, rtol=1e-3, atol=1e-3) for each in wanted) == 1

        runs = [asyncio.ensure_future(run()) for _ in range(4)]
        for file in files[1:]:
            await gpu.load(file, replace=model)
        ending = True
        await asyncio.gather(*runs)
        found = (await gpu.run(model, image=x))["scores"]
        np.testing.assert_allclose(found, wanted[-1], rtol=1e-3, atol=1e-3)
        await model.close()
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 0


async def test_the_weights_of_a_model_in_another_dtype_are_rounded() -> None:
    x = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)
    file, new = image_model(2), drawn(5)
    async with (
        spawn(device="cuda") as gpu,
        await gpu.load(file, swappable=True, dtype="bfloat16") as model,
        await gpu.load(with_weights(file, new), dtype="bfloat16") as other,
    ):
        await gpu.run(model, image=x)
        await model.write(new)
        found, wanted = await gpu.run(model, image=x), await gpu.run(other, image=x)
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array)
