"""An upload that its caller awaits goes straight to an idle worker, and its answer is awaited without a turn
of the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor import BufferRef, CudnnRef, DeadlineExceeded, InvalidRequest, Receipt, StaleBufferError
from cudnn_actor.actors import Envelope, LoopBridge
from cudnn_actor.isolation.process.arrivals import parts_of
from cudnn_actor.isolation.process.parent import owning_loop, straight_upload
from cudnn_actor.isolation.process.parent.dispatcher import Dispatcher
from cudnn_actor.isolation.process.wire import Requests
from cudnn_actor.isolation.staging import NOTE_BYTES
from cudnn_actor.messages import Allocate, Fill, Ping, Upload
from cudnn_actor.operations import Pointwise, PointwiseMode
from cudnn_actor.processes.channel import Channel
from cudnn_actor.supervision import Restarting
from tests.service.rigs import in_thread, seen

from ..inside import service_behind
from ..patience import PATIENCE_S
from .crash_rigs import Points, kill, workers

pytestmark = pytest.mark.usefixtures("a_forkserver")
DIMS = (1 << 18,)


def numbers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(DIMS, dtype=np.float32)


@asynccontextmanager
async def on_many_cores(
    patch: pytest.MonkeyPatch, *, waits_s: float, engine: str = "AmpleEngine"
) -> AsyncIterator[tuple[CudnnRef, Points]]:
    """A service whose loops may stay awake. They wait for the answer to an upload for so long."""
    patch.setattr("cudnn_actor.isolation.process.cores.processors", lambda *_: 64)
    patch.setattr(straight_upload, "_HERE_S", waits_s)
    async with workers(engine, host_arenas=False) as (gpu, points), asyncio.timeout(PATIENCE_S):
        yield gpu, points


async def buffer(gpu: CudnnRef) -> BufferRef:
    """A buffer, and a loop that reads the socket, of which nothing else is ready."""
    ref = await gpu.upload(numbers(0))
    await gpu.ask(Upload(dst=ref, data=numbers(0)))
    await quiet(gpu)
    return ref


async def quiet(gpu: CudnnRef) -> None:
    """Wait until the monitor and the loop have nothing to do."""
    await gpu.drain()

    def have_host() -> None:
        with mailbox.hold():
            pass

    mailbox: Any = service_behind(gpu).state.mailbox
    await in_thread(have_host)
    for _ in range(3):
        await asyncio.sleep(0)


def answer_here(asking: Coroutine[Any, Any, Any]) -> Any:
    """The answer if it is there without a turn of the loop; else None, and nobody waits for it."""
    try:
        asking.send(None)
    except StopIteration as ended:
        return ended.value
    asking.close()
    return None


async def test_an_answer_is_there_without_a_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_many_cores(monkeypatch, waits_s=PATIENCE_S) as (gpu, _):
        ref = await buffer(gpu)
        assert isinstance(answer_here(gpu.ask(Upload(dst=ref, data=numbers(1)), timeout=PATIENCE_S)), Receipt)
        np.testing.assert_array_equal(await gpu.download(ref), numbers(1))
        (uploads,) = [each for each in gpu.metrics().requests if each.operation == "Upload"]
        assert (uploads.finished, uploads.uploaded_bytes) == (2, 2 * numbers(0).nbytes)
        await gpu.free(ref)
        await quiet(gpu)
        new = answer_here(gpu.upload(numbers(2)))
        assert isinstance(new, BufferRef)
        np.testing.assert_array_equal(await gpu.download(new), numbers(2))


async def test_an_answer_is_there_before_its_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_many_cores(monkeypatch, waits_s=PATIENCE_S, engine="ToldEngine") as (gpu, points):
        ref = await buffer(gpu)
        for seed in (1, 2):
            points.hold("told")
            assert isinstance(answer_here(gpu.ask(Upload(dst=ref, data=numbers(seed)))), Receipt)
            points.let_go("told")
            np.testing.assert_array_equal(await gpu.download(ref), numbers(seed))
            await quiet(gpu)
        (uploads,) = [each for each in gpu.metrics().requests if each.operation == "Upload"]
        assert (uploads.finished, uploads.uploaded_bytes) == (3, 3 * numbers(0).nbytes)
        assert gpu.generation == 1


@pytest.mark.parametrize("order", ["upload", "run"])
async def test_what_follows_before_the_frame_is_there_has_its_answer(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_many_cores(monkeypatch, waits_s=PATIENCE_S, engine="ToldEngine") as (gpu, points):
        ref = await buffer(gpu)
        doubled = await gpu.empty(DIMS)
        double: Pointwise[BufferRef] = Pointwise(mode=PointwiseMode.ADD, operands=(ref, ref), result=doubled)
        await gpu.ask(double)
        await quiet(gpu)
        seen = points.visits("told")
        points.hold("told")
        assert isinstance(answer_here(gpu.ask(Upload(dst=ref, data=numbers(1)))), Receipt)
        await in_thread(lambda: points.wait_for_visits("told", seen + 1))
        letting_go = threading.Thread(target=points.let_go, args=("told",))
        letting_go.start()
        if order == "run":
            await gpu.ask(double)
            np.testing.assert_array_equal(await gpu.download(doubled), 2 * numbers(1))
        else:
            assert isinstance(await gpu.ask(Upload(dst=ref, data=numbers(2))), Receipt)
            np.testing.assert_array_equal(await gpu.download(ref), numbers(2))
            await in_thread(lambda: points.wait_for_visits("told", seen + 2))
        await in_thread(letting_go.join)
        assert gpu.generation == 1


async def test_an_upload_that_was_answered_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_many_cores(monkeypatch, waits_s=PATIENCE_S, engine="ToldEngine") as (gpu, points):
        ref = await buffer(gpu)
        for generation in (2, 3):
            points.hold("told")
            assert isinstance(answer_here(gpu.ask(Upload(dst=ref, data=numbers(generation)))), Receipt)
            kill(gpu)
            points.let_go("told")
            np.testing.assert_array_equal(await gpu.download(ref), numbers(generation))
            assert gpu.generation == generation
            await quiet(gpu)
        assert gpu.metrics().replayed == 0


async def test_what_lies_in_memory_that_is_used_again_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_many_cores(monkeypatch, waits_s=0.0) as (gpu, points):
        ref, mailbox = await gpu.empty(DIMS), service_behind(gpu).state.mailbox
        await quiet(gpu)
        assert isinstance(mailbox, Dispatcher)
        staging = mailbox.host.staging
        staging.stock()
        numbered = (await gpu.ask(Fill(dst=ref, value=0.0))).request_id + 1
        for _ in range(3):
            await asyncio.sleep(0)
        for block in staging.pieces:
            words = staging.array(block, (block.nbytes // 8,), np.uint64)
            words[-NOTE_BYTES // 8 :] = numbered
        points.hold("finished")
        assert answer_here(gpu.ask(Upload(dst=ref, data=numbers(1)))) is None
        points.let_go("finished")
        assert (await gpu.ask(Fill(dst=ref, value=0.0))).request_id == numbered + 1


async def test_other_callbacks_have_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_many_cores(monkeypatch, waits_s=PATIENCE_S) as (gpu, _):
        message = Upload(dst=await buffer(gpu), data=numbers(1))
        ready = asyncio.Event()
        asyncio.get_running_loop().call_soon(ready.set)
        assert answer_here(gpu.ask(message)) is None, "a callback is ready"
        assert not ready.is_set()
        await quiet(gpu)
        monkeypatch.setattr(owning_loop, "WAITING_S", PATIENCE_S)
        for _ in range(3):
            assert answer_here(gpu.ask(message)) is not None
        asyncio.get_running_loop().call_soon(ready.set)
        assert answer_here(gpu.ask(message)) is None, "another callback is ready"
        await quiet(gpu)
        assert answer_here(gpu.ask(message)) is not None
        monkeypatch.setattr(owning_loop, "WAITING_S", 0.0)
        assert answer_here(gpu.ask(message)) is None, "the loop is to have a turn"
        await quiet(gpu)
        assert answer_here(gpu.ask(message)) is not None


async def test_where_cores_are_few_a_loop_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_many_cores(monkeypatch, waits_s=PATIENCE_S) as (gpu, _):
        message = Upload(dst=await buffer(gpu), data=numbers(1))
        service_behind(gpu).state.mailbox.loops_may_stay_awake = False
        assert answer_here(gpu.ask(message)) is None
        await quiet(gpu)


async def test_an_answer_that_does_not_come_at_once_comes_by_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with on_many_cores(monkeypatch, waits_s=0.0) as (gpu, points):
        ref = await buffer(gpu)
        points.hold("finished")
        upload = asyncio.ensure_future(gpu.ask(Upload(dst=ref, data=numbers(1))))
        await in_thread(lambda: points.wait_for_visits("finished?", 1))
        assert not upload.done()
        points.let_go("finished")
        assert isinstance(await upload, Receipt)
        np.testing.assert_array_equal(await gpu.download(ref), numbers(1))


async def test_an_upload_runs_again_if_its_worker_is_killed_while_a_loop_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with on_many_cores(monkeypatch, waits_s=PATIENCE_S) as (gpu, points):
        ref = await buffer(gpu)
        points.hold("finished")
        seen = points.visits("finished?")

        def end_worker() -> None:
            points.wait_for_visits("finished?", seen + 1)
            kill(gpu)
            points.let_go("finished")

        killer = threading.Thread(target=end_worker)
        killer.start()
        assert isinstance(await gpu.ask(Upload(dst=ref, data=numbers(1))), Receipt)
        await in_thread(killer.join)
        assert gpu.generation == 2
        np.testing.assert_array_equal(await gpu.download(ref), numbers(1))


@pytest.mark.parametrize(
    ("order", "cause"),
    [("stick", "DEAD: the test"), ("fail", "it could not look"), ("say noise", "worker")],
)
async def test_an_upload_runs_again_if_the_look_for_its_end_fails_or_the_answer_is_noise(
    order: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_many_cores(monkeypatch, waits_s=PATIENCE_S) as (gpu, points):
        ref = await buffer(gpu)
        points.order("finished?", order)
        assert isinstance(await gpu.ask(Upload(dst=ref, data=numbers(1))), Receipt)
        assert gpu.generation == 2
        event = await seen(gpu, Restarting)
        assert isinstance(event, Restarting)
        assert event.cause.cause.startswith(cause)
        np.testing.assert_array_equal(await gpu.download(ref), numbers(1))


async def test_a_message_that_comes_while_a_loop_waits_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_many_cores(monkeypatch, waits_s=PATIENCE_S) as (gpu, points):
        ref = await buffer(gpu)
        points.hold("finished")
        seen = points.visits("finished?")

        def send() -> None:
            points.wait_for_visits("finished?", seen + 1)
            gpu.actor_ref.tell(Ping())
            pings.append(gpu.actor_ref.ask(Ping(), block=False))
            points.let_go("finished")

        pings: list[Any] = []
        sender = threading.Thread(target=send)
        sender.start()
        assert isinstance(await gpu.ask(Upload(dst=ref, data=numbers(1))), Receipt)
        await in_thread(sender.join)
        assert await in_thread(lambda: pings[0].get(timeout=PATIENCE_S)) == 1


async def test_uploads_take_the_straight_path_only_if_nothing_is_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admitted: list[object] = []
    admitting = Dispatcher.admit

    def admit(dispatcher: Dispatcher, envelope: Envelope, **waits: bool) -> None:
        admitted.append(type(envelope.message))
        admitting(dispatcher, envelope, **waits)

    async with on_many_cores(monkeypatch, waits_s=0.0) as (gpu, points):
        refs = [await buffer(gpu) for _ in range(2)]
        monkeypatch.setattr(Dispatcher, "admit", admit)
        points.hold("finished")
        first, second = (
            asyncio.ensure_future(gpu.ask(Upload(dst=ref, data=numbers(n)))) for n, ref in enumerate(refs, 1)
        )
        await in_thread(lambda: points.wait_for_visits("finished?", 1))
        assert admitted == [Upload], "only the second"
        points.let_go("finished")
        await asyncio.gather(first, second)
        for seed, ref in enumerate(refs, 1):
            np.testing.assert_array_equal(await gpu.download(ref), numbers(seed))


async def test_a_buffer_that_was_freed_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_many_cores(monkeypatch, waits_s=PATIENCE_S) as (gpu, _):
        ref = await buffer(gpu)
        await gpu.free(ref)
        other = await gpu.upload(numbers(1))
        assert other.slot == ref.slot
        await quiet(gpu)
        bridge, future = LoopBridge.of_running_loop(), asyncio.get_running_loop().create_future()
        message = Upload(dst=ref, data=numbers(2))
        with pytest.raises(StaleBufferError):
            service_behind(gpu).state.mailbox.admit_awaited(Envelope(message, future=future, bridge=bridge))
        assert not future.done()
        np.testing.assert_array_equal(await gpu.download(other), numbers(1))


async def test_what_a_finalizer_sends_during_a_mailbox_operation_does_not_go_straight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with on_many_cores(monkeypatch, waits_s=PATIENCE_S) as (gpu, _):
        ref = await buffer(gpu)
        mailbox: Any = service_behind(gpu).state.mailbox
        bridge, future = LoopBridge.of_running_loop(), asyncio.get_running_loop().create_future()
        look, roused = mailbox.waiting_elsewhere, list[bool]()
        monkeypatch.setattr(straight_upload, "_AWAKE_S", -1.0)
        monkeypatch.setattr(mailbox.host.sender, "rouse_worker", lambda: roused.append(True))

        def finalized() -> int:
            mailbox.waiting_elsewhere = look
            mailbox.expect_upload()
            message = Upload(dst=ref, data=numbers(1))
            mailbox.admit_awaited(Envelope(message, future=future, bridge=bridge))
            assert not mailbox.host.in_flight.requests
            assert not future.done()
            return 0

        # The mailbox asks this with its lock held, where a finalizer may run.
        mailbox.waiting_elsewhere = finalized
        await gpu.submit(Fill(dst=ref, value=0.0))
        assert isinstance(await future, Receipt)
        assert not roused
        np.testing.assert_array_equal(await gpu.download(ref), numbers(1))


async def test_values_of_other_dims_or_another_dtype_are_refused_or_converted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with on_many_cores(monkeypatch, waits_s=PATIENCE_S) as (gpu, _):
        ref = await buffer(gpu)
        with pytest.raises(InvalidRequest, match="other dims"):
            await gpu.ask(Upload(dst=ref, data=numbers(1).reshape(2, -1)))
        with pytest.raises(InvalidRequest, match="dims"):
            await gpu.ask(Allocate(spec=ref.spec, data=numbers(1).reshape(2, -1)))
        for dst in (7, msgspec.structs.replace(ref, device="cuda:7")):
            with pytest.raises(InvalidRequest, match="dst"):
                await gpu.ask(Upload(dst=dst, data=numbers(1)))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="spec"):
            await gpu.ask(Allocate(spec=[ref.spec], data=numbers(1)))  # type: ignore[arg-type]
        await quiet(gpu)
        await gpu.ask(Upload(dst=ref, data=np.arange(*DIMS, dtype=np.int32)))
        np.testing.assert_array_equal(await gpu.download(ref), np.arange(*DIMS, dtype=np.float32))
        await gpu.ask(Upload(dst=ref, data=numbers(2)[::-1]))
        np.testing.assert_array_equal(await gpu.download(ref), numbers(2)[::-1])
        with pytest.raises(DeadlineExceeded, match="had not started"):
            await gpu.ask(Upload(dst=ref, data=numbers(3)), timeout=0.0)
        np.testing.assert_array_equal(await gpu.download(ref), numbers(2)[::-1])


@pytest.mark.parametrize("idle", [True, False])
async def test_a_worker_is_woken_up_before_the_request_if_it_may_be_asleep(
    idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    sending, flushing = Channel.send, Channel.flush_only

    def send(channel: Channel, frame: Any, *rest: Any) -> None:
        if isinstance(frame, Requests):
            sent.append(len(frame.requests))
        sending(channel, frame, *rest)

    def flush(channel: Channel) -> bool:
        sent.append(1)
        return flushing(channel)

    async with on_many_cores(monkeypatch, waits_s=0.0) as (gpu, _):
        ref = await buffer(gpu)
        monkeypatch.setattr(straight_upload, "_AWAKE_S", -1.0 if idle else PATIENCE_S)
        monkeypatch.setattr(straight_upload, "PROMPT_S", 0.0)
        monkeypatch.setattr(Channel, "send", send)
        monkeypatch.setattr(Channel, "flush_only", flush)
        await gpu.write(ref, numbers(1))
        await gpu.write(ref, numbers(2)[:16].repeat(1 << 14))
        assert sent == ([0, 1, 0, 1] if idle else [1, 1])
        sent.clear()
        monkeypatch.setattr(straight_upload, "PROMPT_S", PATIENCE_S)
        await gpu.write(ref, numbers(3))
        assert sent == [1], "it was woken just now, or is not idle"


def test_the_last_part_of_a_short_array_is_small() -> None:
    """When it is there, the caller waits for the device's copy of it."""
    for nbytes in ((256 << 10) + 4, 600_000, 1 << 20):
        begin, end = parts_of(nbytes)[-1][1:]
        assert 0 < end - begin <= (64 << 10) + 4096
