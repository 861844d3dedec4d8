"""Runs of a model whose inputs were running at a crash: a worker has nothing else while it runs one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from cudnn_actor import BatchedModel, CudnnRef, QuarantinedRequest
from cudnn_actor.messages import DeployModel, ModelGraph, ModelRef, RunModel
from tests.service.rigs import in_thread, outcome
from tests.service.test_batched_models import doubling, rows
from tests.service.test_deployed_models import W, check, images, placed

from ..inside import service_behind
from ..patience import PATIENCE_S
from .crash_rigs import Points, after, gone, kill, workers

pytestmark = pytest.mark.usefixtures("a_forkserver")


async def deployed(gpu: CudnnRef) -> ModelRef:
    w = await gpu.upload(W)
    graphs: tuple[ModelGraph, ...] = (await placed(gpu, w, 4),)
    return await gpu.ask(DeployModel(graphs=graphs))


@asynccontextmanager
async def two_batches_in_flight() -> AsyncIterator[
    tuple[CudnnRef, Points, BatchedModel, list[asyncio.Future[dict[str, Any]]]]
]:
    """Four requests in two batches, which have been executed, and of which nothing is finished."""
    async with (
        workers("LateEngine") as (gpu, points),
        await gpu.load(doubling()) as model,
        gpu.batched(model, max_batch=2, max_delay_us=0) as endpoint,
    ):
        points.hold("finished")
        before = points.visits(after("execute"))
        futures = [endpoint.submit(x=rows(number)) for number in range(4)]
        await in_thread(lambda: points.wait_for_visits(after("execute"), before + 2))
        yield gpu, points, endpoint, futures


def of(model: ModelRef, seed: int, **fields: Any) -> RunModel:
    return RunModel(model=model, arrays={"image": images(4, seed)}, **fields)


async def test_a_run_with_a_crash_behind_it_waits_for_those_before_and_those_after_wait_for_it() -> None:
    async with workers("LateEngine") as (gpu, points):
        model = await deployed(gpu)
        check(await gpu.ask(of(model, 0)), images(4, 0))
        points.hold("finished")
        begin = len(points.passed)
        runs = [gpu.submit(of(model, seed, crashes=int(seed == 3))) for seed in range(6)]
        await in_thread(lambda: points.wait_for_visits("execute", 1 + 3))
        async with asyncio.timeout(PATIENCE_S):
            while len(service_behind(gpu).state.mailbox) > 2:  # noqa: ASYNC110 - there is no event: until it is taken up
                await asyncio.sleep(0)
        points.let_go()
        for seed, future in enumerate(runs):
            check(await outcome(future), images(4, seed))
        steps = [point for _, point in points.passed[begin:] if point in ("execute", "finished?")]
        places = [place for place, point in enumerate(steps) if point == "execute"]
        assert "finished?" in steps[places[2] : places[3]]
        assert "finished?" in steps[places[3] : places[4]]


async def test_nobody_is_blamed_for_a_crash_beside_a_run_that_was_alone() -> None:
    async with workers("LateEngine") as (gpu, points):
        model = await deployed(gpu)
        check(await gpu.ask(of(model, 0)), images(4, 0))
        points.hold("execute")
        alone = gpu.submit(of(model, 3, crashes=1))
        behind = [gpu.submit(of(model, seed)) for seed in (4, 5)]
        (await in_thread(lambda: points.arrival("execute"))).kill()
        points.let_go()
        assert isinstance(await outcome(alone), QuarantinedRequest)
        for seed, future in enumerate(behind, start=4):
            check(await outcome(future), images(4, seed))
        assert (await gpu.statistics()).replayed == 0


async def test_a_run_that_waits_to_be_alone_outlives_a_crash() -> None:
    async with workers("LateEngine") as (gpu, points):
        model = await deployed(gpu)
        points.hold("finished")
        visits = points.visits(after("execute"))
        first = gpu.submit(of(model, 0))
        alone = gpu.submit(of(model, 1, crashes=1))
        cancelled = gpu.submit(of(model, 2, crashes=1))
        await in_thread(lambda: points.wait_for_visits(after("execute"), visits + 1))
        cancelled.cancel()
        pid = kill(gpu)
        await gone(pid)
        points.let_go()
        check(await outcome(first), images(4, 0))
        check(await outcome(alone), images(4, 1))
        assert (await gpu.statistics()).withdrawn == 1


async def test_of_two_batches_in_flight_at_a_crash_each_request_runs_alone_and_is_answered() -> None:
    async with two_batches_in_flight() as (gpu, points, endpoint, futures):
        kill(gpu)
        points.let_go()
        for number, future in enumerate(futures):
            np.testing.assert_array_equal((await outcome(future))["y"], rows(2 * number))
        statistics = await gpu.statistics()
        assert (statistics.restarts, statistics.replayed, endpoint.statistics().divided) == (1, 0, 2)


async def test_a_sample_is_found_though_two_batches_were_in_flight() -> None:
    async with two_batches_in_flight() as (gpu, points, _endpoint, futures):
        points.hold("execute")  # of the next worker: the first request that it runs is the culprit
        kill(gpu)
        points.let_go("finished")
        (await in_thread(lambda: points.arrival("execute"))).kill()
        points.let_go()
        outcomes = [await outcome(future) for future in futures]
        assert sum(isinstance(each, QuarantinedRequest) for each in outcomes) == 1
        for number, answer in enumerate(outcomes):
            if not isinstance(answer, QuarantinedRequest):
                np.testing.assert_array_equal(answer["y"], rows(2 * number))
        assert (await gpu.statistics()).restarts == 2
