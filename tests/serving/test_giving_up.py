"""Clients that go away: what has not started is withdrawn, over HTTP, gRPC and streams of gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tritonclient.grpc.aio as triton

from cudnn_actor.serving.server import InferenceServer, ServerOptions, serve_with

from ..service.rigs import Gate, in_thread, spawn_gated
from .servers import until, write_square

AHEAD = 64
"""How many requests of a stream wait for their turn to be answered."""
ROWS = np.ones((2, 3), np.float32)
DATA = [1.0] * ROWS.size
BODY = msgspec.json.encode(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": list(ROWS.shape), "data": DATA}]}
)


def asked() -> list[triton.InferInput]:
    given = triton.InferInput("x", ROWS.shape, "FP32")
    given.set_data_from_numpy(ROWS)
    return [given]


@contextlib.asynccontextmanager
async def by_http(server: InferenceServer) -> AsyncIterator[None]:
    """An inference that has been sent; at the end its client closes the connection."""
    _, connection = await asyncio.open_connection("127.0.0.1", server.http_port)
    head = f"POST /v2/models/square/infer HTTP/1.1\r\nhost: here\r\ncontent-length: {len(BODY)}\r\n\r\n"
    connection.write(head.encode() + BODY)
    try:
        yield
    finally:
        connection.close()
        await connection.wait_closed()


@contextlib.asynccontextmanager
async def by_grpc(server: InferenceServer) -> AsyncIterator[None]:
    """An inference that has been sent; at the end its client cancels the call."""
    async with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        call = asyncio.ensure_future(client.infer("square", asked()))
        try:
            yield
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)


@contextlib.asynccontextmanager
async def by_stream(server: InferenceServer) -> AsyncIterator[None]:
    """An inference that has been sent on a stream; at the end its client cancels the stream."""

    async def requests() -> AsyncIterator[dict[str, object]]:
        yield {"model_name": "square", "inputs": asked()}
        await asyncio.Event().wait()

    async with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        answers = client.stream_infer(requests())
        first = asyncio.ensure_future(anext(answers))
        try:
            yield
        finally:
            answers.cancel()
            await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize("way", [by_http, by_grpc, by_stream])
async def test_a_run_that_has_not_started_is_withdrawn_when_its_client_goes(
    way: Callable[[InferenceServer], contextlib.AbstractAsyncContextManager[None]], tmp_path: Path
) -> None:
    gate = Gate()
    options = ServerOptions(
        models={"square": write_square(tmp_path)}, http=0, grpc=None if way is by_http else 0
    )
    async with spawn_gated(gate) as gpu, serve_with(gpu, options) as server:
        _, served = server.host.catalog.find("square")
        with gate.closed():
            first = asyncio.ensure_future(served.run({"x": ROWS}, None))
            await in_thread(gate.wait_for_arrival)
            before = gpu.metrics()
            async with way(server):
                await until(lambda: gpu.metrics().queued > before.queued)
            await until(lambda: server.host.running == 0)
        np.testing.assert_array_equal((await first)["y"], ROWS)
        await gpu.drain()
        assert (gpu.metrics().withdrawn, gate.passed) == (1, 1)


async def test_a_full_stream_ends_when_its_client_goes(tmp_path: Path) -> None:
    """It has more requests than run at a time. Its end leaves room for other calls."""
    gate = Gate()
    options = ServerOptions(models={"square": write_square(tmp_path)}, http=None, grpc=0, most_running=1000)
    async with spawn_gated(gate) as gpu, serve_with(gpu, options) as server:

        async def requests() -> AsyncIterator[dict[str, object]]:
            for _ in range(2 * AHEAD):
                yield {"model_name": "square", "inputs": asked()}
            await asyncio.Event().wait()

        def streams() -> list[asyncio.Task[object]]:
            return [each for each in asyncio.all_tasks() if "_GrpcFace._stream" in repr(each.get_coro())]

        async with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
            with gate.closed():
                answers = client.stream_infer(requests())
                first = asyncio.ensure_future(anext(answers))
                # One is to be answered, `AHEAD` wait for that, and one waits for room among them.
                await until(lambda: server.host.running == AHEAD + 2)
                assert streams()
                answers.cancel()
                await asyncio.gather(first, return_exceptions=True)
                await until(lambda: not streams())
