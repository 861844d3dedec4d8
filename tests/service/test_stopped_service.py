"""What a service that is gone says, and what becomes of replies whose event loop is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pykka
import pytest

from cudnn_actor import Allocate, CudnnRef, GetStatistics, Ping, ServiceStopped, TensorSpec, spawn, start

from .rigs import PATIENCE_S, Gate, GatedEngine, Trio, in_thread, service_on

SPEC = TensorSpec.packed((1, 1, 1, 1))


async def test_every_way_of_asking_a_stopped_service_says_so() -> None:
    gpu = await spawn(device="cpu")
    trio = await Trio.on(gpu)
    await gpu.aclose()
    for message in (trio.product(), Ping(), Allocate(spec=SPEC)):
        with pytest.raises(ServiceStopped, match="spawn a new one") as caught:
            await gpu.ask(message)
        assert "closed" in caught.value.reason
        assert isinstance(caught.value, pykka.ActorDeadError)
        with pytest.raises(ServiceStopped):
            gpu.submit(message)
        with pytest.raises(ServiceStopped):
            gpu.tell(message)
        with pytest.raises(pykka.ActorDeadError):
            gpu.actor_ref.tell(message)
        with pytest.raises(pykka.ActorDeadError):
            await in_thread(lambda message=message: gpu.actor_ref.ask(message))
    with pytest.raises(ServiceStopped):
        await gpu.download(trio.y)
    with pytest.raises(ServiceStopped):
        await gpu.drain()


async def test_events_of_a_stopped_service_can_still_be_read() -> None:
    gpu = await spawn(device="cpu")
    await gpu.aclose()
    names = [type(event).__name__ async for event in gpu.events()]
    assert names == ["Started", "Stopped", "Stopped"]


def run(main: Coroutine[Any, Any, Any]) -> None:
    """`asyncio.run` without its care for what is left over: the loop closes with replies still to come."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


def test_a_loop_that_closes_before_its_replies_loses_only_them() -> None:
    gate = Gate()
    service = service_on(lambda: GatedEngine(gate))
    service.launch()
    gpu = CudnnRef(service)

    async def ask_and_leave() -> None:
        trio = await Trio.on(gpu)
        gate.shut()
        gpu.submit(trio.product())
        gpu.submit(Allocate(spec=SPEC))
        gpu.submit(trio.product())
        gate.wait_for_arrival()

    try:
        run(ask_and_leave())
    finally:
        gate.open()
    statistics = service.actor_ref.ask(GetStatistics())
    while statistics.finished + statistics.failed < 3 + 3 + 1:  # the last is the Free of what was allocated
        statistics = service.actor_ref.ask(GetStatistics())
    assert statistics.dropped_replies == 3
    assert statistics.live_buffers == 3, "an allocation for a loop that had closed was kept"
    assert service.actor_ref.ask(Ping()) == 1
    service.stop(PATIENCE_S)


def test_a_loop_that_closes_with_its_replies_undelivered_loses_only_them() -> None:
    service = start(device="cpu")
    gpu = CudnnRef(service)

    async def ask_and_stay_busy_until_the_replies_are_on_their_way() -> None:
        gpu.submit(Allocate(spec=SPEC))
        service.actor_ref.ask(Ping())
        while service.actor_ref.ask(GetStatistics()).live_buffers == 0:
            pass

    run(ask_and_stay_busy_until_the_replies_are_on_their_way())
    run(gpu.ping())  # the next loop sweeps up after the last
    statistics = service.actor_ref.ask(GetStatistics())
    while statistics.live_buffers:
        statistics = service.actor_ref.ask(GetStatistics())
    assert statistics.dropped_replies >= 1
    service.stop(PATIENCE_S)


def test_waiting_for_a_start_or_an_end_cannot_cancel_it_for_the_others() -> None:
    opening = threading.Event()

    class SlowEngine(GatedEngine):
        def open(self) -> None:
            opening.wait(PATIENCE_S)

    service = service_on(lambda: SlowEngine(Gate()))
    service.launch()
    assert not service.started.cancel()
    assert not service.stopped.cancel()
    opening.set()
    service.started.result(PATIENCE_S)
    service.stop(PATIENCE_S)
    assert service.stopped.result() is None


async def test_a_waiter_that_is_cancelled_in_the_start_leaves_the_service_sound() -> None:
    opening = threading.Event()

    class SlowEngine(GatedEngine):
        def open(self) -> None:
            opening.wait(PATIENCE_S)

    service = service_on(lambda: SlowEngine(Gate()))
    service.launch()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.wrap_future(service.started), 0)
    opening.set()
    await asyncio.wrap_future(service.started)
    gpu = CudnnRef(service)
    assert await gpu.ping() == 1
    await gpu.aclose()
