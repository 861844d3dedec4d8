"""The standby: it takes over with everything ready, and its own end is nobody's event."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from types import FrameType
from typing import Any

import pytest
from structlog.typing import EventDict

from cudnn_actor import ConvFwd, CudnnRef, Receipt, ServiceStopped
from cudnn_actor.isolation.process.parent import worker_source
from cudnn_actor.isolation.process.parent.dispatcher import Dispatcher
from cudnn_actor.isolation.process.parent.monitor import WorkerMonitor
from cudnn_actor.isolation.process.parent.process_isolation import ProcessIsolation
from cudnn_actor.messages import ClearPlans
from cudnn_actor.service import StandbyState
from cudnn_actor.supervision import Backoff, ExitKind, Restarted, Restarting, supervisor
from cudnn_actor.trials.bench.crashes import standby_ready
from tests.service.noticed_hangs import LATE_S, NOTICED_S, hanging_standby, late_standby, notice_hang
from tests.service.rigs import SOON_S, Trio, in_thread, outcome, seen, single

from ..inside import service_behind, worker_source_of
from ..log_lines import line
from ..patience import PATIENCE_S
from .crash_rigs import Points, gone, kill, pid_of, sent, workers

pytestmark = pytest.mark.usefixtures("a_forkserver")
BEAT_S = 0.25
READY_WITHIN_S = 8.0
"""A start takes far less, also on a slow machine."""
HANG_AFTER_S = 4.0
"""Of a service that has a worker stopped. Each step of the others takes far less, also on a slow machine."""
PAUSES = Backoff(initial_s=0.01, reset_after_s=LATE_S / 2, at_once=1)


def restarts_told(gpu: CudnnRef) -> int:
    return sum(isinstance(event, Restarting) for event in service_behind(gpu).events.all)


async def test_a_standby_takes_over_and_another_is_started_behind_it(logs: list[EventDict]) -> None:
    async with workers(standby=1) as (gpu, points):
        first = pid_of(gpu)
        standby = (await line(logs, "standby.ready"))["pid"]
        trio = await Trio.on(gpu)
        points.hold("execute")
        futures = [gpu.submit(trio.product()) for _ in range(30)]
        (await in_thread(lambda: points.arrival("execute"))).kill()
        points.let_go()
        for future in futures:
            receipt = await outcome(future)
            assert isinstance(receipt, Receipt)
            assert receipt.generation == 2
        assert (await gpu.ping(), gpu.generation, pid_of(gpu)) == (2, 2, standby)
        assert await trio.result() == 6.0
        restarted = await seen(gpu, Restarted)
        assert isinstance(restarted, Restarted)
        assert restarted.generation == 2
        statistics = await gpu.statistics()
        assert (statistics.restarts, statistics.replayed, statistics.generation) == (1, 1, 2)
        assert (await line(logs, "standby.promoted"))["pid"] == standby
        assert (await line(logs, "standby.ready", 2))["pid"] not in (first, standby)


async def test_several_crashes_each_find_a_standby(logs: list[EventDict]) -> None:
    async with workers(standby=1, max_restarts=9) as (gpu, _):
        trio = await Trio.on(gpu)
        for crash in range(1, 5):
            standby = (await line(logs, "standby.ready", crash))["pid"]
            kill(gpu)
            assert isinstance(await outcome(gpu.submit(trio.product())), Receipt)
            assert (gpu.generation, pid_of(gpu)) == (crash + 1, standby)
        assert await trio.result() == 6.0


async def test_a_standby_has_the_arenas_that_were_taken_after_it_started(logs: list[EventDict]) -> None:
    async with workers(standby=1) as (gpu, points):
        await line(logs, "standby.ready")
        large = await gpu.empty((1, 1, 4096, 5120))
        await gpu.fill(large, 3.0)
        await in_thread(lambda: points.wait_for_visits("after map_arena", 1))
        kill(gpu)
        await gpu.fill(large, 4.0)
        assert (await gpu.download(large))[0, 0, 4095, 5119] == 4.0
        assert (await line(logs, "standby.promoted"))["generation"] == 2


async def test_a_standby_has_the_recent_plans(logs: list[EventDict]) -> None:
    async with workers(standby=1) as (gpu, points):
        trio = await Trio.on(gpu)
        wide = [await gpu.empty((1, 2, 1, 1)) for _ in range(2)]
        other = Trio(gpu, wide[0], wide[1], trio.y)
        for message in (trio.product(), trio.sum(), other.product()):
            await gpu.ask(message)
        await in_thread(lambda: points.wait_for_visits("after build", 6))
        await line(logs, "standby.ready")
        await standby_ready(gpu)
        assert gpu.metrics().standby is StandbyState.WARM
        kill(gpu)
        for message in (trio.product(), other.product()):
            receipt = await outcome(gpu.submit(message))
            assert isinstance(receipt, Receipt)
            assert receipt.generation == 2
        plans = (await gpu.statistics()).plans
        assert (plans.size, plans.misses) == (3, 3)


async def test_a_standby_drops_cleared_plans_and_is_given_none_of_them_again(logs: list[EventDict]) -> None:
    async with workers(standby=1) as (gpu, points):
        trio = await Trio.on(gpu)
        await gpu.ask(trio.product())
        await in_thread(lambda: points.wait_for_visits("after build", 2))
        assert await gpu.clear_plans() == 1
        await gpu.ask(trio.sum())
        for crash in (1, 2):
            builds = 3 + crash  # two of each plan, and one by the second standby
            await in_thread(functools.partial(points.wait_for_visits, "after build", builds))
            await line(logs, "standby.ready", crash)
            kill(gpu)
            assert await gpu.ping() == crash + 1
            assert (await gpu.statistics()).plans.size == 1, "that of the sum"


async def test_a_standby_is_not_given_a_plan_that_is_cleared_while_it_runs(logs: list[EventDict]) -> None:
    async with workers(standby=1) as (gpu, points):
        trio = await Trio.on(gpu)
        await line(logs, "standby.ready")
        points.hold("execute")
        product = gpu.submit(trio.product())
        arrival = await in_thread(lambda: points.arrival("execute"))
        cleared = gpu.submit(ClearPlans())
        await sent(gpu)
        points.let_go("execute")
        arrival.go_on()
        assert isinstance(await outcome(product), Receipt)
        assert await cleared == 1
        kill(gpu)
        assert await gpu.ping() == 2
        assert (await gpu.statistics()).plans.size == 0


@contextlib.asynccontextmanager
async def a_standby_is_held(logs: list[EventDict], points: Points) -> AsyncIterator[None]:
    """The standby of a service starts, and is ready only behind the `with` block."""
    standby = (await line(logs, "standby.ready"))["pid"]
    points.hold("open")
    os.kill(standby, signal.SIGKILL)
    await in_thread(lambda: points.arrival("open"))
    yield
    points.let_go("open")
    await line(logs, "standby.ready", 2)


async def three_products(gpu: CudnnRef) -> list[ConvFwd]:
    """Requests with a plan each."""
    trio = await Trio.on(gpu)
    messages = [trio.product()]
    for dim in (2, 3):
        x, w = [await gpu.empty((1, dim, 1, 1)) for _ in range(2)]
        messages.append(Trio(gpu, x, w, trio.y).product())
    return messages


async def test_a_standby_has_the_plans_that_were_used_last(
    logs: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at most are noted: of those that ran last, not of those that ran for the first time last."""
    monkeypatch.setattr("cudnn_actor.isolation.process.parent.recent_plans.MOST_RECENT", 2)
    async with workers(standby=1) as (gpu, points):
        async with a_standby_is_held(logs, points):
            hot, second, third = await three_products(gpu)
            for message in (hot, second, hot, third):
                await gpu.ask(message)
        await in_thread(lambda: points.wait_for_visits("after build", 3 + 2))
        kill(gpu)
        assert isinstance(await outcome(gpu.submit(hot)), Receipt)
        assert (await gpu.statistics()).plans.misses == 2, "the standby had not built the plan"


async def test_who_waits_for_a_standby_goes_on_when_it_has_the_plans(logs: list[EventDict]) -> None:
    async with workers(standby=1) as (gpu, points):
        async with a_standby_is_held(logs, points):
            for message in await three_products(gpu):
                await gpu.ask(message)
            waiting = asyncio.create_task(standby_ready(gpu))
            await gpu.ping()
            assert not waiting.done()
        await waiting
        assert points.visits("after build") == 3 + 3
        assert points.visits("after load") == 3, "the standby had not loaded what it has built"


async def test_a_standby_that_fails_to_build_a_plan_builds_the_others_and_tries_it_again(
    logs: list[EventDict],
) -> None:
    async with workers(standby=1) as (gpu, points):
        async with a_standby_is_held(logs, points):
            for message in await three_products(gpu):
                await gpu.ask(message)
            points.order("build", "fail")
        await in_thread(lambda: points.wait_for_visits("after build", 3 + 3))
        kill(gpu)
        for message in await three_products(gpu):
            assert isinstance(await outcome(gpu.submit(message)), Receipt)
        assert (await gpu.statistics()).plans.size == 3


async def test_a_standby_gives_up_a_plan_that_it_fails_to_build_again_and_again(
    logs: list[EventDict],
) -> None:
    async with workers(standby=1) as (gpu, points):
        async with a_standby_is_held(logs, points):
            (message, *_) = await three_products(gpu)
            await gpu.ask(message)
            points.order("build", *["fail"] * 10)
        await line(logs, "standby.build_failed")
        assert points.visits("build") == 1 + 4
        assert await gpu.ping() == 1


async def test_a_standby_that_dies_idle_is_a_line_in_the_log_and_is_replaced(logs: list[EventDict]) -> None:
    async with workers(standby=1) as (gpu, _):
        serving = pid_of(gpu)
        standby = (await line(logs, "standby.ready"))["pid"]
        os.kill(standby, signal.SIGKILL)
        died = await line(logs, "standby.died")
        assert (died["pid"], died["why"]) == (standby, "was killed by SIGKILL")
        other = (await line(logs, "standby.ready", 2))["pid"]
        assert other != standby
        assert (pid_of(gpu), await gpu.ping(), restarts_told(gpu)) == (serving, 1, 0)
        assert (await gpu.statistics()).restarts == 0
        await gone(kill(gpu))
        assert await gpu.ping() == 2
        assert pid_of(gpu) == other


@pytest.mark.parametrize("point", ["open", "after open"])
async def test_a_standby_that_dies_in_its_start_is_replaced(point: str, logs: list[EventDict]) -> None:
    async with workers(standby=1) as (gpu, points):
        standby = (await line(logs, "standby.ready"))["pid"]
        points.hold(point)
        os.kill(standby, signal.SIGKILL)
        (await in_thread(lambda: points.arrival(point))).kill()
        points.let_go()
        await line(logs, "standby.died", 2)
        await line(logs, "standby.ready", 2)
        assert (await gpu.ping(), restarts_told(gpu)) == (1, 0)


async def test_a_standby_that_is_stopped_in_its_start_is_replaced_before_it_is_needed(
    logs: list[EventDict],
) -> None:
    async with workers(standby=1) as (gpu, points):
        first = (await line(logs, "standby.ready"))["pid"]
        points.hold("open")
        os.kill(first, signal.SIGKILL)
        starting = await in_thread(lambda: points.arrival("open"))
        os.kill(starting.pid, signal.SIGSTOP)
        points.let_go()
        with hanging_standby(gpu):
            died = await line(logs, "standby.died", 2)
        assert (died["pid"], died["why"]) == (starting.pid, f"was stopped for {NOTICED_S:g} s in its start")
        await line(logs, "standby.ready", 2)
        assert (await gpu.ping(), restarts_told(gpu)) == (1, 0)


async def test_a_standby_whose_start_hangs_is_replaced_when_it_has_taken_too_long(
    logs: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a driver's call, say, or in an import: its process runs, and nothing else tells of it."""
    monkeypatch.setattr(worker_source, "_PAUSES", PAUSES)
    async with workers(standby=1) as (gpu, points):
        first = (await line(logs, "standby.ready"))["pid"]
        points.hold("open")
        os.kill(first, signal.SIGKILL)
        hanging = await in_thread(lambda: points.arrival("open"))
        with late_standby(gpu):
            died = await line(logs, "standby.died", 2)
        assert (died["pid"], died["why"]) == (hanging.pid, f"was not ready within {LATE_S:g} s")
        assert died["next_in_s"] > 0.0, "it is not the first that has died in a row"
        await gone(hanging.pid)
        points.let_go()
        await line(logs, "standby.ready", 2)
        assert (await gpu.ping(), restarts_told(gpu)) == (1, 0)


async def test_so_is_one_whose_launch_hangs(logs: list[EventDict]) -> None:
    async with workers(standby=1) as (gpu, _):
        first = (await line(logs, "standby.ready"))["pid"]
        launcher = worker_source_of(service_behind(gpu)).forkserver
        with launcher._lock, late_standby(gpu):  # as a launch holds it that waits for imports
            os.kill(first, signal.SIGKILL)
            died = await line(logs, "standby.died", 2)
        assert died["why"] == f"it was not launched within {LATE_S:g} s"
        await line(logs, "standby.ready", 2)
        assert (await gpu.ping(), restarts_told(gpu)) == (1, 0)


async def known_as_standby(gpu: CudnnRef, pid: int) -> None:
    """Wait until the service knows of a worker that it has launched as its standby."""
    source = worker_source_of(service_behind(gpu))
    async with asyncio.timeout(PATIENCE_S):
        while source.standby is None or source.standby.pid != pid:  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # there is no event to wait for


async def test_a_standby_that_is_still_starting_takes_over_when_it_is_ready(logs: list[EventDict]) -> None:
    async with workers(standby=1) as (gpu, points):
        standby = (await line(logs, "standby.ready"))["pid"]
        trio = await Trio.on(gpu)
        points.hold("open")
        os.kill(standby, signal.SIGKILL)
        starting = await in_thread(lambda: points.arrival("open"))
        await known_as_standby(gpu, starting.pid)
        kill(gpu)
        await line(logs, "standby.promoted")
        future = gpu.submit(trio.sum())
        starting.go_on()
        assert isinstance(await outcome(future), Receipt)
        assert (pid_of(gpu), gpu.generation) == (starting.pid, 2)
        assert await trio.result() == 7.0


@pytest.mark.parametrize("standbys", [0, 1])
async def test_one_that_is_stopped_in_its_start_is_replaced_like_one_that_hangs(
    standbys: int, logs: list[EventDict]
) -> None:
    async with workers(standby=standbys) as (gpu, points):
        trio = await Trio.on(gpu)
        first = (await line(logs, "standby.ready"))["pid"] if standbys else pid_of(gpu)
        points.hold("open")
        os.kill(first, signal.SIGKILL)
        starting = await in_thread(lambda: points.arrival("open"))
        if standbys:
            await known_as_standby(gpu, starting.pid)
            kill(gpu)
            await line(logs, "standby.promoted")
        os.kill(starting.pid, signal.SIGSTOP)
        points.let_go()
        notice_hang(gpu)
        assert isinstance(await outcome(gpu.submit(trio.sum())), Receipt)
        assert pid_of(gpu) != starting.pid
        await gone(starting.pid)


async def test_a_standby_killed_as_it_takes_over_costs_its_callers_only_time(logs: list[EventDict]) -> None:
    async with workers(standby=1) as (gpu, points):
        await line(logs, "standby.ready")
        trio = await Trio.on(gpu)
        points.hold("build", passing=1)  # the worker that serves
        await gpu.ask(trio.product())
        standby = await in_thread(lambda: points.arrival("build"))
        kill(gpu)
        await line(logs, "standby.promoted")
        future = gpu.submit(trio.sum())
        await seen(gpu, Restarted)
        standby.kill()
        points.let_go()
        receipt = await outcome(future)
        assert isinstance(receipt, Receipt)
        assert receipt.generation == 3
        assert await trio.result() == 12.0
        assert (await gpu.statistics()).restarts == 2


async def test_a_standby_that_has_been_silent_is_not_relied_on(logs: list[EventDict]) -> None:
    async with workers(standby=1) as (gpu, _):
        trio = await Trio.on(gpu)
        standby = (await line(logs, "standby.ready"))["pid"]
        os.kill(standby, signal.SIGSTOP)
        frozen = time.monotonic()
        while time.monotonic() - frozen < 10 * BEAT_S:  # noqa: ASYNC110 - it is time that must pass
            await asyncio.sleep(0.01)
        kill(gpu)
        assert isinstance(await outcome(gpu.submit(trio.product())), Receipt)
        assert pid_of(gpu) != standby
        assert (await gpu.statistics()).restarts == 1
        assert not [entry for entry in logs if entry["event"] == "standby.promoted"]
        await gone(standby)


async def test_a_standby_that_has_just_stopped_is_found_out_by_the_watchdog(logs: list[EventDict]) -> None:
    async with workers(standby=1, hang_after_s=HANG_AFTER_S) as (gpu, _):
        trio = await Trio.on(gpu)
        standby = (await line(logs, "standby.ready"))["pid"]
        os.kill(standby, signal.SIGSTOP)
        kill(gpu)
        receipt = await outcome(gpu.submit(trio.sum()))
        assert isinstance(receipt, Receipt)
        assert await trio.result() == 7.0
        kinds = [
            event.cause.kind for event in service_behind(gpu).events.all if isinstance(event, Restarting)
        ]
        assert kinds in ([ExitKind.CRASH, ExitKind.HUNG], [ExitKind.CRASH])  # the second: on a slow machine
        await gone(standby)


class Late:
    """Catches the next monitor that is started, before it gets to the service, and lets it go late."""

    def __init__(self) -> None:
        self.caught: threading.Thread | None = None
        self.let_go = threading.Event()

    def trace(self, frame: FrameType, _event: str, _: Any) -> None:
        thread = threading.current_thread()
        waits = frame.f_code is Dispatcher.await_host.__code__
        if waits and self.caught is None and thread.name.startswith(WorkerMonitor.__name__):
            self.caught = thread
            self.let_go.wait(3 * PATIENCE_S)


async def test_a_keeper_that_is_given_up_before_it_gets_to_its_service_ends_it_and_leaves_nothing(
    logs: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread got no time, say, and goes on when the service has ended."""
    monkeypatch.setattr(ProcessIsolation, "ready_within_s", READY_WITHIN_S)
    monkeypatch.setattr(supervisor, "KILL_GRACE_S", SOON_S)
    late = Late()
    async with workers(standby=1) as (gpu, _):
        trio = await Trio.on(gpu)
        standby = (await line(logs, "standby.ready"))["pid"]
        threading.settrace(late.trace)
        kill(gpu)
        answer = await outcome(gpu.submit(trio.product()))
        threading.settrace(None)
        assert isinstance(answer, ServiceStopped)
        assert "its thread does not end" in str(answer)
        await gone(standby)
        late.let_go.set()
        assert late.caught is not None
        await in_thread(lambda: late.caught.join(PATIENCE_S))  # type: ignore[union-attr]
        assert not late.caught.is_alive()


async def test_closing_ends_the_standby_too(logs: list[EventDict]) -> None:
    async with workers(standby=1) as (gpu, _):
        standby, serving = (await line(logs, "standby.ready"))["pid"], pid_of(gpu)
    await gone(standby)
    await gone(serving)


async def test_a_frozen_standby_does_not_hold_up_the_service_s_end(logs: list[EventDict]) -> None:
    async with workers(standby=1) as (gpu, _):
        standby = (await line(logs, "standby.ready"))["pid"]
        os.kill(standby, signal.SIGSTOP)
        await gpu.upload(single(1.0))
    await gone(standby)
