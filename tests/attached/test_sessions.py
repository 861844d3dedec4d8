"""What a server does with one client: its order, its end, its bounds, and what nobody foresaw."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import socket
import threading
from typing import Any

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor import (
    ConvFwd,
    ConvSpec,
    CudnnActorError,
    CudnnRef,
    InvalidRequest,
    OutOfMemory,
    ServiceStopped,
    StaleBufferError,
    connect,
)
from cudnn_actor.attached import ServedSocket
from cudnn_actor.attached.client import connecting
from cudnn_actor.attached.client.outgoing import ShareWeights
from cudnn_actor.attached.server import array_answers, copies, received, serving, session
from cudnn_actor.attached.server.asked import Asked
from cudnn_actor.attached.wire import (
    Done,
    Dropped,
    Given,
    NeedsRoom,
    Refused,
    Request,
    Requests,
    Room,
    digest_of,
)
from cudnn_actor.errors import StaleReason, StartFailed
from cudnn_actor.messages import Download, Free
from cudnn_actor.processes.frames import encode
from cudnn_actor.protocol.messages.codec import encode_message
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec

from ..inside import service_behind
from .client_program import X
from .raw_client import ATTACH, Asking, Raw

SPEC = TensorSpec.packed((1, 1, 256, 256), DType.FLOAT32, Layout.NCHW)


@pytest.fixture
async def asking(served: ServedSocket) -> Any:
    raw = Raw(served.path)
    await raw.send(encode(ATTACH))
    yield Asking(raw)
    raw.socket.close()


@pytest.mark.parametrize(("module", "step"), [(session, "check_message"), (received, "references")])
async def test_an_unforeseen_exception_is_the_answer_to_its_request(
    client: CudnnRef, logs: list[EventDict], monkeypatch: pytest.MonkeyPatch, module: Any, step: str
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("nobody foresaw this")

    with monkeypatch.context() as patch:
        patch.setattr(module, step, fails)
        with pytest.raises(CudnnActorError, match="nobody foresaw this"):
            await client.empty((1, 1, 3, 5))
    lines = [(line["event"], line["message"]) for line in logs if line["log_level"] == "error"]
    assert lines == [("request.failed", "Allocate")]
    assert await client.ping() == 1


async def test_another_users_process_is_refused_by_either_side(
    served: ServedSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = os.geteuid() + 1
    for module, error in ((serving, InvalidRequest), (connecting, StartFailed)):
        with monkeypatch.context() as patch:
            patch.setattr(module, "peer_of", lambda _: (1, stranger))
            with pytest.raises(error, match=f"user {stranger}"):
                await connect(served.path)
    async with connect(served.path) as client:
        assert await client.ping() == 1


async def test_the_requests_of_a_client_run_in_its_order(client: CudnnRef) -> None:
    y = await client.empty((1, 1, 2, 2))
    asked: list[asyncio.Future[Any]] = []
    for value in range(40):
        asked.append(asyncio.ensure_future(client.fill(y, value)))
        asked.append(asyncio.ensure_future(client.download(y)))
    found = (await asyncio.gather(*asked))[1::2]
    assert [int(array[0, 0, 0, 0]) for array in found] == list(range(40))


async def test_a_plan_does_not_overtake_what_waits_in_the_mailbox(client: CudnnRef) -> None:
    x, y = await client.empty((1, 1, 1, 1)), await client.empty((1, 1, 1, 1))
    w = await client.upload(np.ones((1, 1, 1, 1), np.float32))
    conv = ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))
    asked: list[asyncio.Future[Any]] = []
    for value in range(40):
        requests = (client.fill(x, value), client.ask(conv), client.fill(x, -1.0), client.download(y))
        asked.extend(map(asyncio.ensure_future, requests))
    found = (await asyncio.gather(*asked))[3::4]
    assert [int(array[0, 0, 0, 0]) for array in found] == list(range(40))


async def test_what_follows_a_stop_in_the_mailbox_is_answered(client: CudnnRef) -> None:
    x = await client.empty((1, 1, 1, 1))
    client.actor_ref.stop(block=False)
    with pytest.raises(ServiceStopped):
        await client.fill(x, 1.0)


async def test_a_message_that_ran_is_refused_once_the_client_has_freed_its_buffer(asking: Asking) -> None:
    one = TensorSpec.packed((1, 1, 1, 1), DType.FLOAT32, Layout.NCHW)
    x, w, y = [await asking.allocate(one) for _ in range(3)]
    conv = ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))
    for _ in range(2):
        assert isinstance(await asking.ask(conv), Done)
    assert isinstance(await asking.ask(Free(buffer=x)), Given)
    answer = await asking.ask(conv)
    assert isinstance(answer, Refused)
    error = answer.error.to_error()
    assert isinstance(error, StaleBufferError)
    assert error.reason is StaleReason.FOREIGN


async def test_a_client_that_dies_frees_what_it_held_within_three_turns_of_the_loop(
    asking: Asking, served: ServedSocket, gpu: CudnnRef
) -> None:
    await asking.allocate()
    assert (await gpu.statistics()).live_buffers == 1
    asking.raw.socket.close()
    for _ in range(3):
        await asyncio.sleep(0)
    assert served.clients == 0
    await gpu.drain()  # it comes after what the server has sent
    assert (await gpu.statistics()).live_buffers == 0


async def test_a_loop_that_stays_awake_reads_nothing_of_a_client_that_does_not_read(
    served: ServedSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[session.Session] = []

    def noted(*facts: Any) -> session.Session:
        sessions.append(session.Session(*facts))
        return sessions[-1]

    monkeypatch.setattr(serving, "Session", noted)
    raw = Raw(served.path)
    await raw.send(encode(ATTACH))
    asking = Asking(raw)
    page = TensorSpec.packed((1, 1, 64, 64), DType.FLOAT32, Layout.NCHW)
    body = encode_message(Download(src=await asking.allocate(page)))  # the answer travels in the frame
    (of_client,) = sessions
    last = asking.last
    while not of_client.channel.backed_up:
        last += 1
        await raw.send(encode(Requests(last, [Request(body)])))
        while of_client.asked:  # noqa: ASYNC110 - nothing tells when the session has answered
            await asyncio.sleep(0)
        await asyncio.sleep(0)
    await raw.send(encode(Requests(last + 1, [Request(body)])))
    assert not of_client.look()
    assert not of_client.asked
    raw.socket.close()


async def test_answers_that_wait_for_room_are_bounded_by_their_bytes(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_answers, "_MOST_UNPLACED", 2 * SPEC.nbytes)
    download = Download(src=await asking.allocate())
    for _ in range(2):
        assert await asking.ask(download) == NeedsRoom(asking.last, SPEC.nbytes)
    refused = await asking.ask(download)
    assert isinstance(refused, Refused)
    assert isinstance(refused.error.to_error(), OutOfMemory)
    await asking.raw.send(encode(Room(2, None, 0)))
    assert isinstance(await asking.answer(), Dropped)
    assert isinstance(await asking.ask(download), NeedsRoom)


@pytest.mark.parametrize(("rows", "on_the_loop"), [(8, True), (1024, False)])
async def test_the_digest_of_large_weights_is_checked_beside_the_loop(
    client: CudnnRef, monkeypatch: pytest.MonkeyPatch, rows: int, on_the_loop: bool
) -> None:
    threads = []

    def noted(values: np.ndarray) -> str:
        threads.append(threading.current_thread())
        return digest_of(values)

    monkeypatch.setattr(copies, "digest_of", noted)
    values = np.arange(rows * 512, dtype=np.float32).reshape(1, 1, rows, 512)
    spec = TensorSpec.packed(values.shape, DType.FLOAT32, Layout.NCHW)
    service: Any = service_behind(client)
    ref, _ = await asyncio.gather(service.share_weight(values, spec), client.upload(X))
    assert np.array_equal(await client.download(ref), values)
    with pytest.raises(InvalidRequest, match="digest"):
        await service._ask_to_share(ShareWeights(spec, "0" * 64, values))
    await client.drain()
    assert [thread is threading.current_thread() for thread in threads] == [on_the_loop] * 2


class _NoDescriptors:
    """A listening socket whose process has no descriptor left, until `some` says otherwise."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.some = False
        self.asked = 0

    def accept(self) -> Any:
        self.asked += 1
        if not self.some:
            raise OSError(errno.EMFILE, "too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


async def test_without_descriptors_a_client_waits_and_the_loop_does_not_spin(served: ServedSocket) -> None:
    listener = _NoDescriptors(served._listener)
    served._listener = listener  # type: ignore[assignment]
    attaching = asyncio.ensure_future(connect(served.path)._attach())
    while not listener.asked:  # noqa: ASYNC110 - until the socket is readable
        await asyncio.sleep(0)
    for _ in range(200):
        await asyncio.sleep(0)
    assert listener.asked < 20  # once for each look, and not for each turn of the loop
    listener.some = True
    async with contextlib.aclosing(await attaching) as client:
        assert client.ready


async def test_an_answered_request_is_freed_without_the_garbage_collector(client: CudnnRef) -> None:
    x = await client.upload(np.ones((1, 1, 1, 1), np.float32))
    y = await client.empty((1, 1, 1, 1))
    conv = ConvFwd(x=x, w=x, y=y, conv=ConvSpec.symmetric(2))
    gc.collect()
    gc.disable()
    try:
        await asyncio.gather(*[client.ask(conv) for _ in range(20)])
        await client.drain()
        left = [each for each in gc.get_objects() if isinstance(each, Asked)]
    finally:
        gc.enable()
    assert len(left) <= 1  # the drain itself
