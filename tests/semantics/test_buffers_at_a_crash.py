"""The table "A buffer at a crash" of docs/failures.md, row by row."""

from __future__ import annotations

import os
from typing import Any

import pytest

from cudnn_actor import BufferRef, CudnnActorError, Fault, FaultPlan, Receipt
from cudnn_actor.messages import Fill

from ..inside import service_behind
from ..service.rigs import outcome
from .overlapping_requests import product_whose_input_is_written
from .scenarios import IN_PROCESS, ON_THREAD, Case, Logs, Scenarios
from .setups import Setup, open_session

BUFFERS = Scenarios("A buffer at a crash", "the buffer")
ANY_CRASH = (Fault.STICKY, Fault.KILL)


@BUFFERS.row("no unfinished request writes it", crashes=ANY_CRASH)
async def nobody_writes_it(setup: Setup, crash: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=FaultPlan().at(1, crash, of=Fill)) as session:
        await outcome(session.gpu.submit(Fill(dst=session.trio.y, value=2)))
        return await session.state(session.spare, 7.0)


@BUFFERS.row("a pure request was writing it", crashes=ANY_CRASH)
async def a_pure_request_writes_it(setup: Setup, crash: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=FaultPlan().at(1, crash, of="ConvFwd")) as session:
        await outcome(session.gpu.submit(session.trio.product()))
        return await session.state(session.trio.y, 6.0)


@BUFFERS.row("a request with `beta` ≠ 0 was writing it", crashes=ANY_CRASH)
async def an_accumulating_request_writes_it(setup: Setup, crash: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=FaultPlan().at(1, crash, of="ConvFwd")) as session:
        assert isinstance(await outcome(session.gpu.submit(session.trio.sum())), CudnnActorError)
        return await session.state(session.trio.y, 7.0)


@BUFFERS.row("a request with `beta` ≠ 0 writes it, and had not started", crashes=ANY_CRASH)
async def an_accumulating_request_had_not_started(setup: Setup, crash: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=FaultPlan().at(1, crash, of=Fill)) as session:
        crashes, waits = session.send(Fill(dst=session.trio.w, value=2), session.trio.sum())
        await outcome(crashes)
        await outcome(waits)
        return await session.state(session.trio.y, 7.0)


@BUFFERS.row(
    "a pure request was writing it, and a later unfinished request writes an input of that request",
    columns=("thread, CUDA", "process, CUDA"),
)
async def its_input_is_written(setup: Setup, _: Fault, logs: Logs) -> str:
    async with product_whose_input_is_written(setup, logs) as (session, product):
        await outcome(product)
        return await session.state(session.trio.y, 6.0)


@BUFFERS.row("a request was writing it that was already running at an earlier crash", crashes=ANY_CRASH)
async def its_writer_crashes_twice(setup: Setup, crash: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=FaultPlan().at(1, crash, of="ConvFwd", times=2)) as session:
        assert isinstance(await outcome(session.gpu.submit(session.trio.product())), CudnnActorError)
        return await session.state(session.trio.y, 6.0)


@BUFFERS.row("a view of it exists", columns=ON_THREAD)
async def a_view_exists(setup: Setup, _: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=FaultPlan().at(1, Fault.STICKY, of=Fill)) as session:
        view: Any = await session.gpu.view(session.spare)
        answer = await outcome(session.gpu.submit(Fill(dst=session.spare, value=8)))
        if isinstance(answer, Receipt):
            assert view.item() == 8.0, "the view does not show the buffer any more"
        return await session.state(session.spare, 8.0)


@BUFFERS.row("`verify` finds bytes in it that differ from the upload", columns=IN_PROCESS, crashes=ANY_CRASH)
async def its_bytes_differ(setup: Setup, crash: Fault, logs: Logs) -> str:
    if setup.device != "cpu":
        pytest.skip("a test cannot corrupt device memory")
    async with open_session(setup, logs, verify=True, faults=FaultPlan().at(1, crash, of=Fill)) as session:
        corrupt(service_behind(session.gpu).state.memory, session.spare)
        await session.gpu.fill(session.trio.y, 2)
        assert await session.state(session.trio.x, 3.0) == "kept", "it holds what was uploaded"
        assert (await session.line("buffer.corrupted"))["slot"] == session.spare.slot
        return await session.state(session.spare, 7.0)


def corrupt(memory: Any, ref: BufferRef) -> None:
    """Change a buffer's bytes without a request."""
    slot = memory.resolve(ref)
    os.pwrite(slot.arena.fd, b"\x55", slot.offset)


@pytest.mark.parametrize("case", BUFFERS.cases())
async def test_a_buffer_after_a_crash(case: Case, logs: Logs) -> None:
    await case.check(logs)


def test_every_cell_of_the_table_has_a_scenario_and_every_scenario_a_cell() -> None:
    BUFFERS.check()
