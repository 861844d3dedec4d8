"""One client may have buffers copied between services: it gets and gives descriptors of their memory."""

from __future__ import annotations

import array
import asyncio
import errno
import mmap
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.typing import EventDict

from cudnn_actor import CudnnRef, connect, spawn
from cudnn_actor.attached import ServedSocket, serve_socket
from cudnn_actor.attached.client.delivery import Delivery
from cudnn_actor.attached.client.sent import Sent
from cudnn_actor.attached.server import holdings
from cudnn_actor.attached.server.holdings import MOST_IMPORTS
from cudnn_actor.attached.server.moves import message_of
from cudnn_actor.attached.wire import FROM_CLIENT, ExportBuffer, ImportBuffer
from cudnn_actor.broker.service_state import Import
from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cpu.arenas import Arenas
from cudnn_actor.errors import (
    DeadlineExceeded,
    ExecutionFailed,
    InvalidRequest,
    OutOfDescriptors,
    OutOfMemory,
    StaleBufferError,
)
from cudnn_actor.memory import ExportedRange
from cudnn_actor.messages import Copy, Download, Fill, Upload
from cudnn_actor.processes.channel import Channel, channel_pair
from cudnn_actor.processes.frames import BadFrame, encode
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec

from ..inside import sent_by, service_behind
from ..patience import PATIENCE_S
from .conftest import eventually
from .raw_client import ATTACH, Raw
from .test_malformed import memory

NOWHERE = BufferRef(slot=0, generation=1, spec=TensorSpec.packed((2,)), device="cpu")
X = np.arange(6000, dtype=np.float32).reshape(2, 3000)
SPEC = TensorSpec.packed((2, 3000))


@pytest.fixture(params=["thread", "process"])
async def gpu(request: pytest.FixtureRequest) -> AsyncIterator[CudnnRef]:
    async with spawn(device="cpu", isolation=request.param) as service:
        yield service


@pytest.fixture
async def mover(served: ServedSocket) -> AsyncIterator[Any]:
    """A client that may move buffers."""
    served.mover = os.getpid()
    async with connect(served.path) as attached:
        yield attached


@pytest.fixture
async def other(tmp_path: Path) -> AsyncIterator[Any]:
    """A client that may, of another service."""
    async with (
        spawn(device="cpu", isolation="thread") as service,
        serve_socket(service, tmp_path / "other.sock") as socket,
    ):
        socket.mover = os.getpid()
        async with connect(socket.path) as attached:
            yield attached


async def exported(client: CudnnRef, ref: BufferRef) -> ExportedRange:
    found: ExportedRange = await service_behind(client).export_buffer(ref, None)
    return found


async def imported(client: CudnnRef, given: ExportedRange, spec: TensorSpec = SPEC) -> BufferRef:
    found: BufferRef = await service_behind(client).import_buffer(given, spec, None)
    return found


async def test_a_buffer_of_another_service_is_read_where_it_lies(mover: CudnnRef, other: CudnnRef) -> None:
    await other.upload(X)  # so that the next one does not begin at 0
    ref = await other.upload(X)
    given = await exported(other, ref)
    assert given.offset
    theirs = await imported(mover, given)
    given.close()
    own = await mover.empty(X.shape)
    for values in (X, X + 1):  # it is the other's memory, no copy
        await other.ask(Upload(dst=ref, data=values))
        await mover.ask(Copy(src=theirs, dst=own))
        np.testing.assert_array_equal(await mover.download(own), values)
    await mover.free(theirs)
    with pytest.raises(StaleBufferError):
        await mover.ask(Copy(src=theirs, dst=own))
    await mover.free(own)
    assert (await mover.statistics()).live_buffers == 0


async def test_the_place_is_told_once_earlier_work_is_done(
    gpu: CudnnRef, mover: CudnnRef, other: CudnnRef
) -> None:
    """The worker is stopped meanwhile, so the work cannot be done. What needs no worker is answered."""
    ref, worker = await mover.upload(X), service_behind(gpu).worker_pid
    if worker is not None:
        os.kill(worker, signal.SIGSTOP)
    filling = mover.submit(Fill(dst=ref, value=7))
    asked = asyncio.ensure_future(exported(mover, ref))
    await asyncio.sleep(0)  # it is sent
    if worker is not None:
        await mover.empty((4,))
        assert not asked.done()
        os.kill(worker, signal.SIGCONT)
    given = await asked
    await filling
    theirs, own = await imported(other, given), await other.empty(X.shape)
    await other.ask(Copy(src=theirs, dst=own))
    given.close()
    assert (await other.download(own) == 7).all()


async def test_a_buffer_of_another_service_can_only_be_copied(mover: CudnnRef, other: CudnnRef) -> None:
    ref = await other.upload(X)
    given = await exported(other, ref)
    theirs, own = await imported(mover, given), await mover.upload(X)
    for message in (
        Download(src=theirs),
        Upload(dst=theirs, data=X),
        Fill(dst=theirs, value=0),
        Copy(src=own, dst=theirs),
        Copy(src=theirs, dst=theirs),
    ):
        with pytest.raises(InvalidRequest):
            await mover.ask(message)
    with pytest.raises(InvalidRequest):
        await exported(mover, theirs)
    np.testing.assert_array_equal(await other.download(ref), X)
    given.close()


async def test_only_the_client_that_may_moves_buffers(client: CudnnRef, other: CudnnRef) -> None:
    own, given = await client.upload(X), await exported(other, await other.upload(X))
    with pytest.raises(InvalidRequest, match="only for the pool"):
        await exported(client, own)
    with pytest.raises(InvalidRequest, match="only for the pool"):
        await imported(client, given)
    given.close()
    assert await client.ping() == 1


async def test_no_other_buffers_are_given_away(
    served: ServedSocket, mover: CudnnRef, other: CudnnRef, gpu: CudnnRef
) -> None:
    async with connect(served.path) as second:
        for ref in (await second.upload(X), await other.upload(X), await gpu.upload(X)):
            with pytest.raises(StaleBufferError):
                await exported(mover, ref)
    shared = await service_behind(mover).share_weight(X, SPEC)  # others read it, and trust its values
    with pytest.raises(InvalidRequest):
        await exported(mover, shared)


async def test_what_is_no_arena_is_refused(mover: CudnnRef) -> None:
    could_be_truncated = memory(1 << 20, 0)
    for descriptor in (could_be_truncated, memory(4096), os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)):
        given = ExportedRange(descriptor, 1 << 20, 0)
        with pytest.raises(ExecutionFailed, match="NOT_AN_ARENA"):
            await imported(mover, given)
        given.close()
    ref = await mover.upload(X)
    np.testing.assert_array_equal(await mover.download(ref), X)


def test_an_engine_cannot_write_to_what_it_maps_for_reading() -> None:
    lender, reader = Arenas(), Arenas()
    descriptor = lender.create(0, 1 << 21)
    lender.bind(0, 0, SPEC)[:] = X
    reader.map_for_reading(5, descriptor, 1 << 21)
    os.close(descriptor)
    found = reader.bind(5, 0, SPEC)
    np.testing.assert_array_equal(found, X)
    assert not found.flags.writeable
    lender.clear()
    np.testing.assert_array_equal(found, X)
    other = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    with pytest.raises(EngineFailure):
        reader.map_for_reading(6, other, 1 << 21)
    os.close(other)
    reader.clear()


async def test_a_server_without_a_descriptor_refuses_one_and_keeps_its_client(
    mover: CudnnRef, other: CudnnRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = await exported(other, await other.upload(X))
    take = Channel.take_descriptor

    def no_room(channel: Channel) -> int:
        os.close(take(channel))
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Channel, "take_descriptor", no_room)
        with pytest.raises(OutOfDescriptors):
            await imported(mover, given)
    await mover.free(await imported(mover, given))
    given.close()


async def test_a_worker_without_a_descriptor_refuses_one_and_lives(
    gpu: CudnnRef, mover: CudnnRef, other: CudnnRef
) -> None:
    worker = service_behind(gpu).worker_pid
    if worker is None:
        pytest.skip("without isolation, there is no worker")
    given, generation = await exported(other, await other.upload(X)), await mover.ping()
    soft, hard = resource.prlimit(worker, resource.RLIMIT_NOFILE)
    resource.prlimit(worker, resource.RLIMIT_NOFILE, (0, hard))
    with pytest.raises(OutOfDescriptors):
        await imported(mover, given)
    resource.prlimit(worker, resource.RLIMIT_NOFILE, (soft, hard))
    await mover.free(await imported(mover, given))
    assert await mover.ping() == generation
    given.close()


def test_what_a_process_has_no_room_to_map_is_not_called_unreadable() -> None:
    """A pool would never try again."""
    lender, reader = Arenas(), Arenas()
    descriptor = lender.create(0, 1 << 21)
    with pytest.MonkeyPatch.context() as patched:

        def no_room(*_: object, **_options: object) -> None:
            raise OSError(errno.EMFILE, "too many open files")

        patched.setattr(mmap, "mmap", no_room)
        with pytest.raises(OutOfDescriptors):
            reader.map_for_reading(0, descriptor, 1 << 21)
    reader.map_for_reading(0, descriptor, 1 << 21)
    os.close(descriptor)
    lender.clear()
    reader.clear()


async def test_a_client_without_a_descriptor_is_told_so(
    mover: CudnnRef, other: CudnnRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, send = await exported(other, await other.upload(X)), Channel.send

    def no_room(channel: Channel, frame: Any, descriptors: tuple[int, ...] = ()) -> None:
        if isinstance(frame, ImportBuffer):
            raise OSError(errno.EMFILE, "too many open files")
        send(channel, frame, descriptors)

    with monkeypatch.context() as patched:
        patched.setattr(Channel, "send", no_room)
        with pytest.raises(OutOfDescriptors):
            await imported(mover, given)
    await mover.free(await imported(mover, given))
    given.close()


@pytest.mark.parametrize("live", [True, False])
async def test_a_free_that_is_late_has_started_only_if_it_was_of_a_live_buffer(
    mover: CudnnRef, gpu: CudnnRef, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    """So a pool knows whether what it has copied was the buffer's until then."""
    ref, take = await mover.upload(X), Delivery.take_answer
    if not live:
        await gpu.free(ref)  # the client does not know

    def late(delivery: Delivery, answer: Any, bridges: Any) -> None:
        sent = sent_by(delivery)[answer.number]
        assert isinstance(sent, Sent)
        sent.envelope.timed_out = True
        take(delivery, answer, bridges)

    monkeypatch.setattr(
        Delivery, "take_answers", lambda delivery, answers, bridges: late(delivery, answers[0], bridges)
    )
    with pytest.raises(DeadlineExceeded) as late_error:
        await mover.free(ref, timeout=PATIENCE_S)
    assert late_error.value.started is live


async def test_a_client_has_so_many_at_a_time(mover: CudnnRef, other: CudnnRef) -> None:
    given = await exported(other, await other.upload(X))
    held = [await imported(mover, given) for _ in range(MOST_IMPORTS)]
    with pytest.raises(OutOfMemory, match="buffers of other services"):
        await imported(mover, given)
    await mover.free(held.pop())
    bad = ExportedRange(memory(4096), 1 << 20, 0)
    with pytest.raises(ExecutionFailed):  # it does not count
        await imported(mover, bad)
    held.append(await imported(mover, given))
    bad.close()
    given.close()
    assert (await mover.statistics()).arena_bytes == 0  # it is none of this service's memory


async def test_what_a_crash_has_ended_counts_no_more(
    gpu: CudnnRef, mover: CudnnRef, other: CudnnRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings, "MOST_IMPORTS", 1)
    given = await exported(other, await other.upload(X))
    theirs = await imported(mover, given)
    worker = service_behind(gpu).worker_pid
    if worker is not None:
        os.kill(worker, signal.SIGKILL)
        await gpu.ping()  # by the next one
        with pytest.raises(StaleBufferError):
            await mover.free(theirs)
        await mover.free(await imported(mover, given))
    given.close()


async def test_what_a_client_has_imported_ends_with_it(
    served: ServedSocket, gpu: CudnnRef, other: CudnnRef
) -> None:
    served.mover = os.getpid()
    given = await exported(other, await other.upload(X))
    async with connect(served.path) as leaving:
        await imported(leaving, given)
        assert (await gpu.statistics()).live_buffers == 1
    await eventually(lambda: _has_none(gpu))
    given.close()


async def _has_none(gpu: CudnnRef) -> bool:
    return not (await gpu.statistics()).live_buffers


async def test_imports_and_allocations_wait_for_each_other(mover: CudnnRef, other: CudnnRef) -> None:
    given = await exported(other, await other.upload(X))
    bad = ExportedRange(memory(4096), 1 << 20, 0)
    found = await asyncio.gather(
        *(
            each
            for number in range(5)
            for each in (
                mover.empty((40 << 20,), dtype="uint8"),  # each takes an arena
                imported(mover, bad if number % 2 else given),
            )
        ),
        return_exceptions=True,
    )
    assert [type(each) for each in found[1::2]] == [
        BufferRef if number % 2 == 0 else ExecutionFailed for number in range(5)
    ]
    assert all(isinstance(each, BufferRef | OutOfMemory) for each in found[::2])
    own = await mover.empty(X.shape)
    first = found[1]
    assert isinstance(first, BufferRef)
    await mover.ask(Copy(src=first, dst=own))
    np.testing.assert_array_equal(await mover.download(own), X)
    given.close()
    bad.close()


MALFORMED = {
    "no descriptor": (ImportBuffer(1, 1 << 21, 0, SPEC, None), False, "without the descriptor"),
    "numbers that fall": (ImportBuffer(0, 1 << 21, 0, SPEC, None), True, "came after"),
    "no bytes": (ImportBuffer(1, 0, 0, SPEC, None), True, "of an arena of 0 bytes"),
    "negative": (ImportBuffer(1, -(1 << 21), 0, SPEC, None), True, "of an arena"),
    "outside": (ImportBuffer(1, 1 << 21, 1 << 21, SPEC, None), True, "of an arena"),
    "before": (ImportBuffer(1, 1 << 21, -256, SPEC, None), True, "of an arena"),
    "across the end": (ImportBuffer(1, 1 << 21, (1 << 21) - 256, SPEC, None), True, "of an arena"),
    "odd": (ImportBuffer(1, 1 << 21, 8, SPEC, None), True, "of an arena"),
    "too large": (ImportBuffer(1, 1 << 60, 0, SPEC, None), True, "of an arena"),
    "a descriptor too many": (ExportBuffer(1, NOWHERE, None), True, "belong to no frame"),
}


@pytest.mark.parametrize("case", MALFORMED)
async def test_a_malformed_frame_costs_its_connection_alone(
    served: ServedSocket, mover: CudnnRef, raw: Raw, logs: list[EventDict], case: str
) -> None:
    frame, descriptor, reason = MALFORMED[case]
    await raw.send(encode(ATTACH))
    fd = memory(1 << 21)
    await raw.send(encode(frame), (fd,) if descriptor else ())
    os.close(fd)
    await raw.ended()
    (line,) = [line for line in logs if line["event"] == "client.malformed"]
    assert reason in line["reason"]
    assert await mover.ping() == 1


NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 40).map(lambda each: each << 8)


@given(arena_bytes=NUMBERS, offset=NUMBERS, dims=st.lists(st.integers(0, 1 << 12), max_size=3))
def test_whatever_numbers_come_a_buffer_lies_inside_its_arena(
    arena_bytes: int, offset: int, dims: list[int]
) -> None:
    ours, theirs = channel_pair()
    channel = Channel(ours, FROM_CLIENT)
    frame = ImportBuffer(1, arena_bytes, offset, TensorSpec.packed(dims), None)
    descriptor = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    theirs.sendmsg([encode(frame)], rights)
    os.close(descriptor)
    (came,) = channel.receive()
    assert came == frame
    try:
        message = message_of(came, channel)
    except BadFrame:
        pass
    else:
        assert isinstance(message, Import)
        memory, nbytes = message.memory, message.spec.nbytes
        assert 0 <= memory.offset < memory.offset + max(nbytes, 1) <= memory.arena_bytes <= 1 << 44
        assert not memory.offset % 256
        memory.close()
    assert not channel.unclaimed_count
    channel.close()
    theirs.close()
