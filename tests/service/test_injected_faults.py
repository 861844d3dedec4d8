"""A fault plan strikes every kind of message, at the place where a device would have."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from cudnn_actor import (
    ConvFwd,
    CudnnRef,
    ExecutionFailed,
    Fault,
    FaultPlan,
    OutOfMemory,
    Receipt,
    StartFailed,
    TensorSpec,
    UnsupportedGraph,
)
from cudnn_actor.messages import Allocate, Copy, Download, Drain, Fill, Free, Upload, Warm

from .rigs import Trio, single, spawn

pytestmark = pytest.mark.usefixtures("isolation")

SPEC = TensorSpec.packed((1, 1, 1, 1))
MESSAGES: dict[str, Any] = {
    "ConvFwd": lambda trio: trio.product(),
    "Allocate": lambda trio: Allocate(spec=SPEC),
    "Allocate with data": lambda trio: Allocate(spec=SPEC, data=single(6)),
    "Upload": lambda trio: Upload(dst=trio.y, data=single(6)),
    "Download": lambda trio: Download(src=trio.y),
    "Copy": lambda trio: Copy(src=trio.x, dst=trio.y),
    "Fill": lambda trio: Fill(dst=trio.y, value=6),
    "Free": lambda trio: Free(buffer=trio.y),
    "Warm": lambda trio: Warm(messages=(trio.product(),)),
    "Drain": lambda trio: Drain(),
}
STATED = [
    (Fault.FAIL_EXECUTION, ExecutionFailed, "scripted by the fault plan"),
    (Fault.OUT_OF_MEMORY, OutOfMemory, "injected by the fault plan; no memory is short"),
]


async def struck(gpu: CudnnRef, name: str) -> tuple[Trio, Any]:
    """The message that comes fourth, behind three allocations."""
    trio = await Trio.on(gpu)
    return trio, MESSAGES[name](trio)


@pytest.mark.pairwise
@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize(("fault", "error", "text"), STATED)
async def test_a_failure_is_the_answer_to_its_message_alone(
    name: str, fault: Fault, error: type[Exception], text: str
) -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(4, fault)) as gpu:
        trio, message = await struck(gpu, name)
        with pytest.raises(error, match=text):
            await gpu.ask(message)
        assert (await gpu.statistics()).live_buffers == 3
        assert isinstance(await gpu.ask(trio.product()), Receipt)
        assert gpu.generation == 1


@pytest.mark.parametrize("name", ["Warm", "Drain"])  # the others: test_crashes.py
async def test_a_sticky_error_restarts_the_actor_whatever_message_it_strikes(name: str) -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(4, Fault.STICKY)) as gpu:
        _, message = await struck(gpu, name)
        await gpu.ask(message)
        assert gpu.generation == 2
        assert (await gpu.statistics()).replayed == 1


@pytest.mark.parametrize("name", MESSAGES)
async def test_a_slow_message_takes_longer_and_is_answered(name: str) -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(4, Fault.SLOW, seconds=0.02)) as gpu:
        _, message = await struck(gpu, name)
        started = time.perf_counter()
        await gpu.ask(message)
        assert time.perf_counter() - started >= 0.02


async def test_a_rejected_build_is_an_unsupported_graph_once() -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(1, Fault.REJECT_BUILD, of=ConvFwd)) as gpu:
        trio = await Trio.on(gpu)
        with pytest.raises(UnsupportedGraph, match="injected"):
            await gpu.ask(trio.product())
        assert isinstance(await gpu.ask(trio.product()), Receipt)


async def test_a_rule_for_one_class_leaves_the_others_alone() -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(2, Fault.FAIL_EXECUTION, of=Fill)) as gpu:
        trio = await Trio.on(gpu)
        answers = await asyncio.gather(
            *(gpu.ask(message) for _ in range(3) for message in (trio.product(), Fill(dst=trio.x, value=1))),
            return_exceptions=True,
        )
        assert [type(answer).__name__ for answer in answers].index("ExecutionFailed") == 3
        assert sum(isinstance(answer, ExecutionFailed) for answer in answers) == 1


async def test_what_has_struck_is_told_in_order() -> None:
    faults = FaultPlan().at(5, Fault.OUT_OF_MEMORY).at(4, Fault.FAIL_EXECUTION)
    async with spawn(device="cpu", faults=faults) as gpu:
        trio = await Trio.on(gpu)
        assert not told(gpu)
        for error in (ExecutionFailed, OutOfMemory):
            with pytest.raises(error):
                await gpu.ask(trio.product())
        assert told(gpu) == [Fault.FAIL_EXECUTION, Fault.OUT_OF_MEMORY]


def told(gpu: CudnnRef) -> list[Fault]:
    return [fired.rule.fault for fired in gpu.faults_fired]


async def test_control_messages_are_neither_counted_nor_struck() -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(1, Fault.FAIL_EXECUTION)) as gpu:
        for _ in range(3):
            await gpu.ping()
            await gpu.statistics()
        with pytest.raises(ExecutionFailed):
            await gpu.drain()


async def test_a_restart_that_fails_counts_and_the_request_waits_it_out() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, of=ConvFwd).at_start(2, times=2)
    async with spawn(device="cpu", faults=faults) as gpu:
        trio = await Trio.on(gpu)
        receipt = await gpu.ask(trio.product())
        assert receipt.generation == 4
        statistics = await gpu.statistics()
        assert (statistics.restarts, statistics.replayed) == (3, 1)
        assert await trio.result() == 6


async def test_starts_that_fail_use_the_restarts_up() -> None:
    with pytest.raises(StartFailed, match="injected crash in start"):
        await spawn(device="cpu", faults=FaultPlan().at_start(1, times=3), max_restarts=2)
    async with spawn(device="cpu", faults=FaultPlan().at_start(1, times=2), max_restarts=2) as gpu:
        assert gpu.generation == 3
