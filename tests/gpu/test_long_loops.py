"""Models with loops that are not unrolled, on a GPU: they give what the exact CPU engine gives."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from cudnn_actor import CudnnRef, DeadlineExceeded, Fault, FaultPlan, RunLoop, spawn
from cudnn_actor.onnx import OnnxModel

from ..onnx.test_long_loops import AS_LOOPS, CASES, known_turns
from ..service.loop_bodies import counting


async def outputs(gpu: CudnnRef, case: Any) -> dict[str, Any]:
    """What a model gives."""
    proto, inputs = case
    async with await gpu.load(OnnxModel(proto, AS_LOOPS)) as model:
        return await gpu.run(model, inputs)


def check_alike(found: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    """Check that outputs agree."""
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-4, err_msg=f"{what}, {name}")


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_loops_of_models_compute_what_the_exact_engine_does(isolation: Any) -> None:
    async with spawn(device="cuda", isolation=isolation) as gpu, spawn(device="cpu", exact=True) as cpu:
        for what, case in CASES.items():
            found, wanted = await asyncio.gather(outputs(gpu, case), outputs(cpu, case))
            check_alike(found, wanted, what)


async def test_runs_with_loops_go_on_after_kills() -> None:
    case = known_turns(500)
    faults = FaultPlan().at(2, Fault.KILL, of=RunLoop).at(5, Fault.STICKY, of=RunLoop)
    async with spawn(device="cuda", faults=faults, max_restarts=9) as gpu, spawn(device="cpu") as cpu:
        wanted = await outputs(cpu, case)
        for _ in range(6):
            check_alike(await outputs(gpu, case), wanted, "amid kills")
        assert (await gpu.statistics()).generation > 1


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_a_loop_of_a_second_and_more_ends_with_its_timeout(isolation: Any) -> None:
    turns = 1 << 20
    async with spawn(device="cuda", isolation=isolation) as gpu:
        count = await gpu.upload(np.zeros(1))
        rows = await gpu.upload(np.zeros((turns, 1)))
        await gpu.warm(counting().body)
        with pytest.raises(DeadlineExceeded):
            await gpu.loop(counting(), turns=turns, count=count, row=rows, timeout=2.0)
        assert 0 < (await gpu.download(rows)).max() < turns
