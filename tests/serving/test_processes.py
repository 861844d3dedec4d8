"""Several processes that serve in front of one service: to a client, they are one server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import tritonclient.grpc.aio as triton

from cudnn_actor.errors import InvalidRequest, StartFailed
from cudnn_actor.serving.model_settings import Batching
from cudnn_actor.serving.server import InferenceServer, ServerOptions, serve, serve_with

from ..service.rigs import Gate, in_thread, spawn_gated
from .servers import PLAIN, until, write_square

pytestmark = pytest.mark.usefixtures("forked_fronts")

INFER = "/v2/models/square/infer"
REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
CONNECTIONS = 16
"""Of so many connections, it is all but certain that each of two processes has one."""


def options_for(folder: Path, **options: Any) -> ServerOptions:
    chosen = {"http": 0, "grpc": None, "models": {"square": write_square(folder)}, "processes": 2, **options}
    return ServerOptions(**chosen)


@contextlib.asynccontextmanager
async def connections(server: InferenceServer, **options: Any) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Clients with a connection each, which are open."""
    base = f"http://127.0.0.1:{server.http_port}"
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=base, **PLAIN, **options))
            for _ in range(CONNECTIONS)
        ]
        for client in clients:
            await client.get("/v2/health/live")
        yield clients


async def everywhere(clients: Sequence[httpx.AsyncClient], path: str, **json: Any) -> list[httpx.Response]:
    """The answers that each connection gets: to a GET, or, with `json`, to a POST."""
    if not json:
        return [await client.get(path) for client in clients]
    return [await client.post(path, json=json) for client in clients]


def statuses(answers: Sequence[httpx.Response]) -> set[int]:
    return {answer.status_code for answer in answers}


@pytest.fixture
def shared() -> Iterator[Path]:
    """A file of shared memory with the numbers 3, 4 and 5."""
    path = Path(f"/dev/shm/cudnn_actor_test_{os.getpid()}")
    path.write_bytes(np.array([3, 4, 5], np.float32).tobytes())
    yield path
    path.unlink(missing_ok=True)


PLACE = {"shared_memory_region": "here", "shared_memory_byte_size": 12}
BY_REGION = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "parameters": PLACE}]}
REGION = "/v2/systemsharedmemory/region/here"


async def register(client: httpx.AsyncClient, shared: Path) -> None:
    """Register the file as the region, and remove it: the server has it open, and needs its name no more."""
    made = await client.post(f"{REGION}/register", json={"key": shared.name, "byte_size": 12})
    assert made.status_code == 200, made.text
    await in_thread(shared.unlink)


async def test_each_process_knows_at_once_what_another_was_told(tmp_path: Path, shared: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text("secret\n")
    headers = {"authorization": "Bearer secret"}
    options = options_for(tmp_path, batch=Batching(max=4), token_file=tokens, service={"device": "cpu"})
    async with serve(options) as server, connections(server, headers=headers) as clients:
        assert len(server.processes) == 2
        assert statuses(await everywhere(clients, "/v2/health/ready")) == {200}
        found = await everywhere(clients, INFER, **REQUEST)
        assert [each.json()["outputs"][0]["data"] for each in found] == [[1, 4, 9]] * CONNECTIONS
        # The counters are those of all processes, and say the same whichever is asked.
        for each in await everywhere(clients, "/v2/models/square/stats"):
            (stats,) = each.json()["model_stats"]
            assert stats["inference_stats"]["success"]["count"] == stats["inference_count"] == CONNECTIONS
        refused = await everywhere(clients, INFER, inputs=[])
        assert statuses(refused) == {400}
        for each in await everywhere(clients, "/v2/models/stats"):
            assert each.json()["model_stats"][0]["inference_stats"]["fail"]["count"] == CONNECTIONS
        metrics = {each.text for each in await everywhere(clients, "/metrics")}
        assert len(metrics) <= 2  # but for what has changed meanwhile
        # A region.
        await register(clients[0], shared)
        found = await everywhere(clients, INFER, **BY_REGION)
        assert [each.json()["outputs"][0]["data"] for each in found] == [[9, 16, 25]] * CONNECTIONS
        assert statuses(await everywhere(clients, f"{REGION}/status")) == {200}
        await clients[-1].post(f"{REGION}/unregister")
        assert statuses(await everywhere(clients, INFER, **BY_REGION)) == {400}
        # A model.
        assert (await clients[1].post("/v2/repository/models/square/unload")).status_code == 200
        assert statuses(await everywhere(clients, INFER, **REQUEST)) == {404}
        index = await clients[2].post("/v2/repository/index")
        assert (index.json()[0]["state"], index.json()[0]["reason"]) == ("UNAVAILABLE", "unloaded")
        assert (await clients[3].post("/v2/repository/models/none/load")).status_code == 404
        assert (await clients[4].post("/v2/repository/models/square/load")).status_code == 200
        assert statuses(await everywhere(clients, INFER, **REQUEST)) == {200}
        # A token.
        for client in clients:
            del client.headers["authorization"]
        assert statuses(await everywhere(clients, "/v2")) == {401}


async def answer_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether a request is answered on a connection."""
    body = msgspec.json.encode(REQUEST)
    head = f"POST {INFER} HTTP/1.1\r\nhost: here\r\ncontent-length: {len(body)}\r\n\r\n"
    try:
        writer.write(head.encode() + body)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        found = await reader.readuntil(b"}]}")
        assert b"[1.0,4.0,9.0]" in found
    except (ConnectionError, asyncio.IncompleteReadError):
        return False
    return True


async def test_a_killed_process_ends_its_own_connections_and_is_replaced(
    tmp_path: Path, shared: Path
) -> None:
    options = options_for(tmp_path, grpc=0, service={"device": "cpu", "isolation": "process"})
    async with serve(options) as server, connections(server) as clients:
        await register(clients[0], shared)
        first, second = server.processes
        opened = [await asyncio.open_connection("127.0.0.1", server.http_port) for _ in range(CONNECTIONS)]
        assert all([await answer_on(*each) for each in opened])
        os.kill(first, signal.SIGKILL)
        await until(lambda: first not in server.processes)
        answered = [await answer_on(*each) for each in opened]
        assert 0 < sum(answered) < CONNECTIONS
        for _, writer in opened:
            writer.close()
        await until(lambda: len(server.processes) == 2)
        assert second in server.processes
        assert first not in server.processes
        assert server.gpu.health().generation == 1
        async with connections(server) as others:  # the new one has all that the old one had
            found = await everywhere(others, INFER, **BY_REGION)
            assert [each.json()["outputs"][0]["data"] for each in found] == [[9, 16, 25]] * CONNECTIONS
        # A worker that dies costs time.
        assert server.gpu.worker_pid is not None
        os.kill(server.gpu.worker_pid, signal.SIGKILL)
        assert statuses(await everywhere(clients, INFER, **REQUEST)) == {200}
        async with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
            rows = triton.InferInput("x", [1, 3], "FP32")
            rows.set_data_from_numpy(np.full((1, 3), 2, np.float32))
            np.testing.assert_array_equal((await client.infer("square", [rows])).as_numpy("y"), 4)
            assert await client.is_server_ready()


async def test_bounds_hold_for_all_processes_and_what_runs_finishes(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        spawn_gated(gate) as gpu,
        serve_with(gpu, options_for(tmp_path, most_running=1)) as server,
        connections(server) as (asker, *clients),
    ):
        with gate.closed():
            running = asyncio.ensure_future(asker.post(INFER, json=REQUEST))
            await in_thread(gate.wait_for_arrival)
            answers = await everywhere(clients, INFER, **REQUEST)
            assert statuses(answers) == {503}
            assert {answer.headers["retry-after"] for answer in answers} == {"1"}
            assert (await clients[0].post("/v2/repository/models/square/unload")).status_code == 200
            assert statuses(await everywhere(clients, "/v2/models/square")) == {404}
        assert (await running).json()["outputs"][0]["data"] == [1, 4, 9]
        assert (await clients[1].post("/v2/repository/models/square/load")).status_code == 200
        assert statuses(await everywhere(clients, INFER, **REQUEST)) == {200}  # its place is free again
        with gate.closed():
            lost = asyncio.ensure_future(asker.post(INFER, json=REQUEST))
            await in_thread(gate.wait_for_arrival)
            for each in (before := server.processes):
                os.kill(each, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                await lost
            await until(lambda: len(server.processes) == 2 and not {*before} & {*server.processes})
        # And so is that of what has ended with its process.
        async with connections(server) as others:
            assert statuses(await everywhere(others, INFER, **REQUEST)) == {200}


async def test_what_cannot_be_had_is_refused_by_name_at_the_start(tmp_path: Path) -> None:
    service = {"device": "cpu"}
    for none in (0, -1):
        with pytest.raises(InvalidRequest, match="processes"):
            async with serve(options_for(tmp_path, processes=none, service=service)):
                pass
    with pytest.raises(InvalidRequest, match=r"spans.*2 serving processes"):
        async with serve(options_for(tmp_path, spans=1.0, service=service)):
            pass
    async with serve(options_for(tmp_path, processes=1, service=service)) as server:
        taken = options_for(tmp_path, http=server.http_port, service=service)
        with pytest.raises(OSError, match=r"[Aa]ddress already in use"):
            async with serve(taken):
                pass
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("no certificate\n")
    with pytest.raises((OSError, StartFailed)):
        async with serve(options_for(tmp_path, certificate=nothing, key=nothing, service=service)):
            pass
