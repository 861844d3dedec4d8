"""`on_give_up`: what happens when the restarts are used up, beside every request's `ServiceStopped`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pykka
import pytest
from structlog.typing import EventDict

from cudnn_actor import CudnnRef, CudnnService, Fault, FaultPlan, ServiceStopped, StartFailed
from cudnn_actor.messages import Fill, Ping
from cudnn_actor.supervision import Escalated, Supervisor

from ..inside import service_behind
from ..patience import PATIENCE_S
from .rigs import Gate, Trio, child_spec, in_thread, outcome, spawn, spawn_gated, start

pytestmark = pytest.mark.usefixtures("isolation")

FATAL: dict[str, Any] = {
    "device": "cpu",
    "max_restarts": 0,
    "faults": FaultPlan().at(1, Fault.STICKY, of=Fill),
}


class Told:
    """A callable that keeps what it gets, and on which thread."""

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self.events: list[Escalated] = []
        self.threads: list[threading.Thread] = []
        self._then = then

    def __call__(self, event: Escalated) -> None:
        self.events.append(event)
        self.threads.append(threading.current_thread())
        if self._then is not None:
            self._then()


async def give_up(gpu: CudnnRef) -> None:
    """Send the one request that the service does not survive."""
    with pytest.raises(ServiceStopped):
        await gpu.fill((await Trio.on(gpu)).x, 1)


async def ended(gpu: CudnnRef) -> None:
    """Wait until the service has stopped, as the events tell."""
    async with asyncio.timeout(PATIENCE_S):
        async for _ in gpu.events():
            pass


async def test_a_callable_gets_the_event_once_on_a_thread_of_the_service() -> None:
    told = Told()
    gpu = await spawn(**FATAL, on_give_up=told)
    await give_up(gpu)
    await gpu.aclose()
    assert [type(event) for event in told.events] == [Escalated]
    assert "INJECTED_STICKY_ERROR" in told.events[0].cause.cause
    assert told.threads[0] is not threading.main_thread()


async def test_the_body_is_left_alone_and_leaving_it_raises_nothing() -> None:
    told = Told()
    async with spawn(**FATAL, on_give_up=told) as gpu:
        await give_up(gpu)
        await ended(gpu)
        await asyncio.sleep(0)  # a cancellation would be due here
        assert not gpu.alive
    assert len(told.events) == 1


async def test_everybody_has_been_answered_when_it_is_called() -> None:
    gate = Gate()
    sent: list[asyncio.Future[Any]] = []
    found: list[tuple[bool, str]] = []

    def look() -> None:
        found.append((gpu.alive, gpu.health().state))

    gpu = await spawn_gated(gate, **{**FATAL, "on_give_up": Told(look)})
    trio = await Trio.on(gpu)
    with gate.closed():
        sent.append(gpu.submit(trio.product()))
        await in_thread(gate.wait_for_arrival)
        sent.append(gpu.submit(Fill(dst=trio.x, value=1)))
        sent.extend(gpu.submit(trio.product()) for _ in range(50))
    for future in sent[1:]:
        assert isinstance(await outcome(future), ServiceStopped)
    await gpu.aclose()
    assert found == [(False, "stopped")]


async def test_the_end_is_told_when_it_has_returned() -> None:
    gate = Gate()
    gate.shut()
    gpu = await spawn(**FATAL, on_give_up=Told(gate.go_through))
    await give_up(gpu)
    await in_thread(gate.wait_for_arrival)
    closing = asyncio.create_task(gpu.aclose())
    assert not gpu.alive
    assert gpu.health().state == "stopped"
    gate.open()
    await asyncio.wait_for(closing, PATIENCE_S)
    assert gate.passed == 1


@pytest.mark.parametrize("way", ["stop", "aclose"])
async def test_it_may_end_the_service_which_has_ended_already(way: str) -> None:
    def end() -> None:
        if way == "stop":
            service_behind(gpu).stop()
        else:
            asyncio.run(gpu.aclose())

    told = Told(end)
    gpu = await spawn(**FATAL, on_give_up=told)
    await give_up(gpu)
    await asyncio.wait_for(gpu.aclose(), PATIENCE_S)
    assert len(told.events) == 1


@pytest.mark.parametrize("error", [RuntimeError("no pager"), SystemExit(3), KeyboardInterrupt()], ids=repr)
async def test_one_that_raises_is_logged_and_breaks_nothing(
    error: BaseException, logs: list[EventDict]
) -> None:
    def fail() -> None:
        raise error

    gpu = await spawn(**FATAL, on_give_up=Told(fail))
    await give_up(gpu)
    await asyncio.wait_for(gpu.aclose(), PATIENCE_S)
    assert [entry["event"] for entry in logs].count("service.give_up_callback_failed") == 1
    with pytest.raises(ServiceStopped):
        await gpu.ping()
    assert "supervisor.thread_lost" not in [entry["event"] for entry in logs]


async def test_an_orderly_end_is_none_of_its_business() -> None:
    told = Told()
    for _ in range(2):
        async with spawn(device="cpu", on_give_up=told) as gpu:
            await gpu.ping()
    gpu = await spawn(device="cpu", on_give_up=told)
    await in_thread(gpu.actor_ref.stop)
    await ended(gpu)
    assert told.events == []


async def test_nor_is_a_restart() -> None:
    told = Told()
    async with spawn(**{**FATAL, "max_restarts": 1}, on_give_up=told) as gpu:
        await gpu.fill((await Trio.on(gpu)).x, 1)
        assert gpu.generation == 2
    assert told.events == []


async def test_a_start_that_fails_is_told_to_who_started_it_alone() -> None:
    told = Told()
    with pytest.raises(StartFailed):
        await spawn(device="cpu", max_restarts=0, faults=FaultPlan().at_start(1), on_give_up=told)
    assert told.events == []


def fill(service: CudnnService) -> None:
    """Send the fatal request from a thread without a loop."""

    async def send() -> None:
        await give_up(CudnnRef(service))

    asyncio.run(send())


class Parent(pykka.ThreadingActor):
    """Keeps what it is told."""

    heard: list[Any]

    def on_start(self) -> None:
        self.heard = []

    def on_receive(self, message: Any) -> Any:
        if message == "heard":
            return self.heard
        self.heard.append(message)
        return None


def test_a_service_for_threads_tells_its_parent_too() -> None:
    told = Told()
    parent = Parent.start()
    service = start(**FATAL, on_give_up=told, parent=parent)
    fill(service)
    assert isinstance(service.stopped.result(PATIENCE_S), Escalated)
    assert len(told.events) == 1  # by the time that the end is told, without waiting for it
    assert parent.ask("heard") == told.events
    parent.stop()


def test_under_a_supervisor_it_is_called_at_the_end_of_each_life() -> None:
    told = Told()
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill).at(2, Fault.STICKY, of=Fill)
    spec, service = child_spec(**{**FATAL, "faults": faults}, on_give_up=told)
    restarted: list[Any] = []
    supervisor = Supervisor.start([spec], listener=restarted.append)
    for life in (1, 2):
        service.started.result(PATIENCE_S)
        fill(service)
        wait_until(lambda life=life: len(told.events) == life and service.ready)  # type: ignore[misc]
    assert service.actor_ref.ask(Ping(), block=True) > 0
    supervisor.stop()
    assert len(told.events) == 2


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)
