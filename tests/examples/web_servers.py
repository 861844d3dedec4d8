"""Real servers in processes of their own, on ports of 127.0.0.1 that the kernel chooses."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from examples.fastapi_service import KERNEL

from ..forked_programs import Program
from ..patience import PATIENCE_S

__all__ = ["PATIENCE_S", "Server", "blurred", "image", "serve"]

ROOT = Path(__file__).parents[2]


class Server:
    """A server's first process, the port that it listens on, and what it has written."""

    def __init__(self, process: Program, port: int, log: Path) -> None:
        self.process = process
        self._log = log
        self._client = httpx.Client(  # every request on a connection of its own
            base_url=f"http://127.0.0.1:{port}",
            limits=httpx.Limits(max_keepalive_connections=0),
            timeout=PATIENCE_S,
            trust_env=False,
            verify=False,  # there is no TLS
        )

    def close(self) -> None:
        """End it, and all that it has started."""
        self._client.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def probe(self, path: str = "/readyz") -> tuple[int, dict[str, Any]]:
        """Status and body of a probe; status 0 where nobody answers."""
        try:
            answer = self._client.get(path)
        except httpx.TransportError:
            return 0, {}
        return answer.status_code, answer.json()

    def blur(self, height: int, width: int, seed: int = 0) -> httpx.Response:
        """Have an image blurred. Any thread."""
        content = image(height, width, seed).tobytes()
        size = {"height": height, "width": width}
        return self._client.post("/blur", params=size, content=content)

    def until(self, what: str, condition: Callable[[], bool], pause_s: float = 0.0) -> None:
        """Wait until a condition holds. Between two looks, pause: for conditions that go on holding."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"not {what}:\n{self.log}"
            with contextlib.suppress(subprocess.TimeoutExpired):  # its end cuts the pause short
                self.process.wait(pause_s)

    def ready(self) -> dict[str, Any]:
        """Wait until it is ready; what it says then."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            assert self.process.poll() is None, self.log
            status, body = self.probe()
            found.append(body)
            return status == 200

        self.until("ready", look, pause_s=0.05)
        return found[-1]

    def ends(self) -> int:
        """Wait until the first process has ended; its status."""
        return self.process.wait(PATIENCE_S)

    def descendants(self) -> set[int]:
        """All processes below the first one."""
        return set(_below(self.process.pid))

    @contextmanager
    def nothing_outlives(self) -> Iterator[None]:
        """Whatever runs below the first process at the beginning has ended within a while of the end."""
        processes = {pid: os.pidfd_open(pid) for pid in self.descendants()}
        try:
            yield
            for pid, process in processes.items():
                assert select.select([process], [], [], PATIENCE_S)[0], f"process {pid} is left:\n{self.log}"
        finally:
            for process in processes.values():
                os.close(process)


def _below(pid: int) -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from _below(child)


@contextmanager
def serve(tmp_path: Path, *command: str, **environment: str) -> Iterator[Server]:
    """A server that is ready. `{port}` in its command, or in the environment, is where it is to listen."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path / "server.log"
    words = [word.format(port=port) for word in command]
    more = {name: value.format(port=port) for name, value in environment.items()}
    with log.open("wb") as output:
        process = Program(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env={**os.environ, **more},
            start_new_session=True,  # so that a Ctrl-C can be sent to all of it, and to nobody else
            spare=True,
        )
    server = Server(process, port, log)
    try:
        server.ready()
        yield server
    finally:
        server.close()


def image(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A grey image."""
    return np.random.default_rng(seed).integers(0, 256, (height, width), np.uint8)


def blurred(picture: np.ndarray) -> np.ndarray:
    """What the server must make of it."""
    kernel = KERNEL[0, 0].astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(picture, kernel.shape[0] // 2), kernel.shape)
    sums: np.ndarray = (windows * kernel).sum(axis=(2, 3))
    return sums.round().clip(0, 255).astype(np.uint8)
