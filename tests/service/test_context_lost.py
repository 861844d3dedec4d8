"""An engine whose memory dies with its context: nothing to recover, and everybody is told so."""

from __future__ import annotations

import asyncio

import pytest

from cudnn_actor import CudnnRef, Fault, FaultPlan, OutcomeUnknown, Receipt, ServiceStopped, StaleBufferError
from cudnn_actor.errors import ContextLost, StaleReason
from cudnn_actor.messages import Download, Fill
from cudnn_actor.supervision import Restarting

from .noticed_hangs import notice_hang
from .rigs import Gate, Trio, VolatileEngine, in_thread, outcome, service_on, spawn_on

FATAL = FaultPlan().at(1, Fault.STICKY, of=Fill)


async def test_all_that_is_pending_ends_in_context_lost_and_the_service_escalates() -> None:
    gate = Gate()
    service = service_on(lambda: VolatileEngine(gate), faults=FATAL)
    service.launch()
    gpu = CudnnRef(service)
    trio = await Trio.on(gpu)
    with gate.closed():
        before = gpu.submit(trio.product())
        gate.wait_for_arrival()
        running = gpu.submit(Fill(dst=trio.y, value=1))
        waiting = [gpu.submit(trio.product()) for _ in range(300)]  # in the batch and in the mailbox
    assert isinstance(await outcome(before), Receipt)
    for future in (running, *waiting):
        error = await outcome(future)
        assert isinstance(error, ContextLost)
        assert "INJECTED_STICKY_ERROR" in error.detail
        assert error.ran is None
    events = [event async for event in gpu.events()]
    assert not any(isinstance(event, Restarting) for event in events)
    assert [type(event).__name__ for event in events[-2:]] == ["Escalated", "Stopped"]
    assert service.failure() is not None
    for ref in (trio.x, trio.w, trio.y):
        with pytest.raises(StaleBufferError) as stale:
            service.state.memory.resolve(ref)
        assert stale.value.reason is StaleReason.CONTEXT_LOST
    with pytest.raises(ServiceStopped, match="gave up"):
        await gpu.ask(Download(src=trio.x))


async def test_the_body_of_such_a_service_fails() -> None:
    async def body() -> None:
        async with spawn_on(lambda: VolatileEngine(Gate()), faults=FATAL, max_restarts=9) as gpu:
            gpu.tell(Fill(dst=(await Trio.on(gpu)).y, value=1))
            await asyncio.Event().wait()

    with pytest.raises(ServiceStopped, match="INJECTED_STICKY_ERROR"):
        await body()


@pytest.mark.usefixtures("short_grace")
async def test_a_thread_that_hangs_there_ends_its_service_as_everywhere() -> None:
    gate = Gate()
    service = service_on(lambda: VolatileEngine(gate))
    service.launch()
    gpu = CudnnRef(service)
    trio = await Trio.on(gpu)
    try:
        gate.catch_one()
        lost = gpu.submit(trio.product())
        await in_thread(gate.wait_for_arrival)
        waiting = gpu.submit(trio.product())
        notice_hang(gpu)
        assert isinstance(await outcome(lost), OutcomeUnknown)
        assert isinstance(await outcome(waiting), ServiceStopped)
    finally:
        gate.open()
    await asyncio.wrap_future(service.stopped)
