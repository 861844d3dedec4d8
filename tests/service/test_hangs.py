"""Hangs: those that listen to the watchdog, and those that nobody can end."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor import (
    BufferRef,
    ConvFwd,
    ConvSpec,
    CudnnRef,
    Fault,
    FaultPlan,
    GraphBuilder,
    Loop,
    OutcomeUnknown,
    ServiceStopped,
    StaleBufferError,
    StartFailed,
    TensorSpec,
)
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.messages import Allocate, Download, Fill, Upload
from cudnn_actor.protocol.messages.messages import Message
from cudnn_actor.service import Spawning
from cudnn_actor.supervision import ExitKind, Restarting

from ..inside import isolation_of
from ..log_lines import line
from ..patience import PATIENCE_S
from .noticed_hangs import NOTICED_S, no_progress_since, notice_hang, short_limit
from .rigs import (
    THREAD_ONLY,
    Gate,
    Trio,
    in_thread,
    outcome,
    seen,
    service_on,
    single,
    spawn,
    spawn_gated,
    spawn_on,
)
from .worker_rigs import GatedEngine

pytestmark = pytest.mark.usefixtures("isolation")

SPEC = TensorSpec.packed((1, 1, 1, 1))


@pytest.mark.parametrize("message", [ConvFwd, Fill, Allocate])
async def test_a_hang_that_listens_is_ended_and_the_request_finishes(
    message: type, logs: list[EventDict]
) -> None:
    faults = FaultPlan().at(4, Fault.HANG)
    async with spawn(device="cpu", faults=faults) as gpu:
        trio = await Trio.on(gpu)
        messages: tuple[Message, ...] = (trio.product(), Fill(dst=trio.y, value=6), Allocate(spec=SPEC))
        (asked,) = [gpu.submit(one) for one in messages if isinstance(one, message)]
        await line(logs, "fault.injected")
        notice_hang(gpu)
        answer = await asked
        if isinstance(answer, BufferRef):
            await gpu.free(answer)
        restarting = await seen(gpu, Restarting)
        assert isinstance(restarting, Restarting)
        assert restarting.cause.kind is ExitKind.HUNG
        assert restarting.cause.cause == f"no progress for {NOTICED_S:g} s"
        statistics = await gpu.statistics()
        assert (statistics.generation, statistics.replayed, statistics.live_buffers) == (2, 1, 3)
        assert await trio.result() == (1 if message is Allocate else 6)


async def test_an_accumulating_request_that_hangs_is_not_run_twice(logs: list[EventDict]) -> None:
    faults = FaultPlan().at(1, Fault.HANG, of=ConvFwd)
    async with spawn(device="cpu", faults=faults) as gpu:
        trio = await Trio.on(gpu)
        hangs = gpu.submit(trio.sum())
        await line(logs, "fault.injected")
        notice_hang(gpu)
        with pytest.raises(OutcomeUnknown, match="was running at a crash"):
            await hangs
        with pytest.raises(StaleBufferError, match="torn"):
            await trio.result()


async def test_work_that_keeps_coming_is_no_hang() -> None:
    """There is always some that is not finished, and each answer is progress."""
    async with spawn(device="cpu") as gpu:
        x, w = [await gpu.upload(np.ones(dims, np.float32)) for dims in ((1, 64, 32, 32), (64, 64, 1, 1))]
        # NumPy lets go of the interpreter's lock in a product of this size, so this thread sees it begun.
        product = ConvFwd(x=x, w=w, y=await gpu.empty(x.dims), conv=ConvSpec.symmetric(2))
        asked = deque(gpu.submit(product) for _ in range(64))
        since: list[float | None] = []
        for _ in range(20):
            for _ in range(64):
                asked.append(gpu.submit(product))
                await asked.popleft()
            since.append(no_progress_since(gpu))
        last = [each for each in since if each is not None]  # some may have ended in this very turn
        assert last
        assert all(earlier < later for earlier, later in itertools.pairwise(last))
        await asyncio.gather(*asked)


@THREAD_ONLY
@pytest.mark.parametrize("operation", ["relu", "sort"])  # by tiles, and by its definition
async def test_a_request_of_many_operations_is_no_hang(operation: str) -> None:
    """However long they take in all: each one is progress."""
    last: list[float] = []

    class Watched(CpuEngine):
        def execute(self, plan: Any, buffers: Sequence[Any], scalars: Sequence[float]) -> None:
            note = self.on_progress

            def noted() -> None:
                note()
                last.append(isolation_of(service).progress().last_s)

            self.on_progress = noted
            last.append(isolation_of(service).progress().last_s)
            super().execute(plan, buffers, scalars)

    g = GraphBuilder()
    y = g.input("x", (4, 4))
    for _ in range(3):
        y = y * getattr(g, operation)(y)
    service = service_on(Watched)
    async with Spawning(service) as gpu:
        await gpu.apply(g.build(y=y), x=await gpu.upload(np.ones((4, 4), "float32")))
    assert len(last) > 6
    assert all(earlier < later for earlier, later in itertools.pairwise(last))


@THREAD_ONLY
@pytest.mark.parametrize("operation", ["relu", "sort"])
async def test_a_plan_of_many_operations_is_no_hang(operation: str) -> None:
    last: list[float] = []

    class Watched(CpuEngine):
        def build(self, graph: Any, *, workspace_limit: int | None) -> Any:
            note = self.on_progress

            def noted() -> None:
                note()
                last.append(isolation_of(service).progress().last_s)

            self.on_progress = noted
            try:
                return super().build(graph, workspace_limit=workspace_limit)
            finally:
                self.on_progress = note

    g = GraphBuilder()
    y = g.input("x", (4, 4))
    for _ in range(6):
        y = getattr(g, operation)(y)
    service = service_on(Watched)
    async with Spawning(service) as gpu:
        await gpu.apply(g.build(y=y), x=await gpu.upload(np.ones((4, 4), "float32")))
    assert len(last) >= 6
    assert all(earlier < later for earlier, later in itertools.pairwise(last))


async def test_an_idle_service_is_no_hang() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        idle = threading.Event()
        with short_limit(gpu, 0.001):  # in its start, the limit would be short for a busy machine
            await in_thread(lambda: idle.wait(0.02))
        health = gpu.health()  # a request would be work in progress, which may take longer than that
        assert (health.generation, health.restarts, health.cause) == (1, 0, None)


@contextmanager
def opened_at_last(gate: Gate) -> Iterator[None]:
    try:
        yield
    finally:
        gate.open()


def actor_thread(gpu: CudnnRef) -> threading.Thread:
    """The thread of the service's present actor. Tests here run one service at a time."""
    (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith("CudnnActor-")]
    return thread


def asked_for(trio: Trio, message: str) -> Message:
    messages: dict[str, Message] = {
        "product": trio.product(),
        "sum": trio.sum(),
        "Upload": Upload(dst=trio.y, data=single(5)),
        "Allocate": Allocate(spec=SPEC, data=single(5)),
        "Download": Download(src=trio.y),
        "large Allocate": Allocate(spec=TensorSpec.packed((1, 1, 1, 20 << 20))),
    }
    return messages[message]


@THREAD_ONLY
@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize(
    ("at", "message", "end"),
    [
        ("execute", "product", OutcomeUnknown),
        ("execute", "sum", OutcomeUnknown),
        ("build", "product", OutcomeUnknown),
        ("write", "Upload", OutcomeUnknown),
        ("write", "Allocate", ServiceStopped),
        ("create_arena", "large Allocate", ServiceStopped),
        ("read", "Download", ServiceStopped),
    ],
)
async def test_a_thread_that_nobody_can_end_ends_its_service(
    at: str, message: str, end: type, logs: list[EventDict]
) -> None:
    gate, engines = Gate(), list[GatedEngine]()

    def engine() -> GatedEngine:
        engines.append(GatedEngine(gate, at))
        return engines[-1]

    service = service_on(engine)
    service.launch()
    gpu = CudnnRef(service)
    with opened_at_last(gate):
        trio = await Trio.on(gpu)
        thread = actor_thread(gpu)
        gate.catch_one()
        asked = gpu.submit(asked_for(trio, message))
        await in_thread(gate.wait_for_arrival)
        behind = [gpu.submit(Fill(dst=trio.x, value=8)) for _ in range(100)]
        notice_hang(gpu)
        assert isinstance(await outcome(asked), end)
        assert all([isinstance(await outcome(future), ServiceStopped) for future in behind])
        escalated = await asyncio.wrap_future(service.stopped)
        assert escalated is not None
        assert str(escalated.cause) == "hung: its thread does not end"
        finished = service.state.counters.finished
    await in_thread(thread.join)  # it comes back, and ends
    assert service.state.counters.finished == finished
    assert engines[-1].closed
    assert "supervisor.thread_lost" in [entry["event"] for entry in logs]


@THREAD_ONLY
@pytest.mark.usefixtures("short_grace")
async def test_a_service_is_started_again_only_when_the_thread_that_hung_has_ended() -> None:
    gate = Gate()
    service = service_on(lambda: GatedEngine(gate), max_restarts=0)
    service.launch()
    gpu = CudnnRef(service)
    with opened_at_last(gate):
        trio = await Trio.on(gpu)
        thread = actor_thread(gpu)
        gate.catch_one()
        asked = gpu.submit(trio.product())
        await in_thread(gate.wait_for_arrival)
        notice_hang(gpu)
        await outcome(asked)
        await asyncio.wrap_future(service.stopped)
        service.launch()
        with pytest.raises(StartFailed, match="has not ended"):
            await asyncio.wrap_future(service.started)
    await in_thread(thread.join)
    service.launch()
    assert await gpu.ping() == 1
    trio = await Trio.on(gpu)
    await gpu.ask(trio.product())
    await gpu.aclose()


@THREAD_ONLY
@pytest.mark.usefixtures("short_grace")
async def test_a_loop_that_was_given_up_ends_with_its_turn() -> None:
    gate, g = Gate(), GraphBuilder()
    loop = Loop(body=g.build(y=g.input("x", (1, 1, 1, 1)) + 1.0), carried={"x": "y"})
    service = service_on(lambda: GatedEngine(gate))
    service.launch()
    gpu = CudnnRef(service)
    with opened_at_last(gate):
        trio = await Trio.on(gpu)
        thread = actor_thread(gpu)
        gate.catch_one()
        asked = asyncio.ensure_future(gpu.loop(loop, x=trio.x, turns=1 << 20))
        await in_thread(gate.wait_for_arrival)
        notice_hang(gpu)
        assert isinstance(await outcome(asked), OutcomeUnknown)
        await asyncio.wrap_future(service.stopped)
    await in_thread(thread.join)
    assert gate.passed == 1


@THREAD_ONLY
@pytest.mark.usefixtures("short_grace")
async def test_closing_a_service_does_not_wait_for_ever_for_a_thread_that_does_not_end() -> None:
    # The drain is cut short; the actor has 5 s to stop, and a grace to notice that it was killed.
    gate = Gate()
    gpu = await spawn_on(lambda: GatedEngine(gate))
    with opened_at_last(gate):
        trio = await Trio.on(gpu)
        gate.catch_one()
        running, waiting = gpu.submit(trio.product()), gpu.submit(trio.product())
        await in_thread(gate.wait_for_arrival)
        async with asyncio.timeout(PATIENCE_S):
            await gpu.aclose(drain_s=0.0)
        assert isinstance(await outcome(running), OutcomeUnknown)
        assert isinstance(await outcome(waiting), ServiceStopped)
