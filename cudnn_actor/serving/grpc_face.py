"""The protocol over gRPC: a server of grpc.aio with handlers that take bytes.

A handler parses the message itself. So bytes that are no message are refused as any wrong request is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NoReturn

import grpc
import numpy as np
from google.protobuf import json_format

from cudnn_actor.protocol.errors import CudnnActorError
from cudnn_actor.serving import grpc_wire
from cudnn_actor.serving.failures import status_of
from cudnn_actor.serving.grpc_schema import SERVICE, message_class
from cudnn_actor.serving.host import Host
from cudnn_actor.serving.requests import Inference, require_short
from cudnn_actor.serving.tokens import Tokens

__all__ = ["grpc_server"]

_OPEN = ("ServerLive", "ServerReady", "ModelReady")
"""The methods that are answered without a token."""
_MOST_AHEAD = 64
"""How many requests of one stream are under way at a time; further requests wait in the connection."""
Operation = Callable[[Any], Awaitable[Mapping[str, Any]]]
_Parsed = tuple[Any, list[memoryview], int]


@contextlib.asynccontextmanager
async def grpc_server(
    host: Host,
    tokens: Tokens | None,
    address: str,
    *,
    credentials: tuple[bytes, bytes] | None,
    most_body: int,
    most_calls: int,
    beside_others: bool = False,
) -> AsyncIterator[int]:
    """Serve at an address, such as "127.0.0.1:8001"; yields the port. Leaving the block ends the server.

    `credentials`: a key and its certificate, for TLS. `most_body`: the most bytes of a message. `most_calls`:
    the most calls at a time, including streams. gRPC has a message in memory before any code here sees it, so
    these two bound the memory of messages. `beside_others`: whether other processes listen at this address,
    too, so that each gets a share of the connections. Raises `OSError` if the server cannot listen at the
    address.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", most_body),
            ("grpc.max_send_message_length", -1),
            # Otherwise a second server, started by mistake, would take half of the connections.
            ("grpc.so_reuseport", int(beside_others)),
        ],
        # And no `grpc.max_concurrent_streams`: a connection at that limit has calls fail with UNAVAILABLE.
        maximum_concurrent_rpcs=most_calls,
    )
    server.add_generic_rpc_handlers((_GrpcFace(host, tokens).handlers(),))
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, grpc.ssl_server_credentials([credentials]))
    except RuntimeError as error:
        raise OSError(f"gRPC cannot listen on {address}: {error}") from error
    if not port:
        raise OSError(f"gRPC cannot listen on {address}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(grace=5)


class _GrpcFace:
    """The server's answers to the calls of gRPC."""

    def __init__(self, host: Host, tokens: Tokens | None) -> None:
        self._host = host
        self._tokens = tokens

    def handlers(self) -> Any:
        """The handlers of all methods here. Other methods of the protocol are answered with UNIMPLEMENTED."""
        methods = {
            name: grpc.unary_unary_rpc_method_handler(
                self._unary(name, operation), response_serializer=_serialize
            )
            for name, operation in self._operations().items()
        }
        methods["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self._infer)
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _operations(self) -> dict[str, Operation]:
        """For each method that is no inference: the function from its request to the fields of its
        response."""
        host, administration = self._host, self._host.administration

        async def load(asked: Any) -> Mapping[str, Any]:
            await host.load(asked.model_name, grpc_wire.parameters_of(asked.parameters))
            return {}

        async def unload(asked: Any) -> Mapping[str, Any]:
            await administration.unload(asked.model_name)
            return {}

        async def status(asked: Any) -> Mapping[str, Any]:
            return {"regions": {each["name"]: each for each in await administration.regions(asked.name)}}

        async def register(asked: Any) -> Mapping[str, Any]:
            await administration.register(asked.name, asked.key, asked.offset, asked.byte_size)
            return {}

        async def unregister(asked: Any) -> Mapping[str, Any]:
            await administration.unregister(asked.name)
            return {}

        async def statistics(asked: Any) -> Mapping[str, Any]:
            return {"model_stats": await administration.statistics(asked.name, asked.version)}

        async def index(asked: Any) -> Mapping[str, Any]:
            return {"models": await administration.index(ready=asked.ready)}

        at_once: dict[str, Callable[[Any], Mapping[str, Any]]] = {
            "ServerLive": lambda _: {"live": host.live},
            "ServerReady": lambda _: {"ready": host.ready},
            "ModelReady": lambda asked: {"ready": host.model_ready(asked.name, asked.version)},
            "ServerMetadata": lambda _: host.metadata(),
            "ModelMetadata": lambda asked: host.model_metadata(asked.name, asked.version),
            "ModelConfig": lambda asked: {"config": host.model_config(asked.name, asked.version)},
        }
        return {
            "ModelStatistics": statistics,
            "RepositoryIndex": index,
            "SystemSharedMemoryStatus": status,
            "SystemSharedMemoryRegister": register,
            "SystemSharedMemoryUnregister": unregister,
            "RepositoryModelLoad": load,
            "RepositoryModelUnload": unload,
            **{name: _awaitable(answer) for name, answer in at_once.items()},
        }

    def _unary(self, name: str, operation: Operation) -> Callable[[bytes, Any], Awaitable[Any]]:
        """The handler of a method, which reads the request and makes the response."""

        async def call(data: bytes, context: Any) -> Any:
            try:
                if name not in _OPEN:
                    self._require_token(context)
                asked = grpc_wire.parse(f"{name}Request", data)
                require_short(value for _, value in asked.ListFields() if isinstance(value, str))
                fields = await operation(asked)
            except CudnnActorError as error:
                await _abort(context, error)
            return json_format.ParseDict(fields, message_class(f"{name}Response")())

        return call

    def _require_token(self, context: Any) -> None:
        if self._tokens is not None:
            given = dict(context.invocation_metadata() or ())
            self._tokens.require(given.get("authorization"))

    async def _infer(self, data: bytes, context: Any) -> bytes:
        try:
            self._require_token(context)
            parsed = grpc_wire.parse_inference(data)
            return await self._answer(parsed, len(data), context, context.time_remaining())
        except CudnnActorError as error:
            await _abort(context, error)

    async def _answer(self, parsed: _Parsed, nbytes: int, call: Any, left_s: float | None) -> bytes:
        """The response to an inference whose request has `nbytes` bytes, by a call's context. Raises
        `CudnnActorError`."""
        request, raw, listed = parsed
        require_short((request.model_name, request.model_version))
        regions, model = self._host.regions, request.model_name

        def encode(version: str, inference: Inference, results: Mapping[str, np.ndarray]) -> bytes:
            return grpc_wire.encode(model, version, inference, results, regions)

        with self._host.admit() as admission:
            admission.take(nbytes)
            return await self._host.infer(
                model,
                request.model_version,
                lambda: grpc_wire.decode(request, raw, regions),
                encode,
                listed=listed,
                headers=lambda: dict(call.invocation_metadata() or ()),
                left_s=None if left_s is None else max(left_s, 0.0),
            )

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """The responses to the requests of a stream, in the order of the requests. An error is a response,
        too.

        Requests run together. The queue bounds their number: while it is full, no request is read from the
        connection.
        """
        try:
            self._require_token(context)
        except CudnnActorError as error:
            await _abort(context, error)
        under_way: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(_MOST_AHEAD)
        running: set[asyncio.Task[bytes]] = set()

        async def read() -> None:
            try:
                async for data in requests:
                    task = asyncio.create_task(self._answer_in_stream(data, context))
                    running.add(task)
                    task.add_done_callback(running.discard)
                    await under_way.put(task)
            finally:
                await under_way.put(None)

        reading = asyncio.create_task(read())
        try:
            while (task := await under_way.get()) is not None:
                yield await task
        finally:  # also if the client has gone: requests that have not started are withdrawn
            for each in (reading, *running):
                each.cancel()
            while not under_way.empty():  # so that `read`, which ends by a `put`, has room for it
                under_way.get_nowait()
            await asyncio.gather(reading, *running, return_exceptions=True)

    async def _answer_in_stream(self, data: bytes, call: Any) -> bytes:
        """The response to one request of a stream."""
        request = None
        try:
            parsed = grpc_wire.parse_inference(data)
            request = parsed[0]
            response = await self._answer(parsed, len(data), call, None)
            asked = grpc_wire.parameters_of(request.parameters)
            return grpc_wire.stream_response(
                response, last=bool(asked.get("triton_enable_empty_final_response"))
            )
        except CudnnActorError as error:
            failed = message_class("ModelStreamInferResponse")(error_message=str(error))
            if request is not None:
                failed.infer_response.id = request.id  # this tells the client which request has failed
            return _serialize(failed)


def _awaitable(answer: Callable[[Any], Mapping[str, Any]]) -> Operation:
    """Wrap a function that answers at once into one that is awaited."""

    async def operation(asked: Any) -> Mapping[str, Any]:
        return answer(asked)

    return operation


def _serialize(message: Any) -> bytes:
    return message.SerializeToString()  # type: ignore[no-any-return]


async def _abort(context: Any, error: CudnnActorError) -> NoReturn:
    """End a call with the status of an error. Raises the exception by which grpc.aio ends calls."""
    await context.abort(getattr(grpc.StatusCode, status_of(error).grpc), str(error))
    raise error  # never reached
