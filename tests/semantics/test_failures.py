"""Who is answered what at a failure, and what the service does: that table of the page, brought about."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from cudnn_actor import Allocate, ConvBwdData, Fault, FaultPlan, Fill, Receipt, StartFailed, TensorSpec

from ..service.rigs import ONE_BY_ONE, outcome
from ..workers.crash_rigs import gone, kill
from .page import words
from .places import Place, World, world
from .scenarios import IN_PROCESS, REPLACED, Case, Logs, Scenarios
from .told import told

FAILURES = Scenarios("Failures and answers", "failure")
ANSWERS = dict(zip(FAILURES.table.column("failure"), FAILURES.table.column("the request gets"), strict=True))


async def answered(here: World, failure: str, future: asyncio.Future[Any]) -> str:
    """What the service does after a failure, whose request got what the page says."""
    answer = await outcome(future)
    for name in words(ANSWERS[failure]):
        assert type(answer).__name__ == name
    return await here.goes_on()


BAD = "a request that cannot mean anything"


@FAILURES.of(BAD)
async def a_bad_request(place: Place, _: Fault, logs: Logs) -> str:
    async with world(place, logs) as here:
        wide = await here.gpu.empty((1, 2, 1, 1))
        return await answered(here, BAD, asyncio.ensure_future(here.gpu.ask(here.trio.product(y=wide))))


STALE = "a stale or foreign reference"


@FAILURES.of(STALE)
async def a_stale_reference(place: Place, _: Fault, logs: Logs) -> str:
    async with world(place, logs) as here:
        await here.gpu.free(here.trio.y)
        return await answered(here, STALE, asyncio.ensure_future(here.gpu.ask(here.trio.product())))


UNSUPPORTED = "a graph that the engine cannot run; it is remembered, and not built again"


@FAILURES.of(UNSUPPORTED)
async def an_unsupported_graph(place: Place, _: Fault, logs: Logs) -> str:
    async with world(place, logs) as here:
        dy, w, dx = [await here.gpu.empty((1, 1, 1, 1), dtype="int8") for _ in range(3)]
        gradient = ConvBwdData(dy=dy, w=w, dx=dx, conv=ONE_BY_ONE)
        await outcome(here.gpu.submit(gradient))
        misses = (await here.gpu.statistics()).plans.misses
        went_on = await answered(here, UNSUPPORTED, here.gpu.submit(gradient))
        assert (await here.gpu.statistics()).plans.misses == misses, "it was built again"
        return went_on


NO_ROOM = "no room for a buffer, or for any plan's workspace"


@FAILURES.of(NO_ROOM)
async def no_room(place: Place, _: Fault, logs: Logs) -> str:
    async with world(place, logs, memory_limit=80 << 20) as here:
        large = Allocate(spec=TensorSpec.packed((1, 1, 4096, 8192)))
        return await answered(here, NO_ROOM, here.gpu.submit(large))


FAILED = "a run fails, and the context is healthy"


@FAILURES.of(FAILED)
async def a_failed_run(place: Place, _: Fault, logs: Logs) -> str:
    async with world(place, logs, faults=FaultPlan().at(1, Fault.FAIL_EXECUTION, of="ConvFwd")) as here:
        return await answered(here, FAILED, here.gpu.submit(here.trio.product()))


@FAILURES.of("the device context dies")
async def the_context_dies(place: Place, _: Fault, logs: Logs) -> str:
    async with world(place, logs, faults=FaultPlan().at(1, Fault.STICKY, of=Fill)) as here:
        await outcome(here.gpu.submit(Fill(dst=here.trio.y, value=2)))
        return await here.goes_on()


@FAILURES.of("the worker is killed, or exits", columns=IN_PROCESS)
async def the_worker_is_killed(place: Place, _: Fault, logs: Logs) -> str:
    async with world(place, logs) as here:
        await gone(kill(here.gpu))
        return await here.goes_on()


@FAILURES.of("the worker says what no honest one would", columns=IN_PROCESS)
async def the_worker_lies(place: Place, _: Fault, logs: Logs) -> str:
    async with told(place, logs) as (here, points):
        points.order("fill", "answer a stranger")
        assert isinstance(await outcome(here.gpu.submit(Fill(dst=here.trio.y, value=2))), Receipt)
        return await here.goes_on()


@FAILURES.of("no progress for `hang_after_s`")
async def no_progress(place: Place, _: Fault, logs: Logs) -> str:
    faults = FaultPlan().at(1, Fault.HANG, of=Fill)
    async with world(place, logs, faults=faults, hang_after_s=place.hang_after_s) as here:
        await outcome(here.gpu.submit(Fill(dst=here.trio.y, value=2)))
        return await here.goes_on()


@FAILURES.of("a start fails, or is not ready in 30 s")
async def a_start_fails(place: Place, _: Fault, logs: Logs) -> str:
    async with world(place, logs, faults=FaultPlan().at_start(1)) as here:
        assert (await here.line("service.restarting"))["cause"] == "start failed"
        assert here.gpu.generation == 2
        return "restarts" if await here.goes_on() == "goes on" else "stops"


@FAILURES.of("the standby dies", columns=IN_PROCESS)
async def the_standby_dies(place: Place, _: Fault, logs: Logs) -> str:
    async with world(place, logs, standby=1) as here:
        ready = await here.line("standby.ready")
        os.kill(ready["pid"], signal.SIGKILL)
        product = here.gpu.submit(here.trio.product())
        await here.line("standby.died")
        assert isinstance(await outcome(product), Receipt)
        return await here.goes_on()


USED_UP = "more than `max_restarts` within `period_s`"


@FAILURES.of(USED_UP, columns=REPLACED)
async def the_restarts_are_used_up(place: Place, _: Fault, logs: Logs) -> str:
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill).at(3, Fault.STICKY, of=Fill)
    async with world(place, logs, faults=faults, max_restarts=1) as here:
        await here.gpu.fill(here.trio.y, 1)  # which counts twice
        return await answered(here, USED_UP, here.gpu.submit(Fill(dst=here.trio.y, value=2)))


async def test_a_service_that_never_becomes_ready_says_so(logs: Logs) -> None:
    faults = FaultPlan().at_start(1).at_start(2)
    with pytest.raises(StartFailed):
        async with world(Place("here", "process", "cpu"), logs, faults=faults, max_restarts=1):
            pass


@pytest.mark.parametrize("case", FAILURES.cases())
async def test_what_comes_of_a_failure(case: Case, logs: Logs) -> None:
    await case.holds(logs)


def test_every_cell_has_its_scenario_and_every_scenario_its_cell() -> None:
    FAILURES.check()
