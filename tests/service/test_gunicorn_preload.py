"""gunicorn forks its workers from a process that has a service already (`--preload`)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..forked_programs import Program
from ..patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
WORKERS = 2


class Server:
    """A gunicorn at work, at a Unix socket."""

    def __init__(self, process: Program, address: Path, log: Path) -> None:
        self.process = process
        self.log = log
        self._address = address

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Until something holds, which it does soon."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            threading.Event().wait(0.01)

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """The status of an answer, and what it says."""
        connection = http.client.HTTPConnection("localhost", timeout=PATIENCE_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(PATIENCE_S)
        with contextlib.closing(connection):
            connection.sock.connect(str(self._address))
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def board(self) -> dict[str, Any]:
        """How the master's load does."""
        return self.get("/board")[1]

    def workers(self) -> set[int]:
        """Process ids of the workers that answer, each of some requests."""
        return {self.board()["pid"] for _ in range(50)}


@contextlib.contextmanager
def serving(isolation: str) -> Iterator[Server]:
    """A server that answers; the folder's name is short, as a socket's path has to be."""
    with tempfile.TemporaryDirectory(prefix="gunicorn-") as folder:
        address, log = Path(folder, "socket"), Path(folder, "log")
        command = ["-W", "ignore:This process:DeprecationWarning", "-m", "gunicorn", "--preload"]
        command += ["--workers", str(WORKERS), "--bind", f"unix:{address}", f"{__package__}.gunicorn_app"]
        environment = {**os.environ, "TEST_ISOLATION": isolation, "XDG_RUNTIME_DIR": folder}
        with (
            log.open("wb") as stderr,
            Program(command, cwd=ROOT, env=environment, stderr=stderr, spare=True) as process,
        ):
            try:
                server = Server(process, address, log)
                server.wait_for(lambda: accepts(server))
                yield server
            finally:
                process.kill()


def accepts(server: Server) -> bool:
    try:
        return server.get("/board")[0] == 200
    except OSError:
        return False


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_workers_are_refused_the_master_s_service_and_have_their_own(isolation: str) -> None:
    with serving(isolation) as server:
        server.wait_for(lambda: server.board()["rounds"] > 0)  # what the master says is on the board
        before = server.board()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            refused = list(pool.map(server.get, ["/parent"] * 100))
            served = list(pool.map(server.get, ["/own"] * 100))
            looked = list(pool.map(server.get, ["/look"] * 4))
        assert {status for status, _ in refused} == {503}
        assert all("spawn after the fork" in answer["error"] for _, answer in refused)
        assert {status for status, _ in served} == {200}
        assert all(answer["same"] and answer["value"] == answer["pid"] for _, answer in served)
        assert [answer["complaints"] for _, answer in looked] == [""] * 4
        old = server.workers()
        server.process.send_signal(signal.SIGHUP)  # new workers; the old ones come to the end of the program
        server.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in old))
        assert server.get("/parent")[0] == 503
        check_master(server, before)


def check_master(server: Server, before: dict[str, int]) -> None:
    """Its load goes on with the same worker, nothing was wrong, and its end is an orderly one."""
    rounds = server.board()["rounds"]
    server.wait_for(lambda: server.board()["rounds"] > rounds)
    after = server.board()
    assert (after["wrong"], after["restarts"], after["worker"]) == (0, 0, before["worker"])
    server.process.terminate()
    assert server.process.wait(PATIENCE_S) == 0, server.log.read_text()
    assert "Traceback" not in server.log.read_text()
    if worker := after["worker"]:
        deadline = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{worker}").exists():
            assert time.monotonic() < deadline, "the master's worker is left over"
            threading.Event().wait(0.01)
