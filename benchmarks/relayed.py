"""The least that a process on the way costs: processes that pass bytes on, and do nothing else.

`Relayed` asks a process that answers each request with a fixed answer: directly, or by a relay, which is an
event loop that reads each request from one socket and writes it to another, and each answer likewise. So the
difference is the cost of a second hop on asyncio, without any work: no frame is decoded, nothing is checked,
and nobody else may send. Requests and answers have as many bytes as those of the smallest convolution.

`python -m benchmarks.relayed KIND FOLDER DESCRIPTORS…` is one of these processes.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ANSWER_BYTES", "REQUEST_BYTES", "Relayed"]

REQUEST_BYTES, ANSWER_BYTES = 512, 100
_LONGEST = 16 << 10
_LOOKS_S = 500e-6
Stamps = list[tuple[int, str]]


class Relayed:
    """Requests of the running event loop to a process that answers. Close it when all is answered.

    Parameters
    ----------
    way
        "direct"; "relay", by a loop that sleeps until something comes; or "awake", by one that sleeps only
        if nothing has come for 0.5 ms.
    looks
        Whether the process that answers looks for the next request for 0.5 ms before it sleeps.
    folder
        Where the other processes write their stamps when they end; None for no stamps.
    """

    def __init__(self, way: str, *, looks: bool = False, folder: Path | None = None) -> None:
        self.stamps: Stamps = []
        """Of this process: nanoseconds, and the stage that was reached."""
        self.relay_pid = 0
        """The process id of the relay; 0 for none."""
        self._is_stamped = folder is not None
        self._socket, end = socket.socketpair()
        where = "" if folder is None else str(folder)
        self._processes: list[subprocess.Popen[bytes]] = []
        ends = [end]
        if way != "direct":
            near, far = socket.socketpair()
            self._start([way, where], [end, near])
            self.relay_pid = self._processes[0].pid
            ends, end = [*ends, near, far], far
        self._start(["looks" if looks else "answer", where], [end])
        for each in ends:
            each.close()
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._future = self._loop.create_future()
        self._future.set_result(None)  # no request waits
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._request = bytes(REQUEST_BYTES)

    def _start(self, arguments: list[str], ends: Sequence[socket.socket]) -> None:
        descriptors = [each.fileno() for each in ends]
        command = [sys.executable, "-m", "benchmarks.relayed", *arguments, *map(str, descriptors)]
        self._processes.append(subprocess.Popen(command, pass_fds=descriptors))

    async def ask(self) -> None:
        """Send one request, and wait for its answer. Raises `ConnectionError` if a process has ended."""
        if self._is_stamped:
            self.stamps.append((time.perf_counter_ns(), "asked"))
        self._future = self._loop.create_future()
        self._socket.send(self._request)
        if self._is_stamped:
            self.stamps.append((time.perf_counter_ns(), "request sent"))
        await self._future
        if self._is_stamped:
            self.stamps.append((time.perf_counter_ns(), "answered"))

    def _read(self) -> None:
        if self._is_stamped:
            self.stamps.append((time.perf_counter_ns(), "awake"))
        if self._socket.recv(_LONGEST):
            self._future.set_result(None)
            return
        self._loop.remove_reader(self._socket.fileno())  # else the loop would spin
        if not self._future.done():
            self._future.set_exception(ConnectionResetError("a process of the floor has ended"))

    def close(self) -> None:
        """End the processes."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for process in self._processes:
            process.wait()


def _answer(connection: socket.socket, *, looks: bool, stamps: Stamps | None) -> None:
    """Answer each request, until the other side ends."""
    answer = bytes(ANSWER_BYTES)
    while True:
        until = time.monotonic() + _LOOKS_S
        while looks and not select.select((connection,), (), (), 0.0)[0] and time.monotonic() < until:
            pass
        if not connection.recv(_LONGEST):
            return
        if stamps is not None:
            stamps.append((time.perf_counter_ns(), "worker: request read"))
        connection.send(answer)
        if stamps is not None:
            stamps.append((time.perf_counter_ns(), "worker: answer sent"))


async def _relay(caller: socket.socket, worker: socket.socket, *, awake: bool, stamps: Stamps | None) -> None:
    """Pass requests and answers on, until the caller ends."""
    loop, ended, until_s = asyncio.get_running_loop(), asyncio.Event(), 0.0
    caller.setblocking(False)
    worker.setblocking(False)

    def pass_on(source: socket.socket, target: socket.socket, what: str) -> None:
        nonlocal until_s
        if stamps is not None:
            stamps.append((time.perf_counter_ns(), f"relay: awake for the {what}"))
        if not (data := source.recv(_LONGEST)):
            ended.set()
            return
        target.send(data)
        if stamps is not None:
            stamps.append((time.perf_counter_ns(), f"relay: {what} sent"))
        if awake:
            sleeps, until_s = until_s == 0.0, loop.time() + _LOOKS_S
            if sleeps:
                stay_awake()

    def stay_awake() -> None:
        nonlocal until_s
        if loop.time() < until_s:
            loop.call_soon(stay_awake)
        else:
            until_s = 0.0

    loop.add_reader(caller.fileno(), pass_on, caller, worker, "request")
    loop.add_reader(worker.fileno(), pass_on, worker, caller, "answer")
    await ended.wait()
    loop.remove_reader(caller.fileno())
    loop.remove_reader(worker.fileno())


def main() -> None:
    """Be one of the processes: of a kind, with a folder for stamps or "", and with descriptors of sockets."""
    kind, folder, *descriptors = sys.argv[1:]
    stamps: Stamps | None = [] if folder else None
    ends = [socket.socket(fileno=int(each)) for each in descriptors]
    if kind in ("answer", "looks"):
        _answer(ends[0], looks=kind == "looks", stamps=stamps)
    else:
        asyncio.run(_relay(ends[0], ends[1], awake=kind == "awake", stamps=stamps))
    if folder:
        Path(folder, f"{kind}.json").write_text(json.dumps(stamps))


if __name__ == "__main__":
    main()
