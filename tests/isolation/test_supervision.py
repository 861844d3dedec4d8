"""Workers under supervision: failures, hangs, restarts used up, nested services."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from cudnn_actor import (
    CudnnRef,
    CudnnService,
    ExecutionFailed,
    InvalidRequest,
    OutOfMemory,
    QuarantinedRequest,
    Receipt,
    ServiceStopped,
    StaleBufferError,
    StartFailed,
    TensorSpec,
    child_spec,
)
from cudnn_actor.errors import StaleReason
from cudnn_actor.isolation.process.parent import monitor
from cudnn_actor.messages import Allocate, Copy
from cudnn_actor.options import Options
from cudnn_actor.supervision import ChildSpec, Escalated, ExitKind, Restarted, Restarting, Stopped
from tests.service.noticed_hangs import NOTICED_S, no_progress_since, notice_hang
from tests.service.rigs import Trio, in_thread, outcome, seen, single
from tests.service.test_nested_supervisors import built

from ..inside import give_engine, service_behind
from ..patience import PATIENCE_S
from .crash_rigs import (
    Points,
    choice,
    freeze,
    gone,
    kill,
    sent,
    service_of,
    workers,
)

pytestmark = pytest.mark.usefixtures("a_forkserver")
ALONE = "that request alone"
STEPS = 3


async def restarts_of(gpu: CudnnRef) -> int:
    return (await gpu.statistics()).restarts


# Failures. First, those that end one request and nothing else.


async def test_a_bad_request_and_a_stale_reference_are_refused_without_a_word_to_the_worker() -> None:
    async with workers() as (gpu, points):
        trio = await Trio.on(gpu)
        spare = await gpu.upload(single(1.0))
        await gpu.free(spare)
        other = await gpu.empty((1, 2, 1, 1))
        with pytest.raises(InvalidRequest):
            await gpu.ask(trio.product(y=other))
        with pytest.raises(StaleBufferError) as caught:
            await gpu.ask(trio.product(y=spare))
        assert caught.value.reason is StaleReason.FREED
        assert points.visits("execute") == 0
        assert await restarts_of(gpu) == 0


async def test_no_room_for_an_arena_is_that_request_s_own_error() -> None:
    async with workers() as (gpu, points):
        trio = await Trio.on(gpu)
        points.order("create_arena", "have no room")
        large = TensorSpec.packed((1, 1, 4096, 5120))
        first, second = [gpu.submit(Allocate(spec=large)) for _ in range(2)]
        assert isinstance(await outcome(first), OutOfMemory)
        assert not isinstance(await outcome(second), Exception)
        assert isinstance(await outcome(gpu.submit(trio.product())), Receipt)
        assert await restarts_of(gpu) == 0


@pytest.mark.parametrize("order", ["fail", "raise"])
async def test_a_failed_run_in_a_healthy_context_is_that_request_s_own_error(order: str) -> None:
    async with workers() as (gpu, points):
        trio = await Trio.on(gpu)
        points.order("execute", order)
        failed, behind = gpu.submit(trio.product()), gpu.submit(trio.product())
        assert isinstance(await outcome(failed), ExecutionFailed)
        assert isinstance(await outcome(behind), Receipt)
        assert await trio.result() == 6.0
        assert await restarts_of(gpu) == 0


# Then those that end the worker.

DEATHS = [
    ("stick", "DEAD: the test killed the context"),
    ("leave", "exited with status 3"),
    ("abort", "was killed by SIGABRT"),
]


@pytest.mark.parametrize(("order", "cause"), DEATHS, ids=[order for order, _ in DEATHS])
async def test_what_ends_a_worker_is_named_and_costs_its_callers_only_time(order: str, cause: str) -> None:
    async with workers() as (gpu, points):
        trio = await Trio.on(gpu)
        points.order("execute", order)
        futures = [gpu.submit(trio.product()) for _ in range(50)]
        for future in futures:
            receipt = await outcome(future)
            assert isinstance(receipt, Receipt)
            assert receipt.generation == 2
        assert await trio.result() == 6.0
        event = await seen(gpu, Restarting)
        assert isinstance(event, Restarting)
        assert (event.generation, event.cause.kind) == (1, ExitKind.CRASH)
        assert cause in event.cause.cause
        restarted = await seen(gpu, Restarted)
        assert isinstance(restarted, Restarted)
        assert (restarted.generation, gpu.generation) == (2, 2)


async def test_restarts_used_up_end_the_service_and_everybody_who_waits_is_told() -> None:
    points = Points()
    try:
        gpu = CudnnRef(service := service_of(points, max_restarts=1))
        service.launch()
        await asyncio.wrap_future(service.started)
        trio = await Trio.on(gpu)
        points.order("execute", "leave", "leave", "leave")
        target = await gpu.upload(single(1.0))
        first = gpu.submit(trio.product(y=target))
        behind = [gpu.submit(Copy(src=trio.x, dst=trio.y)) for _ in range(300)]
        asked = gpu.actor_ref.ask(trio.product(), block=False)
        escalated = await asyncio.wrap_future(service.stopped)
        assert isinstance(escalated, Escalated)
        assert "exited with status 3" in escalated.cause.cause
        ends = [await outcome(future) for future in (first, *behind)]
        assert isinstance(ends[0], QuarantinedRequest)
        assert all(isinstance(end, ServiceStopped) for end in ends[1:])
        with pytest.raises(ServiceStopped):
            await in_thread(lambda: asked.get(timeout=PATIENCE_S))
        with pytest.raises(ServiceStopped):
            await gpu.ping()
        assert gpu.worker_pid is None
    finally:
        points.close()


async def test_a_service_whose_workers_never_start_says_so() -> None:
    points = Points()
    try:
        points.order("open", *["leave"] * 9)
        service = service_of(points, max_restarts=2)
        service.launch()
        with pytest.raises(StartFailed, match="exited with status 3"):
            await asyncio.wrap_future(service.started)
        await asyncio.wrap_future(service.stopped)
        assert points.visits("open") == 3
    finally:
        points.close()


# No progress.


async def test_a_frozen_worker_with_work_is_replaced_within_the_limit() -> None:
    async with workers() as (gpu, _):
        trio = await Trio.on(gpu)
        frozen = freeze(gpu)
        notice_hang(gpu)
        started = time.monotonic()
        futures = [gpu.submit(trio.product()) for _ in range(20)]
        assert all([isinstance(await outcome(future), Receipt) for future in futures])
        assert NOTICED_S * 0.9 <= time.monotonic() - started < Options().hang_after_s
        event = await seen(gpu, Restarting)
        assert isinstance(event, Restarting)
        assert event.cause.kind is ExitKind.HUNG
        await gone(frozen)
        assert (await gpu.statistics()).replayed == 0


async def test_a_frozen_worker_without_work_is_no_event_and_is_replaced_when_work_comes() -> None:
    async with workers() as (gpu, _):
        trio = await Trio.on(gpu)
        freeze(gpu)
        notice_hang(gpu)
        frozen = time.monotonic()
        while time.monotonic() - frozen < 2 * NOTICED_S:  # noqa: ASYNC110 - it is time that must pass
            await asyncio.sleep(0.01)
        assert not [event for event in service_behind(gpu).events.all if isinstance(event, Restarting)]
        assert isinstance(await outcome(gpu.submit(trio.sum())), Receipt)
        assert await trio.result() == 7.0
        assert await restarts_of(gpu) == 1


async def test_many_short_runs_are_no_hang_however_long_they_take_together() -> None:
    async with workers() as (gpu, points):
        trio = await Trio.on(gpu)
        points.hold("execute")
        futures = [gpu.submit(trio.product()) for _ in range(STEPS)]
        await each_is_progress(gpu, points, "execute")
        assert all([isinstance(await outcome(future), Receipt) for future in futures])
        assert await restarts_of(gpu) == 0


async def test_each_plan_of_a_long_warming_counts_anew() -> None:
    async with workers() as (gpu, points):
        wanted = []
        for channels in range(1, STEPS + 1):
            x = await gpu.empty((1, channels, 1, 1))
            w = await gpu.empty((1, channels, 1, 1))
            y = await gpu.empty((1, 1, 1, 1))
            wanted.append(Trio(gpu, x, w, y).product())
        points.hold("build")
        warming = asyncio.ensure_future(gpu.warm(wanted))
        await each_is_progress(gpu, points, "build")
        assert await warming == STEPS
        assert await restarts_of(gpu) == 0


async def each_is_progress(gpu: CudnnRef, points: Points, point: str) -> None:
    """Let `STEPS` arrivals at a point go on, and see that the watchdog counts anew for each.

    For a build it does with the worker's next heartbeat.
    """
    last = 0.0
    for _ in range(STEPS):
        stopped = await in_thread(lambda: points.arrival(point))
        async with asyncio.timeout(PATIENCE_S):
            while (since := no_progress_since(gpu)) is None or since <= last:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        last = since
        stopped.go_on()


# Services under a supervisor of the user's.


def child(name: str, points: Points, **options: object) -> tuple[ChildSpec, CudnnService, CudnnRef]:
    """A service in process isolation that gives up at its first crash."""
    spec, service = child_spec(
        name,
        **{"device": "cpu", "isolation": "process", "max_restarts": 0, **options},  # type: ignore[arg-type]
    )
    give_engine(service, choice("BarrierEngine", points.directory))
    return spec, service, CudnnRef(service)


@pytest.fixture
def points() -> Iterator[Points]:
    points = Points()
    try:
        yield points
    finally:
        points.close()


async def test_a_service_mends_its_worker_itself_while_its_own_restarts_last(points: Points) -> None:
    spec, _, gpu = child("gpu", points, max_restarts=1)
    async with built(spec, restarts=1) as house:
        kept = await gpu.upload(single(7.0))
        await gone(kill(gpu))
        assert (await gpu.download(kept)).item() == 7.0
        assert await gpu.ping() == 2
        assert house.told(Restarting) == []
        kill(gpu)
        await house.until(Restarted, "gpu")
        with pytest.raises(StaleBufferError):
            await gpu.download(kept)
        assert await gpu.ping() == 1


async def test_a_hung_service_that_its_supervisor_stops_leaves_no_worker(
    points: Points, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "ASKED_S", 0.2)
    monkeypatch.setattr(monitor, "TERMINATED_S", 0.2)
    spec, _, gpu = child("gpu", points)
    async with built(spec) as house:
        trio = await Trio.on(gpu)
        frozen = freeze(gpu)
        future = gpu.submit(trio.product())
        await sent(gpu)
        house.supervisor.end("enough")
        await house.until(Stopped, None)
        assert isinstance(await outcome(future), ServiceStopped)
        await gone(frozen)
