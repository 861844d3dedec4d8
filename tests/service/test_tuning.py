"""Models whose plans are tuned: what waits for that, what does not, and what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor import CudnnRef, DeadlineExceeded, InvalidRequest
from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.messages import Warm, WarmModel
from cudnn_actor.models import Model
from cudnn_actor.onnx import OnnxModel

from ..onnx.small_models import image_model
from ..patience import PATIENCE_S
from .rigs import in_thread, spawn, spawn_on
from .workshops import BuildingEngine, KeepingEngine, Workshop, image_graph

IMAGE = np.ones((2, 3, 8, 8), np.float32)


@asynccontextmanager
async def service(
    workshop: Workshop, engine: type[BuildingEngine] = BuildingEngine, **options: Any
) -> AsyncIterator[CudnnRef]:
    async with spawn_on(lambda: engine(workshop), **options) as gpu:
        try:
            yield gpu
        finally:
            workshop.building.open()
            workshop.tuning.open()


def read() -> OnnxModel:
    return OnnxModel(image_model())


async def plan_of(model: Model) -> str:
    return (await model.explain(N=2)).plan


async def tuned(gpu: CudnnRef, model: Model) -> bool:
    """Whether a run takes a tuned plan. The explanation is of the plan that runs take."""
    await model.run(image=IMAGE)
    return (await plan_of(model)).endswith("/tuned")


async def test_a_model_is_tuned_for_the_dims_that_it_is_loaded_with() -> None:
    workshop = Workshop()
    async with service(workshop) as gpu:
        model = await gpu.load(read(), dims={"N": 2}, tune=True)
        assert await tuned(gpu, model)
        assert workshop.tuning.passed == 2


async def test_a_model_is_tuned_for_dims_that_it_is_warmed_for_later() -> None:
    workshop = Workshop()
    async with service(workshop) as gpu:
        model = await gpu.load(read(), tune=True)
        assert workshop.tuning.passed == 0
        await model.warm(N=2)
        assert await tuned(gpu, model)
        await model.warm(N=2)
        assert workshop.tuning.passed == 2


async def test_one_whose_dims_are_numbers_is_tuned_as_it_is_loaded() -> None:
    workshop = Workshop()
    async with service(workshop) as gpu:
        model = await gpu.load(OnnxModel(image_model(2)), tune=True)
        await model.run(image=IMAGE)
        assert (await model.explain()).plan.endswith("/tuned")


async def test_without_tune_nothing_is_measured() -> None:
    workshop = Workshop()
    async with service(workshop) as gpu:
        model = await gpu.load(read(), dims={"N": 2})
        assert not await tuned(gpu, model)
        assert workshop.tuning.passed == 0


@pytest.mark.parametrize("autotune", [False, True])
async def test_a_run_with_other_dims_does_not_wait_for_tuning(autotune: bool) -> None:
    workshop = Workshop()
    async with service(workshop, autotune=autotune) as gpu:
        model = await gpu.load(read(), tune=True)
        with workshop.tuning.closed():
            await asyncio.wait_for(model.run(image=IMAGE), PATIENCE_S)
        assert workshop.tuning.passed == 0


async def test_runs_are_answered_while_the_model_is_tuned_and_then_take_the_tuned_plan() -> None:
    workshop = Workshop()
    async with service(workshop) as gpu:
        model = await gpu.load(read(), tune=True)
        with workshop.tuning.closed():
            warming = asyncio.create_task(model.warm(N=2))
            await in_thread(workshop.tuning.wait_for_arrival)
            for _ in range(3):
                assert not await tuned(gpu, model)
            assert not warming.done()
        await warming
        assert await tuned(gpu, model)


async def test_where_tuning_fails_the_model_answers_with_the_first_choice(logs: list[EventDict]) -> None:
    workshop = Workshop()
    workshop.tuning_failures.append(EngineFailure("BUILDER_DIED", "3 builder processes died of this graph"))
    async with service(workshop) as gpu:
        model = await gpu.load(read(), dims={"N": 2}, tune=True)
        assert not await tuned(gpu, model)
        (told,) = [entry for entry in logs if entry["event"] == "plan.not_tuned"]
        assert "3 builder processes died" in told["error"]
        await model.warm(N=2)  # which tries again
        assert await tuned(gpu, model)


async def test_a_load_that_is_cancelled_ends_the_tuning_at_its_next_candidate() -> None:
    workshop = Workshop()
    async with service(workshop) as gpu:
        with workshop.tuning.closed():
            loading = asyncio.create_task(gpu.load(read(), dims={"N": 2}, tune=True))
            await in_thread(workshop.tuning.wait_for_arrival)
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            await gpu.ping()
            await gpu.drain()  # what it has given back has been taken up
        again = await gpu.load(read(), dims={"N": 2}, tune=True)
        assert await tuned(gpu, again)
        assert workshop.tuning.passed == 1 + 2


async def test_a_load_that_times_out_ends_the_tuning_at_its_next_candidate() -> None:
    workshop = Workshop()
    async with service(workshop) as gpu:
        with workshop.tuning.closed():
            with pytest.raises(DeadlineExceeded):
                await gpu.load(read(), dims={"N": 2}, tune=True, timeout=0.2)
            model = await gpu.load(read(), dims={"N": 2})
            assert not await tuned(gpu, model)
            await model.close()
        again = await gpu.load(read(), dims={"N": 2}, tune=True)
        assert await tuned(gpu, again)
        assert workshop.tuning.passed - 2 in (0, 1)  # it may have begun before the time was up


async def test_a_model_that_another_holds_is_tuned_to_the_end() -> None:
    workshop = Workshop()
    async with service(workshop) as gpu:
        other = await gpu.load(read(), dims={"N": 2})
        with workshop.tuning.closed():
            loading = asyncio.create_task(gpu.load(read(), dims={"N": 2}, tune=True))
            await in_thread(workshop.tuning.wait_for_arrival)
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
        while not await tuned(gpu, other):
            await gpu.ping()


async def test_a_second_service_finds_what_the_first_has_tuned(tmp_path: Path) -> None:
    for measured in (2, 0):
        workshop = Workshop()
        async with service(workshop, KeepingEngine, plan_store=tmp_path / "plans") as gpu:
            model = await gpu.load(read(), dims={"N": 2}, tune=True)
            assert await tuned(gpu, model)
            assert workshop.tuning.passed == measured


@pytest.mark.parametrize("autotune", [False, True])
async def test_cached_takes_what_the_store_has_and_never_measures(tmp_path: Path, autotune: bool) -> None:
    workshop, store = Workshop(), tmp_path / "plans"
    async with service(workshop, KeepingEngine, plan_store=store, autotune=autotune) as gpu:
        model = await gpu.load(read(), dims={"N": 2}, tune="cached")
        assert not await tuned(gpu, model)
        assert workshop.tuning.passed == 0
        other = Workshop()
        async with service(other, KeepingEngine, plan_store=store) as elsewhere:
            await (await elsewhere.load(read(), dims={"N": 2}, tune=True)).close()
        await model.warm(N=2)  # the plan is there, but the store has a better one now
        assert await tuned(gpu, model)
        assert workshop.tuning.passed == 0


async def test_cached_without_a_store_is_the_first_choice() -> None:
    workshop = Workshop()
    async with service(workshop) as gpu:
        model = await gpu.load(read(), dims={"N": 2}, tune="cached")
        assert not await tuned(gpu, model)
        assert workshop.tuning.passed == 0


@pytest.mark.parametrize("tune", [True, "cached", False])
async def test_the_cpu_engine_takes_it_and_has_nothing_to_tune(tune: Any, isolation: str) -> None:
    async with spawn() as gpu:
        model = await gpu.load(read(), dims={"N": 2}, tune=tune)
        assert (await model.run(image=IMAGE))["scores"].shape == (2, 5)
        assert (await model.explain(N=2)).tuned is None


@pytest.mark.parametrize("tune", [1, "yes"])
async def test_a_value_of_tune_that_is_not_known_is_refused(tune: Any) -> None:
    async with spawn() as gpu:
        with pytest.raises(InvalidRequest, match=r"tune=.* is neither True, False nor"):
            await gpu.load(read(), tune=tune)
        model = await gpu.load(read())
        for message in (Warm(tune=tune), WarmModel(model=model.ref, graphs=(), tune=tune)):
            with pytest.raises(InvalidRequest, match="tune"):
                await gpu.ask(message)


async def test_a_warm_for_a_tuned_plan_is_answered_if_that_is_given_back_meanwhile() -> None:
    """A model has the graph, too. Nothing is built for the answer, where requests would wait for that."""
    workshop = Workshop()
    async with service(workshop) as gpu:
        model = await gpu.load(read(), dims={"N": 2})
        with workshop.tuning.closed():
            warming = asyncio.create_task(gpu.ask(Warm(graphs=(image_graph(2),), tune=True)))
            await in_thread(workshop.tuning.wait_for_arrival)
            await model.close()
            assert await asyncio.wait_for(warming, PATIENCE_S) == 0
        assert workshop.building.passed == 1


async def test_clearing_the_plans_ends_tuning_and_what_was_tuned_is_tuned_again() -> None:
    workshop = Workshop()
    async with service(workshop) as gpu:
        model = await gpu.load(read(), dims={"N": 2}, tune=True)
        assert await tuned(gpu, model)
        assert await gpu.clear_plans() == 1
        assert not await tuned(gpu, model)
        with workshop.tuning.closed():
            warming = asyncio.create_task(model.warm(N=2))
            await in_thread(workshop.tuning.wait_for_arrival)
            assert await gpu.clear_plans() == 1
            await asyncio.wait_for(warming, PATIENCE_S)
        assert not await tuned(gpu, model)
        await model.warm(N=2)
        assert await tuned(gpu, model)


async def test_a_warm_builds_nothing_again_that_its_other_plans_have_evicted() -> None:
    workshop = Workshop()
    async with service(workshop, cache_limit=0) as gpu:
        await gpu.warm(image_graph(2))
        assert await asyncio.wait_for(gpu.warm([image_graph(2), image_graph(3)]), PATIENCE_S) == 1
        assert workshop.building.passed == 2
