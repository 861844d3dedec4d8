"""Giving up on a request: what has not started never runs, what has runs to its end, no buffer stays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cudnn_actor import CudnnRef, DeadlineExceeded, Receipt, TensorSpec
from cudnn_actor.messages import Allocate, Drain

from ..loop_clock import LONG_S, pass_time
from ..patience import PATIENCE_S
from .rigs import Gate, Trio, in_thread, outcome, single, spawn, spawn_gated

pytestmark = pytest.mark.usefixtures("isolation")

SPEC = TensorSpec.packed((1, 1, 1, 1))
WAYS = ["ask", "submit"]


def sent(gpu: CudnnRef, way: str, message: Any, timeout: float | None = None) -> asyncio.Future[Any]:
    """The message on its way, whichever way, before anything else can happen."""
    if way == "submit":
        return gpu.submit(message, timeout=timeout)
    return asyncio.ensure_future(gpu.ask(message, timeout=timeout))


async def ended(future: asyncio.Future[Any]) -> None:
    await asyncio.wait([future], timeout=PATIENCE_S)
    assert future.cancelled()


@pytest.mark.parametrize("way", WAYS)
async def test_a_request_that_expires_before_its_start_never_runs(way: str) -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            first = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            error = await outcome(sent(gpu, way, trio.sum(), timeout=0.01))
        assert isinstance(error, DeadlineExceeded)
        assert (error.started, error.timeout_s) == (False, 0.01)
        assert "the request had not started, and was dropped" in str(error)
        assert isinstance(error, TimeoutError)
        await first
        await gpu.drain()
        assert gate.passed == 1
        assert await trio.result() == 6


@pytest.mark.parametrize("way", WAYS)
async def test_a_request_that_expires_after_its_start_runs_to_its_end(way: str) -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            asked = sent(gpu, way, trio.product(), timeout=LONG_S)
            await in_thread(gate.wait_for_arrival)
            pass_time()
            error = await outcome(asked)
        assert isinstance(error, DeadlineExceeded)
        assert error.started
        assert "may still take effect" in str(error)
        assert await trio.result() == 6


async def test_a_timeout_of_nothing_is_dropped_unless_it_is_answered_at_once() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            first = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            errors = [await outcome(sent(gpu, way, trio.sum(), timeout=0.0)) for way in WAYS]
        assert all(isinstance(error, DeadlineExceeded) and not error.started for error in errors)
        await first
        await gpu.drain()
        assert gate.passed == 1


async def test_a_request_that_expires_while_its_event_loop_is_busy_never_runs_either() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            first = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            late = gpu.submit(trio.sum(), timeout=0.0)
        gpu.actor_ref.ask(Drain())  # keeps this loop from its timer until the actor has decided
        error = await outcome(late)
        assert isinstance(error, DeadlineExceeded)
        assert not error.started
        await first
        assert gate.passed == 1
        assert (await gpu.statistics()).expired == 1


@pytest.mark.parametrize("way", WAYS)
async def test_cancelling_withdraws_a_request_that_has_not_started(way: str) -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            first = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            futures = [sent(gpu, way, trio.sum()) for _ in range(100)]
            await asyncio.sleep(0)
            for future in futures[::2]:
                future.cancel()
            await asyncio.gather(*(ended(future) for future in futures[::2]))
        await first
        assert len(await asyncio.gather(*futures[1::2])) == 50
        assert await trio.result() == 6 * 51
        assert (await gpu.statistics()).withdrawn == 50


@pytest.mark.parametrize("way", WAYS)
async def test_cancelling_never_harms_a_request_that_has_started(way: str) -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            running = sent(gpu, way, trio.sum())
            await in_thread(gate.wait_for_arrival)
            behind = sent(gpu, way, trio.sum())
            running.cancel()
            await ended(running)
        await behind
        assert await trio.result() == 13
        statistics = await gpu.statistics()
        assert (statistics.withdrawn, statistics.generation) == (0, 1)


async def test_a_timeout_around_an_ask_is_a_cancellation() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            first = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(gpu.ask(trio.sum()), 0.01)
        await first
        await gpu.drain()
        assert (await gpu.statistics()).withdrawn == 1
        assert await trio.result() == 6


@pytest.mark.pairwise
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("giving_up", ["cancelled", "expired"])
@pytest.mark.parametrize("when", ["waiting", "running"])
async def test_an_allocation_that_nobody_waits_for_leaves_none(way: str, giving_up: str, when: str) -> None:
    gate, timeout = Gate(), 0.05 if giving_up == "expired" else None
    async with spawn_gated(gate, "write") as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            if when == "waiting":
                first = gpu.submit(Allocate(spec=SPEC, data=single(1)))
                await in_thread(gate.wait_for_arrival)
            asked = sent(gpu, way, Allocate(spec=SPEC, data=single(2)), timeout)
            if when == "running":
                await in_thread(gate.wait_for_arrival)
            await asyncio.sleep(0)
            if giving_up == "cancelled":
                asked.cancel()
                await ended(asked)
            else:
                error = await outcome(asked)
                assert isinstance(error, DeadlineExceeded)
                assert error.started is (when == "running")
        if when == "waiting":
            await gpu.free(await first)
        await gpu.drain()  # is answered behind the allocation, whose reply has been discarded by then
        await gpu.drain()  # behind the Free that discarding it sent
        assert (await gpu.statistics()).live_buffers == 3
        assert (await gpu.download(trio.x)).item() == 3


async def test_a_request_that_is_cancelled_as_its_answer_arrives_is_settled_once() -> None:
    async with spawn(device="cpu") as gpu:
        trio = await Trio.on(gpu)
        for steps in range(60):
            task = asyncio.ensure_future(gpu.ask(Allocate(spec=SPEC, data=single(1))))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            result = await outcome(task)
            if not isinstance(result, asyncio.CancelledError):
                await gpu.free(result)
        await gpu.drain()
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 3
        assert isinstance(await gpu.ask(trio.product()), Receipt)
