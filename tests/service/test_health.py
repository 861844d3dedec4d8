"""`alive`, `ready` and `health()`: what a probe may ask of a service at any time, without a message."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import asdict

from cudnn_actor import CudnnRef, Fault, FaultPlan, ServiceStopped, child_spec
from cudnn_actor.messages import Fill
from cudnn_actor.service import HealthState
from cudnn_actor.service.service import CudnnService
from cudnn_actor.supervision import ExitKind, Restarted, Restarting, Started

from ..patience import PATIENCE_S
from .rigs import Gate, Trio, gated_service, in_thread, isolation_option, outcome, seen, spawn, spawn_gated

pytestmark = pytest.mark.usefixtures("isolation")

DIES = FaultPlan().at(1, Fault.STICKY, of=Fill)


def standing(gpu: CudnnRef | CudnnService) -> tuple[bool, bool, str]:
    """What the two properties and the record say, which must agree when nothing changes meanwhile."""
    return gpu.alive, gpu.ready, gpu.health().state


async def becomes(gpu: CudnnRef, state: HealthState) -> None:
    """Wait, without a message, until the service says that it is in a state."""

    def wait() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while gpu.health().state is not state:
            assert time.monotonic() < deadline, gpu.health()
            threading.Event().wait(0.001)

    await in_thread(wait)


async def done(gpu: CudnnRef) -> None:
    """Wait until the actor is done with what it has answered: it answers first."""
    async with asyncio.timeout(PATIENCE_S):
        while gpu.health().working:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_service_that_serves_says_so() -> None:
    async with spawn(device="cpu", max_restarts=2) as gpu:
        assert standing(gpu) == (True, True, "ready")
        await Trio.on(gpu)
        await done(gpu)
        health = gpu.health()
        assert (health.generation, health.restarts, health.restarts_left) == (1, 0, 2)
        assert (health.cause, health.working, health.queued) == (None, False, 0)
        assert health.last_progress_s is not None
        assert 0 <= health.last_progress_s < PATIENCE_S


async def test_a_service_that_has_been_stopped_says_so_and_why() -> None:
    gpu = await spawn(device="cpu")
    await gpu.aclose()
    assert standing(gpu) == (False, False, "stopped")
    health = gpu.health()
    assert health.cause is not None
    assert health.cause.kind is ExitKind.SHUTDOWN
    assert (health.restarts_left, health.working, health.queued) == (0, False, 0)


async def test_one_that_has_not_opened_its_engine_yet_is_alive_and_not_ready() -> None:
    gate = Gate()
    service = gated_service(gate, "open")
    assert standing(service) == (True, False, "starting")
    with gate.closed():
        service.launch()
        await in_thread(gate.wait_for_arrival)
        assert standing(service) == (True, False, "starting")
        assert service.health().generation == 0
        assert service.health().last_progress_s is None
    await asyncio.wrap_future(service.started)
    assert standing(service) == (True, True, "ready")
    await CudnnRef(service).aclose()


async def test_between_a_crash_and_its_successor_it_is_not_ready_and_says_why() -> None:
    gate = Gate()
    async with spawn_gated(gate, "open", faults=DIES, max_restarts=3) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            dying = gpu.submit(Fill(dst=trio.x, value=1))
            await in_thread(gate.wait_for_arrival)
            assert standing(gpu) == (True, False, "restarting")
            health = gpu.health()
            assert (health.restarts, health.restarts_left) == (1, 2)
            assert health.cause is not None
            assert "INJECTED_STICKY_ERROR" in health.cause.cause
        await outcome(dying)
        await seen(gpu, Restarted)  # an answer may come a moment before the supervisor has noted who gave it
        assert standing(gpu) == (True, True, "ready")
        assert gpu.health().generation == 2
        assert gpu.health().cause == health.cause


async def test_restarts_that_leave_the_window_are_left_again() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill)
    async with spawn(device="cpu", faults=faults, max_restarts=1, period_s=0.2) as gpu:
        assert gpu.health().restarts_left == 1
        await gpu.fill((await Trio.on(gpu)).x, 1)

        def wait() -> None:
            deadline = time.monotonic() + PATIENCE_S
            while gpu.health().restarts_left != 1:
                assert time.monotonic() < deadline

        await in_thread(wait)
        assert gpu.health().restarts == 1


async def test_one_that_is_asked_to_stop_is_not_ready_while_it_finishes_what_has_begun() -> None:
    gate = Gate()
    gpu = await spawn_gated(gate)
    trio = await Trio.on(gpu)
    with gate.closed():
        running = gpu.submit(trio.product())
        await in_thread(gate.wait_for_arrival)
        closing = asyncio.create_task(gpu.aclose(drain_s=0))
        await becomes(gpu, HealthState.STOPPING)
        assert standing(gpu) == (True, False, "stopping")
        assert gpu.health().restarts_left == 0
    await outcome(running)
    await closing
    assert standing(gpu) == (False, False, "stopped")


async def test_one_that_gave_up_says_why() -> None:
    with pytest.raises(ServiceStopped):
        async with spawn(device="cpu", faults=DIES, max_restarts=0) as gpu:
            await gpu.fill((await Trio.on(gpu)).x, 1)
    assert standing(gpu) == (False, False, "stopped")
    assert gpu.health().cause is not None
    assert "INJECTED_STICKY_ERROR" in gpu.health().cause.cause  # type: ignore[union-attr]


async def test_while_the_actor_gets_on_no_more_it_answers_at_once_and_tells_of_it() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            sent = [gpu.submit(trio.product()) for _ in range(5)]
            await in_thread(gate.wait_for_arrival)
            before, after = gpu.health(), gpu.health()
            assert before.working
            assert before.last_progress_s is not None
            assert after.last_progress_s is not None
            assert after.last_progress_s > before.last_progress_s
        for future in sent:
            await outcome(future)
        await gpu.drain()
        await done(gpu)


async def test_what_waits_is_counted() -> None:
    gate = Gate()
    async with spawn_gated(gate, "open", faults=DIES) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            gpu.tell(Fill(dst=trio.x, value=1))
            await in_thread(gate.wait_for_arrival)  # the successor, which takes nothing up yet
            before = gpu.health().queued
            sent = [gpu.submit(trio.product()) for _ in range(7)]
            assert gpu.health().queued == before + 7
        for future in sent:
            await outcome(future)


@pytest.mark.parametrize("with_loop", [False, True])
def test_it_can_be_asked_on_any_thread_and_in_any_loop(with_loop: bool) -> None:
    _, service = child_spec(device="cpu", **isolation_option())
    service.launch()
    service.started.result(PATIENCE_S)
    gpu = CudnnRef(service)

    async def ask() -> tuple[bool, bool, str]:
        return standing(gpu)

    def look() -> None:
        found.append(asyncio.run(ask()) if with_loop else standing(gpu))

    found: list[tuple[bool, bool, str]] = []
    thread = threading.Thread(target=look)
    thread.start()
    thread.join(PATIENCE_S)
    service.stop(PATIENCE_S)
    look()
    assert found == [(True, True, "ready"), (False, False, "stopped")]


def test_a_service_that_begins_another_life_is_as_good_as_new() -> None:
    _, service = child_spec(device="cpu", **isolation_option())
    for _ in range(2):
        service.launch()
        service.started.result(PATIENCE_S)
        assert standing(service) == (True, True, "ready")
        assert service.health().cause is None
        service.stop(PATIENCE_S)
        assert standing(service) == (False, False, "stopped")


def test_it_never_looks_like_a_start_when_a_life_ends() -> None:
    """A reader on another thread, all through the end: each state comes from an earlier one."""
    _, service = child_spec(device="cpu", **isolation_option())
    order = ["ready", "stopping", "stopped"]
    for _ in range(20):
        service.launch()
        service.started.result(PATIENCE_S)
        states: list[int] = []

        def look(states: list[int] = states) -> None:
            while not states or states[-1] != order.index("stopped"):
                states.append(order.index(service.health().state))

        reader = threading.Thread(target=look)
        with switching_often():
            reader.start()
            service.stop(PATIENCE_S)
            reader.join(PATIENCE_S)
        assert states == sorted(states)


@contextmanager
def switching_often() -> Iterator[None]:
    """Have threads take turns in the middle of whatever they do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def test_a_health_record_is_frozen_and_plain() -> None:
    async with spawn(device="cpu") as gpu:
        health = gpu.health()
        assert asdict(health)["state"] == "ready"
        with pytest.raises(AttributeError):
            health.state = HealthState.STOPPED  # type: ignore[misc]


async def test_an_event_is_never_ahead_of_what_the_record_says() -> None:
    gate = Gate()
    async with spawn_gated(gate, "open", faults=DIES) as gpu:
        await seen(gpu, Started)
        assert gpu.ready
        trio = await Trio.on(gpu)
        with gate.closed():
            gpu.tell(Fill(dst=trio.x, value=1))
            await seen(gpu, Restarting)
            assert gpu.health().state == "restarting"
