"""What comes of an exception that nobody foresaw in the server: its client gets an error, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor import CudnnActorError, CudnnRef, OutOfMemory, Receipt, ServiceStopped, connect
from cudnn_actor.actors.threads import ThreadRefused
from cudnn_actor.attached import ServedSocket
from cudnn_actor.attached.server import array_answers, failures, sending
from cudnn_actor.attached.wire import Refused, Request, Requests, WireArray
from cudnn_actor.messages import Fill, Ping
from cudnn_actor.processes import frames
from cudnn_actor.processes.frames import BadFrame, encode
from cudnn_actor.protocol.messages.codec import encode_message
from tests.service.rigs import Trio

from ..inside import sessions_of
from ..patience import PATIENCE_S
from ..whole import WHOLE
from .raw_client import ATTACH, Asking, Raw

_SERVER = "/cudnn_actor/attached/server/"
_ROWS = np.ones((1, 1, 64, 96), np.float32)  # an answer of it does not travel in the frame


class _UnforeseenError(Exception):
    """What nobody foresaw."""


class _Entries:
    """Counts the entries into the server's functions, and raises in one of them.

    Not in those that asyncio calls: what is raised before their first instruction, no function can catch.
    """

    def __init__(self, wrong: int) -> None:
        self._left = wrong
        self.place = ""

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or _SERVER not in code.co_filename or caller is None:
            return
        if "/cudnn_actor/" not in caller.f_code.co_filename:
            return
        self._left -= 1
        if self._left == 0:
            self.place = code.co_qualname
            raise _UnforeseenError(self.place)


@contextlib.contextmanager
def _entries(wrong: int) -> Iterator[_Entries]:
    entries, before = _Entries(wrong), sys.gettrace()
    sys.settrace(entries)
    try:
        yield entries
    finally:
        sys.settrace(before)


_REQUESTS: dict[str, Callable[[CudnnRef, Trio, Any], Any]] = {
    "a plan": lambda client, trio, _: client.ask(trio.product()),
    "plans": lambda client, trio, _: asyncio.gather(*[client.ask(trio.product()) for _ in range(3)]),
    "an upload": lambda client, _trio, _: client.upload(_ROWS),
    "a download": lambda client, _, rows: client.download(rows),
    "a short download": lambda client, trio, _: client.download(trio.y),
    "a free": lambda client, _, rows: client.free(rows),
    "a drain": lambda client, trio, _: asyncio.gather(client.ask(trio.product()), client.drain()),
}


@pytest.fixture
async def quiet() -> None:
    """asyncio may be told what a callback has raised."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("request_", _REQUESTS.values(), ids=_REQUESTS)
async def test_an_exception_anywhere_in_the_server_is_its_clients_error_and_leaves_fair_share(
    served: ServedSocket, gpu: CudnnRef, request_: Callable[[CudnnRef, Trio, Any], Any]
) -> None:
    async with connect(served.path) as bystander:
        others = await Trio.on(bystander)
        for wrong in itertools.count(1, 1 if WHOLE else 3):
            async with connect(served.path) as client:
                trio, rows = await Trio.on(client), await client.upload(_ROWS)
                await client.ask(trio.product())
                asking = asyncio.ensure_future(request_(client, trio, rows))
                with _entries(wrong) as entries:
                    await asyncio.wait([asking], timeout=PATIENCE_S)
                place = entries.place
                assert asking.done(), place
                error = asking.exception()
                assert error is None or isinstance(error, CudnnActorError), place
                await gpu.drain()
                await asyncio.sleep(0)
                share = served.share
                assert (share.waits, share.has_one, share.outstanding_us) == (False, False, 0.0), place
                assert not any(session.asked for session in sessions_of(served)), place
                assert isinstance(await bystander.ask(others.product()), Receipt), place
            if not place:
                break
            await gpu.drain()
            assert (await gpu.statistics()).live_buffers == 3, place
        assert wrong > 10, "the server's functions were not traced"


def _without_memory(*_: object) -> bytes:
    raise MemoryError


async def _plans(client: CudnnRef, trio: Trio, count: int) -> list[Any]:
    return await asyncio.gather(*[client.ask(trio.product()) for _ in range(count)], return_exceptions=True)


@pytest.mark.parametrize("error", [MemoryError(), BadFrame("a frame is too long"), OverflowError()])
async def test_answers_that_cannot_be_encoded_together_are_sent_one_by_one(
    client: CudnnRef, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    trio = await Trio.on(client)

    def together(_: object) -> bytes:
        raise error

    monkeypatch.setattr(sending, "encode", together)
    for count in (1, 5):
        assert all(isinstance(each, Receipt) for each in await _plans(client, trio, count))
    assert (await client.download(trio.y)).item() == 6.0


@pytest.mark.parametrize(
    ("error", "told"),
    [(MemoryError(), OutOfMemory), (BadFrame("a frame is too long"), CudnnActorError)],
)
async def test_an_answer_that_cannot_be_encoded_is_an_error_and_the_client_goes_on(
    client: CudnnRef, monkeypatch: pytest.MonkeyPatch, error: Exception, told: type[Exception]
) -> None:
    trio = await Trio.on(client)

    def all_but_errors(frame: Any) -> bytes:
        if all(isinstance(each, Refused) for each in frame.answers):
            return frames.encode(frame)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(sending, "encode", all_but_errors)
        patch.setattr(failures, "encode", all_but_errors)
        for count in (1, 5):
            answers = await _plans(client, trio, count)
            assert [type(each) for each in answers] == [told] * count
    assert isinstance(await client.ask(trio.product()), Receipt)


async def test_a_server_without_memory_for_any_answer_ends_the_session(
    served: ServedSocket, client: CudnnRef, gpu: CudnnRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    trio = await Trio.on(client)
    monkeypatch.setattr(sending, "encode", _without_memory)
    monkeypatch.setattr(failures, "encode", _without_memory)
    assert all(isinstance(each, ServiceStopped) for each in await _plans(client, trio, 5))
    await gpu.drain()
    assert (served.clients, served.share.has_one) == (0, False)
    assert (await gpu.statistics()).live_buffers == 0


async def test_requests_behind_one_with_which_the_session_ends_are_not_taken(
    served: ServedSocket, gpu: CudnnRef, monkeypatch: pytest.MonkeyPatch, logs: list[EventDict]
) -> None:
    raw = Raw(served.path)
    asking = Asking(raw)
    await raw.send(encode(ATTACH))
    ref = await asking.allocate()
    bodies = (b"no message", encode_message(Fill(dst=ref, value=1.0)), encode_message(Ping()))
    with monkeypatch.context() as patch:
        patch.setattr(sending, "encode", _without_memory)
        patch.setattr(failures, "encode", _without_memory)
        await raw.send(encode(Requests(2, [Request(body) for body in bodies])))
        await raw.ended()
    raw.socket.close()
    await gpu.drain()
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["client.failed"]
    assert (served.clients, served.share.has_one) == (0, False)
    assert "Ping" not in {each.operation for each in gpu.metrics().requests}


@pytest.mark.parametrize("rows", [1, 64, 4096])
async def test_arrays_that_cannot_be_copied_to_the_client_are_its_error(
    client: CudnnRef, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    values = np.ones((1, 1, rows, 128), np.float32)  # in the frame, copied on the loop, copied by a thread
    ref = await client.upload(values)
    await client.download(ref)
    with monkeypatch.context() as patch:
        patch.setattr(WireArray, "of", classmethod(_without_memory))
        with pytest.raises(OutOfMemory):
            await client.download(ref)
    assert np.array_equal(await client.download(ref), values)


async def test_arrays_for_which_no_thread_can_be_started_are_the_clients_error(
    client: CudnnRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.ones((1, 1, 4096, 128), np.float32)
    ref = await client.upload(values)

    async def refused(*_: object) -> None:
        raise ThreadRefused("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(array_answers, "in_own_thread", refused)
        with pytest.raises(CudnnActorError, match="start new thread"):
            await client.download(ref)
    assert np.array_equal(await client.download(ref), values)


async def test_a_frame_to_all_clients_that_one_cannot_be_sent_reaches_the_others(
    served: ServedSocket, gpu: CudnnRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(served.path) as first, connect(served.path) as second:
        (session, _) = sorted(sessions_of(served), key=lambda each: each.channel.fileno())
        monkeypatch.setattr(session.channel, "send", _without_memory)
        served.lend("none", None)
        with pytest.raises(ServiceStopped):
            await first.ask(Ping())
        assert await second.ping() == 1
