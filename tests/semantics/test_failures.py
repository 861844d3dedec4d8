"""The table "Failures and answers" of docs/failures.md, row by row."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from cudnn_actor import ConvBwdData, Fault, FaultPlan, Receipt, StartFailed, TensorSpec
from cudnn_actor.messages import Allocate, Fill

from ..isolation.crash_rigs import gone, kill
from ..service.rigs import ONE_BY_ONE, outcome
from .page import words
from .scenarios import IN_PROCESS, REPLACED, Case, Logs, Scenarios
from .scripted_workers import scripted_workers
from .setups import Session, Setup, open_session

FAILURES = Scenarios("Failures and answers", "failure")
ANSWERS = dict(zip(FAILURES.table.column("failure"), FAILURES.table.column("the request gets"), strict=True))


async def reaction_after(session: Session, failure: str, future: asyncio.Future[Any]) -> str:
    """Check that the request got what the page says, and return what the service does after the failure."""
    answer = await outcome(future)
    for name in words(ANSWERS[failure]):
        assert type(answer).__name__ == name
    return await session.reaction()


INVALID = "an invalid request"


@FAILURES.row(INVALID)
async def an_invalid_request(setup: Setup, _: Fault, logs: Logs) -> str:
    async with open_session(setup, logs) as session:
        wide = await session.gpu.empty((1, 2, 1, 1))
        return await reaction_after(
            session, INVALID, asyncio.ensure_future(session.gpu.ask(session.trio.product(y=wide)))
        )


STALE = "a stale or foreign reference"


@FAILURES.row(STALE)
async def a_stale_reference(setup: Setup, _: Fault, logs: Logs) -> str:
    async with open_session(setup, logs) as session:
        await session.gpu.free(session.trio.y)
        return await reaction_after(
            session, STALE, asyncio.ensure_future(session.gpu.ask(session.trio.product()))
        )


UNSUPPORTED = "a graph that the engine cannot run; it is remembered, and not built again"


@FAILURES.row(UNSUPPORTED)
async def an_unsupported_graph(setup: Setup, _: Fault, logs: Logs) -> str:
    async with open_session(setup, logs) as session:
        dy, w, dx = [await session.gpu.empty((1, 1, 1, 1), dtype="int8") for _ in range(3)]
        gradient = ConvBwdData(dy=dy, w=w, dx=dx, conv=ONE_BY_ONE)
        await outcome(session.gpu.submit(gradient))
        misses = (await session.gpu.statistics()).plans.misses
        reaction = await reaction_after(session, UNSUPPORTED, session.gpu.submit(gradient))
        assert (await session.gpu.statistics()).plans.misses == misses, "it was built again"
        return reaction


NO_MEMORY = (
    "there is not enough memory for a buffer, or for the workspace of any plan that could serve the request"
)


@FAILURES.row(NO_MEMORY)
async def no_memory(setup: Setup, _: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, memory_limit=80 << 20) as session:
        large = Allocate(spec=TensorSpec.packed((1, 1, 4096, 8192)))
        return await reaction_after(session, NO_MEMORY, session.gpu.submit(large))


FAILED = "an execution fails, and the context is healthy"


@FAILURES.row(FAILED)
async def a_failed_execution(setup: Setup, _: Fault, logs: Logs) -> str:
    async with open_session(
        setup, logs, faults=FaultPlan().at(1, Fault.FAIL_EXECUTION, of="ConvFwd")
    ) as session:
        return await reaction_after(session, FAILED, session.gpu.submit(session.trio.product()))


@FAILURES.row("the device context dies")
async def the_context_dies(setup: Setup, _: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=FaultPlan().at(1, Fault.STICKY, of=Fill)) as session:
        await outcome(session.gpu.submit(Fill(dst=session.trio.y, value=2)))
        return await session.reaction()


@FAILURES.row("the worker is killed, or exits", columns=IN_PROCESS)
async def the_worker_is_killed(setup: Setup, _: Fault, logs: Logs) -> str:
    async with open_session(setup, logs) as session:
        await gone(kill(session.gpu))
        return await session.reaction()


@FAILURES.row("the worker breaks the protocol", columns=IN_PROCESS)
async def the_worker_breaks_the_protocol(setup: Setup, _: Fault, logs: Logs) -> str:
    async with scripted_workers(setup, logs) as (session, points):
        points.order("fill", "answer a stranger")
        assert isinstance(await outcome(session.gpu.submit(Fill(dst=session.trio.y, value=2))), Receipt)
        return await session.reaction()


@FAILURES.row("no progress for `hang_after_s`")
async def no_progress(setup: Setup, _: Fault, logs: Logs) -> str:
    faults = FaultPlan().at(1, Fault.HANG, of=Fill)
    async with open_session(setup, logs, faults=faults) as session:
        await outcome(session.gpu.submit(Fill(dst=session.trio.y, value=2)))
        return await session.reaction()


@FAILURES.row("a start fails, or is not ready in 30 s")
async def a_start_fails(setup: Setup, _: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=FaultPlan().at_start(1)) as session:
        assert (await session.line("service.restarting"))["cause"] == "start failed"
        assert session.gpu.generation == 2
        return "restarts" if await session.reaction() == "goes on" else "stops"


@FAILURES.row("the standby dies", columns=IN_PROCESS)
async def the_standby_dies(setup: Setup, _: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, standby=1) as session:
        ready = await session.line("standby.ready")
        os.kill(ready["pid"], signal.SIGKILL)
        product = session.gpu.submit(session.trio.product())
        await session.line("standby.died")
        assert isinstance(await outcome(product), Receipt)
        return await session.reaction()


TOO_MANY = "more than `max_restarts` within `period_s`"


@FAILURES.row(TOO_MANY, columns=REPLACED)
async def too_many_restarts(setup: Setup, _: Fault, logs: Logs) -> str:
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill).at(3, Fault.STICKY, of=Fill)
    async with open_session(setup, logs, faults=faults, max_restarts=1) as session:
        await session.gpu.fill(session.trio.y, 1)  # runs twice, so it counts as two messages
        return await reaction_after(session, TOO_MANY, session.gpu.submit(Fill(dst=session.trio.y, value=2)))


async def test_a_service_that_never_becomes_ready_raises_start_failed(logs: Logs) -> None:
    faults = FaultPlan().at_start(1).at_start(2)
    with pytest.raises(StartFailed):
        async with open_session(Setup("process, CPU", "process", "cpu"), logs, faults=faults, max_restarts=1):
            pass


@pytest.mark.parametrize("case", FAILURES.cases())
async def test_the_answer_and_the_reaction_to_a_failure(case: Case, logs: Logs) -> None:
    await case.check(logs)


def test_every_cell_of_the_table_has_a_scenario_and_every_scenario_a_cell() -> None:
    FAILURES.check()
