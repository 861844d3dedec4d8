"""`cudnn-actor top SOURCE`: shows live what services do."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import signal
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec
from rich.console import Console
from rich.live import Live

from cudnn_actor.attached.paths import socket_path
from cudnn_actor.blocking import BlockingRef, connect
from cudnn_actor.cli.top_view import Reading, Since, View
from cudnn_actor.cli.user_error import UserError
from cudnn_actor.protocol.errors import CudnnActorError, InvalidRequest
from cudnn_actor.service.metrics import Metrics

__all__ = ["PrometheusSource", "SocketSource", "Source", "SourceLost", "add_arguments", "run"]

_MOST_BYTES = 4 * 2**20
_WITHIN_S = 5.0
_LEAST_S, _MOST_S = 0.1, 3600.0


class SourceLost(Exception):
    """Raised when a source gives no metrics now. The text says why."""


class Source(Protocol):
    """A source of metrics."""

    def read(self) -> tuple[Metrics, ...]:
        """The metrics of the source's services now. Blocks for some seconds at most. Raises `SourceLost`."""

    def close(self) -> None:
        """Close the source's connection, if it has one. Idempotent."""


class PrometheusSource:
    """An exporter of Prometheus's, with the metrics of `metrics.prometheus.ServiceCollector`.

    The server's answer may take five seconds from the connection on, and have 4 MiB, whatever the server
    does. Redirects are not followed.

    Raises
    ------
    UserError
        `url` is no URL of HTTP, or prometheus-client is not installed.
    """

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UserError(f"SOURCE is the URL of an exporter, or unix:PATH, not {url!r}")
        try:
            from cudnn_actor.metrics.scraped import metrics_of  # noqa: PLC0415 - in an extra
        except ImportError as error:
            raise UserError(str(error)) from None
        self._metrics_of = metrics_of
        self._make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, port
        self._path = (parts.path or "/metrics") + (f"?{parts.query}" if parts.query else "")

    def read(self) -> tuple[Metrics, ...]:
        """The metrics that the exporter has now. Blocks for some seconds at most. Raises `SourceLost`."""
        try:
            found = self._metrics_of(self._text())
        except (OSError, http.client.HTTPException) as error:
            raise SourceLost(str(error) or type(error).__name__) from error
        except ValueError as error:
            raise SourceLost(f"it has {error}") from error
        if not found:
            raise SourceLost("it has no metrics of cudnn-actor")
        return found

    def close(self) -> None:
        """Do nothing: each reading has a connection of its own."""

    def _text(self) -> str:
        connection = self._make(self._host, self._port, timeout=_WITHIN_S)
        out_of_time = threading.Event()

        def end() -> None:
            out_of_time.set()
            # This shuts down the socket itself, since the connection forgets it when the response takes it
            # over. A read that waits then ends.
            with contextlib.suppress(OSError):  # closed meanwhile
                own.shutdown(socket.SHUT_RDWR)

        connection.connect()
        own: socket.socket = connection.sock
        timer = threading.Timer(_WITHIN_S, end)
        timer.daemon = True
        timer.start()
        try:
            connection.request("GET", self._path, headers={"Accept": "text/plain;version=0.0.4"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise SourceLost(f"it answers with status {response.status}")
            body = response.read(_MOST_BYTES + 1)
        except (OSError, http.client.HTTPException):
            if out_of_time.is_set():
                raise SourceLost(f"it has not answered within {_WITHIN_S:g} s") from None
            raise
        finally:
            timer.cancel()
            own.close()
            connection.close()
        if out_of_time.is_set():
            raise SourceLost(f"it has not answered within {_WITHIN_S:g} s")
        if len(body) > _MOST_BYTES:
            raise SourceLost(f"its answer is longer than {_MOST_BYTES:,} bytes")
        return body.decode()


class SocketSource:
    """The socket of a service, as `cudnn_actor.connect` takes it.

    It attaches at the first reading, and again after the service has gone. Readings are at most a quarter of
    a second old.

    Parameters
    ----------
    path
        The socket's path, with or without "unix:" before it.

    Raises
    ------
    UserError
        The path is too long for a socket.
    """

    def __init__(self, path: str) -> None:
        try:
            self._path = socket_path(path)
        except InvalidRequest as error:
            raise UserError(str(error)) from None
        self._gpu: BlockingRef | None = None

    def read(self) -> tuple[Metrics, ...]:
        """The metrics of the service. Blocks while this attaches. Raises `SourceLost`."""
        try:
            if self._gpu is None:
                self._gpu = connect(self._path, name="cudnn-actor top")
            if self._gpu.alive:
                return (self._gpu.metrics(),)
        except (CudnnActorError, OSError) as error:
            self.close()
            raise SourceLost(str(error)) from error
        self.close()
        raise SourceLost("the service has gone")

    def close(self) -> None:
        """Detach from the service."""
        gpu, self._gpu = self._gpu, None
        if gpu is not None:
            gpu.close()


def source_of(text: str) -> PrometheusSource | SocketSource:
    """The source of metrics that a text names: the path of a socket, or the URL of a page."""
    if text.startswith(("unix:", "/")):
        return SocketSource(text)
    return PrometheusSource(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="an exporter's URL (http://localhost:9000/metrics), or a service's socket (unix:PATH)",
    )
    parser.add_argument("--once", action="store_true", help="read once, print, and end")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each reading")
    parser.add_argument("--interval", type=_interval, default=1.0, help="seconds between readings (1)")


def _interval(text: str) -> float:
    seconds = float(text)
    if not _LEAST_S <= seconds <= _MOST_S:
        raise argparse.ArgumentTypeError(f"is not between {_LEAST_S:g} and {_MOST_S:g} seconds")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Show the services until interrupted, or once with `--once`. Raises `UserError` if `--once` finds no
    source."""
    with contextlib.closing(source_of(args.source)) as source:
        return _once(source, args) if args.once else _watch(source, args)


def _once(source: Source, args: argparse.Namespace) -> int:
    try:
        reading = Reading(source.read(), time.monotonic())
    except SourceLost as error:
        raise UserError(f"{args.source}: {error}") from None
    if args.json:
        _print_json(args.source, Since(reading))
    else:
        Console(highlight=False).print(View(args.source, Since(reading)))
    return 0


def _watch(source: Source, args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    since: Since | None = None
    on_screen = console.is_terminal and not args.json
    shown = Live(console=console, screen=True, auto_refresh=False) if on_screen else _Nothing()
    with _interrupt_event() as interrupted, shown as live:
        while not interrupted.is_set():
            lost = ""
            try:
                reading = Reading(source.read(), time.monotonic())
                since = Since(reading, None if since is None else since.now)
            except SourceLost as error:
                lost = str(error)
            if args.json:
                _print_json(args.source, since, lost)
            elif isinstance(live, Live):
                live.update(View(args.source, since, lost), refresh=True)
            else:
                console.print(View(args.source, since, lost))
            _pause(args.interval)
    raise KeyboardInterrupt


@contextlib.contextmanager
def _interrupt_event() -> Iterator[threading.Event]:
    """Yield an event. Ctrl-C sets it, and then raises `KeyboardInterrupt`.

    Python prints and drops an exception that is raised in a destructor or in the callback of a weak
    reference, and the timer of each reading has such a callback. In that case, only the event tells of
    Ctrl-C. In a process that was started with SIGINT ignored, Ctrl-C does nothing.
    """
    found = threading.Event()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield found
        return

    def interrupt(_number: int, _frame: object) -> None:
        found.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)


def _pause(seconds: float) -> None:
    """Wait. Ctrl-C ends the wait, and the command."""
    sys.stdout.flush()
    time.sleep(seconds)


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _print_json(source: str, since: Since | None, lost: str = "") -> None:
    services: list[dict[str, Any]] = []
    if since is not None and not lost:
        for metrics in since.now.services:
            built = msgspec.to_builtins(metrics)
            for each, row in zip(built["requests"], since.rows(metrics), strict=True):
                each["rates"] = row.rates()
            services.append(built)
    said = {"source": source, "lost": lost or None, "services": services}
    print(msgspec.json.encode(said).decode(), flush=True)  # NaN, which any exporter may send, becomes null
