"""Clients of one way in, in a process of their own: what `benchmarks.serving` starts.

    python -m benchmarks.serving_clients JSON

It says that it is ready. For each line with a number of seconds that it is given, it asks for so long, and
answers with a line of JSON: requests a second, and the milliseconds of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np
import onnx
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http
from onnx.helper import tensor_dtype_to_np_dtype
from tritonclient.utils import np_to_triton_dtype, shared_memory

from cudnn_actor import CudnnRef, connect, spawn
from cudnn_actor.cli.throughput import timed_runs

__all__ = ["WAYS", "Job", "main"]

REGION = f"cudnn_actor_benchmark_{os.getpid()}"
_MOST_CONNECTIONS = 1000


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of clients does.

    Parameters
    ----------
    way
        One of `WAYS`.
    address
        Of the server: host and port, or the path of a socket.
    path
        The model's file.
    clients
        How many requests are under way.
    device, dtype
        For a service of its own; `dtype` also for one that it attaches to.
    max_batch, max_delay_us
        How samples are put together where this process does that.
    connections
        Of gRPC, over which it sends its requests in turn.
    """

    way: str
    address: str
    path: str
    clients: int
    device: str
    dtype: Literal["bfloat16", "float16", "float32"] | None
    max_batch: int
    max_delay_us: float
    connections: int = 1


Call = Callable[[], Awaitable[object]]


def picture_of(path: str) -> tuple[str, np.ndarray]:
    """The name of a model's input, and one sample of random values for it."""
    given = onnx.load(path, load_external_data=False).graph.input[0]
    kind = given.type.tensor_type
    dims = [1, *(dim.dim_value for dim in kind.shape.dim[1:])]
    values = np.random.default_rng(0).standard_normal(dims)
    return given.name, values.astype(tensor_dtype_to_np_dtype(kind.elem_type))


@contextlib.asynccontextmanager
async def _batched(gpu: CudnnRef, model: str, job: Job) -> AsyncIterator[Call]:
    name, picture = picture_of(job.path)
    async with (
        await gpu.load(model, dtype=job.dtype) as loaded,
        gpu.batched(loaded, max_batch=job.max_batch, max_delay_us=job.max_delay_us) as endpoint,
    ):
        yield lambda: endpoint({name: picture})


@contextlib.asynccontextmanager
async def in_process(job: Job) -> AsyncIterator[Call]:
    async with spawn(device=job.device, isolation="process") as gpu, _batched(gpu, job.path, job) as call:
        yield call


@contextlib.asynccontextmanager
async def attached(job: Job) -> AsyncIterator[Call]:
    async with connect(job.address) as gpu, _batched(gpu, "model", job) as call:
        yield call


@contextlib.asynccontextmanager
async def over_http(job: Job) -> AsyncIterator[Call]:
    async with triton_http.InferenceServerClient(job.address, conn_limit=_MOST_CONNECTIONS) as client:
        given = _input(triton_http, job)
        yield lambda: client.infer("model", [given])


@contextlib.asynccontextmanager
async def over_grpc(job: Job) -> AsyncIterator[Call]:
    async with _grpc_clients(job) as clients:
        given, turns = _input(triton_grpc, job), itertools.cycle(clients)
        yield lambda: next(turns).infer("model", [given])


@contextlib.asynccontextmanager
async def _grpc_clients(job: Job) -> AsyncIterator[list[Any]]:
    """Clients of gRPC, with a connection each: without that option, all of a process share one."""
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with contextlib.AsyncExitStack() as stack:
        made = [
            triton_grpc.InferenceServerClient(job.address, channel_args=own) for _ in range(job.connections)
        ]
        yield [await stack.enter_async_context(each) for each in made]


@contextlib.asynccontextmanager
async def in_shared_memory(job: Job) -> AsyncIterator[Call]:
    name, picture = picture_of(job.path)
    region = shared_memory.create_shared_memory_region(REGION, REGION, picture.nbytes)
    try:
        shared_memory.set_shared_memory_region(region, [picture])
        async with _grpc_clients(job) as clients:
            (client, *_), turns = clients, itertools.cycle(clients)
            await client.register_system_shared_memory(REGION, REGION, picture.nbytes)
            given = triton_grpc.InferInput(name, picture.shape, np_to_triton_dtype(picture.dtype))
            given.set_shared_memory(REGION, picture.nbytes)
            yield lambda: next(turns).infer("model", [given])
            await client.unregister_system_shared_memory(REGION)
    finally:
        shared_memory.destroy_shared_memory_region(region)


@contextlib.asynccontextmanager
async def plain_http(job: Job) -> AsyncIterator[Call]:
    """Bytes of a picture in, bytes of scores out: `benchmarks.serving_torch`."""
    body, url = picture_of(job.path)[1].tobytes(), f"http://{job.address}/"
    connector = aiohttp.TCPConnector(limit=_MOST_CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask() -> bytes:
            async with session.post(url, data=body) as answer:
                answer.raise_for_status()
                return await answer.read()

        yield ask


def _input(module: Any, job: Job) -> Any:
    name, picture = picture_of(job.path)
    given = module.InferInput(name, picture.shape, np_to_triton_dtype(picture.dtype))
    given.set_data_from_numpy(picture)
    return given


Opened = Callable[[Job], contextlib.AbstractAsyncContextManager[Call]]
WAYS: dict[str, Opened] = {
    "in process": in_process,
    "attached": attached,
    "HTTP, binary": over_http,
    "gRPC": over_grpc,
    "gRPC, shared memory": in_shared_memory,
    "a no-op grpc.aio server": over_grpc,
    "PyTorch and uvicorn, eager": plain_http,
    "PyTorch and uvicorn, compiled": plain_http,
}


async def _serve(job: Job) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        functools.partial(asyncio.StreamReaderProtocol, lines), sys.stdin
    )
    async with WAYS[job.way](job) as call:
        await call()
        print("ready", flush=True)
        while line := await lines.readline():
            took, per_s = await timed_runs(call, job.clients, float(line))
            print(json.dumps([per_s, [round(each * 1e3, 4) for each in took]]), flush=True)


def main() -> None:
    asyncio.run(_serve(msgspec.json.decode(sys.argv[1], type=Job)))


if __name__ == "__main__":
    main()
