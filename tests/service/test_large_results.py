"""Results of models in staging memory: given without a copy, held, lent to runs, and used again."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from cudnn_actor import (
    DType,
    ExecutionFailed,
    InvalidRequest,
)
from cudnn_actor.engines.base import EngineFailure, StickyError
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.isolation import staging
from cudnn_actor.isolation.process.parent import model_runs
from cudnn_actor.messages import (
    DeployModel,
    Download,
    UnloadModel,
)
from cudnn_actor.models import Feature

from ..patience import PATIENCE_S
from .rigs import AsynchronousEngine, Device, spawn, spawn_on
from .test_deployed_models import W, check, deployed, images, placed, run

pytestmark = pytest.mark.usefixtures("isolation")


async def test_large_results_are_given_without_a_copy_and_their_memory_is_used_again() -> None:
    count = 100_000
    async with deployed(count) as (gpu, model):
        kept = []
        for seed in range(6):
            results = await run(gpu, model, images(count, seed))
            check(results, images(count, seed))
            kept.append((seed, results["logits"]))
        for seed, logits in kept:
            np.testing.assert_allclose(logits, images(count, seed) @ W, rtol=1e-4, atol=1e-5)
        down = await gpu.ask(Download(src=await gpu.upload(W)))
        np.testing.assert_array_equal(down, W)


COUNT = 20_000
"""So many rows that results are lent, and not copied."""


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the data fills a segment of staging memory: each has 4 MiB, and room for notes."""
    for module in (staging, model_runs):
        monkeypatch.setattr(module, "SEGMENT_BYTES", (4 << 20) + (64 << 10))


@pytest.fixture
def no_idle_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_IDLE_BYTES", 0)


async def test_no_later_run_changes_a_large_result_that_is_held() -> None:
    async with deployed(COUNT) as (gpu, model):
        held = {seed: await run(gpu, model, images(COUNT, seed)) for seed in range(14)}
        together = [run(gpu, model, images(COUNT, seed)) for seed in range(14, 24)]
        held |= dict(enumerate(await asyncio.gather(*together), start=14))
        for seed in range(0, 24, 2):
            del held[seed]  # so some memory comes back, beside what is held
        for seed in range(30, 36):
            check(await run(gpu, model, images(COUNT, seed)), images(COUNT, seed))
        for seed, results in held.items():
            check(results, images(COUNT, seed))


async def test_a_part_of_a_large_result_keeps_it() -> None:
    async with deployed(COUNT) as (gpu, model):
        last = {seed: (await run(gpu, model, images(COUNT, seed)))["logits"][-3:].T for seed in range(6)}
        for seed in range(10, 14):
            await run(gpu, model, images(COUNT, seed))
        for seed, rows in last.items():
            np.testing.assert_allclose(rows.T, images(COUNT, seed)[-3:] @ W, rtol=1e-5, atol=1e-6)


async def test_a_large_result_with_two_names_is_two_arrays() -> None:
    async with spawn() as gpu:
        graph = await placed(gpu, await gpu.upload(W), COUNT, outputs={"first": "z", "second": "z"})
        model = await gpu.ask(DeployModel(graphs=(graph,)))
        results = await run(gpu, model, images(COUNT))
        results["first"][:] = 7
        np.testing.assert_allclose(results["second"], images(COUNT) @ W, rtol=1e-5, atol=1e-6)


async def test_the_memory_of_large_results_is_used_again_once_they_are_dropped() -> None:
    async with deployed(COUNT) as (gpu, model):
        for seed in range(3):
            await run(gpu, model, images(COUNT, seed))
        before = _segments()
        gc.disable()  # nothing else keeps them until the collector looks for cycles
        try:
            for seed in range(100):
                results = await run(gpu, model, images(COUNT, seed))
                assert gpu.worker_pid is None or _is_staged(results["logits"])
        finally:
            gc.enable()
        check(results, images(COUNT, 99))
        assert _segments() <= before + 1


@pytest.mark.usefixtures("small_segments")
async def test_results_of_an_unloaded_model_are_held_and_then_given_back() -> None:
    count = 25_000  # so the places of ten runs fit in two segments
    async with deployed(count, 4) as (gpu, model):
        check(await run(gpu, model, images(4)), images(4))
        before = _segments()
        held = [await run(gpu, model, images(count, seed)) for seed in range(9)]
        await gpu.ask(UnloadModel(model=model, graphs=(f"of {count}",)))
        for seed in range(3):
            check(await run(gpu, model, images(4, seed)), images(4, seed))
        for seed, results in enumerate(held):
            check(results, images(count, seed))
        del results
        held.clear()
        async with asyncio.timeout(PATIENCE_S):
            while _segments() > before + 1:
                check(await run(gpu, model, images(4)), images(4))


async def test_a_large_result_outlives_its_service() -> None:
    async with deployed(COUNT) as (gpu, model):
        results = await run(gpu, model, images(COUNT))
    check(results, images(COUNT))


async def test_a_worker_that_is_killed_changes_no_result_that_is_held() -> None:
    async with deployed(COUNT, max_restarts=50) as (gpu, model):
        held = {}
        for start in range(0, 60, 6):
            together = [asyncio.ensure_future(run(gpu, model, images(COUNT, start + n))) for n in range(6)]
            held[start] = await together[0]
            if gpu.worker_pid is not None:
                os.kill(gpu.worker_pid, signal.SIGKILL)
            for number, results in enumerate(await asyncio.gather(*together)):
                check(results, images(COUNT, start + number))
        for start, results in held.items():
            check(results, images(COUNT, start))


async def test_a_run_reads_lent_memory_where_it_lies() -> None:
    count = 30_000
    async with deployed(count) as (gpu, model):
        feature = Feature(name="image", dtype=DType.FLOAT32, dims=("N", 3))
        lent = await gpu.staging(feature, N=count + 8)
        assert lent.shape == (count + 8, 3)
        assert lent.flags.c_contiguous
        for seed in range(3):
            lent[:] = np.nan
            lent[8:] = images(count, seed)
            check(await run(gpu, model, lent[8:]), images(count, seed))  # a part of it
            buffer = await gpu.upload(lent[8:])
            np.testing.assert_array_equal(await gpu.download(buffer), images(count, seed))
            results = await run(gpu, model, np.asfortranarray(lent[8:]))  # not contiguous: it is copied
            check(results, images(count, seed))
        for wrong in ({}, {"N": -1}, {"N": 2, "M": 3}):
            with pytest.raises(InvalidRequest):
                await gpu.staging(feature, wrong)
        with pytest.raises(InvalidRequest, match="is of type int"):
            await gpu.staging(3)  # type: ignore[arg-type]


async def test_lent_memory_is_used_again_once_it_is_dropped() -> None:
    feature = Feature(name="image", dtype=DType.FLOAT32, dims=("N", 3))
    async with deployed() as (gpu, _):
        seen = set()
        for _ in range(20):
            lent = await gpu.staging(feature, N=100_000)
            seen.add(lent.__array_interface__["data"][0])
            del lent
        assert len(seen) < 20


@pytest.mark.usefixtures("small_segments", "no_idle_segments")
async def test_lent_memory_is_given_back_by_the_next_turns_once_it_is_dropped() -> None:
    feature = Feature(name="image", dtype=DType.FLOAT32, dims=("N", 3))
    async with deployed() as (gpu, model):
        check(await run(gpu, model, images(4)), images(4))  # later runs use its staging memory
        before = _segments()
        lent = [await gpu.staging(feature, N=3 << 17) for _ in range(4)]
        lent[0][:] = 1
        assert _segments() >= before + 3
        lent.clear()
        async with asyncio.timeout(PATIENCE_S):
            while _segments() > before + 1:
                check(await run(gpu, model, images(4)), images(4))


@pytest.mark.usefixtures("small_segments", "no_idle_segments")
async def test_a_worker_unmaps_lent_memory_that_runs_have_read() -> None:
    count = 3 << 17
    feature = Feature(name="image", dtype=DType.FLOAT32, dims=("N", 3))
    async with deployed(count, 4) as (gpu, model):
        check(await run(gpu, model, images(4)), images(4))
        into = [await gpu.empty((count, 2)) for _ in range(2)]
        await run(gpu, model, images(count), scores=into[0], logits=into[1])
        before = _segments()
        lent, base = [await gpu.staging(feature, N=count) for _ in range(4)], images(count)
        for number, x in enumerate(lent, 1):
            np.multiply(base, number, out=x)
            assert await run(gpu, model, x, scores=into[0], logits=into[1]) == {}
            logits, some = await gpu.download(into[1]), slice(None, None, 101)
            np.testing.assert_allclose(logits[some], x[some] @ W, rtol=1e-5, atol=1e-5)
        del x, logits
        lent.clear()
        async with asyncio.timeout(PATIENCE_S):
            while max(_segments(), len(_mapped(gpu.worker_pid or "self"))) > before + 1:
                check(await run(gpu, model, images(4)), images(4))


def _mapped(pid: int | str = "self") -> list[str]:
    """The segments of staging memory that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split()[0] for line in maps if "cudnn-actor-stage" in line]


def _segments() -> int:
    """How many segments of staging memory this process has mapped."""
    return len(_mapped())


def _is_staged(array: np.ndarray) -> bool:
    """Whether an array lies in staging memory."""
    address = array.__array_interface__["data"][0]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in (m.split("-") for m in _mapped()))


async def test_lent_memory_outlives_its_service() -> None:
    feature = Feature(name="image", dtype=DType.FLOAT32, dims=("N", 3))
    async with deployed() as (gpu, _):
        lent = await gpu.staging(feature, N=4)
        lent[:] = 3
    np.testing.assert_array_equal(lent, np.full((4, 3), 3))


async def test_an_output_that_cannot_be_read_leaves_none_of_the_others_in_staging_memory() -> None:
    device = Device()
    device.run_freely()
    async with spawn_on(lambda: AsynchronousEngine(device)) as gpu:
        model = await gpu.ask(DeployModel(graphs=(await placed(gpu, await gpu.upload(W), 4),)))
        for collected in (2, 4):
            device.fetch_fails_with = EngineFailure("BAD_COPY", "the test says so")
            with pytest.raises(ExecutionFailed, match="BAD_COPY"):
                await run(gpu, model, images(4))
            assert device.fetched == collected
        check(await run(gpu, model, images(4)), images(4))


class _PinsOnce(CpuEngine):
    """An engine whose context dies when it pins memory for the first time."""

    def __init__(self, dies: list[bool]) -> None:
        super().__init__()
        self._dies = dies

    def pin(self, memory: memoryview) -> None:
        if self._dies.pop():
            raise StickyError("DEAD", "the test killed the context")


async def test_memory_is_lent_by_the_next_incarnation_if_the_context_dies_meanwhile() -> None:
    dies = [False, True]
    async with spawn_on(lambda: _PinsOnce(dies)) as gpu:
        lent = await gpu.staging(Feature(name="image", dtype=DType.FLOAT32, dims=("N", 3)), N=4)
        assert lent.shape == (4, 3)
        assert gpu.generation == 2
