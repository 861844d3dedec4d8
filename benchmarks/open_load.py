"""Requests that begin at random moments, whatever has been answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Load", "Request", "other_process"]

_AHEAD_S = 0.1
"""How long the other process has to read the moments."""
_PROGRAM = """
import bisect, json, socket, sys, time
with socket.socket(fileno=int(sys.argv[1])) as given:
    for line in given.makefile("rb"):
        due, at = json.loads(line), 0
        while at < len(due):
            time.sleep(max(0.0, due[at] - time.perf_counter()))
            until = bisect.bisect(due, time.perf_counter(), at)
            given.sendall(b"x" * (until - at))
            at = until
"""


class Request(NamedTuple):
    """The moments at which a request was to be sent and was answered, in seconds.

    `member`: the one that had it first, if that is known. `late`: for how many seconds it was sent too late.
    """

    began: float
    ended: float
    member: str | None = None
    late: float = 0.0


Load = Callable[[Callable[[], Awaitable[Any]], float, float], Awaitable[list[Request]]]
"""Makes calls, so many a second for so many seconds, and returns them."""


@contextlib.asynccontextmanager
async def other_process() -> AsyncIterator[Load]:
    """A load whose moments another process tells, by a socket.

    So requests come to the event loop as they come to a server. A thread would want the interpreter's lock
    for each of them, like the threads that copy; a timer of the loop is a millisecond coarse; and a loop that
    spins takes the lock from the threads that copy. Both processes have the same clock.
    """
    own, others = socket.socketpair()
    with others:
        arguments = [sys.executable, "-c", _PROGRAM, str(others.fileno())]
        process = await asyncio.create_subprocess_exec(*arguments, pass_fds=[others.fileno()])
    own.setblocking(False)

    async def load(call: Callable[[], Awaitable[Any]], per_s: float, seconds: float) -> list[Request]:
        return await _load(own, call, per_s, seconds)

    try:
        yield load
    finally:
        own.close()
        await process.wait()


async def _load(
    own: socket.socket, call: Callable[[], Awaitable[Any]], per_s: float, seconds: float
) -> list[Request]:
    count = max(1, round(per_s * seconds))
    waits = np.random.default_rng(0).exponential(1 / per_s, count)
    due = (time.perf_counter() + _AHEAD_S + np.cumsum(waits)).tolist()
    loop, found = asyncio.get_running_loop(), list[Request]()
    begun, left = iter(due), asyncio.Event()

    async def one(due_s: float) -> None:
        late = time.perf_counter() - due_s
        await call()
        found.append(Request(due_s, time.perf_counter(), late=late))

    def start() -> None:
        told = own.recv(1 << 16)
        if not told:
            loop.remove_reader(own)
            left.set()
        for _ in told:
            tasks.create_task(one(due_s := next(begun)))
            if due_s == due[-1]:
                left.set()

    async with asyncio.TaskGroup() as tasks:
        loop.add_reader(own, start)
        try:
            await loop.sock_sendall(own, json.dumps(due).encode() + b"\n")
            await left.wait()
        finally:
            loop.remove_reader(own)
    if next(begun, None) is not None:
        raise RuntimeError("the process that tells the moments has ended: its error stands above")
    return found
