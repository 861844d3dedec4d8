"""The end of a service: what had begun is finished, what had not says so, no worker holds it up for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pykka
import pytest
from structlog.typing import EventDict

from cudnn_actor import (
    BufferRef,
    CudnnRef,
    CudnnService,
    OutcomeUnknown,
    Receipt,
    ServiceStopped,
    StartFailed,
    TensorSpec,
)
from cudnn_actor.isolation.process.parent import monitor
from cudnn_actor.isolation.process.parent.in_flight import WINDOW
from cudnn_actor.messages import Allocate, Copy, Drain, Ping
from cudnn_actor.supervision import Restarting
from tests.service.rigs import Trio, in_thread, outcome

from ..inside import service_behind
from ..patience import PATIENCE_S
from .crash_rigs import Points, freeze, gone, kill, pid_of, sent, service_of

pytestmark = pytest.mark.usefixtures("a_forkserver")
ASKED_S, TERMINATED_S = 0.4, 0.2


@pytest.fixture(autouse=True)
def long_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, a worker that ends has the time to."""
    monkeypatch.setattr(monitor, "ASKED_S", float(PATIENCE_S))
    monkeypatch.setattr(monitor, "TERMINATED_S", float(PATIENCE_S))


@pytest.fixture
def asked_soon_over(monkeypatch: pytest.MonkeyPatch, long_patience: None) -> None:
    """A worker that does not end when it is asked is told soon."""
    monkeypatch.setattr(monitor, "ASKED_S", ASKED_S)


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch, asked_soon_over: None) -> None:
    """One that does not end when it is told is killed soon, too."""
    monkeypatch.setattr(monitor, "TERMINATED_S", TERMINATED_S)


@asynccontextmanager
async def ending(
    engine: str = "BarrierEngine", *arguments: bool
) -> AsyncIterator[tuple[CudnnService, CudnnRef, Points, Trio]]:
    """A service that the test ends; no worker of it is left afterwards."""
    points = Points()
    try:
        service = service_of(points, engine, *arguments)
        service.launch()
        await asyncio.wrap_future(service.started)
        gpu = CudnnRef(service)
        trio = await Trio.on(gpu)
        worker = pid_of(gpu)
        yield service, gpu, points, trio
        await asyncio.wait_for(asyncio.wrap_future(service.end()), PATIENCE_S)
        await gone(worker)
        assert gpu.worker_pid is None
    finally:
        points.close()


def signals(logs: list[EventDict]) -> list[str]:
    return [entry["signal"] for entry in logs if entry["event"] == "worker.slow_to_stop"]


# Asked.


async def test_what_had_begun_is_finished_and_what_had_not_says_so(logs: list[EventDict]) -> None:
    # One read of the worker's socket takes at most 16 KiB, so the worker may have read some of the requests
    # that were sent before its `Stop`, the ping first, and not `Stop` itself. It runs those.
    async with ending() as (service, gpu, points, trio):
        points.hold("execute")
        begun = gpu.submit(trio.sum())
        await in_thread(lambda: points.arrival("execute"))
        waiting = [gpu.submit(Copy(src=trio.x, dst=trio.w)) for _ in range(300)]
        drained = gpu.submit(Drain())
        asked = gpu.actor_ref.ask(Ping(), block=False)
        stopped = service.end("enough")
        await asking_is_over(gpu)
        points.let_go()
        await asyncio.wrap_future(stopped)
        assert isinstance(await outcome(begun), Receipt)
        ends = [await outcome(future) for future in waiting]
        begun_too = sum(isinstance(end, Receipt) for end in ends)
        assert begun_too <= WINDOW, "what the worker never had was not begun"
        assert all(isinstance(end, ServiceStopped) for end in ends[begun_too:])
        assert isinstance(await outcome(drained), ServiceStopped)
        answer = await in_thread(lambda: outcome_of(asked))
        assert answer == 1 or isinstance(answer, ServiceStopped)
        assert signals(logs) == []


def outcome_of(asked: pykka.Future[Any]) -> Any:
    try:
        return asked.get(timeout=PATIENCE_S)
    except ServiceStopped as error:
        return error


async def asking_is_over(gpu: CudnnRef) -> None:
    """Until the worker has been sent its `Stop`."""
    async with asyncio.timeout(PATIENCE_S):
        while not service_behind(gpu).state.mailbox.host.workers.stopping:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_what_was_enqueued_is_waited_for(logs: list[EventDict]) -> None:
    async with ending("LateEngine") as (service, gpu, points, trio):
        points.hold("finished")
        begun = [gpu.submit(message) for message in (trio.sum(), Copy(src=trio.x, dst=trio.w))]
        await in_thread(lambda: points.wait_for_visits("after copy", 1))
        stopped = service.end("enough")
        await asking_is_over(gpu)
        points.let_go()
        await asyncio.wrap_future(stopped)
        assert all([isinstance(await outcome(future), Receipt) for future in begun])
        assert signals(logs) == []


async def test_closing_drains_first() -> None:
    async with ending() as (_, gpu, points, trio):
        points.hold("execute")
        futures = [gpu.submit(trio.product()) for _ in range(100)]
        stopped = await in_thread(lambda: points.arrival("execute"))
        closing = asyncio.ensure_future(gpu.aclose())
        points.let_go()
        assert stopped.pid
        await closing
        assert all([isinstance(await outcome(future), Receipt) for future in futures])


async def test_pykka_s_stop_ends_the_service_behind_what_was_sent_before() -> None:
    async with ending() as (service, gpu, _, trio):
        before = gpu.submit(trio.product())
        await sent(gpu)
        assert await in_thread(lambda: gpu.actor_ref.stop(timeout=PATIENCE_S))
        await asyncio.wait_for(asyncio.wrap_future(service.stopped), PATIENCE_S)
        assert isinstance(await outcome(before), Receipt | ServiceStopped)
        with pytest.raises(ServiceStopped):
            await gpu.ping()


async def test_an_arena_that_is_being_taken_is_finished_too() -> None:
    async with ending() as (service, gpu, points, _):
        points.hold("create_arena")
        wanted = gpu.submit(Allocate(spec=TensorSpec.packed((1, 1, 4096, 5120))))
        await in_thread(lambda: points.arrival("create_arena"))
        stopped = service.end("enough")
        await asking_is_over(gpu)
        points.let_go()
        await asyncio.wrap_future(stopped)
        assert isinstance(await outcome(wanted), BufferRef)


# Told, and killed.


@pytest.mark.usefixtures("asked_soon_over")
async def test_a_worker_that_does_not_end_when_asked_is_told_by_a_signal(logs: list[EventDict]) -> None:
    async with ending() as (service, gpu, points, trio):
        points.hold("close")
        begun = gpu.submit(trio.product())
        assert isinstance(await outcome(begun), Receipt)
        await asyncio.wrap_future(service.end("enough"))
        assert signals(logs) == ["SIGTERM"]


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("engine", ["BarrierEngine", "deaf"])
async def test_a_worker_in_the_middle_of_a_run_is_killed_in_the_end(
    engine: str, logs: list[EventDict]
) -> None:
    async with ending("BarrierEngine", *([True] if engine == "deaf" else [])) as (service, gpu, points, trio):
        points.hold("close" if engine == "deaf" else "execute")
        begun = gpu.submit(trio.sum())
        if engine != "deaf":
            await in_thread(lambda: points.arrival("execute"))
        behind = [gpu.submit(trio.product()) for _ in range(10)] if engine != "deaf" else []
        assert engine != "deaf" or isinstance(await outcome(begun), Receipt)
        await asyncio.wrap_future(service.end("enough"))
        assert signals(logs) == ["SIGTERM", "SIGKILL"]
        assert isinstance(await outcome(begun), Receipt if engine == "deaf" else OutcomeUnknown)
        assert all([isinstance(await outcome(future), ServiceStopped) for future in behind])


@pytest.mark.usefixtures("short_patience")
async def test_a_frozen_worker_does_not_hold_up_the_end(logs: list[EventDict]) -> None:
    async with ending() as (service, gpu, _, trio):
        freeze(gpu)
        future = gpu.submit(trio.product())
        await sent(gpu)
        await asyncio.wrap_future(service.end("enough"))
        assert isinstance(await outcome(future), ServiceStopped)
        assert signals(logs) == ["SIGTERM", "SIGKILL"]


async def test_a_worker_that_dies_while_it_stops_ends_the_service_all_the_same() -> None:
    async with ending() as (service, gpu, points, trio):
        points.hold("execute")
        begun = gpu.submit(trio.sum())
        stopped_at = await in_thread(lambda: points.arrival("execute"))
        behind = [gpu.submit(trio.product()) for _ in range(10)]
        stopped = service.end("enough")
        await asking_is_over(gpu)
        stopped_at.kill()
        await asyncio.wait_for(asyncio.wrap_future(stopped), PATIENCE_S)
        assert isinstance(await outcome(begun), OutcomeUnknown)
        assert all([isinstance(await outcome(future), ServiceStopped) for future in behind])
        assert not [event for event in service.events.all if isinstance(event, Restarting)]


# Stops at odd moments.


@pytest.mark.parametrize("point", ["open", "after open"])
async def test_a_stop_while_the_worker_starts(point: str) -> None:
    points = Points()
    try:
        service = service_of(points)
        points.hold(point)
        service.launch()
        worker = (await in_thread(lambda: points.arrival(point))).pid
        await asyncio.wait_for(asyncio.wrap_future(service.end("never mind")), PATIENCE_S)
        with pytest.raises(StartFailed):
            service.started.result(0)
        await gone(worker)
    finally:
        points.close()


async def test_a_stop_while_a_successor_starts_answers_what_was_to_run_again() -> None:
    async with ending() as (service, gpu, points, trio):
        points.hold("execute")
        begun = gpu.submit(trio.product())
        dying = await in_thread(lambda: points.arrival("execute"))
        points.hold("open")
        dying.kill()
        waiting = [gpu.submit(trio.product()) for _ in range(300)]
        successor = (await in_thread(lambda: points.arrival("open"))).pid
        await asyncio.wait_for(asyncio.wrap_future(service.end("enough")), PATIENCE_S)
        await gone(successor)
        for future in (begun, *waiting):
            assert isinstance(await outcome(future), ServiceStopped)


async def test_a_stop_right_behind_a_crash_answers_everybody() -> None:
    async with ending() as (service, gpu, _, trio):
        futures = [gpu.submit(trio.product()) for _ in range(100)]
        await sent(gpu)
        kill(gpu)
        futures += [gpu.submit(Copy(src=trio.x, dst=trio.w)) for _ in range(100)]
        stopped = service.end("enough")
        await asyncio.wait_for(asyncio.wrap_future(stopped), PATIENCE_S)
        for future in futures:
            assert isinstance(await outcome(future), Receipt | ServiceStopped)


async def test_a_service_that_was_stopped_can_be_started_again_by_its_supervisor_s_spec() -> None:
    async with ending() as (service, gpu, points, trio):
        points.hold("execute")
        lost = gpu.submit(trio.product())
        dying = await in_thread(lambda: points.arrival("execute"))
        points.hold("open")
        dying.kill()
        await in_thread(lambda: points.arrival("open"))  # so the next one has begun nothing
        await asyncio.wrap_future(service.end("the first life is over"))
        points.let_go()
        assert isinstance(await outcome(lost), ServiceStopped)
        service.launch()
        await asyncio.wrap_future(service.started)
        again = await Trio.on(gpu)
        await gpu.ask(again.product())
        assert await again.result() == 6.0
        assert await gpu.ping() == 1
