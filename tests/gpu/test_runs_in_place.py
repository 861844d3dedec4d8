"""Runs of models on a GPU between the same buffers again and again, which are captured on these."""

from __future__ import annotations

import numpy as np
import pytest

from cudnn_actor import BufferRef, CudnnRef, spawn
from cudnn_actor.messages import Allocate, RunModel

from ..engines.references import relative_error
from .test_kept_weights import COUNTS, MODELS, Deployed, drawn

_OFTEN = 70


class Places:
    """Buffers for the input and the output of a run, and the run's message."""

    def __init__(self, gpu: CudnnRef, of: Deployed, x: BufferRef, y: BufferRef) -> None:
        assert of.model is not None
        self.gpu, self.of, self.x, self.y = gpu, of, x, y
        self.message = RunModel.of(of.model, {"x": x}, {"y": y})

    async def check(self, exact: Deployed, count: int, seed: int) -> None:
        """Run twice: it is right, and leaves its input as it is."""
        x = drawn(seed, self.x.spec.dims)
        await self.gpu.write(self.x, x)
        for _ in range(2):
            await self.gpu.fill(self.y, np.nan)
            await self.gpu.ask(self.message)
        wanted = await exact.run(count, seed)
        assert relative_error(await self.gpu.download(self.y), wanted.astype(np.float64)) < 1e-2
        np.testing.assert_array_equal(await self.gpu.download(self.x), x)


@pytest.mark.parametrize("name", MODELS)
async def test_runs_in_place_are_right_whatever_is_written(name: str) -> None:
    async with spawn(device="cuda", isolation="process") as gpu, spawn(device="cpu", exact=True) as cpu:
        on_gpu, on_cpu = (Deployed(each, MODELS[name]) for each in (gpu, cpu))
        for each in (on_gpu, on_cpu):
            await each.deploy()
        count = COUNTS[0]
        graph, _ = MODELS[name](count)
        specs = [graph.ports[graph.places[port]].spec for port in "xy"]
        sets = [
            Places(gpu, on_gpu, *[await gpu.ask(Allocate(spec=spec)) for spec in specs]) for _ in range(10)
        ]
        for places in sets:
            for _ in range(_OFTEN):
                await gpu.ask(places.message)
        for turn in range(3):
            for seed, places in enumerate(sets):
                await places.check(on_cpu, count, 100 * turn + seed)
            for each in (on_gpu, on_cpu):
                for number, ref in enumerate(each.weights.values()):
                    await each.gpu.write(ref, drawn(10 * turn + number + 1, ref.spec.dims))
