"""The restarts used up: every reply fails, the body fails, the parent is told."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager

import pytest

from cudnn_actor import CudnnRef, Fault, FaultPlan, Receipt, ServiceStopped
from cudnn_actor.messages import Fill

from .rigs import Gate, Trio, gated_service, in_thread, outcome, spawn, spawn_gated

pytestmark = pytest.mark.usefixtures("isolation")

FATAL = FaultPlan().at(1, Fault.STICKY, of=Fill)


async def test_every_pending_reply_gets_service_stopped() -> None:
    gate = Gate()
    service = gated_service(gate, faults=FATAL, max_restarts=0)
    service.launch()
    gpu = CudnnRef(service)
    trio = await Trio.on(gpu)
    with gate.closed():
        before = gpu.submit(trio.product())
        await in_thread(gate.wait_for_arrival)
        fatal = gpu.submit(Fill(dst=trio.x, value=1))
        waiting = [gpu.submit(trio.product()) for _ in range(200)]
        asked = [service.actor_ref.ask(trio.product(), block=False) for _ in range(3)]
    assert isinstance(await outcome(before), Receipt)
    for future in (fatal, *waiting):
        error = await outcome(future)
        assert isinstance(error, ServiceStopped)
        assert "INJECTED_STICKY_ERROR" in error.reason
    for answer in asked:
        with pytest.raises(ServiceStopped):
            await in_thread(answer.get)
    failure = service.failure()
    assert failure is not None
    assert failure.reason.startswith("gave up at the 1st failure within 60 s (max_restarts=0): crash: ")


def fatal() -> AbstractAsyncContextManager[CudnnRef]:
    """A service that gives up at its first Fill."""
    return spawn(device="cpu", faults=FATAL, max_restarts=0)


async def test_the_body_is_cancelled_and_service_stopped_stands_in_its_place() -> None:
    async def body() -> None:
        async with fatal() as gpu:
            gpu.tell(Fill(dst=(await Trio.on(gpu)).x, value=1))
            await asyncio.Event().wait()

    with pytest.raises(ServiceStopped, match="INJECTED_STICKY_ERROR") as caught:
        await body()
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_body_that_awaits_a_request_gets_service_stopped_too() -> None:
    with pytest.raises(ServiceStopped, match="gave up"):
        async with fatal() as gpu:
            await gpu.fill((await Trio.on(gpu)).x, 1)


async def test_a_body_that_swallows_the_cancellation_fails_all_the_same() -> None:
    async def body() -> None:
        async with fatal() as gpu:
            gpu.tell(Fill(dst=(await Trio.on(gpu)).x, value=1))
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    with pytest.raises(ServiceStopped):
        await body()


async def test_a_body_that_goes_on_after_the_failure_fails_at_its_end() -> None:
    async def body() -> None:
        async with fatal() as gpu:
            with contextlib.suppress(ServiceStopped, asyncio.CancelledError):
                await gpu.fill((await Trio.on(gpu)).x, 1)

    with pytest.raises(ServiceStopped):
        await body()


async def test_an_error_of_the_body_s_own_is_not_replaced() -> None:
    async def body() -> None:
        async with fatal() as gpu:
            with contextlib.suppress(ServiceStopped, asyncio.CancelledError):
                await gpu.fill((await Trio.on(gpu)).x, 1)
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        await body()


async def test_a_cancellation_from_outside_stays_one() -> None:
    entered = asyncio.Event()

    async def body() -> None:
        async with fatal() as gpu:
            trio = await Trio.on(gpu)
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                gpu.tell(Fill(dst=trio.x, value=1))
                async for _ in gpu.events():
                    pass

    task = asyncio.create_task(body())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_task_group_around_the_body_sees_the_failure_and_no_cancellation() -> None:
    async def body() -> None:
        async with fatal() as gpu:
            gpu.tell(Fill(dst=(await Trio.on(gpu)).x, value=1))
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(body())
    assert caught.group_contains(ServiceStopped)


async def test_leaving_a_body_whose_service_was_stopped_from_outside_is_no_failure() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        await in_thread(gpu.actor_ref.stop)
        with pytest.raises(ServiceStopped):
            await gpu.drain()
