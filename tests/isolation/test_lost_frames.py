"""Frames that get lost, whole or in half: the worker believes itself idle, and is replaced all the same."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest
from structlog.typing import EventDict

from cudnn_actor import BufferRef, CudnnRef, Receipt, TensorSpec
from cudnn_actor.messages import Allocate, Fill, Ping
from cudnn_actor.protocol.messages.messages import Message
from cudnn_actor.service import Spawning
from cudnn_actor.supervision import ExitKind, Restarting
from tests.service.noticed_hangs import NOTICED_S, hanging_standby, notice_hang, short_limit
from tests.service.rigs import BEYOND_S, LIMIT_S, Trio, in_thread, outcome, seen, single

from ..log_lines import line
from ..patience import PATIENCE_S
from .crash_rigs import Points, after, gone, kill, pid_of, sent, service_of, workers

pytestmark = pytest.mark.usefixtures("a_forkserver")
LARGE = TensorSpec.packed((1, 1, 4096, 5120))


async def hung(gpu: CudnnRef) -> None:
    event = await seen(gpu, Restarting)
    assert isinstance(event, Restarting)
    assert (event.generation, event.cause.kind) == (1, ExitKind.HUNG)


async def test_a_stray_byte_before_an_answer_ends_within_the_limit() -> None:
    async with workers() as (gpu, points):
        trio = await Trio.on(gpu)
        points.order("execute", "say a stray byte")
        product = gpu.submit(trio.product())
        await in_thread(lambda: points.wait_for_visits("execute", 1))
        notice_hang(gpu)
        assert isinstance(await outcome(product), Receipt)
        await hung(gpu)
        assert await trio.result() == 6.0


async def test_a_stray_byte_of_an_idle_worker_ends_the_next_request_s_wait_within_the_limit() -> None:
    async with workers() as (gpu, points):
        await gpu.ping()
        points.order("fill", "say a stray byte behind an answer")
        await gpu.fill(await gpu.upload(single(1.0)), 2.0)
        notice_hang(gpu)
        assert await outcome(gpu.submit(Ping())) == 2
        await hung(gpu)


@pytest.mark.parametrize("lost", ["a request", "an allocation", "a question"])
async def test_a_lost_frame_is_found_although_the_worker_has_nothing_to_do(lost: str) -> None:
    async with workers() as (gpu, points):
        trio = await Trio.on(gpu)
        messages: dict[str, Message] = {
            "a request": trio.product(),
            "an allocation": Allocate(spec=LARGE),
            "a question": Ping(),
        }
        points.order("fill", "lose a frame")
        other = await gpu.upload(single(1.0))
        filled = gpu.submit(Fill(dst=other, value=2.0))
        await in_thread(lambda: points.wait_for_visits("fill", 1))
        waits = gpu.submit(messages[lost])
        assert isinstance(await outcome(filled), Receipt)
        assert gpu.health().working
        notice_hang(gpu)
        assert isinstance(await outcome(waits), Receipt | BufferRef | int)
        await hung(gpu)
        assert (await gpu.download(other)).item() == 2.0


@pytest.mark.parametrize("first", [True, False])
async def test_a_worker_whose_word_that_it_is_ready_is_lost_is_replaced(first: bool) -> None:
    points = Points()
    points.order("after open", *([] if first else ["go"]), "lose the ready")
    service = service_of(points)
    service.launch()
    gpu = CudnnRef(service)
    try:
        if not first:
            await asyncio.wrap_future(service.started)
            kill(gpu)
        await in_thread(lambda: points.wait_for_visits("after open", 1 if first else 2))
        notice_hang(gpu)
        await asyncio.wrap_future(service.started)
        assert await gpu.ping() == (2 if first else 3)
        event = await seen(gpu, Restarting)
        assert isinstance(event, Restarting)
        if first:
            assert event.cause.kind is ExitKind.START_FAILED
            assert f"made no progress for {NOTICED_S:g} s in its start" in event.cause.cause
    finally:
        await gpu.aclose()
        points.close()


async def test_a_standby_whose_word_that_it_is_ready_is_lost_is_replaced_before_it_is_needed(
    logs: list[EventDict],
) -> None:
    points = Points()
    points.order("after open", "go", "lose the ready")
    try:
        async with Spawning(service_of(points, standby=1)) as gpu:
            with hanging_standby(gpu):
                died = await line(logs, "standby.died")
            assert died["why"] == f"made no progress for {NOTICED_S:g} s in its start"
            await gone(died["pid"])
            other = (await line(logs, "standby.ready"))["pid"]
            assert (await gpu.ping(), (await gpu.statistics()).restarts) == (1, 0)
            kill(gpu)
            assert (await gpu.ping(), pid_of(gpu)) == (2, other)
    finally:
        points.close()


@pytest.mark.parametrize("lost", ["lose a frame", "lose an answer"])
async def test_other_requests_do_not_hide_a_lost_frame(lost: str) -> None:
    async with workers() as (gpu, points):
        trio = await Trio.on(gpu)
        other = await gpu.upload(single(1.0))
        if lost == "lose a frame":
            points.order("fill", lost)
            filled = gpu.submit(Fill(dst=other, value=2.0))
            await in_thread(lambda: points.wait_for_visits("fill", 1))
            waits = gpu.submit(trio.product())
            assert isinstance(await outcome(filled), Receipt)
        else:
            points.order("execute", lost)
            waits = gpu.submit(trio.product())
            await in_thread(lambda: points.wait_for_visits("execute", 1))
        notice_hang(gpu)
        async with asyncio.timeout(PATIENCE_S):
            while not waits.done():
                await gpu.fill(other, 3.0)
        assert isinstance(waits.result(), Receipt)
        await hung(gpu)
        assert await trio.result() == 6.0


async def test_answers_that_a_blocked_loop_does_not_read_are_not_held_against_the_worker() -> None:
    async with workers() as (gpu, points):
        trio = await Trio.on(gpu)
        points.hold("execute")
        waits = gpu.submit(trio.product())
        await sent(gpu)
        await in_thread(lambda: points.arrival("execute"))
        points.let_go()
        points.wait_for_visits(after("execute"), 1)  # on the loop's own thread, like what follows
        never = threading.Event()
        with short_limit(gpu, LIMIT_S):
            never.wait(BEYOND_S)
        assert isinstance(await outcome(waits), Receipt)
        assert await gpu.ping() == 1


async def test_answers_that_wait_for_a_log_handler_are_not_held_against_the_worker() -> None:
    blocked, services, began = threading.Event(), list[CudnnRef](), list[float]()

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("engine.smokes"):
                took_s = time.monotonic() - began[0]  # what the request has taken so far is no hang either
                with short_limit(services[0], took_s + NOTICED_S):
                    blocked.wait(took_s + 5 * NOTICED_S)

    logger, handler = logging.getLogger("cudnn_actor"), Slow()
    logger.addHandler(handler)
    try:
        async with workers() as (gpu, points):
            services.append(gpu)
            trio = await Trio.on(gpu)
            points.order("execute", "log critically")
            began.append(time.monotonic())
            assert isinstance(await outcome(gpu.submit(trio.product())), Receipt)
            assert await gpu.ping() == 1
    finally:
        logger.removeHandler(handler)


async def test_a_request_after_a_long_idle_time_has_all_the_time_that_it_may_have() -> None:
    async with workers() as (gpu, points):
        trio = await Trio.on(gpu)
        idle = threading.Event()
        points.hold("execute")
        with short_limit(gpu, LIMIT_S):
            await in_thread(lambda: idle.wait(BEYOND_S))
            waits = gpu.submit(trio.product())
            await in_thread(lambda: points.arrival("execute"))
            await in_thread(lambda: idle.wait(LIMIT_S / 4))  # the watchdog looks twice in that time
        points.let_go()
        assert isinstance(await outcome(waits), Receipt)
        assert await gpu.ping() == 1
