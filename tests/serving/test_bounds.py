"""What all requests together may take of an inference server."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from cudnn_actor.serving import connections, http_face
from cudnn_actor.serving.server import ServerOptions, serve

from ..loop_clock import pass_time
from ..patience import PATIENCE_S
from .servers import PLAIN, write_square

pytestmark = pytest.mark.usefixtures("forked_fronts")

MOST = 4000
HELD = 3900


def body(values: int) -> str:
    numbers = ",".join(["1.5"] * values)
    return f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":[{values // 3},3],"data":[{numbers}]}}]}}'


async def test_requests_under_way_have_no_more_bytes_than_the_server_takes(tmp_path: Path) -> None:
    options = ServerOptions(
        models={"square": write_square(tmp_path)},
        http=0,
        grpc=0,
        most_bytes=MOST,
        service={"device": "cpu", "isolation": "thread"},
    )
    async with serve(options) as server, httpx.AsyncClient(**PLAIN) as client:
        url = f"http://127.0.0.1:{server.http_port}/v2/models/square/infer"
        _, slow = await asyncio.open_connection("127.0.0.1", server.http_port)
        head = f"POST /v2/models/square/infer HTTP/1.1\r\nhost: here\r\ncontent-length: {MOST}\r\n\r\n"
        slow.write(head.encode() + b" " * HELD)
        while server.host.bytes < HELD:  # noqa: ASYNC110 - until it has come, which nothing tells
            await asyncio.sleep(0)
        refused = await client.post(url, content=body(30))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert f"{MOST:,} bytes" in refused.json()["error"]
        asked = triton.InferInput("x", [20, 3], "FP32")
        asked.set_data_from_numpy(np.ones((20, 3), np.float32))
        async with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as other:
            with pytest.raises(InferenceServerException) as raised:
                await other.infer("square", [asked])
            assert raised.value.status() == str(grpc.StatusCode.RESOURCE_EXHAUSTED)
            slow.close()
            while server.host.bytes:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert (await client.post(url, content=body(30))).json()["outputs"][0]["shape"] == [10, 3]
            np.testing.assert_array_equal((await other.infer("square", [asked])).as_numpy("y"), 1)
        assert server.host.bytes == 0


async def test_a_body_counts_as_it_is_once_it_is_decompressed(tmp_path: Path) -> None:
    options = ServerOptions(
        models={"square": write_square(tmp_path)},
        http=0,
        grpc=None,
        most_bytes=MOST,
        service={"device": "cpu", "isolation": "thread"},
    )
    async with serve(options) as server, httpx.AsyncClient(**PLAIN) as client:
        url = f"http://127.0.0.1:{server.http_port}/v2/models/square/infer"
        packed = gzip.compress(body(3 * MOST).encode())
        assert len(packed) < MOST
        found = await client.post(url, content=packed, headers={"content-encoding": "gzip"})
        assert found.status_code == 503
        assert server.host.bytes == 0


def asked(rows: int) -> list[triton.InferInput]:
    given = triton.InferInput("x", [rows, 3], "FP32")
    given.set_data_from_numpy(np.ones((rows, 3), np.float32))
    return [given]


@contextlib.asynccontextmanager
async def open_stream(client: triton.InferenceServerClient) -> AsyncIterator[None]:
    """A stream with one answer; it is a call that stays."""

    async def requests() -> AsyncIterator[dict[str, object]]:
        yield {"model_name": "square", "inputs": asked(1)}
        await asyncio.Event().wait()

    answers = client.stream_infer(requests())
    _, error = await anext(answers)
    assert error is None
    try:
        yield
    finally:
        answers.cancel()


async def answered(client: triton.InferenceServerClient) -> bool:
    """Whether it lives, once a call that has ended counts no more."""
    while True:
        try:
            return bool(await client.is_server_live())
        except InferenceServerException as error:
            assert error.status() == str(grpc.StatusCode.RESOURCE_EXHAUSTED)  # noqa: PT017


async def test_messages_and_calls_of_grpc_are_bounded(tmp_path: Path) -> None:
    """With `most_running=1`, at two calls."""
    options = ServerOptions(
        models={"square": write_square(tmp_path)},
        http=None,
        grpc=0,
        most_body=MOST,
        most_running=1,
        service={"device": "cpu", "isolation": "thread"},
    )
    async with (
        serve(options) as server,
        triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as one,
        triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as two,
        triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as three,
    ):
        fitting = MOST // 12 - 20
        assert (await one.infer("square", asked(fitting))).as_numpy("y").shape == (fitting, 3)
        with pytest.raises(InferenceServerException, match="larger than max") as raised:
            await one.infer("square", asked(MOST // 12))
        assert raised.value.status() == str(grpc.StatusCode.RESOURCE_EXHAUSTED)
        async with open_stream(one):
            async with open_stream(two):
                with pytest.raises(InferenceServerException) as raised:
                    await three.is_server_live()
                assert raised.value.status() == str(grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert await answered(three)


async def test_one_connection_of_grpc_may_have_all_that_can_be_under_way(tmp_path: Path) -> None:
    """It is one process's, of three."""
    options = ServerOptions(
        models={"square": write_square(tmp_path)},
        http=None,
        grpc=0,
        most_running=3,
        processes=3,
        service={"device": "cpu"},
    )
    async with (
        serve(options) as server,
        triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client,
        open_stream(client),
        open_stream(client),
    ):
        np.testing.assert_array_equal((await client.infer("square", asked(1))).as_numpy("y"), 1)


async def test_so_many_connections_are_answered_and_no_more(tmp_path: Path) -> None:
    most = 2
    options = ServerOptions(
        models={"square": write_square(tmp_path)},
        http=0,
        grpc=None,
        most_connections=most,
        service={"device": "cpu", "isolation": "thread"},
    )
    async with serve(options) as server, contextlib.AsyncExitStack() as stack:
        url = f"http://127.0.0.1:{server.http_port}/v2/health/live"
        clients = [await stack.enter_async_context(httpx.AsyncClient(**PLAIN)) for _ in range(most + 1)]
        assert [(await each.get(url)).status_code for each in clients] == [200] * most + [503]
        assert (await clients[0].get(url)).status_code == 200
        await clients[0].aclose()
        while (await clients[most].get(url)).status_code == 503:  # until the end of that connection is known
            pass


async def test_only_what_the_option_bounds_is_told_of_it(tmp_path: Path) -> None:
    options = ServerOptions(
        models={"square": write_square(tmp_path)},
        http=0,
        grpc=None,
        most_body=MOST,
        service={"device": "cpu", "isolation": "thread"},
    )
    async with serve(options) as server, httpx.AsyncClient(**PLAIN) as client:
        url = f"http://127.0.0.1:{server.http_port}/v2"
        for path, most, option in (
            ("/models/square/infer", MOST, True),
            ("/repository/models/square/load", 1 << 20, False),
        ):
            small = body(30) if option else "{}"
            fits = await client.post(url + path, content=small + " " * (most - len(small)))
            assert fits.status_code == 200
            found = await client.post(url + path, content=small + " " * (most + 1 - len(small)))
            assert found.status_code == 413
            assert ("--most-body" in found.json()["error"]) == option


@pytest.mark.parametrize("earlier", [0, 1, 2])
async def test_headers_that_do_not_end_close_their_connection(
    earlier: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so many whole requests."""
    options = ServerOptions(
        models={"square": write_square(tmp_path)},
        http=0,
        grpc=None,
        service={"device": "cpu", "isolation": "thread"},
    )
    head = b"GET /v2/health/live HTTP/1.1\r\nhost: here\r\n"
    async with serve(options) as server, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
        for _ in range(earlier):
            writer.write(head + b"\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(connections, "_HEADERS_S", 0.01)
        if not earlier:  # the time of the first ones begins with the connection
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
        writer.write(head)
        with contextlib.suppress(ConnectionError):  # it was closed before that
            assert await reader.read() == b""
        writer.close()


async def test_headers_that_came_behind_another_request_have_no_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing else closes the connection, such as the end of the 75 s between requests.
    monkeypatch.setattr(connections.BoundedConnection, "timeout_keep_alive_handler", lambda _: None)
    options = ServerOptions(
        models={"square": write_square(tmp_path)},
        http=0,
        grpc=None,
        service={"device": "cpu", "isolation": "thread"},
    )
    head = b"GET /v2/health/live HTTP/1.1\r\nhost: here\r\n"
    async with serve(options) as server, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
        writer.write((head + b"\r\n") * 3 + head)
        for _ in range(3):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await long_enough()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_the_rest_of_a_body_that_was_refused_has_as_much_time_as_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ServerOptions(
        models={"square": write_square(tmp_path)},
        http=0,
        grpc=None,
        most_body=MOST,
        service={"device": "cpu", "isolation": "thread"},
    )
    head = b"POST /v2/models/square/infer HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n"
    async with serve(options) as server, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
        writer.write(head % (2 * MOST))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413")
        monkeypatch.setattr(connections, "_HEADERS_S", 0.01)
        writer.write(b"{")  # the rest never comes
        with contextlib.suppress(ConnectionError):  # it was closed before that
            while await reader.read(1 << 16):
                pass
        writer.close()


async def test_a_connection_may_be_silent_between_requests_and_while_one_is_under_way(tmp_path: Path) -> None:
    """For longer than headers may take: less than 60 s for a body, and than 75 s between requests."""
    options = ServerOptions(
        models={"square": write_square(tmp_path)},
        http=0,
        grpc=None,
        service={"device": "cpu", "isolation": "thread"},
    )
    content = body(3).encode()
    head = b"POST /v2/models/square/infer HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n" % len(content)
    async with serve(options) as server, asyncio.timeout(PATIENCE_S + 200):  # of which most passes at once
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
        for _ in range(2):
            for part in (head[:9], head[9:]):
                writer.write(part)
                await writer.drain()
            while not server.host.running:  # noqa: ASYNC110 - until it has begun, which nothing tells
                await asyncio.sleep(0)
            await long_enough()
            writer.write(content)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            length = next(line for line in answer.split(b"\r\n") if line.startswith(b"content-length: "))
            await reader.readexactly(int(length.split()[1]))
            await long_enough()
        writer.close()


async def long_enough() -> None:
    """Let the time pass in which headers must arrive."""
    pass_time(connections._HEADERS_S + 1)
    for _ in range(5):  # turns in which what is due runs
        await asyncio.sleep(0)


async def test_a_body_that_does_not_end_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_face, "_BODY_S", 0.01)
    options = ServerOptions(
        models={"square": write_square(tmp_path)},
        http=0,
        grpc=None,
        service={"device": "cpu", "isolation": "thread"},
    )
    async with serve(options) as server, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
        writer.write(b"POST /v2/models/square/infer HTTP/1.1\r\nhost: here\r\ncontent-length: 9\r\n\r\n{")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400")
        assert b"the body has not come within 0 s" in await reader.readuntil(b"}")
        assert (server.host.running, server.host.bytes) == (0, 0)
        writer.close()
