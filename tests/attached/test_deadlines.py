"""A deadline says whether its request may have started: the server knows, and is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudnn_actor import CudnnRef, DeadlineExceeded, connect
from cudnn_actor.actors import envelope
from cudnn_actor.attached import serve_socket
from cudnn_actor.attached.wire import Withdraw
from cudnn_actor.messages import Free

from ..inside import sent_by, service_behind
from ..patience import PATIENCE_S
from ..service.rigs import Gate, Trio, in_thread, isolated, outcome, spawn_gated
from .client_program import X


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    monkeypatch.setattr(envelope, "_WORD_S", 60.0)  # the server's word comes first, however slow it is
    return Gate()


@pytest.fixture(params=["thread", "process"])
async def client(request: pytest.FixtureRequest, gate: Gate, tmp_path: Path) -> AsyncIterator[CudnnRef]:
    with isolated(request.param):
        async with spawn_gated(gate) as gpu, serve_socket(gpu, tmp_path / "s") as served:
            async with connect(served.path) as attached:
                yield attached


async def expire(client: CudnnRef, *, of: int, last: bool = False) -> None:
    """Have the timeout pass now of all requests, or of the last, once so many have been sent."""
    link: Any = service_behind(client).state.mailbox
    while len(sent_by(link)) < of:  # noqa: ASYNC110 - the link says nothing
        await asyncio.sleep(0)
    envelopes = [sent.envelope for sent in sent_by(link).values()]
    for each in envelopes[-1:] if last else envelopes:
        each.future.get_loop().call_soon_threadsafe(each.expire)


@pytest.mark.parametrize("way", ["ask", "submit", "another loop"])
async def test_a_deadline_says_whether_its_request_had_started(
    client: CudnnRef, gate: Gate, way: str
) -> None:
    def sent(message: Any) -> asyncio.Future[Any]:
        if way == "submit":
            return client.submit(message, timeout=PATIENCE_S)
        if way == "ask":
            return asyncio.ensure_future(client.ask(message, timeout=PATIENCE_S))
        return asyncio.ensure_future(in_thread(lambda: asyncio.run(client.ask(message, timeout=PATIENCE_S))))

    trio = await Trio.on(client)
    product, total = trio.product(), trio.sum()
    for message in (total, product):  # so that it knows them
        await client.ask(message)
    before = gate.passed
    with gate.closed():
        begun = sent(product)
        await in_thread(gate.wait_for_arrival)
        late = sent(total)
        await expire(client, of=2)
        waiting, running = await outcome(late), await outcome(begun)
    assert isinstance(waiting, DeadlineExceeded)
    assert isinstance(running, DeadlineExceeded)
    assert (waiting.started, running.started) == (False, True)
    await client.drain()
    assert gate.passed == before + 1
    assert await trio.result() == 6


@pytest.mark.parametrize("client", ["thread"], indirect=True)
async def test_a_request_in_the_servers_queue_had_not_started(client: CudnnRef, gate: Gate) -> None:
    trio = await Trio.on(client)
    with gate.closed():
        first = [client.submit(trio.product()) for _ in range(400)]  # more than the service takes at once
        await in_thread(gate.wait_for_arrival)
        late = client.submit(trio.sum(), timeout=PATIENCE_S)
        await expire(client, of=401, last=True)
        error = await outcome(late)
        assert isinstance(error, DeadlineExceeded)
        assert not error.started
    await asyncio.gather(*first)
    assert await trio.result() == 6


@pytest.mark.parametrize("client", ["thread"], indirect=True)
async def test_a_free_that_expires_in_the_servers_queue_frees_nothing(client: CudnnRef, gate: Gate) -> None:
    trio = await Trio.on(client)
    buffer = await client.upload(X)
    with gate.closed():
        first = [client.submit(trio.product()) for _ in range(400)]  # more than the service takes at once
        await in_thread(gate.wait_for_arrival)
        late = client.submit(Free(buffer=buffer), timeout=PATIENCE_S)
        await expire(client, of=401, last=True)
        error = await outcome(late)
        assert isinstance(error, DeadlineExceeded)
        assert not error.started
    await asyncio.gather(*first)
    assert np.array_equal(await client.download(buffer), X)


@pytest.fixture
def deaf(client: CudnnRef, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server hears of nothing that is withdrawn."""
    link: Any = service_behind(client).state.mailbox
    send = link._send
    monkeypatch.setattr(link, "_send", lambda frame: None if isinstance(frame, Withdraw) else send(frame))


@pytest.mark.usefixtures("deaf")
@pytest.mark.parametrize("client", ["thread"], indirect=True)
async def test_without_the_servers_word_a_request_may_have_started(
    client: CudnnRef, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envelope, "_WORD_S", 0.01)
    trio = await Trio.on(client)
    with gate.closed():
        first = client.submit(trio.product())
        await in_thread(gate.wait_for_arrival)
        late = client.submit(trio.sum(), timeout=PATIENCE_S)
        await expire(client, of=2, last=True)
        error = await outcome(late)
        assert isinstance(error, DeadlineExceeded)
        assert error.started
    await first


@pytest.mark.usefixtures("deaf")
@pytest.mark.parametrize("client", ["thread"], indirect=True)
async def test_an_answer_that_comes_before_the_word_is_the_word(client: CudnnRef, gate: Gate) -> None:
    trio = await Trio.on(client)
    with gate.closed():
        late = client.submit(trio.product(), timeout=PATIENCE_S)
        await in_thread(gate.wait_for_arrival)
        await expire(client, of=1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not late.done()
    error = await outcome(late)
    assert isinstance(error, DeadlineExceeded)
    assert error.started
