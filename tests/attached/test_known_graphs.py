"""Graphs of an attached client travel once, within bounds that both sides keep."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor import CudnnRef, Graph, GraphBuilder, Loop, RunGraph, RunLoop
from cudnn_actor.attached import ServedSocket
from cudnn_actor.attached.client import link
from cudnn_actor.attached.server import received
from cudnn_actor.attached.wire import ForgetGraph, KnowGraph, Requests
from cudnn_actor.isolation import known_graphs
from cudnn_actor.processes.frames import encode

from ..inside import channel_of, service_behind, sessions_of
from .raw_client import ATTACH, Raw

DIMS = (1, 4, 8, 8)


def adding(value: float, name: str = "x") -> Graph:
    builder = GraphBuilder()
    return builder.build(y=builder.add(builder.input(name, DIMS, "float32"), value))


@pytest.fixture
def sent(client: CudnnRef, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The frames that the client sends."""
    frames: list[Any] = []
    mailbox: Any = service_behind(client).state.mailbox
    channel = channel_of(mailbox)
    send = channel.send

    def noting(frame: Any, descriptors: tuple[int, ...] = ()) -> None:
        frames.append(frame)
        send(frame, descriptors)

    monkeypatch.setattr(channel, "send", noting)
    return frames


async def test_requests_wait_for_a_frame_until_they_have_so_many_bytes(
    client: CudnnRef, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, x, y = adding(1.0), await client.empty(DIMS), await client.empty(DIMS)
    await client.ask(RunGraph.bind(graph, x=x, y=y))

    async def frames() -> int:
        runs = [RunGraph.bind(graph, x=x, y=y) for _ in range(12)]  # the server has no numbers for them yet
        sent.clear()
        await asyncio.gather(*map(client.ask, runs))
        return len(sent)

    assert await frames() < 4
    monkeypatch.setattr(link, "_GATHERED_BYTES", 0)
    assert await frames() == 12


def kinds(frames: list[Any]) -> list[str]:
    return [type(frame).__name__ for frame in frames if isinstance(frame, KnowGraph | ForgetGraph)]


async def test_a_graph_is_sent_once_however_often_it_runs(client: CudnnRef, sent: list[Any]) -> None:
    graph = adding(2.0)
    x, y = await client.upload(np.ones(DIMS, np.float32)), await client.empty(DIMS)
    z = await client.empty(DIMS)
    for target in (y, z, y):
        await client.ask(RunGraph.bind(graph, x=x, y=target))
    assert np.array_equal(await client.download(z), np.full(DIMS, 3.0))
    assert kinds(sent) == ["KnowGraph"]
    assert not [
        frame for frame in sent if isinstance(frame, Requests) and graph.encoded[:200] in encode(frame)
    ]


async def test_a_loop_names_its_body(client: CudnnRef, sent: list[Any]) -> None:
    loop = Loop(body=adding(1.0), carried={"x": "y"})
    x, y = await client.upload(np.zeros(DIMS, np.float32)), await client.empty(DIMS)
    scratch = await client.empty(loop.scratch.dims, dtype="uint8")
    for turns in (2, 5):
        await client.ask(RunLoop.bind(loop, {"x": x, "y": y}, turns=turns, scratch=scratch))
        assert np.array_equal(await client.download(y), np.full(DIMS, turns))
    assert kinds(sent) == ["KnowGraph"]


async def test_both_sides_keep_the_bounds_and_forgotten_graphs_come_again(
    client: CudnnRef, served: ServedSocket, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_graphs, "MOST_GRAPHS", 3)
    graphs = [adding(float(value)) for value in range(5)]
    x, y = await client.upload(np.zeros(DIMS, np.float32)), await client.empty(DIMS)
    (session,) = sessions_of(served)
    kept = session.received.graphs
    runs = [RunGraph.bind(graph, x=x, y=y) for graph in graphs]
    for value, run in enumerate((*runs, runs[0])):
        await client.ask(run)
        assert np.array_equal(await client.download(y), np.full(DIMS, value % 5))
        assert len(kept) <= 3
        names = {known.message.graph.identity for known in session.received.known.values()}
        assert all(identity in kept for identity in names)
    assert kinds(sent) == [*["KnowGraph"] * 3, *["KnowGraph", "ForgetGraph"] * 3]
    service_behind(client).state.forget(frozenset({graphs[0].identity}), frozenset())
    await client.ask(RunGraph.bind(graphs[1], x=x, y=y))
    assert graphs[0].identity not in kept


async def test_graphs_are_bounded_by_their_bytes_and_the_latest_stays(
    client: CudnnRef, served: ServedSocket
) -> None:
    mailbox: Any = service_behind(client).state.mailbox
    mailbox._graphs.limit_bytes = 1
    x, y = await client.upload(np.zeros(DIMS, np.float32)), await client.empty(DIMS)
    (session,) = sessions_of(served)
    for value in range(3):
        await client.ask(RunGraph.bind(adding(float(value)), x=x, y=y))
        assert len(session.received.graphs) == 1


async def test_a_client_that_ends_leaves_no_graph(client: CudnnRef, served: ServedSocket) -> None:
    x, y = await client.upload(np.zeros(DIMS, np.float32)), await client.empty(DIMS)
    await client.ask(RunGraph.bind(adding(1.0), x=x, y=y))
    (session,) = sessions_of(served)
    assert len(session.received.graphs) == 1
    session.end()
    assert len(session.received.graphs) == len(session.received.known) == 0


def know(graph: Graph, identity: str | None = None) -> bytes:
    return encode(KnowGraph(identity or graph.identity, graph.encoded))


BROKEN: dict[str, tuple[list[bytes], str]] = {
    "another identity": ([know(adding(1.0), adding(2.0).identity)], "another identity"),
    "twice": ([know(adding(1.0))] * 2, "came twice"),
    "never sent": ([encode(ForgetGraph("a"))], "no graph 'a'"),
    "too many": ([know(adding(float(value))) for value in range(4)], "3 graphs"),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_client_cannot_pass_the_bounds_or_lend_a_graph_anothers_identity(
    raw: Raw, client: CudnnRef, logs: list[EventDict], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(received, "MOST_GRAPHS", 2)
    frames, reason = BROKEN[case]
    await raw.send(encode(ATTACH))
    for frame in frames:
        await raw.send(frame)
    await raw.ended()
    assert [reason in line["reason"] for line in logs if line["event"] == "client.malformed"] == [True]
    assert await client.ping() == 1
