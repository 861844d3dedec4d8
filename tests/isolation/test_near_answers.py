"""A worker says that an answer is near, and the event loop that awaits it stays awake until then."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cudnn_actor import CudnnRef, Receipt
from cudnn_actor.execution.executor import Enqueued, Executor
from cudnn_actor.execution.polling import EARLY_S
from cudnn_actor.isolation.process.parent.values import Values
from cudnn_actor.isolation.process.wire import Requests
from cudnn_actor.memory import MemoryTable
from cudnn_actor.messages import Ping, Upload
from cudnn_actor.processes.channel import Channel
from tests.service.rigs import AsynchronousEngine, Device, Trio, in_thread, outcome

from ..patience import PATIENCE_S
from ..sleeps import watched_sleeps
from .crash_rigs import Points, workers

pytestmark = pytest.mark.usefixtures("a_forkserver")
_LOOKS = 40
"""Looks at a fence in a run that takes longer than `EARLY_S`."""


async def run_for_a_while(gpu: CudnnRef, points: Points, trio: Trio) -> None:
    """A run that the worker knows to take longer than `EARLY_S`."""
    points.hold("finished")
    seen = points.visits("finished?")
    future = gpu.submit(trio.product())
    await in_thread(lambda: points.wait_for_visits("finished?", seen + _LOOKS))
    points.let_go("finished")
    assert isinstance(await outcome(future), Receipt)


@asynccontextmanager
async def long_runs(engine: str = "AmpleEngine") -> AsyncIterator[tuple[CudnnRef, Points, Trio]]:
    """A service whose worker knows its runs to take longer than `EARLY_S`."""
    async with workers(engine) as (gpu, points), asyncio.timeout(PATIENCE_S):
        trio = await Trio.on(gpu)
        await run_for_a_while(gpu, points, trio)
        yield gpu, points, trio


def test_a_loop_that_looks_at_what_is_in_flight_may_do_so_while_another_thread_has_the_host() -> None:
    requests: dict[int, Any] = {}

    class Ended:
        @property
        def message(self) -> Ping:
            requests[2] = None  # another thread dispatches a request meanwhile
            return Ping()

    requests[1] = Ended()
    sender: Any = SimpleNamespace(in_flight=SimpleNamespace(requests=requests))
    of_none: Any = None
    assert not Values(of_none, of_none, sender, None, None).are_answered_soon
    assert len(requests) == 2


async def test_a_loop_stays_awake_until_an_answer_that_is_near() -> None:
    async with long_runs() as (gpu, points, trio):
        points.hold("finished")
        with watched_sleeps() as sleeps:
            future = gpu.submit(trio.product())
            await sleeps.awake.wait()
            points.let_go("finished")
            assert isinstance(await future, Receipt)
        assert await trio.result() == 6.0


async def test_a_loop_sleeps_again_if_the_answer_does_not_come() -> None:
    async with long_runs() as (gpu, points, trio):
        points.hold("finished")
        with watched_sleeps() as sleeps:
            future = gpu.submit(trio.product())
            await sleeps.until_time_passes()
            points.let_go("finished")
            assert isinstance(await future, Receipt)
        await run_for_a_while(gpu, points, trio)


async def test_a_loop_sleeps_again_when_the_answer_has_come_and_others_have_not() -> None:
    async with long_runs() as (gpu, points, trio):
        points.hold("finished")
        with watched_sleeps() as sleeps:
            fences = points.visits("fence")
            first = gpu.submit(trio.product())
            await sleeps.awake.wait()
            second = gpu.submit(trio.product())
            await in_thread(lambda: points.wait_for_visits("fence", fences + 2))
            third = gpu.submit(trio.product())
            await in_thread(lambda: points.wait_for_visits("fence", fences + 3))
            for answered in (first, second):
                points.order("finished?", "go")
                assert isinstance(await answered, Receipt)
                sleeps.asleep.clear()
                await sleeps.asleep.wait()
            points.let_go("finished")
            assert isinstance(await third, Receipt)


async def test_a_loop_sleeps_where_cores_are_few() -> None:
    async with long_runs("LateEngine") as (gpu, points, trio):
        with watched_sleeps() as sleeps:
            await run_for_a_while(gpu, points, trio)
            assert not sleeps.awake.is_set()


class Clock:
    """Stands in for `time` in the executor."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_the_end_of_a_run_is_near_once_and_only_if_it_is_alone_and_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, device = Clock(), Device()
    monkeypatch.setattr("cudnn_actor.execution.executor.time", clock)
    executor: Executor[str] = Executor(AsynchronousEngine(device), MemoryTable("cpu"))

    def run(tag: str, took_s: float, count: int = 1, behind: int = 0) -> list[bool]:
        """Enqueue runs behind one fence. Whether their end is near, asked four times, twice at last."""
        for _ in range(count):
            executor.defer(Enqueued("task", tag, ()))
        executor.fence()
        for _ in range(behind):
            executor.defer(Enqueued("task", tag, ()))
            executor.fence()
        begun_s, answers = clock.now, []
        for at in (0.0, took_s - 2 * EARLY_S, took_s - EARLY_S / 2, took_s - EARLY_S / 4):
            clock.now = begun_s + max(at, 0.0)
            assert not executor.has_passed()
            answers.append(executor.take_near_end())
        for fence in device.fences[-1 - behind :]:
            fence.set()
            assert executor.has_passed()
        while executor.take_done():
            pass
        return answers

    never = [False] * 4
    assert run("long", 4e-3) == never, "how long it takes is not known"
    assert run("long", 4e-3) == [False, False, True, False]
    assert run("long", 4e-3, count=2) == run("long", 4e-3, behind=1) == never
    assert run("short", EARLY_S) == run("short", EARLY_S) == never


@pytest.mark.parametrize("cores", [2, 64])
async def test_a_loop_stays_awake_for_a_short_copy_if_there_are_cores(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cudnn_actor.isolation.process.cores.processors", lambda *_: cores)
    async with workers("AmpleEngine", host_arenas=False) as (gpu, points), asyncio.timeout(PATIENCE_S):
        values = np.arange(10.0)
        message = Upload(dst=await gpu.upload(values), data=values)
        await gpu.ask(message)
        points.hold("finished")
        with watched_sleeps() as sleeps:
            future = gpu.submit(message)
            if cores == 2:
                await in_thread(lambda: points.wait_for_visits("finished?", 1))
                assert not sleeps.awake.is_set()
            else:
                await sleeps.until_time_passes()
            points.let_go("finished")
            assert isinstance(await future, Receipt)


@pytest.mark.parametrize("cores", [2, 64])
@pytest.mark.parametrize("count", [10, 100_000])
async def test_worker_and_loop_are_awake_for_a_new_buffer_if_there_are_cores(
    cores: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the main thread, the monitor sends it: the loop wakes the worker, and the monitor wakes the loop."""
    sent: list[tuple[int, bool]] = []
    sending = Channel.send

    def send(channel: Channel, frame: Any, *rest: Any) -> Any:
        if isinstance(frame, Requests):
            sent.append((len(frame.requests), threading.current_thread() is threading.main_thread()))
        return sending(channel, frame, *rest)

    monkeypatch.setattr("cudnn_actor.isolation.process.cores.processors", lambda *_: cores)
    async with workers("AmpleEngine", host_arenas=False) as (gpu, points), asyncio.timeout(PATIENCE_S):
        values = np.arange(float(count))
        await gpu.upload(values)
        points.hold("finished")
        monkeypatch.setattr(Channel, "send", send)
        with watched_sleeps() as sleeps:
            future = asyncio.ensure_future(gpu.upload(values))
            if cores == 2:
                await in_thread(lambda: points.wait_for_visits("finished?", 1))
                assert not sleeps.awake.is_set()
            else:
                await sleeps.until_time_passes()
            points.let_go("finished")
            np.testing.assert_array_equal(await gpu.download(await future), values)
    roused = [*itertools.takewhile((0, True).__eq__, sent)]  # again, if the monitor takes long
    assert bool(roused) is (cores > 2)
    assert sent[len(roused)] == (1, False)
    assert all(requests for requests, _ in sent[len(roused) :])
