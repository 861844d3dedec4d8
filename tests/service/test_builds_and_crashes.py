"""Crashes, stops and hangs while requests wait for a plan: they have not started, and none is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cudnn_actor import (
    ConvFwd,
    CudnnRef,
    Fault,
    FaultPlan,
    OutcomeUnknown,
    QuarantinedRequest,
    Receipt,
    ServiceStopped,
)
from cudnn_actor.engines.base import StickyError
from cudnn_actor.errors import ContextLost
from cudnn_actor.messages import Download, Fill, Warm
from cudnn_actor.supervision import ExitKind, Restarting

from .noticed_hangs import no_progress_since, notice_hang
from .rigs import Gate, Trio, in_thread, outcome, seen, service_on, single, spawn_on
from .test_builds import cold, held, taken_up, workshop_service
from .worker_rigs import GatedEngine
from .workshops import BuildingEngine, MortalBuildingEngine, Workshop


async def test_a_crash_runs_what_waited_in_the_successor_in_order_and_judges_none_of_it() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill)
    async with workshop_service(faults=faults) as (gpu, workshop, trio):
        other = await gpu.upload(single(0))
        with held(workshop):
            waits = gpu.submit(cold(trio, beta=1.0))  # not pure: 6 + 1
            behind: list[asyncio.Future[Any]] = [
                gpu.submit(trio.sum()),  # 6 + 7
                gpu.submit(Download(src=trio.y)),
                gpu.submit(Warm(messages=(cold(trio),))),
            ]
            await in_thread(workshop.building.wait_for_arrival)
            await taken_up(gpu)
            assert isinstance(await gpu.ask(Fill(dst=other, value=1)), Receipt)  # the crash
            assert gpu.generation == 2
        assert (await waits).generation == 2
        assert isinstance(await behind[0], Receipt)
        assert (await behind[1]).item() == 13
        assert await behind[2] == 1
        assert (await gpu.statistics()).replayed == 1  # the Fill


async def test_what_waits_is_not_quarantined_however_often_others_crash() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill).at(3, Fault.STICKY, of=Fill)
    async with workshop_service(faults=faults) as (gpu, workshop, trio):
        other = await gpu.upload(single(0))
        with held(workshop):
            waits = gpu.submit(cold(trio))
            await in_thread(workshop.building.wait_for_arrival)
            for _ in range(2):
                await gpu.ask(Fill(dst=other, value=1))
            assert gpu.generation == 3
        assert isinstance(await waits, Receipt)


async def test_a_request_that_is_cancelled_between_two_lives_does_not_run() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill)
    async with workshop_service(faults=faults) as (gpu, workshop, trio):
        other = await gpu.upload(single(0))
        with held(workshop):
            waits = gpu.submit(cold(trio))
            await in_thread(workshop.building.wait_for_arrival)
            await gpu.ask(Fill(dst=other, value=1))
            waits.cancel()
            await asyncio.sleep(0)
        await gpu.drain()
        assert await trio.result() == 1


async def test_a_stop_answers_what_waits_for_a_plan() -> None:
    workshop = Workshop()
    gpu = await spawn_on(lambda: BuildingEngine(workshop))
    trio = await Trio.on(gpu)
    with held(workshop):
        asked: list[asyncio.Future[Any]] = [
            gpu.submit(cold(trio)),
            gpu.submit(Download(src=trio.y)),
            gpu.submit(Fill(dst=trio.x, value=1)),
        ]
        pykka_one = gpu.actor_ref.ask(cold(trio), block=False)
        await in_thread(workshop.building.wait_for_arrival)
        await taken_up(gpu)
        await gpu.aclose(drain_s=0.0)
        errors = [await outcome(future) for future in asked]
        assert all(isinstance(error, ServiceStopped) for error in errors)
        assert not any(error.interrupted for error in errors)
        with pytest.raises(ServiceStopped):
            await in_thread(pykka_one.get)


async def test_where_the_memory_dies_with_the_context_so_do_those_that_wait() -> None:
    workshop = Workshop()
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill)
    gpu = await spawn_on(lambda: MortalBuildingEngine(workshop), faults=faults)
    trio = await Trio.on(gpu)
    other = await gpu.upload(single(0))
    with held(workshop):
        asked: list[asyncio.Future[Any]] = [gpu.submit(cold(trio)), gpu.submit(Download(src=trio.y))]
        await in_thread(workshop.building.wait_for_arrival)
        asked.append(gpu.submit(Fill(dst=other, value=1)))
        errors = [await outcome(future) for future in asked]
    assert all(isinstance(error, ContextLost) for error in errors)
    await gpu.aclose()


# The build thread itself.


async def test_a_context_that_a_build_finds_dead_is_a_crash() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        workshop.failures = [StickyError("DEAD", "the build found it so")]
        assert (await gpu.ask(cold(trio))).generation == 2


async def test_a_build_thread_that_dies_leaves_nobody_waiting() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        workshop.dies = True
        other = gpu.submit(Download(src=trio.y))
        assert (await gpu.ask(cold(trio))).generation == 2
        assert (await other).item() == 1


async def test_a_graph_whose_build_has_ended_two_lives_is_quarantined_and_the_service_goes_on() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        dead = StickyError("DEAD", "the build found it so")
        workshop.failures = [dead, dead]
        with pytest.raises(QuarantinedRequest, match="the build found it so"):
            await gpu.ask(cold(trio))
        assert gpu.generation == 3
        assert isinstance(await gpu.ask(trio.product()), Receipt)
        with pytest.raises(QuarantinedRequest):
            await gpu.ask(cold(trio))
        assert await gpu.warm([cold(trio)]) == 0


async def hung(gpu: CudnnRef, workshop: Workshop, trio: Trio) -> asyncio.Future[Any]:
    workshop.building.catch_one()
    waits = gpu.submit(cold(trio))
    await in_thread(workshop.building.wait_for_arrival)
    return waits


async def test_a_build_that_does_not_end_is_a_hang_also_while_others_are_served() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        other = await Trio.on(gpu)
        waits = await hung(gpu, workshop, trio)
        notice_hang(gpu)
        while gpu.generation == 1:
            await gpu.ask(other.product())
        restarting = await seen(gpu, Restarting)
        assert isinstance(restarting, Restarting)
        assert restarting.cause.kind is ExitKind.HUNG
        assert (await waits).generation == 2
        workshop.building.open()


async def test_a_graph_whose_build_hangs_twice_is_quarantined() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        with workshop.building.closed():
            asked = gpu.submit(cold(trio))
            for _ in range(2):
                await in_thread(workshop.building.wait_for_arrival)
                notice_hang(gpu)
            assert isinstance(await outcome(asked), QuarantinedRequest)
            assert isinstance(await gpu.ask(Fill(dst=trio.x, value=1)), Receipt)


async def test_tuning_that_gets_on_is_no_hang() -> None:
    """Each plan that it tries is progress."""
    async with workshop_service(autotune=True) as (gpu, workshop, trio):
        workshop.tuning.catch_one()
        warmed = gpu.submit(Warm(messages=(cold(trio),)))
        await one_after_the_other(gpu, workshop.tuning)
        assert await warmed == 1
        assert gpu.generation == 1


async def test_many_builds_one_after_the_other_are_no_hang() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        asked = []
        for number in (2, 3):
            x, y = [await gpu.empty((1, 1, 1, number)) for _ in range(2)]
            asked.append((x, y))
        workshop.building.catch_one()
        runs = [gpu.submit(trio.product(x=x, y=y)) for x, y in asked]
        await one_after_the_other(gpu, workshop.building)
        for run in runs:
            assert isinstance(await run, Receipt)
        assert gpu.generation == 1


async def one_after_the_other(gpu: CudnnRef, gate: Gate) -> None:
    """Let two that come by a gate go on, and see that there was progress between them."""
    await in_thread(gate.wait_for_arrival)
    first = no_progress_since(gpu)
    gate.release_caught()
    await in_thread(gate.wait_for_arrival)
    second = no_progress_since(gpu)
    gate.open()
    assert first is not None
    assert second is not None
    assert first < second


async def test_closing_does_not_wait_for_ever_for_a_build() -> None:
    workshop = Workshop()
    service = service_on(lambda: BuildingEngine(workshop))
    service.launch()
    await asyncio.wrap_future(service.started)
    gpu = CudnnRef(service)
    trio = await Trio.on(gpu)
    with held(workshop):
        waits = gpu.submit(cold(trio))
        await in_thread(workshop.building.wait_for_arrival)
        await gpu.aclose(drain_s=0.0)
        assert isinstance(await outcome(waits), ServiceStopped)


class LostAndBuilding(GatedEngine):
    """A gate before each run, and plans from a second thread."""

    def __init__(self, gate: Gate, workshop: Workshop) -> None:
        super().__init__(gate)
        self._workshop = workshop

    def builder(self, access: object) -> Any:
        return BuildingEngine(self._workshop).builder(access)


@pytest.mark.usefixtures("short_grace")
async def test_what_waits_for_a_plan_is_answered_too_when_a_thread_does_not_end() -> None:
    gate, workshop = Gate(), Workshop()
    service = service_on(lambda: LostAndBuilding(gate, workshop))
    service.launch()
    gpu = CudnnRef(service)
    trio, other = await Trio.on(gpu), await Trio.on(gpu)
    await gpu.warm([trio.product()])
    with held(workshop):
        waits, behind = gpu.submit(cold(trio)), gpu.submit(Download(src=trio.y))
        await in_thread(workshop.building.wait_for_arrival)
        gate.catch_one()
        lost = gpu.submit(other.product())
        await in_thread(gate.wait_for_arrival)
        notice_hang(gpu)
        workshop.building.open()  # it waits for nothing but the thread that hangs
        assert isinstance(await outcome(lost), OutcomeUnknown)
        assert isinstance(await outcome(waits), ServiceStopped)
        assert isinstance(await outcome(behind), ServiceStopped)
        gate.open()
    await gpu.aclose()


async def test_a_plan_of_the_last_life_is_built_again_in_the_next() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, of=ConvFwd)
    async with workshop_service(faults=faults) as (gpu, _, trio):
        assert (await gpu.ask(trio.product())).generation == 2
        assert (await gpu.statistics()).plans.misses == 1
