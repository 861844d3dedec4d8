"""Hangs: those that listen to the watchdog, and those that nobody can end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor import (
    Allocate,
    ConvFwd,
    CudnnRef,
    Download,
    ExitKind,
    Fault,
    FaultPlan,
    Fill,
    OutcomeUnknown,
    Receipt,
    Restarting,
    ServiceStopped,
    StaleBufferError,
    Statistics,
    TensorSpec,
)
from cudnn_actor.protocol.messages import Message

from .rigs import (
    PATIENCE_S,
    SOON_S,
    THREAD_ONLY,
    Gate,
    Trio,
    in_thread,
    outcome,
    seen,
    single,
    spawn,
    spawn_gated,
    spawn_on,
)
from .worker_rigs import GatedEngine

pytestmark = pytest.mark.usefixtures("isolation")

SPEC = TensorSpec.packed((1, 1, 1, 1))


@pytest.mark.parametrize("message", [ConvFwd, Fill, Allocate])
async def test_a_hang_that_listens_is_ended_and_the_request_finishes(message: type) -> None:
    faults = FaultPlan().at(4, Fault.HANG)
    async with spawn(device="cpu", faults=faults, hang_after_s=SOON_S) as gpu:
        trio = await Trio.on(gpu)
        if message is ConvFwd:
            await gpu.ask(trio.product())
        elif message is Fill:
            await gpu.fill(trio.y, 6)
        else:
            await gpu.free(await gpu.ask(Allocate(spec=SPEC)))
        restarting = await seen(gpu, Restarting)
        assert isinstance(restarting, Restarting)
        assert restarting.cause.kind is ExitKind.HUNG
        assert restarting.cause.cause == f"no progress for {SOON_S} s"
        statistics = await gpu.statistics()
        assert (statistics.generation, statistics.replayed, statistics.live_buffers) == (2, 1, 3)


async def test_an_accumulating_request_that_hangs_is_not_run_twice() -> None:
    faults = FaultPlan().at(1, Fault.HANG, of=ConvFwd)
    async with spawn(device="cpu", faults=faults, hang_after_s=SOON_S) as gpu:
        trio = await Trio.on(gpu)
        with pytest.raises(OutcomeUnknown, match="was running at a crash"):
            await gpu.ask(trio.sum())
        with pytest.raises(StaleBufferError, match="torn"):
            await trio.result()


async def test_work_that_keeps_coming_is_no_hang() -> None:
    async with spawn(device="cpu", hang_after_s=SOON_S) as gpu:
        trio = await Trio.on(gpu)
        loop = asyncio.get_running_loop()
        end = loop.time() + 2 * SOON_S
        while loop.time() < end:
            await asyncio.gather(*(gpu.ask(trio.product()) for _ in range(64)))
        assert gpu.generation == 1


async def test_an_idle_service_is_no_hang() -> None:
    gate = Gate()
    async with spawn_gated(gate, hang_after_s=0.001) as gpu:
        idle = threading.Event()
        await in_thread(lambda: idle.wait(0.02))
        assert await gpu.ping() == 1


class Lost:
    """A request whose thread nobody can end, from the moment its service has given the thread up."""

    def __init__(
        self, gpu: CudnnRef, trio: Trio, answer: object, thread: threading.Thread, gate: Gate
    ) -> None:
        self.gpu, self.trio, self.answer, self.thread, self.gate = gpu, trio, answer, thread, gate

    async def wakes_up(self) -> None:
        self.gate.open()
        await in_thread(self.thread.join)


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


async def lose(gpu: CudnnRef, gate: Gate, message: str) -> Lost:
    trio = await Trio.on(gpu)
    thread = actor_thread(gpu)
    gate.catch_one()
    messages: dict[str, Message] = {
        "product": trio.product(),
        "sum": trio.sum(),
        "Allocate": Allocate(spec=SPEC, data=single(5)),
        "Download": Download(src=trio.y),
        "large Allocate": Allocate(spec=TensorSpec.packed((1, 1, 1, 20 << 20))),
    }
    asked = gpu.submit(messages[message])
    await in_thread(gate.wait_for_arrival)
    behind = [gpu.submit(Fill(dst=trio.x, value=8)) for _ in range(100)]
    answer = await outcome(asked)
    assert {type(await outcome(future)) for future in behind} == {Receipt}
    assert gpu.generation == 2
    return Lost(gpu, trio, answer, thread, gate)


def without_questions(statistics: Statistics, asked: int) -> tuple[int, ...]:
    """All that a lost thread could have changed; `asked` control messages have been answered since."""
    return (
        statistics.finished - asked,
        statistics.failed,
        statistics.withdrawn,
        statistics.expired,
        statistics.replayed,
        statistics.live_buffers,
        statistics.arena_bytes,
        statistics.plans.size,
        statistics.dropped_replies,
    )


@THREAD_ONLY
@pytest.mark.parametrize(
    ("at", "message"), [("execute", "product"), ("execute", "sum"), ("build", "product")]
)
async def test_a_thread_that_nobody_can_end_is_given_up_and_its_output_with_it(
    at: str, message: str, logs: list[EventDict]
) -> None:
    gate, engines = Gate(), list[GatedEngine]()

    def engine() -> GatedEngine:
        engines.append(GatedEngine(gate, at))
        return engines[-1]

    async with spawn_on(engine, hang_after_s=SOON_S) as gpu:
        with opened_at_last(gate):
            lost = await lose(gpu, gate, message)
            assert isinstance(lost.answer, OutcomeUnknown)
            assert "gave no sign of life" in lost.answer.cause
            with pytest.raises(StaleBufferError, match="torn"):
                await lost.trio.result()
            # The first place that fits is where y was, unless its bytes are withheld.
            others = [await gpu.upload(single(50 + n)) for n in range(20)]
            before = await gpu.statistics()
            await lost.wakes_up()
            after = await gpu.statistics()
            assert without_questions(after, 1) == without_questions(before, 0)
            assert [(await gpu.download(ref)).item() for ref in others] == [50 + n for n in range(20)]
            assert [engine.closed for engine in engines[-2:]] == [True, False]
            assert (await gpu.download(lost.trio.x)).item() == 8
            assert isinstance(await gpu.ask(lost.trio.product(y=others[0])), Receipt)
            assert (await gpu.download(others[0])).item() == 16
    assert "supervisor.thread_lost" in [entry["event"] for entry in logs]


@THREAD_ONLY
@pytest.mark.parametrize(("at", "message"), [("write", "Allocate"), ("create_arena", "large Allocate")])
async def test_an_allocation_whose_thread_is_lost_is_made_anew_and_only_once(at: str, message: str) -> None:
    gate = Gate()
    async with spawn_on(lambda: GatedEngine(gate, at), hang_after_s=SOON_S) as gpu:
        with opened_at_last(gate):
            lost = await lose(gpu, gate, message)
            assert (await gpu.statistics()).live_buffers == 4
            others = [await gpu.upload(single(50 + n)) for n in range(20)]
            before = await gpu.statistics()
            await lost.wakes_up()
            after = await gpu.statistics()
            assert without_questions(after, 1) == without_questions(before, 0)
            assert [(await gpu.download(ref)).item() for ref in others] == [50 + n for n in range(20)]
            if at == "write":
                assert (await gpu.download(lost.answer)).item() == 5  # type: ignore[arg-type]


@THREAD_ONLY
async def test_a_download_whose_thread_is_lost_is_read_again() -> None:
    gate = Gate()
    async with spawn_on(lambda: GatedEngine(gate, "read"), hang_after_s=SOON_S) as gpu:
        with opened_at_last(gate):
            lost = await lose(gpu, gate, "Download")
            assert isinstance(lost.answer, np.ndarray)
            assert lost.answer.item() == 1
            before = await gpu.statistics()
            await lost.wakes_up()
            assert without_questions(await gpu.statistics(), 1) == without_questions(before, 0)


@THREAD_ONLY
async def test_a_lost_thread_whose_call_fails_when_it_wakes_answers_nothing() -> None:
    gate = Gate()
    async with spawn_on(lambda: GatedEngine(gate, "write"), hang_after_s=SOON_S) as gpu:
        with opened_at_last(gate):
            trio = await Trio.on(gpu)
            thread = actor_thread(gpu)
            gate.catch_one()
            # The dims are wrong, which the engine would say once it gets on.
            asked = asyncio.ensure_future(gpu.write(trio.y, single(1).reshape(1)))
            assert isinstance(await outcome(asked), OutcomeUnknown)
            before = await gpu.statistics()
            await Lost(gpu, trio, None, thread, gate).wakes_up()
            assert without_questions(await gpu.statistics(), 1) == without_questions(before, 0)


@THREAD_ONLY
async def test_closing_a_service_does_not_wait_for_ever_for_a_thread_that_does_not_end() -> None:
    # The drain is cut short; the actor has 5 s to stop, and 1 s more to notice that it was killed.
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
