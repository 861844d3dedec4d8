"""An event loop is closed with work in flight: nothing of that work stays, and nothing is printed."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from cudnn_actor import CudnnRef, CudnnService
from cudnn_actor.messages import Drain, GetStatistics
from cudnn_actor.models.loop_locks import LoopLocks

from ..inside import has_service, service_behind
from ..patience import PATIENCE_S
from .rigs import Gate, Trio, gated_service, in_thread, spawn, start
from .test_several_loops import on_threads

pytestmark = pytest.mark.usefixtures("isolation")

UPLOADS = 25


@pytest.fixture(autouse=True)
def nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No "Exception ignored in ...", which Python prints for an error that nobody can catch."""
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    yield
    gc.collect()
    assert [str(each.exc_value) for each in ignored] == []


@pytest.fixture
def service() -> Iterator[CudnnService]:
    service = start(device="cpu")
    yield service
    service.stop(PATIENCE_S)


class LeftLoop:
    """An event loop that runs until what it was given waits, and then runs no more."""

    def __init__(self, *jobs: Coroutine[Any, Any, Any]) -> None:
        self.loop = asyncio.new_event_loop()
        self.tasks = [self.loop.create_task(job) for job in jobs]
        for task in self.tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is what the tests are about
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()  # once round: so what is answered meanwhile is not seen

    def close(self) -> list[Any]:
        """Close the loop and drop its tasks. Returns the results of those that were done."""
        self.loop.close()
        done = [task.result() for task in self.tasks if task.done()]
        self.tasks.clear()
        gc.collect()
        return done


def uploads(gpu: CudnnRef) -> LeftLoop:
    return LeftLoop(*[gpu.upload(np.ones((64, 64), "float32")) for _ in range(UPLOADS)])


def live_buffers(service: CudnnService) -> int:
    for _ in range(2):  # the first one's answer has what nobody receives freed
        service.actor_ref.ask(Drain(), timeout=PATIENCE_S)
    statistics: Any = service.actor_ref.ask(GetStatistics(), timeout=PATIENCE_S)
    return int(statistics.live_buffers)


@pytest.mark.parametrize("when", ["before", "after"])
def test_uploads_on_a_loop_that_is_closed_before_or_after_the_answers_leave_no_buffer(
    service: CudnnService, when: str
) -> None:
    left = uploads(CudnnRef(service))
    if when == "after":
        service.actor_ref.ask(Drain(), timeout=PATIENCE_S)  # answered, and the loop has not seen it
    done = left.close()
    assert live_buffers(service) == len(done)


async def test_uploads_on_four_loops_that_are_closed_leave_no_buffer_while_another_loop_goes_on() -> None:
    async with spawn(device="cpu") as gpu:
        await gpu.ping()

        def upload_and_leave() -> int:
            left = uploads(gpu)
            gpu.actor_ref.ask(Drain(), timeout=PATIENCE_S)
            return len(left.close())

        done = sum(await in_thread(lambda: on_threads(*[upload_and_leave] * 4)))
        for _ in range(2):
            await gpu.drain()
        assert (await gpu.statistics()).live_buffers == done


def launched(gate: Gate) -> CudnnService:
    service = gated_service(gate)
    service.launch()
    service.started.result(PATIENCE_S)
    return service


# Coroutines that Python closes because their loop has: they can await nothing.


def closed_with_its_loop(left: LeftLoop) -> None:
    left.loop.close()
    for task in left.tasks:
        if (coroutine := task.get_coro()) is not None:
            coroutine.close()


def test_a_body_that_is_dropped_with_its_loop_ends_its_service() -> None:
    held: list[CudnnRef] = []

    async def body() -> None:
        async with spawn(device="cpu") as gpu:
            held.append(gpu)
            await asyncio.get_running_loop().create_future()

    ends_with(body, held)


def test_a_start_that_is_dropped_with_its_loop_ends_its_service() -> None:
    spawning = spawn(device="cpu")

    async def body() -> None:
        await spawning

    left = LeftLoop(body())
    while not has_service(spawning):  # a thread finds the engine first
        left.loop.run_until_complete(asyncio.sleep(0))
    closed_with_its_loop(left)
    service_behind(spawning).stopped.result(PATIENCE_S)


def test_a_start_that_is_dropped_before_there_is_a_service_leaves_nothing() -> None:
    spawning = spawn(device="cpu")

    async def body() -> None:
        await spawning

    closed_with_its_loop(LeftLoop(body()))
    assert not has_service(spawning)


def test_an_aclose_that_is_dropped_with_its_loop_ends_its_service() -> None:
    gate = Gate()
    service = launched(gate)
    trio = asyncio.run(Trio.on(CudnnRef(service)))
    with gate.closed():
        service.actor_ref.tell(trio.product())
        gate.wait_for_arrival()
        closed_with_its_loop(LeftLoop(CudnnRef(service).aclose()))
    service.stopped.result(PATIENCE_S)


def ends_with(body: Callable[[], Coroutine[Any, Any, None]], held: list[CudnnRef]) -> None:
    left = LeftLoop(body())
    while not held:
        left.loop.run_until_complete(asyncio.sleep(0.001))
    closed_with_its_loop(left)
    service_behind(held[0]).stopped.result(PATIENCE_S)


def test_a_lock_that_is_dropped_with_its_loop_wakes_nobody() -> None:
    locks, entered = LoopLocks(), list[str]()

    async def work(name: str) -> None:
        async with locks.of_running_loop():
            entered.append(name)
            await asyncio.get_running_loop().create_future()

    closed_with_its_loop(LeftLoop(work("first"), work("second")))
    assert entered == ["first"]
