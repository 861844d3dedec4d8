"""`cudnn-actor top`: a real exporter, and strangers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import http.server
import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cudnn_actor import spawn
from cudnn_actor.attached import serve_socket
from cudnn_actor.cli import top
from cudnn_actor.cli.top import PrometheusSource, SocketSource, SourceLost
from cudnn_actor.cli.top_view import Reading, Since, View
from cudnn_actor.cli.user_error import UserError
from cudnn_actor.protocol.messages.messages import Ping
from cudnn_actor.service.service import CudnnService, start

from ..patience import PATIENCE_S
from .terminal import cudnn_actor_here

pytest.importorskip("prometheus_client", reason="it is in the group `test`")

from prometheus_client import CollectorRegistry, generate_latest

from cudnn_actor.metrics.prometheus import ServiceCollector
from cudnn_actor.metrics.scraped import metrics_of

ANSWER_LIMIT_S = 0.3


@pytest.fixture
def service() -> Iterator[CudnnService]:
    with start(device="cpu", isolation="thread", name="topped") as service:
        service.actor_ref.ask(Ping())
        yield service


class Server:
    """An HTTP server that answers with `body`, or as `handle` does."""

    def __init__(self) -> None:
        self.body = b""
        self.status = 200
        self.asked = threading.Semaphore(0)
        self.release = threading.Event()
        self.drips = False
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(self.status)
        handler.end_headers()
        handler.wfile.write(self.body)
        handler.wfile.flush()
        self.asked.release()
        with contextlib.suppress(OSError):  # the reader has left
            while self.drips and not self.release.wait(0.02):
                handler.wfile.write(b"#")  # never as long without a byte as its reader waits for one

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def scraped(*services: CudnnService) -> bytes:
    registry = CollectorRegistry()
    registry.register(ServiceCollector(*services))
    return generate_latest(registry)


def shown(view: View, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_is_scraped_is_what_was_published(service: CudnnService) -> None:
    assert metrics_of(scraped(service).decode()) == (service.metrics(),)


def test_once_as_json(service: CudnnService, server: Server) -> None:
    server.body = scraped(service)
    done = cudnn_actor_here("top", server.url, "--once", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (found,) = json.loads(done.stdout)["services"]
    assert (found["service"], found["state"]) == ("topped", "ready")
    (ping,) = [each for each in found["requests"] if each["operation"] == "Ping"]
    assert ping["rates"]["total_p99"] > 0
    assert ping["rates"]["requests_per_second"] is None


def test_once_in_a_pipe_is_plain_text(service: CudnnService, server: Server) -> None:
    server.body = scraped(service)
    done = cudnn_actor_here("top", server.url, "--once")
    assert (done.returncode, done.stderr) == (0, "")
    assert "topped on cpu: ready" in done.stdout
    assert "\x1b" not in done.stdout


def test_rates_are_those_between_two_readings(service: CudnnService) -> None:
    before = Reading((service.metrics(),), 10.0)
    for _ in range(4):
        service.actor_ref.ask(Ping())
    since = Since(Reading((service.metrics(),), 12.0), before)
    (row,) = since.rows(since.now.services[0])
    assert row.rates()["requests_per_second"] == 2.0
    assert (row.total.count, row.now.finished) == (4, 5)
    (anew,) = Since(before, since.now).rows(before.services[0])  # a counter that has fallen began anew
    assert anew.total.count == 1


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_it_fits_any_width_without_colour(service: CudnnService, width: int) -> None:
    text = shown(View("http://x", Since(Reading((service.metrics(),), 0.0)), "gone"), width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert "topped" in text
    assert "Ping" in text
    assert ("finished" in text) == (width == 200)


async def test_the_socket_of_a_service_is_a_source_too(tmp_path: Path) -> None:
    path = tmp_path / "gpu.sock"
    source = SocketSource(f"unix:{path}")
    with pytest.raises(SourceLost):
        await asyncio.to_thread(source.read)
    for _ in range(2):  # a new service at the same place is found
        async with spawn(device="cpu", isolation="thread", name="shared") as gpu, serve_socket(gpu, path):
            (metrics,) = await asyncio.to_thread(source.read)
            assert (metrics.service, metrics.state) == ("shared", "ready")
        await asyncio.to_thread(read_until_lost, source)
    await asyncio.to_thread(source.close)


def read_until_lost(source: SocketSource) -> None:
    """Read until the end of the connection has come: before, a source has what it was told last."""
    with contextlib.suppress(SourceLost):
        while True:
            source.read()


@contextlib.contextmanager
def handling_ctrl_c(handler: Any = signal.default_int_handler) -> Iterator[None]:
    """Ctrl-C is handled like that, also in processes that are started, whoever started this one."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_on_a_terminal_a_lost_source_is_said_and_tried_again(service: CudnnService, server: Server) -> None:
    server.body = scraped(service)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    command = [sys.executable, "-m", "cudnn_actor.cli", "top", server.url, "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    with handling_ctrl_c():
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        read_until(ours, "topped on cpu: ready")
        server.status = 503
        read_until(ours, "status 503")
        server.status = 200
        read_until(ours, "topped on cpu: ready")
        process.send_signal(signal.SIGINT)
        rest = read_until(ours, None)
        assert "\x1b[?1049l" in rest  # the screen is given back
        assert process.wait(PATIENCE_S) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux")
def test_it_runs_under_tmux(service: CudnnService, server: Server, tmp_path: Path) -> None:
    """It draws on the screen of a terminal, and Ctrl-C gives the screen back."""
    server.body = scraped(service)
    environment = {**os.environ, "SHELL": "/bin/sh"}
    for name in ("TMUX", "COLUMNS", "LINES"):
        environment.pop(name, None)

    def tmux(*words: str) -> str:
        command = ["tmux", "-f", os.devnull, "-S", str(tmp_path / "tmux"), *words]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=PATIENCE_S, env=environment
        )
        return done.stdout

    def screen_with(words: str) -> str:
        by = time.monotonic() + PATIENCE_S
        while words not in (screen := tmux("capture-pane", "-p")):
            assert "ended with" not in screen, screen
            assert time.monotonic() < by, screen
        return screen

    top = shlex.join([sys.executable, "-m", "cudnn_actor.cli", "top", server.url, "--interval", "0.1"])
    shell = f"trap : INT; {top}; echo ended with $?; read line"  # Ctrl-C is for the shell, too
    with handling_ctrl_c():
        tmux("new-session", "-d", "-x", "100", "-y", "30", shell)
    try:
        screen = screen_with("topped on cpu: ready")
        assert "Ping" in screen
        assert max(map(len, screen.splitlines())) <= 100
        assert tmux("display-message", "-p", "#{alternate_on}") == "1\n"
        tmux("send-keys", "C-c")
        assert screen_with("ended with").split("\n", 1)[0].endswith("ended with 130")
        assert tmux("display-message", "-p", "#{alternate_on}") == "0\n"
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):  # it has ended, which an assertion says
            tmux("kill-server")


class Interrupted:
    """A source in whose readings Ctrl-C comes, and is forgotten, as in a destructor."""

    def __init__(self) -> None:
        self.readings = 0

    def read(self) -> Any:
        self.readings += 1
        if self.readings == 3:
            raise RuntimeError("no more readings")
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise SourceLost("interrupted")

    def close(self) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("before", "raised", "readings"),
    [(signal.default_int_handler, KeyboardInterrupt, 1), (signal.SIG_IGN, RuntimeError, 3)],
)
def test_ctrl_c_ends_it_where_python_forgets_the_exception(
    monkeypatch: pytest.MonkeyPatch, before: Any, raised: type[BaseException], readings: int
) -> None:
    """But not in a process that was started to ignore Ctrl-C."""
    source = Interrupted()
    monkeypatch.setattr(top, "source_of", lambda _: source)
    with handling_ctrl_c(before):
        with pytest.raises(raised):
            top.run(argparse.Namespace(source="here", json=True, once=False, interval=0.01))
        assert signal.getsignal(signal.SIGINT) is before
    assert source.readings == readings


def read_until(terminal: int, words: str | None) -> str:
    """What comes until these words do, or until the end."""
    text = ""
    while words is None or words not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text):
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # its other end is closed
            break
        text += piece.decode(errors="replace")
    else:
        return text
    assert words is None, text
    return text


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"nothing of ours 1\n", "no metrics of cudnn-actor|no metrics in"),
        (b"\xff\xfe", "no metrics|decode"),
        (b'cudnn_actor_state{service="a",cudnn_actor_state="odd"} 1\n', "no metrics in"),
        (b'cudnn_actor_generation{service="a"} NaN\ncudnn_actor_state{service="a"} 1\n', "no metrics in"),
        (b"#" * (top._MOST_BYTES + 1), "longer than"),
        (b"", "no metrics of"),
    ],
)
def test_a_strangers_answer_is_refused(server: Server, body: bytes, why: str) -> None:
    server.body = body
    with pytest.raises(SourceLost, match=why):
        PrometheusSource(server.url).read()


def test_a_server_that_never_ends_is_left(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "_WITHIN_S", ANSWER_LIMIT_S)
    server.drips = True
    with pytest.raises(SourceLost, match="within"):
        PrometheusSource(server.url).read()


def test_a_strangers_names_cannot_write_on_the_terminal() -> None:
    text = (
        'cudnn_actor_state{service="\x1b[2Ja%s",cudnn_actor_state="ready"} 1\n'
        'cudnn_actor_standby{service="\x1b[2Ja%s",cudnn_actor_standby="none"} 1\n'
    ) % (("[red]" * 100,) * 2)
    (metrics,) = metrics_of(text)
    assert len(metrics.service) == 100
    seen = shown(View("x", Since(Reading((metrics,), 0.0))), 300)
    assert "?[2Ja[red]" in seen
    assert "\x1b" not in seen


@pytest.mark.parametrize("source", ["nonsense", "ftp://x/", "http://", "http://x:99999999/"])
def test_what_is_no_url_is_refused(source: str) -> None:
    with pytest.raises(UserError, match="is the URL"):
        PrometheusSource(source)


def test_once_without_a_server_says_so_in_a_line() -> None:
    done = cudnn_actor_here("top", "http://127.0.0.1:1/metrics", "--once")
    assert done.returncode == 2
    assert re.fullmatch(r"cudnn-actor: http://127.0.0.1:1/metrics: .*refused\n", done.stderr)
