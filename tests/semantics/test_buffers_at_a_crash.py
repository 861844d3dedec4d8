"""What becomes of a buffer at a crash: that table of the page, brought about."""

from __future__ import annotations

import os
from typing import Any

import pytest

from cudnn_actor import BufferRef, CudnnActorError, Fault, FaultPlan, Fill, Receipt

from ..service.rigs import outcome
from .late import product_whose_input_is_written
from .places import Place, world
from .scenarios import IN_PROCESS, ON_THREAD, Case, Logs, Scenarios

BUFFERS = Scenarios("A buffer at a crash", "the buffer")
ANY_CRASH = (Fault.STICKY, Fault.KILL)


@BUFFERS.of("no unfinished request writes it", crashes=ANY_CRASH)
async def nobody_writes_it(place: Place, crash: Fault, logs: Logs) -> str:
    async with world(place, logs, faults=FaultPlan().at(1, crash, of=Fill)) as here:
        await outcome(here.gpu.submit(Fill(dst=here.trio.y, value=2)))
        return await here.state(here.bystander, 7.0)


@BUFFERS.of("a pure request was writing it", crashes=ANY_CRASH)
async def a_pure_request_writes_it(place: Place, crash: Fault, logs: Logs) -> str:
    async with world(place, logs, faults=FaultPlan().at(1, crash, of="ConvFwd")) as here:
        await outcome(here.gpu.submit(here.trio.product()))
        return await here.state(here.trio.y, 6.0)


@BUFFERS.of("a request with `beta` ≠ 0 was writing it", crashes=ANY_CRASH)
async def an_accumulating_request_writes_it(place: Place, crash: Fault, logs: Logs) -> str:
    async with world(place, logs, faults=FaultPlan().at(1, crash, of="ConvFwd")) as here:
        assert isinstance(await outcome(here.gpu.submit(here.trio.sum())), CudnnActorError)
        return await here.state(here.trio.y, 7.0)


@BUFFERS.of("a request with `beta` ≠ 0 was to write it, and had not begun", crashes=ANY_CRASH)
async def an_accumulating_request_would_write_it(place: Place, crash: Fault, logs: Logs) -> str:
    async with world(place, logs, faults=FaultPlan().at(1, crash, of=Fill)) as here:
        struck, behind = here.send(Fill(dst=here.trio.w, value=2), here.trio.sum())
        await outcome(struck)
        await outcome(behind)
        return await here.state(here.trio.y, 7.0)


@BUFFERS.of(
    "a pure request was writing it, and a later unfinished one an input of that",
    columns=("thread, CUDA", "process, CUDA"),
)
async def its_input_is_written(place: Place, _: Fault, logs: Logs) -> str:
    async with product_whose_input_is_written(place, logs) as (here, product):
        await outcome(product)
        return await here.state(here.trio.y, 6.0)


@BUFFERS.of("a request was writing it for which this is the second crash", crashes=ANY_CRASH)
async def a_second_crash_of_its_writer(place: Place, crash: Fault, logs: Logs) -> str:
    async with world(place, logs, faults=FaultPlan().at(1, crash, of="ConvFwd", times=2)) as here:
        assert isinstance(await outcome(here.gpu.submit(here.trio.product())), CudnnActorError)
        return await here.state(here.trio.y, 6.0)


@BUFFERS.of("somebody has a view of it", columns=ON_THREAD)
async def somebody_has_a_view(place: Place, _: Fault, logs: Logs) -> str:
    async with world(place, logs, faults=FaultPlan().at(1, Fault.STICKY, of=Fill)) as here:
        view: Any = await here.gpu.view(here.bystander)
        answer = await outcome(here.gpu.submit(Fill(dst=here.bystander, value=8)))
        if isinstance(answer, Receipt):
            assert view.item() == 8.0, "it is not the buffer any more"
        return await here.state(here.bystander, 8.0)


@BUFFERS.of("`verify` finds that it does not hold what was uploaded", columns=IN_PROCESS, crashes=ANY_CRASH)
async def its_bytes_are_others(place: Place, crash: Fault, logs: Logs) -> str:
    if place.device != "cpu":
        pytest.skip("nobody but the service can spoil device memory")
    async with world(place, logs, verify=True, faults=FaultPlan().at(1, crash, of=Fill)) as here:
        spoil(here.gpu._state.memory, here.bystander)
        await here.gpu.fill(here.trio.y, 2)
        assert await here.state(here.trio.x, 3.0) == "kept", "it holds what was uploaded"
        assert (await here.line("buffer.corrupted"))["slot"] == here.bystander.slot
        return await here.state(here.bystander, 7.0)


def spoil(memory: Any, ref: BufferRef) -> None:
    """Write to a buffer's bytes behind everybody's back."""
    slot = memory.resolve(ref)
    os.pwrite(slot.arena.fd, b"\x55", slot.offset)


@pytest.mark.parametrize("case", BUFFERS.cases())
async def test_what_becomes_of_a_buffer(case: Case, logs: Logs) -> None:
    await case.holds(logs)


def test_every_cell_has_its_scenario_and_every_scenario_its_cell() -> None:
    BUFFERS.check()
