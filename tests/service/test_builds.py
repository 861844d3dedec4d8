"""Plans built on a second thread: who waits for them, who doesn't, and in what order all of them run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor import (
    Activation,
    ConvBwdData,
    ConvFwd,
    CudnnRef,
    DeadlineExceeded,
    Epilogue,
    ExecutionFailed,
    Fault,
    FaultPlan,
    GraphBuilder,
    MailboxFull,
    OutOfMemory,
    Receipt,
    StaleBufferError,
    TensorSpec,
    UnsupportedGraph,
)
from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.errors import NotDeployed
from cudnn_actor.messages import (
    Allocate,
    Copy,
    DeployModel,
    Download,
    Drain,
    Fill,
    Free,
    ModelGraph,
    RunModel,
    UnloadModel,
    Upload,
    Warm,
)
from cudnn_actor.service import Spawning

from ..loop_clock import LONG_S, pass_time
from ..patience import PATIENCE_S
from .rigs import ONE_BY_ONE, Device, Trio, in_thread, outcome, single, spawn_on
from .workshops import AsynchronousBuildingEngine, BuildingEngine, KeepingEngine, Workshop

SPEC = TensorSpec.packed((1, 1, 1, 1))
RELU = Epilogue(activation=Activation.RELU)


@asynccontextmanager
async def workshop_service(
    *, asynchronous: bool = False, **options: Any
) -> AsyncIterator[tuple[CudnnRef, Workshop, Trio]]:
    """A service whose plan for `Trio.product` is there, and which builds any other as the test lets it."""
    workshop, device = Workshop(), Device()
    device.run_freely()

    def engine() -> Any:
        return AsynchronousBuildingEngine(workshop, device) if asynchronous else BuildingEngine(workshop)

    async with spawn_on(engine, **options) as gpu:
        try:
            trio = await Trio.on(gpu)
            await gpu.warm([trio.product()])
            yield gpu, workshop, trio
        finally:
            workshop.building.open()
            workshop.tuning.open()


@contextmanager
def held(workshop: Workshop) -> Iterator[None]:
    """Builds do not end in here."""
    with workshop.building.closed():
        yield


def cold(trio: Trio, **fields: Any) -> ConvFwd:
    """y = relu(x * w): a plan that is not there, of the same buffers as `trio.product`."""
    return trio.product(epilogue=RELU, **fields)


async def taken_up(gpu: CudnnRef) -> None:
    """Until the actor has looked at all that was sent (fewer than 64 messages)."""
    await gpu.ping()
    await gpu.ping()


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_request_whose_plan_is_ready_overtakes_one_whose_plan_is_being_built(
    asynchronous: bool,
) -> None:
    async with workshop_service(asynchronous=asynchronous) as (gpu, workshop, trio):
        other = await Trio.on(gpu)
        with held(workshop):
            waits = gpu.submit(cold(trio))
            await in_thread(workshop.building.wait_for_arrival)
            for _ in range(100):
                assert isinstance(await gpu.ask(other.product()), Receipt)
            assert await other.result() == 6
            await gpu.free(await gpu.upload(single(1)))
            assert not waits.done()
        assert isinstance(await waits, Receipt)
        assert await trio.result() == 6


async def test_what_conflicts_with_a_waiting_request_keeps_its_place() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        other = await gpu.upload(single(5))
        with held(workshop):
            behind: list[asyncio.Future[Any]] = [
                gpu.submit(message)
                for message in (
                    cold(trio),  # y = relu(3 * 2)
                    Upload(dst=trio.x, data=single(-1)),  # which that reads
                    Download(src=trio.y),
                    trio.product(),  # y = -1 * 2
                    Copy(src=trio.y, dst=other),
                    Fill(dst=trio.y, value=7),
                    Download(src=other),
                )
            ]
            await in_thread(workshop.building.wait_for_arrival)
            await taken_up(gpu)
            assert not any(future.done() for future in behind)
            assert (await gpu.statistics()).queued == 7
        answers = await asyncio.gather(*behind)
        assert (answers[2].item(), answers[6].item()) == (6, -2)
        assert await trio.result() == 7
        assert (await gpu.statistics()).queued == 0


async def test_two_that_read_the_same_buffer_do_not_wait_for_each_other() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        elsewhere = await gpu.upload(single(0))
        with held(workshop):
            waits = gpu.submit(cold(trio))
            await in_thread(workshop.building.wait_for_arrival)
            await gpu.ask(trio.product(y=elsewhere))
            assert (await gpu.download(trio.x)).item() == 3
            assert not waits.done()
        await waits


async def test_freeing_a_buffer_that_a_waiting_request_uses_waits_too() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        with held(workshop):
            waits = gpu.submit(cold(trio))
            freed, late = gpu.submit(Free(buffer=trio.w)), gpu.submit(Fill(dst=trio.w, value=1))
            await in_thread(workshop.building.wait_for_arrival)
            await taken_up(gpu)
            assert not freed.done()
        assert isinstance(await waits, Receipt)
        assert await outcome(freed) is None
        error = await outcome(late)
        assert isinstance(error, StaleBufferError)
        assert error.reason == "freed"
        assert await trio.result() == 6


async def test_a_bad_request_is_refused_at_once_and_nothing_is_built_for_it() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        await gpu.free(trio.w)
        with held(workshop):
            ask = gpu.actor_ref.ask  # past the checks of the caller's side
            for message in (cold(trio), Fill(dst=trio.w, value=1)):
                with pytest.raises(StaleBufferError):
                    await in_thread(partial(ask, message))
        assert (await gpu.statistics()).plans.misses == 1


async def test_many_who_want_one_plan_wait_for_one_build() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        others = [await Trio.on(gpu) for _ in range(20)]
        with held(workshop):
            asked = [gpu.submit(cold(each)) for each in (trio, *others)]
            await in_thread(workshop.building.wait_for_arrival)
            await taken_up(gpu)
        receipts = await asyncio.gather(*asked)
        assert len({receipt.plan for receipt in receipts}) == 1
        plans = (await gpu.statistics()).plans
        assert (plans.misses, plans.hits, plans.size) == (2, 20, 2)
        assert plans.build_s > 0


async def test_a_refusal_answers_all_who_wait_and_is_remembered() -> None:
    async with workshop_service() as (gpu, workshop, _):
        dy, w, dx = [await gpu.upload(np.ones((1, 1, 1, 1), np.int8)) for _ in range(3)]
        message = ConvBwdData(dy=dy, w=w, dx=dx, conv=ONE_BY_ONE)
        with held(workshop):
            asked = [gpu.submit(message) for _ in range(3)]
            await in_thread(workshop.building.wait_for_arrival)
        errors = [await outcome(future) for future in asked]
        errors.append(await outcome(gpu.submit(message)))
        assert all(isinstance(error, UnsupportedGraph) for error in errors)
        assert len({id(error) for error in errors}) == 4
        plans = (await gpu.statistics()).plans
        assert (plans.misses, plans.hits, plans.refused) == (2, 3, 1)


async def test_a_build_that_fails_answers_those_who_wait_and_is_tried_again_for_the_next() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        workshop.failures = [EngineFailure("NOT_NOW", "the test says so")]
        with held(workshop):
            asked = [gpu.submit(cold(trio)) for _ in range(2)]
            await in_thread(workshop.building.wait_for_arrival)
            await taken_up(gpu)
        errors = [await outcome(future) for future in asked]
        assert all(isinstance(error, ExecutionFailed) for error in errors)
        assert errors[0] is not errors[1]
        assert "NOT_NOW" in str(errors[0])
        assert isinstance(await gpu.ask(cold(trio)), Receipt)


async def test_an_injected_rejection_is_of_one_request() -> None:
    faults = FaultPlan().at(1, Fault.REJECT_BUILD, of=ConvFwd)
    async with workshop_service(faults=faults) as (gpu, _, trio):
        with pytest.raises(UnsupportedGraph, match="injected"):
            await gpu.ask(cold(trio))
        assert isinstance(await gpu.ask(cold(trio)), Receipt)
        assert (await gpu.statistics()).plans.refused == 0


# Cancelling, deadlines, room.


async def test_a_waiting_request_that_is_cancelled_never_runs() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        with held(workshop):
            waits, behind = gpu.submit(cold(trio)), gpu.submit(Fill(dst=trio.y, value=9))
            await in_thread(workshop.building.wait_for_arrival)
            await taken_up(gpu)
            waits.cancel()
            behind.cancel()
            await asyncio.sleep(0)
        await gpu.drain()
        assert await trio.result() == 1
        assert (await gpu.statistics()).withdrawn == 2


async def test_a_waiting_request_whose_time_is_up_had_not_started() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        with held(workshop):
            waits = gpu.submit(cold(trio), timeout=LONG_S)
            await in_thread(workshop.building.wait_for_arrival)
            pass_time()
            error = await outcome(waits)
            assert isinstance(error, DeadlineExceeded)
            assert not error.started
        await gpu.drain()
        assert await trio.result() == 1
        assert (await gpu.statistics()).expired == 1


async def test_those_that_wait_for_a_plan_take_room_in_the_mailbox() -> None:
    async with workshop_service(mailbox=4) as (gpu, workshop, trio):
        other = await Trio.on(gpu)
        with held(workshop):
            waiting = []
            for _ in range(4):
                waiting.append(gpu.submit(cold(trio)))
                await taken_up(gpu)
            with pytest.raises(MailboxFull):
                gpu.submit(other.product())
            assert isinstance(await gpu.ask(other.product()), Receipt)  # an ask waits its turn, which comes
        await asyncio.gather(*waiting)
        assert isinstance(await gpu.submit(other.product()), Receipt)


# Warm and drain.


async def test_drain_waits_for_what_waits_for_a_plan_and_holds_up_nobody() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        with held(workshop):
            waits, drained = gpu.submit(cold(trio)), gpu.submit(Drain())
            await in_thread(workshop.building.wait_for_arrival)
            await gpu.ask(Allocate(spec=SPEC))
            assert not drained.done()
        await drained
        assert waits.done()


async def test_warm_is_answered_when_its_plans_are_there_and_holds_up_nobody() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        with held(workshop):
            warmed = gpu.submit(Warm(messages=(cold(trio), cold(trio), trio.product())))
            drained = gpu.submit(Drain())
            await in_thread(workshop.building.wait_for_arrival)
            assert isinstance(await gpu.ask(trio.product()), Receipt)
            assert not warmed.done()
            assert not drained.done()
        assert await warmed == 1
        await drained
        assert isinstance(await gpu.ask(cold(trio)), Receipt)
        plans = (await gpu.statistics()).plans
        assert (plans.misses, plans.hits) == (2, 2)
        assert await gpu.warm([cold(trio)]) == 0


async def test_warm_does_not_count_what_cannot_be_built() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        dy, w, dx = [await gpu.upload(np.ones((1, 1, 1, 1), np.int8)) for _ in range(3)]
        workshop.room = 0
        refused = ConvBwdData(dy=dy, w=w, dx=dx, conv=ONE_BY_ONE)
        assert await gpu.warm([refused, cold(trio)]) == 0
        workshop.room = None
        assert await gpu.warm([refused, cold(trio)]) == 1


# Workspace.


async def wide(gpu: CudnnRef) -> ConvFwd:
    """A convolution that needs a workspace, and can do with less than it would like."""
    x, y = [await gpu.empty((1, 4, 64, 64)) for _ in range(2)]
    w = await gpu.upload(np.ones((4, 4, 1, 1), np.float32))
    await gpu.fill(x, 1.0)
    return ConvFwd(x=x, w=w, y=y, conv=ONE_BY_ONE, epilogue=RELU)


async def test_where_the_device_has_no_room_a_plan_with_less_workspace_runs() -> None:
    async with workshop_service() as (gpu, workshop, _):
        message = await wide(gpu)
        workshop.room = 8192
        assert isinstance(await gpu.ask(message), Receipt)
        assert (await gpu.download(message.y) == 4).all()
        plans = (await gpu.statistics()).plans
        assert (plans.misses, plans.size) == (2, 2)


async def test_where_no_plan_is_small_enough_those_who_wait_are_told_and_the_next_is_tried_again() -> None:
    async with workshop_service() as (gpu, workshop, _):
        message = await wide(gpu)
        workshop.room = 8
        with held(workshop):
            asked = [gpu.submit(message) for _ in range(2)]
            await in_thread(workshop.building.wait_for_arrival)
            await taken_up(gpu)
        errors = [await outcome(future) for future in asked]
        assert all(isinstance(error, OutOfMemory) for error in errors)
        assert errors[0] is not errors[1]
        workshop.room = None
        assert isinstance(await gpu.ask(message), Receipt)


# Tuning.


async def test_requests_run_the_first_plan_until_the_tuned_one_is_there(logs: list[EventDict]) -> None:
    async with workshop_service(autotune=True) as (gpu, workshop, trio):
        with workshop.tuning.closed():
            warmed = gpu.submit(Warm(messages=(cold(trio),)))
            await in_thread(workshop.tuning.wait_for_arrival)
            first = await gpu.ask(cold(trio))
            assert not warmed.done()
        assert await warmed == 1
        tuned = await gpu.ask(cold(trio))
        assert tuned.plan == f"{first.plan}/tuned"
        assert await gpu.warm([cold(trio)]) == 0
    shown = [(entry["done"], entry["of"]) for entry in logs if entry["event"] == "plan.tuning"]
    assert shown[-2:] == [(0, 2), (1, 2)]


async def test_no_build_waits_for_tuning() -> None:
    async with workshop_service(autotune=True) as (gpu, workshop, trio):
        with workshop.tuning.closed():
            warmed = gpu.submit(Warm(messages=(cold(trio),)))
            await in_thread(workshop.tuning.wait_for_arrival)
            late = trio.product(epilogue=Epilogue(activation=Activation.TANH))
            assert isinstance(await gpu.ask(late), Receipt)
            assert not warmed.done()
        assert await warmed == 1


async def test_without_the_option_nothing_is_tuned() -> None:
    async with workshop_service() as (gpu, workshop, trio):
        with workshop.tuning.closed():
            assert await gpu.warm([cold(trio)]) == 1
        assert "tuned" not in (await gpu.ask(cold(trio))).plan


async def test_a_plan_that_is_kept_on_disk_waits_for_no_build(tmp_path: Path) -> None:
    workshop = Workshop()

    def service() -> Spawning:
        return spawn_on(lambda: KeepingEngine(workshop), plan_store=tmp_path / "plans")

    async with service() as gpu:
        await gpu.warm([(await Trio.on(gpu)).product()])
    async with service() as gpu:  # as a worker that starts behind a crash
        ready, other = await Trio.on(gpu), await Trio.on(gpu)
        with held(workshop):
            building = gpu.submit(cold(other))
            await in_thread(workshop.building.wait_for_arrival)
            await asyncio.wait_for(gpu.ask(ready.product()), PATIENCE_S)
            assert not building.done()
        await building


async def test_a_kept_plan_that_the_library_refuses_is_built(tmp_path: Path, logs: list[EventDict]) -> None:
    workshop = Workshop()
    store = tmp_path / "plans"
    async with spawn_on(lambda: KeepingEngine(workshop), plan_store=store) as gpu:
        await gpu.warm([(await Trio.on(gpu)).product()])
    built = workshop.building.passed
    async with spawn_on(lambda: BuildingEngine(workshop), plan_store=store) as gpu:  # which restores none
        trio = await Trio.on(gpu)
        await gpu.ask(trio.product())
        assert await trio.result() == 6
    assert workshop.building.passed == built + 1
    assert "plan_store.bad_file" in {line["event"] for line in logs}


async def test_a_model_is_forgotten_after_its_runs_that_wait_for_their_plan() -> None:
    async with workshop_service() as (gpu, workshop, _):
        g = GraphBuilder()
        graph = g.build(y=g.relu(g.input("x", (3,))))
        buffers = (await gpu.empty((3,)), await gpu.empty((3,)))
        one = ModelGraph(
            name="one",
            graph=graph,
            buffers=buffers,
            specs={"x": buffers[0].spec},
            inputs={"x": "x"},
            outputs={"y": "y"},
        )
        model = await gpu.ask(DeployModel(graphs=(one,)))
        with held(workshop):
            runs = [gpu.submit(RunModel.of(model, {"x": np.full(3, n, np.float32)})) for n in range(3)]
            await in_thread(workshop.building.wait_for_arrival)
            unloading = gpu.submit(UnloadModel(model=model))
            await taken_up(gpu)
            assert not unloading.done()
        for n, answer in enumerate(await asyncio.gather(*runs)):
            np.testing.assert_array_equal(answer["y"], np.full(3, n))
        await unloading
        with pytest.raises(NotDeployed):
            await gpu.ask(RunModel.of(model, {"x": np.zeros(3, np.float32)}))
