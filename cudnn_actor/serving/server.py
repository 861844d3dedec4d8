"""The life of an inference server: a service, its models, HTTP and gRPC on one event loop, and its end.

At SIGTERM or SIGINT it drains: it is no longer ready, takes no more inferences, answers those that it has,
and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry

from cudnn_actor.actors.logs import Log
from cudnn_actor.attached import serve_socket
from cudnn_actor.metrics.prometheus import ServiceCollector
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.service.spawning import spawn
from cudnn_actor.serving.catalog import Catalog, Lend, Origin
from cudnn_actor.serving.connections import MOST_HEADERS, BoundedConnection
from cudnn_actor.serving.grpc_face import grpc_server
from cudnn_actor.serving.host import Host
from cudnn_actor.serving.http_face import make_app
from cudnn_actor.serving.regions import SharedMemory
from cudnn_actor.serving.served import Served, load
from cudnn_actor.serving.settings import Batching, Settings, read_settings
from cudnn_actor.serving.tokens import Tokens
from cudnn_actor.serving.watch import Watch

__all__ = ["InferenceServer", "ServerOptions", "serve", "serve_with", "told_to_end"]

log = Log("cudnn_actor")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of an inference server.

    Parameters
    ----------
    models
        Files of models, by the names under which they are served.
    host
        The address to listen on.
    repository
        A folder with files `NAME/VERSION/model.onnx`, which is watched; None for none.
    http, grpc
        The ports; 0 for one that the system chooses, None for none.
    batch
        How requests are put together where a model allows it and has no `model.toml`; None for no batches.
    token_file
        A file of tokens; None to take requests without.
    certificate, key
        Files of a certificate and its key, in PEM, for TLS; None for none.
    most_body
        The most bytes of a request.
    most_running
        How many inferences may be under way.
    most_bytes
        How many bytes the requests of all of them may have; None for four of the largest.
    most_connections
        How many HTTP connections may be open.
    socket
        The path of a socket by which other processes of this user attach to the service; None for none. It is
        there before the models, whose weights the clients share.
    drain_s
        Seconds that running inferences get when the server ends.
    poll_s
        Seconds between two looks at the repository.
    spans
        Of the requests whose clients send no span, the share that gets one, 0 to 1; None for no spans at all.
        They go to OpenTelemetry's global tracer provider: see `RequestSpans`.
    service
        Options of `spawn`.
    """

    models: Mapping[str, Path] = field(default_factory=dict)
    repository: Path | None = None
    host: str = "127.0.0.1"
    http: int | None = 8000
    grpc: int | None = 8001
    batch: Batching | None = None
    token_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    most_body: int = 256 << 20
    most_running: int = 1024
    most_bytes: int | None = None
    most_connections: int = 4096
    socket: Path | None = None
    drain_s: float = 30.0
    poll_s: float = 1.0
    spans: float | None = None
    service: Mapping[str, Any] = field(default_factory=dict)

    @property
    def local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


class InferenceServer:
    """A server that runs. Made by `serve`.

    Parameters
    ----------
    gpu
        The service that runs the models.
    host
        What answers.
    http_port, grpc_port
        The ports that it listens on; None for none.
    """

    def __init__(self, gpu: CudnnRef, host: Host, http_port: int | None, grpc_port: int | None) -> None:
        self.gpu = gpu
        self.host = host
        self.http_port = http_port
        self.grpc_port = grpc_port


@contextlib.asynccontextmanager
async def serve(options: ServerOptions) -> AsyncIterator[InferenceServer]:
    """Start a server; leaving the block drains it for up to `drain_s` seconds, and stops it.

    Raises as `spawn`, and as `CudnnRef.load` for a model; `Refused` for the token file, `OSError` for an
    address or a certificate, and `ImportError` if spans are wanted without the extra `opentelemetry`.
    """
    async with spawn(**options.service) as gpu, serve_with(gpu, options) as server:
        yield server


@contextlib.asynccontextmanager
async def serve_with(gpu: CudnnRef, options: ServerOptions) -> AsyncIterator[InferenceServer]:
    """As `serve`, with a service that runs already; it goes on. `options.service` is not used."""
    tokens = None
    if options.token_file is not None:
        tokens = await asyncio.to_thread(Tokens, options.token_file)
    async with contextlib.AsyncExitStack() as stack:
        if options.spans is not None:
            await stack.enter_async_context(_request_spans(gpu, options.spans))
        lend: Lend | None = None
        if options.socket is not None:
            serving = serve_socket(gpu, options.socket, models=options.models)
            lend = (await stack.enter_async_context(serving)).lend
        regions = SharedMemory(offered=options.local)
        stack.callback(regions.close)
        catalog = Catalog(_loader(gpu, options), lend)
        stack.push_async_callback(catalog.close)
        host = Host(
            gpu,
            catalog,
            regions,
            most_running=options.most_running,
            most_bytes=4 * options.most_body if options.most_bytes is None else options.most_bytes,
        )
        registry = CollectorRegistry()
        registry.register(ServiceCollector(gpu))
        http_port = None
        if options.http is not None:
            app = make_app(host, registry, tokens, most_body=options.most_body)
            http_port = await stack.enter_async_context(_http(app, options))
        grpc_port = None
        if options.grpc is not None:
            credentials = await asyncio.to_thread(_credentials, options)
            grpc_port = await stack.enter_async_context(_grpc(host, tokens, options, credentials))
        stack.push_async_callback(_drained, host, options.drain_s)
        for name, path in options.models.items():
            catalog.add(name, Origin(path, "1"))
            await catalog.load(name)
        if options.repository is not None:
            watch = Watch(catalog, options.repository, taken=options.models)
            await watch.look(at_once=True)
            stack.enter_context(_cancelled(asyncio.create_task(watch.keep_looking(options.poll_s))))
        host.starting = False
        yield InferenceServer(gpu, host, http_port, grpc_port)


def _request_spans(gpu: CudnnRef, ratio: float) -> contextlib.AbstractAsyncContextManager[Any]:
    from cudnn_actor.metrics.opentelemetry import RequestSpans  # noqa: PLC0415 - needs the extra

    return RequestSpans(gpu, ratio=ratio)


def _loader(gpu: CudnnRef, options: ServerOptions) -> Any:
    default = Settings(batch=options.batch)

    async def load_origin(name: str, origin: Origin) -> Served:
        settings = await asyncio.to_thread(read_settings, origin.path.with_name("model.toml"), default)
        return await load(gpu, name, origin.path, origin.version, settings, if_possible=settings is default)

    return load_origin


async def _drained(host: Host, drain_s: float) -> None:
    """Take no more inferences, and wait until those that run have been answered."""
    host.draining = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            await host.idle()


class _Uvicorn(uvicorn.Server):
    """uvicorn, without handlers of signals: this process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _http(app: Any, options: ServerOptions) -> AsyncIterator[int]:
    """Serve an application; gives the port. Raises `OSError` if the address cannot be had."""
    assert options.http is not None
    listener = _listener(options.host, options.http)
    config = uvicorn.Config(
        app,
        http=BoundedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # it warns of each request that is none, and any client can send many
        access_log=False,
        server_header=False,
        date_header=False,
        h11_max_incomplete_event_size=MOST_HEADERS,
        limit_concurrency=options.most_connections,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key,
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


def _grpc(
    host: Host, tokens: Tokens | None, options: ServerOptions, credentials: tuple[bytes, bytes] | None
) -> contextlib.AbstractAsyncContextManager[int]:
    at = f"[{options.host}]" if ":" in options.host else options.host
    return grpc_server(
        host,
        tokens,
        f"{at}:{options.grpc}",
        credentials=credentials,
        most_body=options.most_body,
        most_calls=2 * options.most_running,  # what is no inference, and streams, beside the inferences
    )


def _credentials(options: ServerOptions) -> tuple[bytes, bytes] | None:
    """The key and the certificate for TLS; None for none. Raises `OSError`."""
    if options.certificate is None or options.key is None:
        return None
    return options.key.read_bytes(), options.certificate.read_bytes()


@contextlib.contextmanager
def _cancelled(task: asyncio.Task[None]) -> Iterator[None]:
    """Cancel a task at the end of the block."""
    try:
        yield
    finally:
        task.cancel()


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


@contextlib.contextmanager
def told_to_end() -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set within the block. Runs on the main thread's loop."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, told.set)
    try:
        yield told
    finally:
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)
