"""Models that a service on a GPU knows: captured, crashed, and fed from many tasks."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import numpy as np
import pytest

from cudnn_actor import CudnnRef, Fault, FaultPlan, Graph, GraphBuilder, spawn
from cudnn_actor.messages import DeployModel, Fill, ModelGraph, ModelRef, RunModel

WIDTH = 64
W = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8


def layers(count: int) -> Graph:
    g = GraphBuilder()
    x, w = g.input("x", (count, WIDTH)), g.input("w", (WIDTH, WIDTH))
    for _ in range(3):
        x = g.relu(g.matmul(x, w))
    return g.build(y=g.softmax(x, axis=-1), z=x)


def expected(x: np.ndarray) -> dict[str, np.ndarray]:
    for _ in range(3):
        x = np.maximum(x @ W, 0)
    e = np.exp(x - x.max(-1, keepdims=True))
    return {"scores": e / e.sum(-1, keepdims=True), "features": x}


def given(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


async def deploy(gpu: CudnnRef, *counts: int) -> ModelRef:
    w, graphs = await gpu.upload(W), []
    for count in counts:
        graph = layers(count)
        x, y, z = [await gpu.empty((count, WIDTH)) for _ in range(3)]
        graphs.append(
            ModelGraph(
                name=str(count),
                graph=graph,
                buffers=(x, w, y, z),
                specs={"image": x.spec},
                inputs={"image": "x"},
                outputs={"scores": "y", "features": "z"},
            )
        )
    return await gpu.ask(DeployModel(graphs=tuple(graphs)))


async def check(gpu: CudnnRef, model: ModelRef, count: int, seed: int) -> None:
    x = given(count, seed)
    results = await gpu.ask(RunModel.of(model, {"image": x}))
    for name, wanted in expected(x).items():
        np.testing.assert_allclose(results[name], wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_runs_of_several_sizes_in_turn_are_right(isolation: Any) -> None:
    async with spawn(device="cuda", isolation=isolation) as gpu:
        model = await deploy(gpu, 8, 4096, 1)
        for seed in range(12):
            await check(gpu, model, (8, 4096, 1)[seed % 3], seed)
        await asyncio.gather(*(check(gpu, model, (8, 4096, 1)[seed % 3], seed) for seed in range(120)))


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_inputs_and_outputs_on_the_device_are_copied_on_it(isolation: Any) -> None:
    async with spawn(device="cuda", isolation=isolation) as gpu:
        model = await deploy(gpu, 128)
        into = await gpu.empty((128, WIDTH))
        for seed in range(6):
            x = given(128, seed)
            message = RunModel.of(model, {"image": await gpu.upload(x)}, {"features": into})
            results = await gpu.ask(message)
            wanted = expected(x)
            np.testing.assert_allclose(results["scores"], wanted["scores"], rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(await gpu.download(into), wanted["features"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("standby", [0, 1])
async def test_runs_survive_kills_and_sticky_errors(standby: int) -> None:
    # A run that is sent again counts once more. So two faults of runs could meet the same run, which would be
    # quarantined then.
    faults = FaultPlan().at(20, Fault.STICKY, of=RunModel).at(1, Fault.KILL, of=Fill)
    async with spawn(device="cuda", isolation="process", standby=standby, faults=faults) as gpu:
        model = await deploy(gpu, 8, 512)
        other = await gpu.upload(np.ones(4, np.float32))
        runs = [check(gpu, model, (8, 512)[seed % 2], seed) for seed in range(100)]
        await asyncio.gather(*runs[:60], gpu.ask(Fill(dst=other, value=2.0)), *runs[60:])
        assert gpu.generation == 3
        pid = gpu.worker_pid
        assert pid is not None
        running = asyncio.gather(*(check(gpu, model, 512, seed) for seed in range(100)))
        os.kill(pid, signal.SIGKILL)
        await running


async def test_growing_scratch_memory_keeps_captured_runs_right() -> None:
    async with spawn(device="cuda", isolation="thread") as gpu:
        model = await deploy(gpu, 8, 65536)
        for seed in range(4):
            await check(gpu, model, 8, seed)
        for seed in range(3):
            await check(gpu, model, 65536, seed)
            await check(gpu, model, 8, seed)
