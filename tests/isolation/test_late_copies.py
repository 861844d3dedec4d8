"""Large arrays are copied to a worker part by part, behind the requests that read them."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudnn_actor import CudnnRef, CudnnService, GraphBuilder
from cudnn_actor.engines import EngineChoice, WorkerEngine
from cudnn_actor.engines.cpu import CpuEngine, transfer
from cudnn_actor.isolation.process.arrivals import LATE_BYTES, Arrival, Part, parts_of
from cudnn_actor.isolation.process.parent import late_copies
from cudnn_actor.isolation.process.parent.in_flight import WorkerRequest
from cudnn_actor.isolation.process.parent.late_copies import LateCopies, LateCopy, as_bytes
from cudnn_actor.isolation.process.parent.sender import Sender
from cudnn_actor.isolation.process.wire import Requests
from cudnn_actor.isolation.staging import NOTE_BYTES, PIECES, Staging
from cudnn_actor.messages import Allocate, DeployModel, Fill, ModelGraph, RunModel, Upload
from cudnn_actor.options import make_options
from cudnn_actor.processes.channel import Channel
from cudnn_actor.service import Spawning
from tests.service.test_deployed_models import check, deployed, images, run

from ..inside import service_behind
from ..patience import PATIENCE_S
from .crash_rigs import workers
from .device_engine import __name__ as engines

pytestmark = pytest.mark.usefixtures("a_forkserver")
LIGHT, HEAVY = (200_000,), (900_000,)
"""Dims of float32 arrays: the first is copied on an event loop's thread."""
_MOST_ROUNDS = 100
"""So many rounds of uploads are not all sent by another thread."""
Note = Callable[[int], object]


@asynccontextmanager
async def on_a_device(**options: Any) -> AsyncIterator[CudnnRef]:
    """A service whose worker has the CPU engine with the manners of a GPU: its arenas are not mapped here."""
    worker = WorkerEngine(f"{engines}:DeviceEngine")
    choice = EngineChoice("cpu", CpuEngine, True, worker=worker, preload=(engines,), host_arenas=False)
    service = CudnnService(make_options({"device": "cpu", "isolation": "process", **options}), engine=choice)
    async with Spawning(service) as gpu:
        yield gpu


def numbers(dims: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(dims, dtype=np.float32)


def between_parts(patch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Have this process do something between the first part of the next late copy and the others."""

    def copy(dst: np.ndarray, src: np.ndarray, parts: Sequence[Part], note: Note, *, rounds: int) -> None:
        first, *others = parts
        assert others
        transfer.copy_parts(dst, src, [first], note, rounds=rounds)
        patch.setattr(late_copies, "copy_parts", transfer.copy_parts)
        do()
        transfer.copy_parts(dst, src, others, note, rounds=rounds)

    patch.setattr(late_copies, "copy_parts", copy)


def kill_worker(gpu: CudnnRef) -> None:
    assert gpu.worker_pid is not None
    os.kill(gpu.worker_pid, signal.SIGKILL)


@pytest.mark.parametrize("dims", [LIGHT, HEAVY], ids=["light", "heavy"])
async def test_an_upload_whose_worker_is_killed_between_two_parts_is_whole(
    dims: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_a_device() as gpu:
        ref = await gpu.upload(numbers(dims))
        for seed in (1, 2):
            between_parts(monkeypatch, lambda: kill_worker(gpu))
            await gpu.ask(Upload(dst=ref, data=numbers(dims, seed)))
            np.testing.assert_array_equal(await gpu.download(ref), numbers(dims, seed))
        assert gpu.generation == 3


@pytest.mark.parametrize("count", [30_000, 200_000], ids=["light", "heavy"])
async def test_a_run_whose_worker_is_killed_between_two_parts_is_right(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployed(count, isolation="process") as (gpu, model):
        check(await run(gpu, model, images(count)), images(count))
        between_parts(monkeypatch, lambda: kill_worker(gpu))
        check(await run(gpu, model, images(count, 1)), images(count, 1))
        check(await run(gpu, model, images(count, 2)), images(count, 2))


@pytest.mark.parametrize("dims", [LIGHT, HEAVY], ids=["light", "heavy"])
async def test_an_upload_that_is_cancelled_between_two_parts_disturbs_no_later_one(
    dims: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_a_device() as gpu:
        ref, loop = await gpu.upload(numbers(dims)), asyncio.get_running_loop()
        for seed in range(1, 4):
            task = asyncio.ensure_future(gpu.ask(Upload(dst=ref, data=numbers(dims, seed))))
            cancelled = threading.Event()

            def cancel(task: asyncio.Future[Any] = task, cancelled: threading.Event = cancelled) -> None:
                if threading.current_thread() is threading.main_thread():
                    task.cancel()
                else:
                    loop.call_soon_threadsafe(task.cancel)
                    loop.call_soon_threadsafe(cancelled.set)
                    assert cancelled.wait(PATIENCE_S)

            between_parts(monkeypatch, cancel)
            with pytest.raises(asyncio.CancelledError):
                await task
            await gpu.ask(Upload(dst=ref, data=numbers(dims, -seed + 10)))
            np.testing.assert_array_equal(await gpu.download(ref), numbers(dims, -seed + 10))
        await gpu.drain()
        pieces = service_behind(gpu).state.mailbox.host.staging.pieces
        assert len(set(pieces)) == len(pieces) == PIECES * (dims is LIGHT)


async def test_an_upload_to_a_new_buffer_takes_the_fast_path_if_a_slot_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is as any other upload: also if its worker is killed between two parts, or its caller leaves."""
    slow: list[object] = []
    dispatching = Sender.dispatch

    def dispatch(sender: Sender, request: WorkerRequest) -> None:
        slow.extend([request.message] * (type(request.message) is Allocate))
        dispatching(sender, request)

    monkeypatch.setattr(Sender, "dispatch", dispatch)
    async with on_a_device() as gpu:
        memory = service_behind(gpu).state.memory
        # Just after a buffer was freed, the monitor may have the host still. Then it sends the upload.
        for seed in range(_MOST_ROUNDS):
            before = len(slow)
            refs = [await gpu.upload(numbers(LIGHT, seed + number)) for number in range(3)]
            for number, ref in enumerate(refs):
                np.testing.assert_array_equal(await gpu.download(ref), numbers(LIGHT, seed + number))
            assert memory.live() == tuple(refs)
            for ref in refs:
                await gpu.free(ref)
            if len(slow) == before:
                break
        assert len(slow) == before
        between_parts(monkeypatch, lambda: kill_worker(gpu))
        ref = await gpu.upload(numbers(LIGHT, 5))
        np.testing.assert_array_equal(await gpu.download(ref), numbers(LIGHT, 5))
        assert gpu.generation == 2
        task = asyncio.ensure_future(gpu.upload(numbers(LIGHT, 6)))
        between_parts(monkeypatch, lambda: task.cancel() and None)
        with pytest.raises(asyncio.CancelledError):
            await task
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 1  # it comes behind the message that frees the other
        assert memory.live() == (ref,)


async def test_a_request_is_sent_before_its_values_are_copied_and_answered_before_later_ones_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    sending = Channel.send

    def copy(dst: np.ndarray, src: np.ndarray, parts: Sequence[Part], note: Note, *, rounds: int) -> None:
        order.append("copied")
        transfer.copy_parts(dst, src, parts, note, rounds=rounds)

    def send(channel: Channel, frame: Any, *rest: Any) -> Any:
        order.extend(["sent"] * (isinstance(frame, Requests) and len(frame.requests)))
        return sending(channel, frame, *rest)

    async with on_a_device() as gpu:
        refs = [await gpu.upload(numbers(HEAVY)) for _ in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr(late_copies, "copy_parts", copy)
            patch.setattr(Channel, "send", send)
            await asyncio.gather(*[gpu.submit(Upload(dst=ref, data=numbers(HEAVY, 1))) for ref in refs])
        assert order == ["sent", "copied"] * 3
        for ref in refs:
            np.testing.assert_array_equal(await gpu.download(ref), numbers(HEAVY, 1))


@pytest.mark.parametrize(("side", "on_the_loop"), [(128, True), (300, False), (512, False)])
async def test_an_event_loop_copies_no_more_than_256_kib_of_a_strided_array(
    side: int, on_the_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    copy = transfer.store

    def store(dst: np.ndarray, array: np.ndarray) -> None:
        threads.append(threading.current_thread())
        copy(dst, array)

    async with on_a_device() as gpu:
        ref, values = await gpu.upload(numbers((side, side))), numbers((side, side), 1).T
        monkeypatch.setattr(transfer, "store", store)
        for _ in range(20):
            await gpu.ask(Upload(dst=ref, data=values))
        monkeypatch.undo()
        np.testing.assert_array_equal(await gpu.download(ref), values)
    assert (threading.main_thread() in threads) is on_the_loop


@pytest.mark.parametrize("count", [30_000, 200_000], ids=["light", "heavy"])
async def test_an_event_loop_copies_no_more_than_a_mebibyte(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends larger runs, and leaves their values to the monitor."""
    senders: set[int] = set()
    copiers: set[int] = set()
    sending = Channel.send

    def copy(dst: np.ndarray, src: np.ndarray, parts: Sequence[Part], note: Note, *, rounds: int) -> None:
        copiers.add(threading.get_ident())
        transfer.copy_parts(dst, src, parts, note, rounds=rounds)

    def send(channel: Channel, frame: Any, *rest: Any) -> Any:
        if isinstance(frame, Requests):
            senders.add(threading.get_ident())
        return sending(channel, frame, *rest)

    async with deployed(count, isolation="process") as (gpu, model):
        check(await run(gpu, model, images(count)), images(count))
        with monkeypatch.context() as patch:
            patch.setattr(late_copies, "copy_parts", copy)
            patch.setattr(Channel, "send", send)
            check(await run(gpu, model, images(count, 1)), images(count, 1))
    here = {threading.get_ident()}
    assert senders == here
    assert (copiers == here) == (images(count).nbytes <= 1 << 20)


async def test_an_event_loop_leaves_inputs_that_are_large_together_to_the_monitor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dims, copiers = (150_000,), list[int]()

    def copy(dst: np.ndarray, src: np.ndarray, parts: Sequence[Part], note: Note, *, rounds: int) -> None:
        copiers.append(threading.get_ident())
        transfer.copy_parts(dst, src, parts, note, rounds=rounds)

    g = GraphBuilder()
    graph = g.build(y=g.input("a", dims) + g.input("b", dims))
    async with on_a_device() as gpu:
        a, b, y = [await gpu.empty(dims) for _ in range(3)]
        summed = ModelGraph(
            name="sum",
            graph=graph,
            buffers=(a, b, y),
            specs={"a": a.spec, "b": b.spec},
            inputs={"a": "a", "b": "b"},
            outputs={"y": "y"},
        )
        model = await gpu.ask(DeployModel(graphs=(summed,)))
        for seed in range(3):
            given = {"a": numbers(dims, seed), "b": numbers(dims, -seed + 10)}
            with monkeypatch.context() as patch:
                patch.setattr(late_copies, "copy_parts", copy)
                results = await gpu.ask(RunModel.of(model, given, {}))
            np.testing.assert_array_equal(results["y"], given["a"] + given["b"])
    assert len(copiers) == 6
    assert threading.get_ident() not in copiers


async def test_runs_that_come_together_do_not_take_their_memory_before_the_copies_of_those_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, waiting = 100_000, list[int]()

    async with deployed(count, isolation="process") as (gpu, model):
        copies = service_behind(gpu).state.mailbox.host.sender.copies

        def copy(dst: np.ndarray, src: np.ndarray, parts: Sequence[Part], note: Note, *, rounds: int) -> None:
            waiting.append(len(copies.pending))
            transfer.copy_parts(dst, src, parts, note, rounds=rounds)

        with monkeypatch.context() as patch:
            patch.setattr(late_copies, "copy_parts", copy)
            runs = [run(gpu, model, images(count, seed)) for seed in range(24)]
            for seed, results in enumerate(await asyncio.gather(*runs)):
                check(results, images(count, seed))
    assert len(waiting) == 24
    assert max(waiting) <= 5, "one, and those for which there was memory"


async def test_what_was_sent_before_is_answered_while_a_worker_waits_for_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with workers("LateEngine", host_arenas=False) as (gpu, points):
        ref, other = await gpu.upload(numbers(LIGHT)), await gpu.empty((4,), dtype="float32")
        await gpu.ask(Upload(dst=ref, data=numbers(LIGHT)))
        mailbox: Any = service_behind(gpu).state.mailbox
        points.hold("finished")
        begun, answered = mailbox.begun(), list[Any]()

        def await_answer() -> None:
            end_s = time.monotonic() + PATIENCE_S
            while mailbox.begun() < begun + 2 and time.monotonic() < end_s:
                os.sched_yield()  # from then on, the worker waits for the second part
            points.let_go("finished")
            poll = select.poll()
            poll.register(mailbox.channel.fileno(), select.POLLIN)
            answered.extend(poll.poll(PATIENCE_S * 1e3))

        before = gpu.submit(Fill(dst=other, value=7.0))
        between_parts(monkeypatch, await_answer)
        await gpu.ask(Upload(dst=ref, data=numbers(LIGHT, 1)))
        await before
        assert answered
        np.testing.assert_array_equal(await gpu.download(ref), numbers(LIGHT, 1))


async def test_arrays_of_all_kinds_arrive(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "values", np.float32, "w+", shape=(8, 3, 110, 110))
    mapped[...] = numbers(mapped.shape, 3)
    base = numbers((8, 110, 110, 3))
    async with on_a_device() as gpu:
        for array in (base, base.astype(np.float64), base.transpose(0, 3, 1, 2), base[::-1], mapped):
            for layout in ("NCHW", "NHWC"):
                ref = await gpu.empty(array.shape, layout=layout, dtype="float32")
                for values in (array, -array):
                    await gpu.ask(Upload(dst=ref, data=values))
                    np.testing.assert_array_equal(await gpu.download(ref), values.astype(np.float32))


@pytest.mark.parametrize("nbytes", [1, LATE_BYTES, LATE_BYTES + 1, 4 << 20, (9 << 20) + 5, 1 << 30])
def test_parts_follow_each_other_and_begin_at_pages(nbytes: int) -> None:
    parts = parts_of(nbytes)
    assert [number for number, _, _ in parts] == list(range(len(parts)))
    assert [begin for _, begin, _ in parts] == [0, *(end for _, _, end in parts[:-1])]
    assert parts[-1][2] == nbytes
    assert not any(begin % 4096 for _, begin, _ in parts)
    assert 8 * len(parts) <= NOTE_BYTES


@pytest.mark.parametrize("count", [1, 2, 8, 32])
def test_as_many_arrays_lie_in_a_segment_as_without_the_words_behind_them(count: int) -> None:
    staging = Staging(lambda *_: None, lambda _: None)
    blocks = [staging.take((32 << 20) // count + NOTE_BYTES) for _ in range(count)]
    assert len({block.segment for block in blocks}) == 1
    staging.close()


def test_nothing_is_there_until_it_has_been_copied() -> None:
    segment = memoryview(bytearray(b"\1" * NOTE_BYTES))
    src, dst = numbers(LIGHT), np.zeros(LIGHT, np.float32)
    copy, there = LateCopy(src, as_bytes(dst), Arrival(segment, 0), alone=True), Arrival(segment, 0).is_there
    parts = parts_of(src.nbytes)
    assert len(parts) > 1
    assert not any(there(number) for number, _, _ in parts)
    copies = LateCopies()
    copies.pending.append(copy)
    copies.drop((copy,))
    copies.make_all()
    assert not any(there(number) for number, _, _ in parts)
    assert not dst.any()
    arrival, count = Arrival(segment, 0), len(parts)
    assert arrival.first_missing(0, count) == 0
    arrival.note(1)
    assert arrival.first_missing(0, count) == 0
    assert arrival.first_missing(1, count) == 2
    copy.make()
    assert all(there(number) for number, _, _ in parts)
    assert arrival.first_missing(0, count) == arrival.first_missing(1, count) == count
    np.testing.assert_array_equal(dst, src)
    src[:] = 0.0
    copy.make()  # once more, because another turn was interrupted
    assert dst.all()


def test_a_copy_is_made_again_where_a_thread_has_not_noted_it(monkeypatch: pytest.MonkeyPatch) -> None:
    src, dst = numbers(LIGHT), np.zeros(LIGHT, np.float32)
    arrival = Arrival(memoryview(bytearray(NOTE_BYTES)), 0)
    copies = LateCopies()
    copies.pending.append(LateCopy(src, as_bytes(dst), arrival, alone=True))

    def copy(dst: np.ndarray, src: np.ndarray, parts: Sequence[Part], note: Note, *, rounds: int) -> None:
        transfer.copy_parts(dst, src, parts[:1], note, rounds=rounds)

    monkeypatch.setattr(late_copies, "copy_parts", copy)
    with pytest.raises(MemoryError):
        copies.make_first()
    copies.make_all()
    assert all(arrival.is_there(number) for number, _, _ in parts_of(src.nbytes))
    np.testing.assert_array_equal(dst, src)
