"""The table "A request at a crash" of docs/failures.md, row by row."""

from __future__ import annotations

import asyncio

import pytest

from cudnn_actor import CudnnActorError, Fault, FaultPlan
from cudnn_actor.isolation.process.parent import monitor
from cudnn_actor.messages import Copy, Fill

from ..isolation.crash_rigs import sent
from ..isolation.slow_death import dying_slowly
from ..service.rigs import SOON_S, outcome
from .hung_thread import hung_thread
from .overlapping_requests import product_whose_input_is_written
from .scenarios import IN_PROCESS, ON_THREAD, REPLACED, Case, Logs, Scenarios
from .setups import CrashTooEarly, Setup, open_session

REQUESTS = Scenarios("A request at a crash", "the request", key=3)
ANY_CRASH = (Fault.STICKY, Fault.KILL)
HANG_TOO = (*ANY_CRASH, Fault.HANG)
MANY = 400
"""More messages than an actor takes from the mailbox at once, or than a worker has at a time."""


def crashes_at(crash: Fault, of: str, *, times: int = 1) -> FaultPlan:
    """Makes the actor crash at the first `times` messages of a class."""
    return FaultPlan().at(1, crash, of=of, times=times)


@REQUESTS.row("waited in the mailbox", "either", "any")
async def it_waited(setup: Setup, crash: Fault, logs: Logs) -> str:
    faults = FaultPlan().at(1, Fault.SLOW, of=Copy, seconds=0.2).at(1, crash, of=Fill)
    async with open_session(setup, logs, faults=faults) as session:
        _, crashes, *waiting = session.send(
            Copy(src=session.trio.x, dst=session.spare),  # takes 0.2 s, in which the others are sent
            Fill(dst=session.trio.w, value=2),
            *(session.trio.sum() for _ in range(MANY)),
        )
        results = [await session.result_of(future) for future in waiting]
        await outcome(crashes)
        if not setup.loses_memory:
            assert await session.value(session.trio.y) == 1 + 6 * MANY, "one of them did not run exactly once"
        return results[-1]


@REQUESTS.row(
    "was taken from the mailbox or sent to the worker, and had not started",
    "either",
    "any",
    crashes=ANY_CRASH,
)
async def it_had_not_started(setup: Setup, crash: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=crashes_at(crash, "Fill")) as session:
        crashes, waits = session.send(Fill(dst=session.trio.w, value=2), session.trio.sum())
        await outcome(crashes)
        result = await session.result_of(waits)
        assert setup.loses_memory or await session.value(session.trio.y) == 7.0
        return result


@REQUESTS.row("had started", "yes", "first", crashes=HANG_TOO)
async def it_had_started(setup: Setup, crash: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=crashes_at(crash, "ConvFwd")) as session:
        return await session.result_of(session.gpu.submit(session.trio.product()))


@REQUESTS.row("had started", "no", "first", crashes=HANG_TOO)
async def it_accumulates_and_had_started(setup: Setup, crash: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=crashes_at(crash, "ConvFwd")) as session:
        return await session.result_of(session.gpu.submit(session.trio.sum()))


@REQUESTS.row("had started", "yes", "second", columns=REPLACED, crashes=ANY_CRASH)
async def it_had_started_at_two_crashes(setup: Setup, crash: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=crashes_at(crash, "ConvFwd", times=2)) as session:
        return await session.result_of(session.gpu.submit(session.trio.product()))


@REQUESTS.row(
    "had started, and so had a later request that writes its input",
    "yes",
    "first",
    columns=("thread, CUDA", "process, CUDA"),
)
async def its_input_is_written(setup: Setup, _: Fault, logs: Logs) -> str:
    async with product_whose_input_is_written(setup, logs) as (session, product):
        return await session.result_of(product)


@REQUESTS.row("had started, on a thread that hangs and does not end", "yes", "first", columns=ON_THREAD)
async def its_thread_hangs(setup: Setup, _: Fault, logs: Logs) -> str:
    async with hung_thread(setup, logs) as (session, product):
        return await session.result_of(product)


@REQUESTS.row(
    "had started, and the kernel has not ended the killed worker after 5 s (`worker.not_killed`)",
    "yes",
    "first",
    crashes=(Fault.HANG,),
    columns=IN_PROCESS,
)
async def its_worker_does_not_die(setup: Setup, crash: Fault, logs: Logs) -> str:
    assert monitor.KILLED_S == 5.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "KILLED_S", SOON_S)
        async with (
            open_session(setup, logs, faults=crashes_at(crash, "ConvFwd")) as session,
            dying_slowly(session.gpu),
        ):
            return await session.result_of(session.gpu.submit(session.trio.product()))


@REQUESTS.row("had started, and no restart is left", "yes", "first")
async def no_restart_is_left(setup: Setup, crash: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, max_restarts=0, faults=crashes_at(crash, "ConvFwd")) as session:
        product = session.gpu.submit(session.trio.product())
        result = await session.result_of(product)
        error = product.exception()
        assert isinstance(error, CudnnActorError)
        assert error.ran is None, "nobody can know whether it ran"
        return result


@REQUESTS.row("reads a buffer that the crash has torn", "either", "any")
async def it_reads_a_torn_buffer(setup: Setup, crash: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=crashes_at(crash, "ConvFwd")) as session:
        tears, reads = session.send(session.trio.sum(), Copy(src=session.trio.y, dst=session.spare))
        await outcome(tears)
        return await session.result_of(reads)


@REQUESTS.row("is sent after the crash, and uses a quarantined plan", "either", "any", columns=REPLACED)
async def its_plan_is_quarantined(setup: Setup, crash: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=crashes_at(crash, "ConvFwd", times=2)) as session:
        await outcome(session.gpu.submit(session.trio.product()))
        return await session.result_of(session.gpu.submit(session.trio.product(y=session.spare)))


@REQUESTS.row("was withdrawn before it started", "either", "any")
async def it_was_withdrawn(setup: Setup, crash: Fault, logs: Logs) -> str:
    faults = FaultPlan().at(1, Fault.SLOW, of=Copy, seconds=0.2).at(1, crash, of=Fill)
    async with open_session(setup, logs, faults=faults) as session:
        slow, withdrawn, crashes = session.send(
            Copy(src=session.trio.x, dst=session.spare), session.trio.sum(), Fill(dst=session.trio.x, value=2)
        )
        await sent(session.gpu)
        withdrawn.cancel()
        await asyncio.sleep(0)  # asyncio reports the cancelled future in the loop's next turn
        if slow.done():
            raise CrashTooEarly
        await outcome(crashes)
        if setup.loses_memory:
            return "never runs" if withdrawn.cancelled() else "runs"
        assert (await session.gpu.statistics()).withdrawn == 1
        return "never runs" if await session.value(session.trio.y) == 1.0 else "runs"


@REQUESTS.row("had finished, and its answer had not arrived yet", "either", "any")
async def it_had_finished(setup: Setup, crash: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=crashes_at(crash, "Fill")) as session:
        finished = session.gpu.submit(session.trio.sum())
        if setup.device != "cpu":  # there it could still be unfinished when the next request starts
            await outcome(finished)
        await outcome(session.gpu.submit(Fill(dst=session.trio.x, value=2)))
        return await session.result_of(finished)


@pytest.mark.parametrize("case", REQUESTS.cases())
async def test_a_request_after_a_crash(case: Case, logs: Logs) -> None:
    await case.check(logs)


def test_every_cell_of_the_table_has_a_scenario_and_every_scenario_a_cell() -> None:
    REQUESTS.check()
