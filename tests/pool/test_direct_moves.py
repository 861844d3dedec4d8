"""Buffers that go from device to device, and what ends in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor import CudnnRef
from cudnn_actor.attached.client.attached_service import AttachedService
from cudnn_actor.errors import DeadlineExceeded, OutOfDescriptors, ServiceStopped, StaleBufferError
from cudnn_actor.memory import ExportedRange
from cudnn_actor.messages import Fill
from cudnn_actor.pool import Pool, moving, spawn_pool
from cudnn_actor.protocol.errors import StaleReason
from cudnn_actor.protocol.types.buffers import BufferRef

from ..inside import service_behind
from .conftest import is_back, kill, some

Then = Callable[[], Awaitable[Any]]


@pytest.fixture(params=["thread", "process"])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    async with spawn_pool(["cpu", "cpu"], isolation=request.param, max_restarts=20) as members:
        yield members


@pytest.fixture(autouse=True)
def all_go_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "DIRECT_BYTES", 0)


def through_host(logs: list[EventDict]) -> list[str]:
    """Why buffers have gone through the host."""
    return [line["why"] for line in logs if line["event"] == "move.through_host"]


def after(monkeypatch: pytest.MonkeyPatch, step: str, then: Then) -> None:
    """Have something happen once behind a step of a move: `export_buffer` or `import_buffer`."""
    original = getattr(AttachedService, step)

    async def replaced(service: AttachedService, *given: Any) -> Any:
        found = await original(service, *given)
        monkeypatch.setattr(AttachedService, step, original)
        await then()
        return found

    monkeypatch.setattr(AttachedService, step, replaced)


async def live(pool: Pool, member: int) -> int:
    await pool.on(member).drain()  # what the pool has sent without waiting
    return (await pool.on(member).statistics()).live_buffers


async def test_buffers_go_both_ways(pool: Pool, logs: list[EventDict]) -> None:
    for values, options in (
        (some(2, 3, 4, 5), {}),
        (some(2, 3, 4, 5), {"layout": "NHWC", "dtype": "bfloat16"}),
        (some(3, 0), {}),
        (np.arange(3 << 20, dtype=np.uint8), {}),
    ):
        ref = await pool.on(0).upload(values, **options)  # type: ignore[arg-type]
        expected = await pool.download(ref)
        for to in (1, 0, 1):
            old, ref = ref, await pool.move(ref, to=to)
            assert (ref.spec, pool.member_of(ref)) == (old.spec, to)
            with pytest.raises(StaleBufferError):
                await pool.download(old)
        np.testing.assert_array_equal(await pool.download(ref), expected)
        await pool.free(ref)
    assert [await live(pool, member) for member in (0, 1)] == [0, 0]
    assert through_host(logs) == []
    assert (pool.statistics().direct_moves, pool.statistics().host_moves) == (12, 0)


async def test_requests_that_were_sent_before_are_in_what_is_moved(pool: Pool) -> None:
    y = await pool.on(0).upload(np.zeros(1000, np.float32))
    fills = [pool.on(0).submit(Fill(dst=y, value=value)) for value in range(20)]
    moved = await pool.move(y, to=1)
    for filling in fills:
        await filling
    assert (await pool.download(moved) == 19).all()


async def test_what_cannot_be_mapped_goes_through_the_host(
    pool: Pool, logs: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def not_sealed(_: AttachedService, *_given: Any) -> ExportedRange:
        descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, 1 << 21)
        return ExportedRange(descriptor, 1 << 21, 0)

    monkeypatch.setattr(AttachedService, "export_buffer", not_sealed)
    x = some(4)
    ref = await pool.on(0).upload(x)
    for to in (1, 0, 1):
        ref = await pool.move(ref, to=to)
    np.testing.assert_array_equal(await pool.download(ref), x)
    (why,) = through_host(logs)  # it is not tried again between these devices
    assert "not sealed" in why
    assert (pool.statistics().direct_moves, pool.statistics().host_moves) == (0, 3)


async def test_a_source_without_a_descriptor_moves_through_the_host(
    pool: Pool, logs: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_room(_: AttachedService, *_given: Any) -> ExportedRange:
        raise OutOfDescriptors(limit=4)

    x = some(4)
    ref = await pool.on(0).upload(x)
    with monkeypatch.context() as patched:
        patched.setattr(AttachedService, "export_buffer", no_room)
        ref = await pool.move(ref, to=1)
    (why,) = through_host(logs)
    assert "out of file descriptors" in why
    ref = await pool.move(ref, to=0)  # and the next one does not
    np.testing.assert_array_equal(await pool.download(ref), x)
    assert (pool.statistics().direct_moves, pool.statistics().host_moves) == (1, 1)


async def test_a_buffer_that_was_freed_meanwhile_has_not_moved(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes may be another buffer's by then."""
    ref = await pool.on(0).upload(some(4))

    async def free() -> None:
        await pool.free(ref)
        await pool.on(0).upload(some(4, seed=1))

    after(monkeypatch, "export_buffer", free)
    with pytest.raises(StaleBufferError):
        await pool.move(ref, to=1)
    assert await live(pool, 1) == 0


@pytest.mark.parametrize("bound", [0, 1 << 40])
@pytest.mark.parametrize("started", [True, False])
async def test_a_timeout_at_the_end_leaves_one_buffer(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, started: bool, bound: int
) -> None:
    """The source says of its free whether it has started, and so whether the buffer has ended."""
    monkeypatch.setattr(moving, "DIRECT_BYTES", bound)
    x, free = some(4), CudnnRef.free
    ref = await pool.on(0).upload(x)

    async def late(service: CudnnRef, buffer: BufferRef, **_options: Any) -> None:
        if started:
            await free(service, buffer)
        raise DeadlineExceeded(timeout_s=1.0, started=started)

    with monkeypatch.context() as patched:
        patched.setattr(CudnnRef, "free", late)
        if started:
            ref = await pool.move(ref, to=1)
        else:
            with pytest.raises(DeadlineExceeded):
                await pool.move(ref, to=1)
    np.testing.assert_array_equal(await pool.download(ref), x)
    assert [await live(pool, member) for member in (0, 1)] == [not started, started]


@pytest.mark.parametrize("step", ["export_buffer", "import_buffer"])
async def test_the_targets_process_ends(pool: Pool, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    x = some(4)
    ref = await pool.on(0).upload(x)

    async def end() -> None:
        kill(pool, 1)

    after(monkeypatch, step, end)
    with pytest.raises(ServiceStopped):
        await pool.move(ref, to=1)
    np.testing.assert_array_equal(await pool.download(ref), x)
    await is_back(pool, 1, 2)
    ref = await pool.move(ref, to=1)
    np.testing.assert_array_equal(await pool.download(ref), x)


@pytest.mark.parametrize("step", ["export_buffer", "import_buffer"])
async def test_the_sources_process_ends(pool: Pool, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    ref = await pool.on(0).upload(some(4))

    async def end() -> None:
        kill(pool, 0)
        await is_back(pool, 0, 2)

    after(monkeypatch, step, end)
    with pytest.raises(ServiceStopped):
        await pool.move(ref, to=1)
    assert await live(pool, 1) == 0


@pytest.fixture
async def workers() -> AsyncIterator[Pool]:
    async with spawn_pool(["cpu", "cpu"], isolation="process", max_restarts=20) as members:
        yield members


def end_worker(pool: Pool, member: int) -> Then:
    async def end() -> None:
        service = service_behind(pool.on(member))
        worker = service.worker_pid
        os.kill(worker, signal.SIGKILL)
        await pool.on(member).ping()  # by the next one
        while service.worker_pid in (None, worker):  # noqa: ASYNC110 - its event comes soon
            await asyncio.sleep(0)

    return end


@pytest.mark.parametrize("step", ["export_buffer", "import_buffer"])
async def test_the_sources_worker_ends(
    workers: Pool, logs: list[EventDict], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    x = some(4)
    ref = await workers.on(0).upload(x)
    after(monkeypatch, step, end_worker(workers, 0))
    ref = await workers.move(ref, to=1)
    np.testing.assert_array_equal(await workers.download(ref), x)
    assert through_host(logs) == []  # the memory outlives it


@pytest.mark.parametrize("ends", [1, 2])
async def test_the_targets_worker_ends(
    workers: Pool, logs: list[EventDict], monkeypatch: pytest.MonkeyPatch, ends: int
) -> None:
    """With its mapping: what was imported is lost, so the values go through the host."""
    x = some(4)
    ref = await workers.on(0).upload(x)

    async def end() -> None:
        for _ in range(ends):
            await end_worker(workers, 1)()

    after(monkeypatch, "import_buffer", end)
    ref = await workers.move(ref, to=1)
    np.testing.assert_array_equal(await workers.download(ref), x)
    (why,) = through_host(logs)
    assert StaleReason.CONTEXT_LOST.value in why
    assert await live(workers, 1) == 1
    ref = await workers.move(await workers.move(ref, to=0), to=1)  # and the next ones do not
    np.testing.assert_array_equal(await workers.download(ref), x)
    assert len(through_host(logs)) == 1
    assert (await workers.on(1).statistics()).restarts == ends  # and nothing else has ended one


async def test_copies_that_end_worker_after_worker_are_not_tried_again(
    workers: Pool, logs: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = some(4)
    for direct in (True, True, False):
        ref = await workers.on(0).upload(x)
        with monkeypatch.context() as patched:
            after(patched, "import_buffer", end_worker(workers, 1))
            ref = await workers.move(ref, to=1)
        np.testing.assert_array_equal(await workers.download(ref), x)
        assert bool(through_host(logs)) is direct
        logs.clear()
    assert (await workers.on(1).statistics()).restarts == 2


async def test_one_worker_that_ends_under_many_copies_counts_once(
    workers: Pool, logs: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = [await workers.on(0).upload(some(4)) for _ in range(4)]
    last, ended, original = refs.pop(), asyncio.Event(), AttachedService.import_buffer
    mapped = 0

    async def replaced(service: AttachedService, *given: Any) -> BufferRef:
        nonlocal mapped
        found = await original(service, *given)
        mapped += 1
        if mapped == len(refs):
            await end_worker(workers, 1)()
            ended.set()
        await ended.wait()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(AttachedService, "import_buffer", replaced)
        await asyncio.gather(*(workers.move(ref, to=1) for ref in refs))
    assert len(through_host(logs)) == len(refs)
    await workers.move(last, to=1)
    assert workers.statistics().direct_moves == 1


async def test_many_move_at_a_time(pool: Pool, logs: list[EventDict]) -> None:
    refs: list[BufferRef] = [await pool.on(0).upload(np.full(100, number)) for number in range(40)]
    moved = await asyncio.gather(*(pool.move(ref, to=1) for ref in refs))
    for number, ref in enumerate(moved):
        assert (await pool.download(ref) == number).all()
    assert await live(pool, 0) == 0
    assert await live(pool, 1) == 40
    assert all("buffers of other services" in why for why in through_host(logs))
