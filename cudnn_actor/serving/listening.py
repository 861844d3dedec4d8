"""The ports of HTTP and gRPC on which a server listens, in one process or in several."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import uvicorn

from cudnn_actor.serving.connections import MOST_HEADERS, BoundedConnection
from cudnn_actor.serving.grpc_face import grpc_server
from cudnn_actor.serving.host import Host
from cudnn_actor.serving.http_face import make_app
from cudnn_actor.serving.tokens import Tokens

__all__ = ["Listening", "listen", "reserve_port"]


class Listening(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The addresses on which a process listens, and its limits.

    Parameters
    ----------
    host
        The address.
    http, grpc
        The ports; 0 for one that the system chooses, None for none.
    certificate, key
        Files of a certificate and its key, in PEM, for TLS; None for none.
    most_body
        The most bytes of a request.
    most_calls
        How many calls of gRPC there may be at a time.
    most_connections
        How many HTTP connections may be open.
    beside_others
        Whether other processes listen on the same ports, and the kernel divides connections among them.
    """

    host: str
    http: int | None
    grpc: int | None
    certificate: str | None
    key: str | None
    most_body: int
    most_calls: int
    most_connections: int
    beside_others: bool = False


@contextlib.asynccontextmanager
async def listen(
    host: Host, tokens: Tokens | None, at: Listening
) -> AsyncIterator[tuple[int | None, int | None]]:
    """Listen until the end of the block; gives the ports of HTTP and gRPC.

    Raises `OSError` for an address or a certificate.
    """
    async with contextlib.AsyncExitStack() as stack:
        http_port = grpc_port = None
        if at.http is not None:
            app = make_app(host, tokens, most_body=at.most_body)
            http_port = await stack.enter_async_context(_http(app, at))
        if at.grpc is not None:
            credentials = await asyncio.to_thread(_credentials, at)
            address = f"[{at.host}]" if ":" in at.host else at.host
            grpc_port = await stack.enter_async_context(
                grpc_server(
                    host,
                    tokens,
                    f"{address}:{at.grpc}",
                    credentials=credentials,
                    most_body=at.most_body,
                    most_calls=at.most_calls,
                    beside_others=at.beside_others,
                )
            )
        yield http_port, grpc_port


@contextlib.contextmanager
def reserve_port(host: str, port: int | None) -> Iterator[int | None]:
    """A port that processes of this user, and no others, may listen on within the block; None for None.

    Its socket does not listen, so it gets no connection. It keeps the port while no process listens, and is
    how one is chosen for port 0. Raises `OSError` if somebody listens there.
    """
    if port is None:
        yield None
        return
    with socket.socket(_family(host)) as probe:  # without SO_REUSEPORT, so that it fails beside a listener
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        port = probe.getsockname()[1]
    with socket.socket(_family(host)) as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        keeper.bind((host, port))
        yield port


class _Uvicorn(uvicorn.Server):
    """A uvicorn server without signal handlers: this process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _http(app: Any, at: Listening) -> AsyncIterator[int]:
    """Serve an application; yields the port. Raises `OSError` if it cannot listen at the address."""
    assert at.http is not None
    listener = socket.create_server(
        (at.host, at.http), family=_family(at.host), backlog=1024, reuse_port=at.beside_others
    )
    config = uvicorn.Config(
        app,
        http=BoundedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # it warns of each malformed request, and any client can send many
        access_log=False,
        server_header=False,
        date_header=False,
        h11_max_incomplete_event_size=MOST_HEADERS,
        limit_concurrency=at.most_connections + 1,  # uvicorn counts the one that it refuses
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        ssl_certfile=at.certificate,
        ssl_keyfile=at.key,
    )
    server = _Uvicorn(config)
    await asyncio.to_thread(config.load)  # here, so that a wrong certificate is said before anything listens
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()


def _credentials(at: Listening) -> tuple[bytes, bytes] | None:
    """The key and the certificate for TLS; None for none. Raises `OSError`."""
    if at.certificate is None or at.key is None:
        return None
    with open(at.key, "rb") as key, open(at.certificate, "rb") as certificate:
        return key.read(), certificate.read()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
