"""An awake worker reads parts of a caller's array itself, while the caller's thread copies the others."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudnn_actor import CudnnRef, Receipt
from cudnn_actor.isolation.process.arrivals import Arrival, shared_parts_of
from cudnn_actor.isolation.process.child.parent_memory import ParentMemory
from cudnn_actor.isolation.process.parent.late_copies import LateCopy, as_bytes
from cudnn_actor.isolation.process.status import barrier
from cudnn_actor.isolation.staging import NOTE_BYTES
from cudnn_actor.memory.array_addresses import address_of
from cudnn_actor.messages import Upload
from tests.service.rigs import in_thread

from ..inside import service_behind
from ..patience import PATIENCE_S
from .crash_rigs import kill
from .test_straight_uploads import answer_here, buffer, numbers, on_many_cores, quiet

PARTS = shared_parts_of(numbers(0).nbytes)
LAST = PARTS[-1][0]
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
readable = pytest.mark.skipif(
    _SCOPE.exists() and _SCOPE.read_text().strip() != "0", reason="Yama lets no process read its parent"
)


def arrival_of(gpu: CudnnRef) -> Arrival:
    """The words of the piece that uploads use."""
    host: Any = service_behind(gpu).state.mailbox.host
    (notes,) = host.staging.notes.values()
    arrival: Arrival = notes.arrival
    return arrival


def after_first_part(patch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Have this process do something after it has copied the first part of the next array."""
    place = f"{Arrival.__module__}.barrier"

    def noted() -> None:
        patch.setattr(place, barrier)
        barrier()
        do()

    patch.setattr(place, noted)


def wait_until_there(arrival: Arrival, number: int) -> None:
    """Wait until a part is there. It is the other process that copies it."""
    end_s = time.monotonic() + PATIENCE_S
    while not arrival.is_there(number) and time.monotonic() < end_s:
        os.sched_yield()
    assert arrival.is_there(number)


def words(address: int = 0) -> Arrival:
    """The words of an array that a worker may read at this address."""
    arrival = Arrival(memoryview(bytearray(NOTE_BYTES)), 0)
    arrival.clear(address)
    return arrival


@contextlib.contextmanager
def own_memory() -> Any:
    pidfd = os.pidfd_open(os.getpid())
    try:
        yield ParentMemory(pidfd)
    finally:
        os.close(pidfd)


@readable
@pytest.mark.usefixtures("a_forkserver")
async def test_a_worker_reads_parts_while_its_parent_copies_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_many_cores(monkeypatch, waits_s=PATIENCE_S) as (gpu, _):
        ref = await buffer(gpu)
        arrival = arrival_of(gpu)
        for seed in (1, 2):
            after_first_part(monkeypatch, lambda: wait_until_there(arrival, 1))
            assert isinstance(answer_here(gpu.ask(Upload(dst=ref, data=numbers(seed)))), Receipt)
            np.testing.assert_array_equal(await gpu.download(ref), numbers(seed))
            await quiet(gpu)


@readable
@pytest.mark.usefixtures("a_forkserver")
async def test_an_upload_is_whole_if_its_worker_is_killed_when_it_has_read_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with on_many_cores(monkeypatch, waits_s=0.0) as (gpu, _):
        ref = await buffer(gpu)
        arrival = arrival_of(gpu)

        def end_worker() -> None:
            wait_until_there(arrival, LAST)
            kill(gpu)

        after_first_part(monkeypatch, end_worker)
        assert isinstance(await gpu.ask(Upload(dst=ref, data=numbers(1))), Receipt)
        assert gpu.generation == 2
        np.testing.assert_array_equal(await gpu.download(ref), numbers(1))


@pytest.mark.usefixtures("a_forkserver")
async def test_where_the_kernel_refuses_the_parent_copies_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_many_cores(monkeypatch, waits_s=PATIENCE_S, engine="RefusedEngine") as (gpu, _):
        ref = await buffer(gpu)
        for seed in (1, 2):
            assert isinstance(await gpu.ask(Upload(dst=ref, data=numbers(seed))), Receipt)
            np.testing.assert_array_equal(await gpu.download(ref), numbers(seed))
            await quiet(gpu)


@pytest.mark.usefixtures("a_forkserver")
async def test_a_worker_is_told_of_an_array_only_where_cores_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with on_many_cores(monkeypatch, waits_s=PATIENCE_S) as (gpu, _):
        ref, values = await buffer(gpu), numbers(1)
        await gpu.ask(Upload(dst=ref, data=values))
        assert arrival_of(gpu).address == address_of(values)
        await quiet(gpu)
        service_behind(gpu).state.mailbox.loops_may_stay_awake = False
        await gpu.ask(Upload(dst=ref, data=values))
        assert not arrival_of(gpu).address


@pytest.mark.usefixtures("a_forkserver")
async def test_an_array_is_kept_until_the_answer_although_its_caller_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with on_many_cores(monkeypatch, waits_s=0.0) as (gpu, points):
        ref, values = await buffer(gpu), numbers(1)
        kept = weakref.ref(values)
        points.hold("finished")
        seen = points.visits("finished?")
        task = asyncio.ensure_future(gpu.ask(Upload(dst=ref, data=values)))
        await in_thread(lambda: points.wait_for_visits("finished?", seen + 1))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task, values
        gc.collect()
        assert kept() is not None
        points.let_go("finished")
        await gpu.drain()
        gc.collect()
        assert kept() is None
        np.testing.assert_array_equal(await gpu.download(ref), numbers(1))


def test_both_sides_together_copy_all_parts_once() -> None:
    src, dst, arrival, copied = (
        as_bytes(numbers(0)),
        np.zeros(numbers(0).nbytes, np.uint8),
        words(),
        list[int](),
    )

    def read(begin: int, end: int) -> bool:
        dst[begin:end] = src[begin:end]
        copied.append(begin)
        return len(copied) < 3 or arrival.copy_from_front(dst, src, PARTS) == LAST - 2

    assert arrival.read_from_back(read, PARTS)
    assert copied == [begin for _, begin, _ in PARTS[:-4:-1]]
    assert all(arrival.is_there(number) for number, _, _ in PARTS)
    np.testing.assert_array_equal(dst, src)


def test_the_parent_copies_what_a_worker_has_begun_and_does_not_finish() -> None:
    src, dst, arrival = numbers(0), np.zeros_like(numbers(0)), words()
    copy = LateCopy(src, as_bytes(dst), arrival, alone=True, shared=True)
    begun, ends = threading.Event(), threading.Event()

    def read(_begin: int, _end: int) -> bool:
        begun.set()
        return ends.wait(PATIENCE_S)

    worker = threading.Thread(target=arrival.read_from_back, args=(read, PARTS))
    worker.start()
    assert begun.wait(PATIENCE_S)
    copy.make()
    assert all(arrival.is_there(number) for number, _, _ in PARTS)
    np.testing.assert_array_equal(dst, src)
    ends.set()
    worker.join()


def test_a_worker_that_is_refused_leaves_all_parts_to_its_parent_and_asks_no_more() -> None:
    src, dst, nowhere = as_bytes(numbers(0)), np.zeros(numbers(0).nbytes, np.uint8), words(8)
    with own_memory() as memory:
        memory.fetch(dst, nowhere, PARTS)
        assert not memory.is_readable
        assert nowhere.copy_from_front(dst, src, PARTS) == len(PARTS)
        np.testing.assert_array_equal(dst, src)
        arrival = words(address_of(src))
        memory.fetch(dst, arrival, PARTS)
        assert not any(arrival.is_there(number) for number, _, _ in PARTS)


def test_a_worker_reads_the_bytes_of_the_array_and_no_others() -> None:
    src, memory = numbers(0), np.zeros(numbers(0).size + 2, np.float32)
    with own_memory() as parents:
        parents.fetch(memory[1:-1], words(address_of(src)), PARTS)
        assert parents.is_readable
    np.testing.assert_array_equal(memory, [0.0, *src, 0.0])


def test_the_memory_of_a_process_that_has_ended_is_not_read() -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    pidfd = os.pidfd_open(child)
    os.waitpid(child, 0)
    assert not ParentMemory(pidfd).is_readable
    os.close(pidfd)
