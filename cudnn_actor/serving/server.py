"""The life of an inference server: a service, its models, HTTP and gRPC on one event loop, and its end.

At SIGTERM or SIGINT it drains: it is no longer ready, takes no more inferences, answers those that it has,
and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from cudnn_actor.actors.logs import Log
from cudnn_actor.attached import serve_socket
from cudnn_actor.metrics.prometheus import ServiceCollector
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.service.spawning import spawn
from cudnn_actor.serving.administration import OwnAdministration
from cudnn_actor.serving.catalog import Catalog, Lend, Origin
from cudnn_actor.serving.fronts import FrontAdministration, Fronts, serving_processes
from cudnn_actor.serving.host import Host
from cudnn_actor.serving.limits import Limits
from cudnn_actor.serving.listening import Listening, listen, reserve_port
from cudnn_actor.serving.model_settings import Batching, Settings, read_settings
from cudnn_actor.serving.regions import SharedMemory
from cudnn_actor.serving.served import Served, load
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
        How requests are put into batches, for models that allow it and have no `model.toml`; None for no
        batches.
    token_file
        A file of tokens; None to take requests without a token.
    certificate, key
        Files of a certificate and its key, in PEM, for TLS; None for none.
    most_body
        The most bytes of a request.
    most_running
        How many inferences may be under way.
    most_bytes
        How many bytes the requests of all these inferences may have; None for four times `most_body`.
    most_connections
        How many HTTP connections may be open.
    socket
        The path of a socket by which other processes of this user attach to the service; None for none. It
        exists before the models are loaded, so that attached clients share their weights.
    drain_s
        Seconds that running inferences get when the server ends.
    poll_s
        Seconds between two looks at the repository.
    processes
        How many processes serve HTTP and gRPC. With 1, this process does. With more, that many serving
        processes do, and send their inferences to this process.
    spans
        The share of requests that get a span, 0 to 1, among those whose clients send none; None for no spans
        at all. Spans go to OpenTelemetry's global tracer provider: see `RequestSpans`.
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
    processes: int = 1
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
    """A server that runs. `serve` makes it.

    Parameters
    ----------
    gpu
        The service that runs the models.
    host
        The server's operations. With several serving processes, it answers no request itself.
    catalog
        The models.
    ports
        The ports of HTTP and gRPC on which the server listens; None for none.
    fronts
        The serving processes; None if this process serves.
    """

    def __init__(
        self,
        gpu: CudnnRef,
        host: Host,
        catalog: Catalog,
        ports: tuple[int | None, int | None],
        fronts: Fronts | None = None,
    ) -> None:
        self.gpu = gpu
        self.host = host
        self.catalog = catalog
        self.http_port, self.grpc_port = ports
        self.fronts = fronts

    @property
    def processes(self) -> list[int]:
        """The process ids of the serving processes that listen now; an empty list if this process serves."""
        return [] if self.fronts is None else self.fronts.pids


@contextlib.asynccontextmanager
async def serve(options: ServerOptions) -> AsyncIterator[InferenceServer]:
    """Start a server: `async with serve(options) as server`. Leaving the block drains it for up to `drain_s`
    seconds, and stops it.

    Raises as `spawn`, and as `CudnnRef.load` for a model; `InvalidRequest` for `processes`, `Refused` for the
    token file, `OSError` for an address or a certificate, and `ImportError` if spans are wanted without the
    extra `opentelemetry`.
    """
    async with spawn(**options.service) as gpu, serve_with(gpu, options) as server:
        yield server


@contextlib.asynccontextmanager
async def serve_with(gpu: CudnnRef, options: ServerOptions) -> AsyncIterator[InferenceServer]:
    """Start a server, as `serve` does, with a service that runs already, and goes on after the block.
    `options.service` is not used."""
    _require_processes(options)
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
        registry = CollectorRegistry()
        registry.register(ServiceCollector(gpu))
        limits = Limits(
            options.most_running, 4 * options.most_body if options.most_bytes is None else options.most_bytes
        )
        fronts = None
        if options.processes == 1:
            catalog = Catalog(_loader(gpu, options), lend)
            stack.push_async_callback(catalog.close)
            administration = OwnAdministration(catalog, regions, registry)
            host = Host(gpu, catalog, administration, regions, limits)
            ports = await stack.enter_async_context(listen(host, tokens, _listening(options)))
            stack.push_async_callback(_drain, host, options.drain_s)
            await _load_all(stack, catalog, options)
        else:
            http = stack.enter_context(reserve_port(options.host, options.http))
            grpc = stack.enter_context(reserve_port(options.host, options.grpc))
            ports = http, grpc
            processes = serving_processes(
                gpu._service, options.processes, _listening(options, *ports), tokens, limits=limits
            )
            fronts = await stack.enter_async_context(processes)
            catalog = Catalog(_loader(gpu, options), lend, changed=fronts.announce, retire=fronts.retire)
            stack.push_async_callback(catalog.close)
            administration = FrontAdministration(catalog, regions, registry, fronts=fronts)
            host = Host(gpu, catalog, administration, regions, limits)
            stack.push_async_callback(fronts.drain, options.drain_s)
            await fronts.start(catalog, regions, administration)
            await _load_all(stack, catalog, options)
            fronts.starting = False
            await fronts.wait_until_known()
        host.starting = False
        yield InferenceServer(gpu, host, catalog, ports, fronts)


async def _load_all(stack: contextlib.AsyncExitStack, catalog: Catalog, options: ServerOptions) -> None:
    """Load the models, and watch the repository from now on."""
    for name, path in options.models.items():
        catalog.add(name, Origin(path, "1"))
        await catalog.load(name)
    if options.repository is not None:
        watch = Watch(catalog, options.repository, taken=options.models)
        await watch.look(at_once=True)
        stack.callback(asyncio.create_task(watch.keep_looking(options.poll_s)).cancel)


def _require_processes(options: ServerOptions) -> None:
    if options.processes < 1:
        raise InvalidRequest(
            field="processes", value=options.processes, problem="is below 1", fix="give how many are to serve"
        )
    if options.spans is not None and options.processes > 1:
        raise InvalidRequest(
            field="spans",
            value=options.spans,
            problem=f"cannot be had from {options.processes} serving processes",
            fix="leave out --spans, or serve in one process",
        )


def _listening(options: ServerOptions, http: int | None = None, grpc: int | None = None) -> Listening:
    """The addresses on which this process listens, or, with the ports that they share, each serving process.

    gRPC has a call's message in memory before any code can count it, so each process bounds its calls. One
    connection may send all inferences that can be under way, so each process takes `most_running` calls. Of
    the further calls, which are no inferences, and of the connections of HTTP, each process takes its share.
    """
    several = options.processes > 1
    certificate, key = (None if each is None else str(each) for each in (options.certificate, options.key))
    return Listening(
        host=options.host,
        http=http if several else options.http,
        grpc=grpc if several else options.grpc,
        certificate=certificate,
        key=key,
        most_body=options.most_body,
        most_calls=options.most_running + -(-options.most_running // options.processes),
        most_connections=-(-options.most_connections // options.processes),
        beside_others=several,
    )


def _request_spans(gpu: CudnnRef, ratio: float) -> contextlib.AbstractAsyncContextManager[Any]:
    from cudnn_actor.metrics.opentelemetry import RequestSpans  # noqa: PLC0415 - needs the extra

    return RequestSpans(gpu, ratio=ratio)


def _loader(gpu: CudnnRef, options: ServerOptions) -> Any:
    default = Settings(batch=options.batch)

    async def load_origin(name: str, origin: Origin) -> Served:
        settings = await asyncio.to_thread(read_settings, origin.path.parent / "model.toml", default)
        return await load(gpu, name, origin.path, origin.version, settings, if_possible=settings is default)

    return load_origin


async def _drain(host: Host, drain_s: float) -> None:
    """Take no more inferences, and wait until those under way have been answered, for up to `drain_s`
    seconds."""
    host.draining = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            await host.idle()


@contextlib.contextmanager
def told_to_end() -> Iterator[asyncio.Event]:
    """Yield an event that SIGTERM and SIGINT set within the block. Only for the main thread's event loop."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, told.set)
    try:
        yield told
    finally:
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)
