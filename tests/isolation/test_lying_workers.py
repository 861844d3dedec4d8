"""Workers that break the protocol: each is found out, named and replaced; callers see latency only."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.typing import EventDict

from cudnn_actor import BufferRef, CudnnRef, Receipt, TensorSpec
from cudnn_actor.messages import Allocate, Download, Drain, Fill, Warm
from cudnn_actor.protocol.messages.messages import Message
from cudnn_actor.service import Spawning
from cudnn_actor.supervision import Restarting
from tests.service.rigs import Trio, in_thread, outcome, seen, single

from ..inside import service_behind
from ..log_lines import line
from ..patience import PATIENCE_S
from .crash_rigs import Points, service_of, workers

pytestmark = pytest.mark.usefixtures("a_forkserver")
LARGE = TensorSpec.packed((1, 1, 4096, 5120))


async def named(gpu: CudnnRef, why: str) -> None:
    """The service has said what its worker did, as the cause of a restart."""
    event = await seen(gpu, Restarting)
    assert isinstance(event, Restarting)
    assert "broke the protocol" in event.cause.cause
    assert why in event.cause.cause


LIES = [
    ("say noise", "MessagePack data is malformed"),
    ("say too much", "a frame of 4,294,967,295 bytes"),
    ("say what the parent says", "Invalid value 'Promote'"),
    ("answer a stranger", "it answered request 1000000 in place 0, which it does not have"),
    ("answer a number below none", "it answered request -1"),
    ("answer in a wrong place", "which it does not have"),
    ("give a number", "it answered ConvFwd with int"),
    ("give noise", "does not decode"),
    ("refuse oddly", "unknown error class 'NoSuchError'"),
    ("refuse with wrong facts", "wrong facts for ExecutionFailed"),
    ("drop", "it dropped request"),
    ("be ready again", "it sent Ready, which was not asked for"),
    ("make an arena unasked", "it named arena 9, which it was not asked to make"),
    ("refuse an arena unasked", "it named arena 9, which it was not asked to make"),
    ("log badly", "it sent a log line with a reserved field name"),
    ("drown in descriptors", "descriptors came that belong to no frame"),
]


@pytest.mark.parametrize(("lie", "why"), LIES, ids=[lie for lie, _ in LIES])
async def test_a_lie_in_the_middle_of_work_costs_its_callers_only_time(lie: str, why: str) -> None:
    async with workers() as (gpu, points):
        trio = await Trio.on(gpu)
        other = await gpu.upload(single(1.0))
        points.order("execute", lie)
        product = gpu.submit(trio.product())
        behind = [gpu.submit(trio.product(y=other)), gpu.submit(Fill(dst=trio.x, value=5.0))]
        drained = gpu.submit(Drain())
        assert isinstance(await outcome(product), Receipt)
        assert all([isinstance(await outcome(future), Receipt) for future in behind])
        assert await outcome(drained) is None
        await named(gpu, why)
        assert await trio.result() == 6.0
        assert (await gpu.download(other)).item() == 6.0
        assert (await gpu.statistics()).restarts == 1


async def test_a_second_answer_is_a_lie_and_the_first_one_counts() -> None:
    async with workers() as (gpu, points):
        trio = await Trio.on(gpu)
        points.order("execute", "answer twice")
        receipt = await outcome(gpu.submit(trio.product()))
        assert isinstance(receipt, Receipt)
        assert receipt.generation == 1
        await named(gpu, "which it does not have")
        assert await gpu.ping() == 2


MISFITS = [
    ("build", "give a receipt", "it answered Warm with a receipt"),
    ("read", "give a number", "it answered Download with int"),
    ("write", "give a number", "it answered Allocate with int"),
    ("fill", "give a number", "it answered Fill with int"),
]


@pytest.mark.parametrize(
    ("point", "lie", "why"), MISFITS, ids=[f"{lie} at {point}" for point, lie, _ in MISFITS]
)
async def test_an_answer_that_does_not_fit_its_question_is_a_lie(point: str, lie: str, why: str) -> None:
    async with workers(host_arenas=False) as (gpu, points):
        trio = await Trio.on(gpu)
        before = (await gpu.statistics()).live_buffers
        questions: dict[str, Message] = {
            "build": Warm(messages=(trio.product(),)),
            "read": Download(src=trio.x),
            "write": Allocate(spec=trio.x.spec, data=single(4.0)),
            "fill": Fill(dst=trio.y, value=1.0),
        }
        points.order(point, lie)
        answer = await outcome(gpu.submit(questions[point]))
        assert not isinstance(answer, Exception), answer
        await named(gpu, why)
        assert (await gpu.statistics()).live_buffers == before + isinstance(answer, BufferRef)


ARENAS = [
    ("make an arena of nothing", "without the descriptor that belongs to it"),
    ("make a short arena", "its arena 1 is not sealed memory"),
    ("refuse an arena oddly", "unknown error class 'NoSuchError'"),
]


@pytest.mark.parametrize(("lie", "why"), ARENAS, ids=[lie for lie, _ in ARENAS])
async def test_a_lie_about_an_arena_costs_those_who_wait_for_it_only_time(lie: str, why: str) -> None:
    async with workers() as (gpu, points):
        trio = await Trio.on(gpu)
        points.order("create_arena", lie)
        wanted = [gpu.submit(Allocate(spec=LARGE)) for _ in range(2)]
        refs = [await outcome(future) for future in wanted]
        assert all(isinstance(ref, BufferRef) for ref in refs), refs
        await named(gpu, why)
        await gpu.fill(refs[0], 1.0)
        await gpu.ask(trio.product())
        assert await trio.result() == 6.0


@asynccontextmanager
async def started_behind_a_lie(lie: str) -> AsyncIterator[CudnnRef]:
    """A service whose first worker lies before it says that it is ready."""
    points = Points()
    try:
        points.order("open", lie)
        gpu = await asyncio.wait_for(_started(points), PATIENCE_S)
        try:
            yield gpu
        finally:
            await gpu.aclose()
    finally:
        points.close()


async def _started(points: Points) -> CudnnRef:
    return await Spawning(service_of(points))


STARTS = [
    ("say noise", "MessagePack data is malformed"),
    ("be ready as another", "it said that it is ready as incarnation 7"),
    ("answer a stranger", "it answered request 1000000"),
    ("make an arena unasked", "it named arena 9"),
    ("log badly", "it sent a log line with a reserved field name"),
    ("drown in descriptors", "descriptors came that belong to no frame"),
]


@pytest.mark.parametrize(("lie", "why"), STARTS, ids=[lie for lie, _ in STARTS])
async def test_a_lie_in_the_start_is_a_failed_start(lie: str, why: str) -> None:
    async with started_behind_a_lie(lie) as gpu:
        await named(gpu, why)
        assert await gpu.ping() == gpu.generation == 2


STANDBYS = [
    ("say noise", "MessagePack data is malformed"),
    ("answer a stranger", "it sent Answers, which was not asked for"),
    ("make an arena unasked", "it sent ArenaMade, which was not asked for"),
    ("log badly", "it sent a log line with a reserved field name"),
    ("drown in descriptors", "descriptors came that belong to no frame"),
]


@pytest.mark.parametrize(("lie", "why"), STANDBYS, ids=[lie for lie, _ in STANDBYS])
async def test_a_lie_of_a_standby_is_a_line_in_the_log(lie: str, why: str, logs: list[EventDict]) -> None:
    async with workers(standby=1) as (gpu, points):
        await in_thread(lambda: points.wait_for_visits("after open", 2))
        trio = await Trio.on(gpu)
        points.order("build", "go", lie)  # the worker that serves builds first
        await gpu.ask(trio.product())
        assert why in (await line(logs, "standby.died"))["why"]
        assert await gpu.ping() == 1
        assert (await gpu.statistics()).restarts == 0
        assert not [event for event in service_behind(gpu).events.all if isinstance(event, Restarting)]


async def test_the_descriptors_that_a_liar_sent_are_closed() -> None:
    async with workers() as (gpu, points):
        trio = await Trio.on(gpu)
        before = len(os.listdir("/proc/self/fd"))
        points.order("execute", "drown in descriptors")
        await gpu.ask(trio.product())
        await gpu.ping()
        assert len(os.listdir("/proc/self/fd")) <= before + 4


async def test_a_worker_s_line_of_any_level_is_a_line_and_no_lie(logs: list[EventDict]) -> None:
    async with workers() as (gpu, points):
        buffer = await gpu.upload(single(1.0))
        points.order("fill", "log critically")
        await gpu.fill(buffer, 2.0)
        assert await gpu.ping() == 1
        lines = [entry for entry in logs if entry["event"] == "engine.smokes"]
        assert [(entry["log_level"], entry["where"]) for entry in lines] == [("critical", "at the back")]
        assert (await gpu.statistics()).restarts == 0
