"""The protocol over HTTP: an ASGI application of Starlette."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import numpy as np
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cudnn_actor.protocol.errors import CudnnActorError
from cudnn_actor.serving import http_wire
from cudnn_actor.serving.failures import NotOffered, Refused, TooLarge, status_of
from cudnn_actor.serving.host import Host
from cudnn_actor.serving.requests import Inference, require_short
from cudnn_actor.serving.tokens import Tokens

__all__ = ["make_app"]

_BODY_S = 60.0
"""Seconds within which a request's body must arrive."""
_MOST_CONTROL = 1 << 20
"""The most bytes of a request that is no inference."""
_PAGE = Path(__file__).with_name("page.html").read_bytes()
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src blob:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
Handler = Callable[[Request], Awaitable[Response]]


def make_app(host: Host, tokens: Tokens | None, *, most_body: int) -> Starlette:
    """The ASGI application of a server.

    Parameters
    ----------
    host
        The server's operations.
    tokens
        The tokens, one of which each request must have, except those for health and the page; None for no
        tokens.
    most_body
        The most bytes of a request's body.
    """
    face = _HttpFace(host, most_body)
    model = "/v2/models/{model}"
    of_model: list[tuple[str, str, Handler]] = [
        ("", "GET", face.model_metadata),
        ("/config", "GET", face.model_config),
        ("/stats", "GET", face.statistics),
        ("/infer", "POST", face.infer),
    ]
    memory = "/v2/systemsharedmemory"
    guarded: list[tuple[str, str, Handler]] = [
        ("/v2", "GET", face.metadata),
        ("/v2/models/stats", "GET", face.statistics),
        *((f"{model}{tail}", method, handler) for tail, method, handler in of_model),
        *((f"{model}/versions/{{version}}{tail}", method, handler) for tail, method, handler in of_model),
        ("/v2/repository/index", "POST", face.index),
        (f"/v2/repository{model[3:]}/load", "POST", face.load),
        (f"/v2/repository{model[3:]}/unload", "POST", face.unload),
        *((f"{memory}{region}/status", "GET", face.regions) for region in ("", "/region/{region}")),
        (f"{memory}/region/{{region}}/register", "POST", face.register),
        *((f"{memory}{region}/unregister", "POST", face.unregister) for region in ("", "/region/{region}")),
        ("/metrics", "GET", face.metrics),
    ]
    refused = ["/v2/cudasharedmemory/{rest:path}", "/v2/trace/setting", "/v2/logging"]
    refused.append(f"{model}/trace/setting")
    opened: list[tuple[str, str, Handler]] = [
        ("/", "GET", face.page),
        ("/v2/health/live", "GET", face.live),
        ("/v2/health/ready", "GET", face.ready),
        (f"{model}/ready", "GET", face.model_ready),
        (f"{model}/versions/{{version}}/ready", "GET", face.model_ready),
    ]
    routes = [Route(path, _answering(handler, None), methods=[method]) for path, method, handler in opened]
    routes += [Route(path, _answering(face.not_offered, tokens), methods=["GET", "POST"]) for path in refused]
    routes += [
        Route(path, _answering(handler, tokens), methods=[method]) for path, method, handler in guarded
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_such_path})


def _answering(handler: Handler, tokens: Tokens | None) -> Handler:
    """Wrap a handler: errors become answers, and requests need a token."""

    async def answer(request: Request) -> Response:
        try:
            if tokens is not None:
                tokens.require(request.headers.get("authorization"))
            require_short(request.path_params.values())
            return await handler(request)
        except CudnnActorError as error:
            return _failure(error)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it

    return answer


def _failure(error: CudnnActorError) -> Response:
    status = status_of(error)
    headers = {"Retry-After": "1"} if status.again else {}
    if status.http == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _json({"error": str(error)}, status.http, headers)


async def _no_such_path(_: Request, error: Exception) -> Response:
    """The answer for an unknown path or method: JSON, as for all errors."""
    assert isinstance(error, HTTPException)
    return _json(
        {"error": f"{error.detail}; see the Open Inference Protocol"}, error.status_code, error.headers
    )


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


class _HttpFace:
    """The server's answers to the requests of HTTP. Methods raise errors, as `CudnnActorError`."""

    def __init__(self, host: Host, most_body: int) -> None:
        self._host = host
        self._most_body = most_body

    # Health.

    async def live(self, _: Request) -> Response:
        return Response(status_code=200 if self._host.live else 503)

    async def ready(self, _: Request) -> Response:
        return Response(status_code=200 if self._host.ready else 503)

    async def model_ready(self, request: Request) -> Response:
        return Response(status_code=200 if self._host.model_ready(**_model(request)) else 503)

    # Requests that read.

    async def page(self, _: Request) -> Response:
        return Response(_PAGE, headers=_PAGE_HEADERS, media_type="text/html")

    async def metrics(self, _: Request) -> Response:
        return Response(await self._host.administration.metrics(), media_type=CONTENT_TYPE_LATEST)

    async def metadata(self, _: Request) -> Response:
        return _json(self._host.metadata())

    async def model_metadata(self, request: Request) -> Response:
        return _json(self._host.model_metadata(**_model(request)))

    async def model_config(self, request: Request) -> Response:
        return _json(self._host.model_config(**_model(request)))

    async def statistics(self, request: Request) -> Response:
        return _json({"model_stats": await self._host.administration.statistics(**_model(request))})

    async def index(self, request: Request) -> Response:
        asked = await self._control(request)
        return _json(await self._host.administration.index(ready=asked.get("ready") is True))

    async def not_offered(self, request: Request) -> Response:
        raise NotOffered(what=request.url.path[:100])

    # Requests that change something.

    async def load(self, request: Request) -> Response:
        asked = await self._control(request)
        parameters = asked.get("parameters", {})
        if not isinstance(parameters, dict):
            raise Refused(problem="parameters are no object", fix="leave them out")
        await self._host.load(request.path_params["model"], parameters)
        return _json({})

    async def unload(self, request: Request) -> Response:
        await self._control(request)
        await self._host.administration.unload(request.path_params["model"])
        return _json({})

    async def regions(self, request: Request) -> Response:
        return _json(await self._host.administration.regions(request.path_params.get("region", "")))

    async def register(self, request: Request) -> Response:
        asked = await self._control(request)
        key, offset, nbytes = asked.get("key"), asked.get("offset", 0), asked.get("byte_size")
        if not isinstance(key, str) or not (_is_int64(offset) and _is_int64(nbytes)):
            raise Refused(
                problem="key, offset or byte_size is missing or out of range", fix="give all of them"
            )
        require_short([key])
        await self._host.administration.register(request.path_params["region"], key, offset, nbytes)
        return _json({})

    async def unregister(self, request: Request) -> Response:
        await self._host.administration.unregister(request.path_params.get("region", ""))
        return _json({})

    # Inference.

    async def infer(self, request: Request) -> Response:
        with self._host.admit() as admission:
            body = await self._body(request, self._most_body, admission.take)
            header = request.headers.get(http_wire.HEADER_LENGTH)
            json_bytes = http_wire.header_length(header, len(body))
            regions, model = self._host.regions, request.path_params["model"]

            def decode() -> Inference:
                return http_wire.decode(body, json_bytes, regions)

            def encode(version: str, inference: Inference, results: Mapping[str, np.ndarray]) -> Response:
                parts, head = http_wire.encode(model, version, inference, results, regions)
                return _answer(parts, head, request.headers.get("accept-encoding", ""))

            version = request.path_params.get("version", "")
            with _while_connected(request):
                return await self._host.infer(
                    model, version, decode, encode, listed=json_bytes, headers=lambda: request.headers
                )

    async def _body(self, request: Request, most: int, take: Callable[[int], object] = int) -> bytes:
        """Receive the whole body, and decompress it.

        `take` is called with the number of bytes of each part that arrives, before the part is kept. Raises
        `Refused`, `TooLarge`, and the errors of `take`.
        """
        said = request.headers.get("content-length", "0")
        if said.isascii() and said.isdigit() and (len(said) > 18 or int(said) > most):
            raise _too_large(most)
        parts, taken = [], 0
        try:
            async with asyncio.timeout(_BODY_S):
                async for chunk in request.stream():
                    taken += len(chunk)
                    if taken > most:
                        raise _too_large(most)
                    take(len(chunk))
                    parts.append(chunk)
        except TimeoutError:
            raise Refused(
                problem=f"the body has not come within {_BODY_S:.0f} s", fix="send it again"
            ) from None
        whole = parts[0] if len(parts) == 1 else b"".join(parts)
        encoding = request.headers.get("content-encoding", "")
        if encoding in ("", "identity"):
            return whole
        inflated = await self._host.aside(lambda: http_wire.decompress(whole, encoding, most))
        take(len(inflated))
        return inflated

    async def _control(self, request: Request) -> dict[str, Any]:
        """The JSON object in the body of a request that is no inference; {} for an empty body."""
        body = await self._body(request, _MOST_CONTROL)
        try:
            return msgspec.json.decode(body, type=dict[str, Any]) if body.strip() else {}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refused(
                problem=f"the body is no JSON object: {str(error)[:200]}", fix="send one"
            ) from error


@contextlib.contextmanager
def _while_connected(request: Request) -> Iterator[None]:
    """Cancel the block if the client closes its connection. Then raises `ClientDisconnect`.

    A task that waits for the end of the connection would do, too, but adds a ninth to the cost of a request.
    """
    connection, task = request.scope["state"]["connection"], asyncio.current_task()
    assert task is not None
    if connection.lost:
        raise ClientDisconnect
    connection.on_lost = task.cancel  # one request of a connection is under way at a time
    try:
        yield
    except asyncio.CancelledError:
        if connection.lost and not task.uncancel():  # no other code has cancelled it
            raise ClientDisconnect from None
        raise
    finally:
        connection.on_lost = None


def _is_int64(value: Any) -> TypeGuard[int]:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _too_large(most: int) -> TooLarge:
    option = "" if most == _MOST_CONTROL else ", or serve with a larger --most-body"
    return TooLarge(problem=f"the body has more than {most:,} bytes", fix=f"send less{option}")


def _model(request: Request) -> dict[str, str]:
    found = request.path_params
    return {"name": found.get("model", ""), "version": found.get("version", "")}


def _answer(parts: list[bytes | memoryview], head: int | None, accepted: str) -> Response:
    headers = {} if head is None else {http_wire.HEADER_LENGTH: str(head)}
    media = "application/json" if head is None else "application/octet-stream"
    found = http_wire.compress(parts, accepted) if "gzip" in accepted or "deflate" in accepted else None
    if found is not None:
        headers["Content-Encoding"] = found[0]
    return Response(b"".join(parts) if found is None else found[1], 200, headers, media_type=media)
