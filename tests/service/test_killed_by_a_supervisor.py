"""A supervisor of the user's that kills a whole service: also then everybody is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from cudnn_actor import CudnnRef, OutcomeUnknown, ServiceStopped, StaleBufferError
from cudnn_actor.supervision import ChildPolicy, Stopped, Supervisor

from ..patience import PATIENCE_S
from .rigs import Gate, Trio, gated_child, in_thread, outcome

pytestmark = pytest.mark.usefixtures("isolation")


@asynccontextmanager
async def under_a_killer(gate: Gate) -> AsyncIterator[tuple[CudnnRef, Supervisor]]:
    """A service whose supervisor does not ask it to stop: it kills, at once."""
    spec, service = gated_child(gate, "gpu")
    spec = replace(spec, policy=ChildPolicy(id="gpu", shutdown_s=0))
    supervisor = Supervisor([spec])
    supervisor.launch()
    await asyncio.wrap_future(service.started)
    try:
        yield CudnnRef(service), supervisor
    finally:
        gate.open()
        supervisor.end("the test is over")
        assert await in_thread(lambda: supervisor.join(PATIENCE_S))


async def test_a_killed_service_answers_everybody_though_its_thread_hangs(
    isolation: str, request: pytest.FixtureRequest
) -> None:
    if isolation == "thread":
        request.getfixturevalue("short_grace")
    gate = Gate()
    async with under_a_killer(gate) as (gpu, supervisor):
        trio = await Trio.on(gpu)
        gate.catch_one()
        running = gpu.submit(trio.product())
        await in_thread(gate.wait_for_arrival)
        waiting = [gpu.submit(trio.product()) for _ in range(100)]
        supervisor.end("enough")
        end = await outcome(running)
        # Of a thread nobody knows whether it writes still; a process has gone: the next would run it again.
        if isolation == "thread":
            assert isinstance(end, OutcomeUnknown)
        else:
            assert isinstance(end, ServiceStopped)
            assert end.interrupted
        assert all([isinstance(await outcome(future), ServiceStopped) for future in waiting])
        async with asyncio.timeout(PATIENCE_S):
            events = [event async for event in gpu.events()]
        assert isinstance(events[-1], Stopped)
        assert events[-1].child is None
        assert not gpu.actor_ref.is_alive()
        with pytest.raises(ServiceStopped):
            await gpu.ping()


async def test_a_killed_idle_service_ends_in_order() -> None:
    async with under_a_killer(Gate()) as (gpu, supervisor):
        trio = await Trio.on(gpu)
        supervisor.end("enough")
        async with asyncio.timeout(PATIENCE_S):
            names = [type(event).__name__ async for event in gpu.events()]
        assert names == ["Started", "Stopped", "Stopped"]
        with pytest.raises((ServiceStopped, StaleBufferError)):
            await gpu.ask(trio.product())
