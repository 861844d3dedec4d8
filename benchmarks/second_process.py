"""The least that a request to a second process costs beside its run on the device, and that a copy takes.

A plain process (`second_process_side`) gets a word on a socket pair, has its device work, and sends the word
back. There are no messages, tables, checks or locks. What it measures is what any design with a second
process pays on this machine: being woken up on the way there and on the way back, and on a GPU the launch of
a CUDA graph and the look at an event behind it.

A way is named by who sleeps, "sleeps" or "polls": the caller, then the other process. "loop" is a caller on
asyncio, which sleeps in its selector.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.isolation.process.arrivals import Arrival, parts_of

from .second_process_side import COPY, POLLS, READY, RUN, SLEEPS, WORDS_BYTES

__all__ = ["Other", "other_process", "request_floors"]

_SIDE = "benchmarks.second_process_side"
_TURNS = 4
_WARM = 10
_LEAST_BYTES = 4096
_READY_S = 120.0


class Other(NamedTuple):
    """The other process, from this one's side.

    Attributes
    ----------
    run_us
        How long its device takes for a run.
    ask
        Sends it a word, and waits for the answer: asleep, polling, or on asyncio.
    upload
        Has it copy an array to its device: the request first, then the array into memory that both map.
    """

    run_us: float
    ask: dict[str, Callable[[bytes], Awaitable[None]]]
    upload: Callable[[np.ndarray], Awaitable[None]]


@contextlib.asynccontextmanager
async def other_process(
    device: str, *, nodes: int = 1, run_us: float = 0.0, nbytes: int = _LEAST_BYTES
) -> AsyncIterator[Other]:
    """A process that sleeps between requests. A run of its device is so many kernels, and takes so long."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = os.memfd_create("second-process")
    os.ftruncate(descriptor, nbytes + WORDS_BYTES)
    words = [device, str(nodes), str(run_us), str(nbytes), str(theirs.fileno()), str(descriptor)]
    process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
        [sys.executable, "-m", _SIDE, *words], pass_fds=(theirs.fileno(), descriptor)
    )
    theirs.close()
    memory = mmap.mmap(descriptor, nbytes + WORDS_BYTES)
    os.close(descriptor)
    try:
        ours.settimeout(_READY_S)
        ready = ours.recv(READY.size)
        if not ready:
            raise RuntimeError("the other process has failed: its error stands above")
        ours.settimeout(None)
        yield _connected(ours, memory, nbytes, READY.unpack(ready)[0])
    finally:
        ours.close()
        process.wait()


def _connected(connection: socket.socket, memory: mmap.mmap, nbytes: int, run_us: float) -> Other:
    values, arrival = np.frombuffer(memory, np.uint8, nbytes), Arrival(memoryview(memory), nbytes)
    loop = asyncio.get_running_loop()

    async def asleep(word: bytes) -> None:
        connection.send(word)
        connection.recv(len(word))

    async def polling(word: bytes) -> None:
        connection.send(word)
        while True:
            with contextlib.suppress(BlockingIOError):
                connection.recv(len(word), socket.MSG_DONTWAIT)
                return

    async def on_loop(word: bytes) -> None:
        future = loop.create_future()
        loop.add_reader(connection.fileno(), lambda: future.set_result(connection.recv(len(word))))
        connection.send(word)
        await future
        loop.remove_reader(connection.fileno())

    async def upload(array: np.ndarray) -> None:
        arrival.clear()
        connection.send(COPY)
        source = array.reshape(-1).view(np.uint8)
        for number, begin, end in parts_of(nbytes):
            np.copyto(values[begin:end], source[begin:end])
            arrival.note(number)
        connection.recv(len(COPY))

    return Other(run_us, {"sleeps": asleep, "polls": polling, "loop": on_loop}, upload)


async def request_floors(device: str, nodes: int, run_us: float, runs: int) -> dict[str, Any]:
    """Microseconds of a request beside its run on the device, p50 and p90, for each way. In turns.

    Also how long the run takes on the device: about as long as it should.
    """
    took: dict[str, list[float]] = {}
    async with other_process(device, nodes=nodes, run_us=run_us) as other:
        for _ in range(_TURNS):
            for waits in (SLEEPS, POLLS):
                await other.ask["sleeps"](waits)
                for caller, ask in other.ask.items():
                    of = took.setdefault(f"{caller}, {waits.decode()}", [])
                    for number in range(_WARM + runs // _TURNS):
                        begin = time.perf_counter()
                        await ask(RUN)
                        if number >= _WARM:
                            of.append((time.perf_counter() - begin) * 1e6 - other.run_us)
    floors: dict[str, Any] = {"device_us": round(other.run_us, 1)}
    for way, each in took.items():
        p90 = statistics.quantiles(each, n=10)[-1]
        floors[way] = {"p50": round(statistics.median(each), 1), "p90": round(p90, 1)}
    return floors
