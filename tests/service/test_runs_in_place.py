"""Runs of a model between the same buffers again and again: a device comes to work on these themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cudnn_actor import BufferRef, CudnnRef, CudnnService, GraphBuilder, StaleBufferError, TensorSpec
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.engine_choice import EngineChoice, WorkerEngine
from cudnn_actor.messages import Allocate, DeployModel, ModelGraph, ModelRef, RunModel, WriteWeights
from cudnn_actor.options import make_options
from cudnn_actor.service import Spawning

from .rigs import in_thread

_FIRST = 64
"""Runs after which copies come to an end."""
_ROWS, _MOST_SETS = 4, 8
W = np.arange(6, dtype=np.float32).reshape(3, 2) - 2


@asynccontextmanager
async def deployed(
    copies: int = 1 << 40, *, rigid: bool = False, rows: int = _ROWS
) -> AsyncIterator[tuple[CudnnRef, ModelGraph, ModelRef]]:
    """A model on a device in a worker that makes so many copies: relu(x @ w), and x @ w."""
    engine = WorkerEngine("tests.isolation.device_engine:FrugalEngine", (copies, rigid))
    choice = EngineChoice("cpu", CpuEngine, CpuEngine.outlives_context, worker=engine)
    options = make_options({"device": "cpu", "isolation": "process"})
    service = await in_thread(lambda: CudnnService(options, engine=choice))
    async with Spawning(service) as gpu:
        g = GraphBuilder()
        x, w = g.input("x", (rows, 3)), g.input("w", (3, 2))
        y = g.matmul(x, w)
        graph = g.build(y=g.relu(y), z=y)
        own = [await gpu.empty((rows, 3)), await gpu.upload(W), *[await gpu.empty((rows, 2)) for _ in "yz"]]
        given = ModelGraph(
            name="only",
            graph=graph,
            buffers=tuple(own),
            specs={"image": own[0].spec},
            inputs={"image": "x"},
            outputs={"scores": "y", "logits": "z"},
        )
        yield gpu, given, await gpu.ask(DeployModel(graphs=(given,)))


class Places:
    """Buffers for the input and the outputs of runs."""

    def __init__(self, model: ModelRef, x: BufferRef, scores: BufferRef, logits: BufferRef) -> None:
        self.x, self.scores, self.logits = x, scores, logits
        self.message = RunModel.of(model, {"image": x}, {"scores": scores, "logits": logits})

    @classmethod
    async def of(cls, gpu: CudnnRef, model: ModelRef, seed: int = 0) -> Places:
        x = await gpu.upload(values(seed))
        return cls(model, x, await gpu.empty((_ROWS, 2)), await gpu.empty((_ROWS, 2)))

    async def check(self, gpu: CudnnRef, x: np.ndarray, w: np.ndarray = W) -> None:
        for ref in (self.scores, self.logits):
            await gpu.fill(ref, np.nan)
        await gpu.ask(self.message)
        np.testing.assert_allclose(await gpu.download(self.logits), x @ w, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(await gpu.download(self.scores), np.maximum(x @ w, 0), 1e-5, 1e-6)
        np.testing.assert_array_equal(await gpu.download(self.x), x)


def values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((_ROWS, 3)).astype(np.float32)


async def often(gpu: CudnnRef, message: RunModel, runs: int = _FIRST + 2) -> None:
    for _ in range(runs):
        assert await gpu.ask(message) == {}


async def test_runs_between_the_same_buffers_end_without_copies() -> None:
    async with deployed(copies=3 * _FIRST) as (gpu, _, model):
        places = await Places.of(gpu, model)
        await often(gpu, places.message, 2 * _FIRST)
        for seed in range(3):
            await gpu.write(places.x, values(seed))
            await places.check(gpu, values(seed))


async def test_they_read_weights_that_were_written_in_between() -> None:
    async with deployed() as (gpu, graph, model):
        places = await Places.of(gpu, model)
        await often(gpu, places.message)
        for factor in (2, 3):
            w = W * np.float32(factor)
            await gpu.ask(WriteWeights(model=model, buffers=(graph.buffers[1],), values=(w,)))
            await places.check(gpu, values(0), w)


async def test_an_engine_that_prepares_no_other_buffers_copies() -> None:
    async with deployed(rigid=True) as (gpu, _, model):
        places = await Places.of(gpu, model)
        await often(gpu, places.message)
        await places.check(gpu, values(0))


async def test_each_set_of_buffers_is_used_by_the_runs_that_name_it() -> None:
    async with deployed() as (gpu, _, model):
        sets = [await Places.of(gpu, model, seed) for seed in range(_MOST_SETS + 2)]
        for _ in range(_FIRST + 2):
            for each in sets:
                assert await gpu.ask(each.message) == {}
        for seed, each in enumerate(sets):
            await each.check(gpu, values(seed))
        one, other = sets[:2]
        mixed = Places(model, one.x, other.logits, one.scores)
        await mixed.check(gpu, values(0))


async def test_a_buffer_that_is_laid_out_otherwise_is_copied() -> None:
    async with deployed() as (gpu, _, model):
        spec = TensorSpec.strided((_ROWS, 3), (1, _ROWS), "float32")
        x = await gpu.ask(Allocate(spec=spec, data=values(0)))
        places = Places(model, x, await gpu.empty((_ROWS, 2)), await gpu.empty((_ROWS, 2)))
        await often(gpu, places.message)
        await places.check(gpu, values(0))


async def test_a_freed_buffer_is_not_used_any_more() -> None:
    async with deployed() as (gpu, _, model):
        places = await Places.of(gpu, model)
        await often(gpu, places.message)
        await gpu.free(places.logits)
        with pytest.raises(StaleBufferError):
            await gpu.ask(places.message)
        kept = await gpu.empty((_ROWS, 2))
        await gpu.fill(kept, 7.0)
        others = Places(model, places.x, places.scores, await gpu.empty((_ROWS, 2)))
        await others.check(gpu, values(0))
        assert (await gpu.download(kept) == 7.0).all()


async def test_buffers_that_runs_have_used_are_unmapped_when_they_are_freed() -> None:
    rows = 1 << 17
    async with deployed(rows=rows) as (gpu, _, model):
        fillers: list[BufferRef] = []
        for arenas in (2, 3):
            while await in_thread(partial(_arenas, gpu)) < arenas:
                fillers.append(await gpu.empty((1 << 20,), dtype="uint8"))
        x, y, z = [await gpu.empty((rows, columns)) for columns in (3, 2, 2)]
        await often(gpu, RunModel.of(model, {"image": x}, {"scores": y, "logits": z}))
        for each in (*fillers, x, y, z):
            await gpu.free(each)
        await gpu.statistics()  # the worker has been told before this
        assert await in_thread(partial(_arenas, gpu)) == 2, "one is kept for the next buffers"


def _arenas(gpu: CudnnRef) -> int:
    """How many arenas the worker has mapped."""
    maps = Path(f"/proc/{gpu.worker_pid}/maps").read_text().splitlines()
    return sum("cudnn-actor-arena" in line for line in maps)
