"""Models whose graphs run by provisional plans at first: who waits for better ones, and when they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor import ConvFwd, ConvSpec, CudnnRef
from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.errors import ExecutionFailed
from cudnn_actor.models import Model
from cudnn_actor.onnx import OnnxModel

from ..onnx.small_models import image_model
from ..patience import PATIENCE_S
from .rigs import in_thread, spawn_on
from .workshops import BuildingEngine, KeepingEngine, Workshop, image_graph

WEIGHTS = 5


@asynccontextmanager
async def service(
    engine: type[BuildingEngine] = BuildingEngine, **options: Any
) -> AsyncIterator[tuple[CudnnRef, Workshop]]:
    workshop = Workshop()
    workshop.hurries = True
    async with spawn_on(lambda: engine(workshop), **options) as gpu:
        try:
            yield gpu, workshop
        finally:
            workshop.improving.open()
            workshop.tuning.open()


async def load(gpu: CudnnRef, **options: Any) -> Model:
    return await gpu.load(OnnxModel(image_model()), **options)


async def run(model: Model, n: int = 2) -> np.ndarray:
    image = np.arange(n * 3 * 64, dtype=np.float32).reshape(n, 3, 8, 8)
    scores: np.ndarray = (await asyncio.wait_for(model.run(image=image), PATIENCE_S))["scores"]
    return scores


async def is_provisional(model: Model, n: int = 2) -> bool:
    """Of the plan that runs take now."""
    return (await model.explain(N=n)).plan.endswith("/provisional")


async def until_replaced(gpu: CudnnRef, model: Model, n: int = 2) -> None:
    while await is_provisional(model, n):
        await gpu.ping()


async def test_a_run_waits_for_a_provisional_plan_alone_and_later_ones_take_the_better() -> None:
    async with service() as (gpu, workshop):
        model = await load(gpu)
        with workshop.improving.closed():
            first = await run(model)
            assert (await run(model) == first).all()
            assert await is_provisional(model)
            assert workshop.improving.passed == 0
        await until_replaced(gpu, model)
        assert (await run(model) == first).all()
        assert workshop.improving.passed == 1


async def test_a_first_run_has_its_plan_built_while_it_uploads_its_weights_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with service() as (gpu, workshop):
        upload, begun, all_begun, go_on = gpu.upload, list[object](), asyncio.Event(), asyncio.Event()

        async def upload_together(values: object, **options: Any) -> Any:
            begun.append(values)
            if len(begun) == WEIGHTS:
                all_begun.set()
            await go_on.wait()
            return await upload(values, **options)

        monkeypatch.setattr(gpu, "upload", upload_together)
        model = await load(gpu)
        with workshop.improving.closed():
            with workshop.building.closed():
                running = asyncio.create_task(run(model))
                await asyncio.wait_for(all_begun.wait(), PATIENCE_S)
                await in_thread(workshop.building.wait_for_arrival)
                go_on.set()
                while (await gpu.statistics()).live_buffers < WEIGHTS:
                    await gpu.ping()
                assert not running.done()
            assert np.isfinite(await running).all()
            assert workshop.building.passed == 1


async def test_a_plan_that_cannot_be_built_meanwhile_fails_the_run() -> None:
    async with service() as (gpu, workshop):
        model = await load(gpu)
        workshop.failures = [EngineFailure("CRAFT_FAILED", "as told") for _ in range(2)]
        with pytest.raises(ExecutionFailed, match="CRAFT_FAILED"):
            await run(model)
        workshop.failures.clear()
        await run(model)


async def test_what_is_explained_before_anything_has_run_is_the_preferred_plan() -> None:
    async with service() as (gpu, workshop):
        model = await load(gpu)
        assert not await is_provisional(model)
        with workshop.improving.closed():
            await run(model, 3)
            assert await is_provisional(model, 3)


async def test_another_size_does_not_wait_for_the_better_plan_of_the_first() -> None:
    async with service() as (gpu, workshop):
        model = await load(gpu)
        with workshop.improving.closed():
            await run(model)
            await in_thread(workshop.improving.wait_for_arrival)
            await run(model, 3)
            assert await is_provisional(model, 3)
        await until_replaced(gpu, model)
        await until_replaced(gpu, model, 3)


async def test_clearing_provisional_plans_abandons_the_better_ones() -> None:
    async with service() as (gpu, workshop):
        model = await load(gpu)
        with workshop.improving.closed():
            first = await run(model)
            await in_thread(workshop.improving.wait_for_arrival)
            warming = asyncio.create_task(model.warm(N=2))
            await gpu.ping()
            assert await gpu.clear_plans() == 1
            await asyncio.wait_for(warming, PATIENCE_S)
            assert (await run(model) == first).all()
            assert await is_provisional(model)
        await until_replaced(gpu, model)
        assert (await run(model) == first).all()


async def test_to_warm_a_model_is_to_wait_for_the_better_plan() -> None:
    async with service() as (gpu, workshop):
        model = await load(gpu)
        with workshop.improving.closed():
            await run(model)
            warming = asyncio.create_task(model.warm(N=2))
            await in_thread(workshop.improving.wait_for_arrival)
            await gpu.ping()
            assert not warming.done()
        await asyncio.wait_for(warming, PATIENCE_S)
        assert not await is_provisional(model)


async def test_a_warm_that_joins_a_build_for_a_run_waits_for_the_better_plan() -> None:
    async with service() as (gpu, workshop):
        model = await load(gpu)
        with workshop.improving.closed():
            with workshop.building.closed():
                running = asyncio.create_task(run(model))
                await in_thread(workshop.building.wait_for_arrival)
                warming = asyncio.create_task(model.warm(N=2))
                await gpu.ping()
            await running
            await in_thread(workshop.improving.wait_for_arrival)
            assert not warming.done()
        await asyncio.wait_for(warming, PATIENCE_S)
        assert not await is_provisional(model)


async def test_a_warm_model_never_has_a_provisional_plan() -> None:
    async with service() as (gpu, workshop):
        model = await load(gpu, dims={"N": 2})
        assert not await is_provisional(model)
        assert workshop.improving.passed == 0


async def test_where_nothing_better_can_be_built_the_plan_stays_and_nobody_waits_again(
    logs: list[EventDict],
) -> None:
    async with service() as (gpu, workshop):
        workshop.improving_failures.append(EngineFailure("BUILDER_DIED", "3 processes died of this graph"))
        model = await load(gpu)
        with workshop.improving.closed():
            await run(model)
            warming = asyncio.create_task(model.warm(N=2))
            await in_thread(workshop.improving.wait_for_arrival)
        await asyncio.wait_for(warming, PATIENCE_S)
        assert await is_provisional(model)
        (told,) = [entry for entry in logs if entry["event"] == "plan.not_replaced"]
        assert "3 processes died" in told["error"]
        with workshop.improving.closed():
            await asyncio.wait_for(model.warm(N=2), PATIENCE_S)
        await run(model)


async def test_the_store_keeps_the_provisional_plan_until_the_better_one_replaces_it(tmp_path: Path) -> None:
    async with service(KeepingEngine, plan_store=tmp_path / "plans") as (gpu, workshop):
        model = await load(gpu)
        with workshop.improving.closed():
            await run(model)
            async with service(KeepingEngine, plan_store=tmp_path / "plans") as (other, elsewhere):
                with elsewhere.improving.closed(), elsewhere.building.closed():
                    second = await load(other)
                    await run(second)  # without a build
                    assert await is_provisional(second)
                await until_replaced(other, second)
        await model.warm(N=2)
    async with service(KeepingEngine, plan_store=tmp_path / "plans") as (gpu, workshop):
        with workshop.building.closed():
            model = await load(gpu)
            await run(model)
        assert not await is_provisional(model)


async def test_whoever_wants_the_better_plan_does_not_get_a_stored_provisional_one(tmp_path: Path) -> None:
    async with service(KeepingEngine, plan_store=tmp_path / "plans") as (gpu, workshop):
        model = await load(gpu)
        with workshop.improving.closed():
            await run(model)
            async with service(KeepingEngine, plan_store=tmp_path / "plans") as (other, _):
                second = await load(other, dims={"N": 2})
                assert not await is_provisional(second)


async def test_a_provisional_plan_is_tuned_at_once_and_the_better_one_does_not_replace_the_tuned() -> None:
    async with service(autotune=True) as (gpu, workshop):
        model = await load(gpu)
        with workshop.improving.closed():
            await run(model)
            await in_thread(workshop.improving.wait_for_arrival)
            warming = asyncio.create_task(model.warm(N=2))
            while not (await model.explain(N=2)).plan.endswith("/tuned"):
                await gpu.ping()
        await asyncio.wait_for(warming, PATIENCE_S)
        assert (await model.explain(N=2)).plan.endswith("/tuned")


async def test_a_model_that_is_closed_meanwhile_gets_none() -> None:
    async with service() as (gpu, workshop):
        model = await load(gpu)
        with workshop.improving.closed():
            await run(model)
            await in_thread(workshop.improving.wait_for_arrival)
            await run(model, 3)  # whose better plan would be built after that
            await model.close()
            await gpu.drain()
        again = await load(gpu)
        await run(again)
        await until_replaced(gpu, again)
        assert workshop.improving.passed == 2


async def test_requests_that_are_no_model_have_the_best_plan_from_the_start() -> None:
    async with service() as (gpu, workshop):
        x, w = [await gpu.upload(np.ones((1, 1, size, size), np.float32)) for size in (4, 1)]
        y = await gpu.empty(x.spec.dims)
        receipt = await gpu.ask(ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2)))
        assert not receipt.plan.endswith("/provisional")
        assert workshop.improving.passed == 0


async def test_a_warm_is_answered_whose_plan_was_evicted_and_given_back_meanwhile() -> None:
    """A cache of one plan, and a model whose graph the caller warms, too."""
    async with service(cache_limit=0) as (gpu, workshop):
        model = await load(gpu)
        with workshop.improving.closed():
            await run(model)
            await in_thread(workshop.improving.wait_for_arrival)
            warming = asyncio.create_task(gpu.warm(image_graph(2)))
            await gpu.ping()
            await run(model, 3)
            await model.close()
            await gpu.ping()
            assert not warming.done()
        await asyncio.wait_for(warming, PATIENCE_S)
