"""What becomes of a request at a crash: that table of the page, brought about."""

from __future__ import annotations

import asyncio

import pytest

from cudnn_actor import Copy, CudnnActorError, Fault, FaultPlan, Fill

from ..service.rigs import outcome
from ..workers.crash_rigs import sent
from .late import product_whose_input_is_written
from .lost import lost_thread
from .places import Place, TooLate, world
from .scenarios import ON_THREAD, REPLACED, Case, Logs, Scenarios

REQUESTS = Scenarios("A request at a crash", "the request", key=3)
ANY_CRASH = (Fault.STICKY, Fault.KILL)
HANG_TOO = (*ANY_CRASH, Fault.HANG)
MANY = 400
"""More than an actor takes up at once, or a worker has."""


def strikes(place: Place, crash: Fault, of: str, *, times: int = 1) -> dict[str, object]:
    """Options for a crash at the first messages of a class."""
    faults = FaultPlan().at(1, crash, of=of, times=times)
    return {"faults": faults, **({"hang_after_s": place.hang_after_s} if crash is Fault.HANG else {})}


@REQUESTS.of("waited in the mailbox", "or not", "any")
async def it_waited(place: Place, crash: Fault, logs: Logs) -> str:
    faults = FaultPlan().at(1, Fault.SLOW, of=Copy, seconds=0.2).at(1, crash, of=Fill)
    async with world(place, logs, faults=faults) as here:
        _, struck, *waiting = here.send(
            Copy(src=here.trio.x, dst=here.bystander),  # until all of them are there
            Fill(dst=here.trio.w, value=2),
            *(here.trio.sum() for _ in range(MANY)),
        )
        ends = [await here.end(future) for future in waiting]
        await outcome(struck)
        if not place.mortal:
            assert await here.value(here.trio.y) == 1 + 6 * MANY, "one of them did not run just once"
        return ends[-1]


@REQUESTS.of("was taken up or sent, and had not begun", "or not", "any", crashes=ANY_CRASH)
async def it_had_not_begun(place: Place, crash: Fault, logs: Logs) -> str:
    async with world(place, logs, **strikes(place, crash, "Fill")) as here:
        struck, behind = here.send(Fill(dst=here.trio.w, value=2), here.trio.sum())
        await outcome(struck)
        end = await here.end(behind)
        assert place.mortal or await here.value(here.trio.y) == 7.0
        return end


@REQUESTS.of("had begun", "yes", "first", crashes=HANG_TOO)
async def it_had_begun(place: Place, crash: Fault, logs: Logs) -> str:
    async with world(place, logs, **strikes(place, crash, "ConvFwd")) as here:
        return await here.end(here.gpu.submit(here.trio.product()))


@REQUESTS.of("had begun", "no", "first", crashes=HANG_TOO)
async def it_accumulates_and_had_begun(place: Place, crash: Fault, logs: Logs) -> str:
    async with world(place, logs, **strikes(place, crash, "ConvFwd")) as here:
        return await here.end(here.gpu.submit(here.trio.sum()))


@REQUESTS.of("had begun", "yes", "second", columns=REPLACED, crashes=ANY_CRASH)
async def it_had_begun_twice(place: Place, crash: Fault, logs: Logs) -> str:
    async with world(place, logs, **strikes(place, crash, "ConvFwd", times=2)) as here:
        return await here.end(here.gpu.submit(here.trio.product()))


@REQUESTS.of(
    "had begun, and a later one that writes its input as well",
    "yes",
    "first",
    columns=("thread, CUDA", "process, CUDA"),
)
async def its_input_is_written(place: Place, _: Fault, logs: Logs) -> str:
    async with product_whose_input_is_written(place, logs) as (here, product):
        return await here.end(product)


@REQUESTS.of("had begun, on a thread that nobody can end", "yes", "first", columns=ON_THREAD)
async def its_thread_is_lost(place: Place, _: Fault, logs: Logs) -> str:
    async with lost_thread(place, logs) as (here, product):
        return await here.end(product)


@REQUESTS.of("had begun, and no restart is left", "yes", "first")
async def no_restart_is_left(place: Place, crash: Fault, logs: Logs) -> str:
    async with world(place, logs, max_restarts=0, **strikes(place, crash, "ConvFwd")) as here:
        product = here.gpu.submit(here.trio.product())
        end = await here.end(product)
        error = product.exception()
        assert isinstance(error, CudnnActorError)
        assert error.ran is None, "nobody knows"
        return end


@REQUESTS.of("reads what the crash has torn", "or not", "any")
async def it_reads_what_is_torn(place: Place, crash: Fault, logs: Logs) -> str:
    async with world(place, logs, **strikes(place, crash, "ConvFwd")) as here:
        tears, reads = here.send(here.trio.sum(), Copy(src=here.trio.y, dst=here.bystander))
        await outcome(tears)
        return await here.end(reads)


@REQUESTS.of("runs a plan that is quarantined", "or not", "after", columns=REPLACED)
async def its_plan_is_quarantined(place: Place, crash: Fault, logs: Logs) -> str:
    async with world(place, logs, **strikes(place, crash, "ConvFwd", times=2)) as here:
        await outcome(here.gpu.submit(here.trio.product()))
        return await here.end(here.gpu.submit(here.trio.product(y=here.bystander)))


@REQUESTS.of("was withdrawn before it had begun", "or not", "any")
async def it_was_withdrawn(place: Place, crash: Fault, logs: Logs) -> str:
    faults = FaultPlan().at(1, Fault.SLOW, of=Copy, seconds=0.2).at(1, crash, of=Fill)
    async with world(place, logs, faults=faults) as here:
        slow, withdrawn, struck = here.send(
            Copy(src=here.trio.x, dst=here.bystander), here.trio.sum(), Fill(dst=here.trio.x, value=2)
        )
        await sent(here.gpu)
        withdrawn.cancel()
        await asyncio.sleep(0)  # a future tells of its end in the loop's next turn
        if slow.done():
            raise TooLate
        await outcome(struck)
        if place.mortal:
            return "never runs" if withdrawn.cancelled() else "runs"
        assert (await here.gpu.statistics()).withdrawn == 1
        return "never runs" if await here.value(here.trio.y) == 1.0 else "runs"


@REQUESTS.of("had finished, and its answer was on its way", "or not", "any")
async def it_had_finished(place: Place, crash: Fault, logs: Logs) -> str:
    async with world(place, logs, **strikes(place, crash, "Fill")) as here:
        finished = here.gpu.submit(here.trio.sum())
        if place.device != "cpu":  # where it may be unfinished, though it was sent before
            await outcome(finished)
        await outcome(here.gpu.submit(Fill(dst=here.trio.x, value=2)))
        return await here.end(finished)


@pytest.mark.parametrize("case", REQUESTS.cases())
async def test_what_becomes_of_a_request(case: Case, logs: Logs) -> None:
    await case.holds(logs)


def test_every_cell_has_its_scenario_and_every_scenario_its_cell() -> None:
    REQUESTS.check()
