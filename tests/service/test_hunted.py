"""What was hunted down: each of these failed once."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from typing import Any

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.cuda.running.recipe import Buffer, GraphStep, Number, Recipe
from cudnn_actor.execution.executor import Enqueued, Executor
from cudnn_actor.memory import MemoryTable
from cudnn_actor.protocol.errors import OutOfMemory
from cudnn_actor.service.spawning import Spawning
from cudnn_actor.supervision import Restarting

from .rigs import AsynchronousEngine, Device, Trio, in_thread, seen, service_on, spawn_on
from .workshops import BuildingEngine, Workshop


def test_work_that_is_not_fenced_yet_is_no_device_that_hangs() -> None:
    executor: Executor[str] = Executor(AsynchronousEngine(Device()), MemoryTable("cpu"))
    executor.defer(Enqueued("request", "tag", ()))
    assert executor.working_since() is None
    before = time.monotonic()
    executor.fence()
    since = executor.working_since()
    assert since is not None
    assert since >= before


class Graph:
    """As far as a program wants one of the frontend's."""

    def execute(self, *_: Any, **__: Any) -> None:
        """Run nothing."""


def test_a_program_that_is_dropped_ends_at_once_and_not_in_the_collector() -> None:
    step = GraphStep("eng", 0, (1, 2), (Buffer(1), Number(0, double=True)))
    graph = Graph()
    program = Program(CudaPlan(Recipe("tag", (step,), 0, 2, 1), (graph,)), None, None, fast=False)
    dropped = weakref.ref(graph)
    gc.disable()
    try:
        del program, graph
        assert dropped() is None
    finally:
        gc.enable()


async def test_a_graph_that_is_warmed_twice_is_built_once_and_not_on_the_actors_thread() -> None:
    shop = Workshop()
    shop.failures = [OutOfMemory(requested=0, in_use=0, limit=0)]
    async with spawn_on(lambda: BuildingEngine(shop)) as gpu:
        trio = await Trio.on(gpu)
        assert await gpu.warm([trio.product(), trio.product()]) == 0


class FragileEngine(BuildingEngine):
    """Its context is found dead after a build that has failed."""

    def __init__(self, workshop: Workshop, dead: list[str]) -> None:
        super().__init__(workshop)
        self._dead = dead

    def probe(self) -> str | None:  # type: ignore[override]
        return self._dead.pop() if self._dead else None


async def test_the_graph_whose_build_killed_the_context_is_blamed_not_the_next() -> None:
    shop, dead = Workshop(), ["dead"]
    service = service_on(lambda: FragileEngine(shop, dead))
    shop.failures = [EngineFailure("DEAD", "the test's")]
    async with Spawning(service) as gpu:
        trio = await Trio.on(gpu)
        first, second = trio.product(), trio.product(alpha=2.0)
        shop.building.catch_one()
        answers = [gpu.submit(first)]
        await in_thread(shop.building.wait_for_arrival)
        answers.append(gpu.submit(second))
        await gpu.ping()
        shop.building.release_caught()
        await seen(gpu, Restarting)
        blamed = set(service.state.ended_by_build)
        shop.building.open()
        await asyncio.gather(*answers)
        assert blamed == {service.state.lower(first).graph.digest()}
