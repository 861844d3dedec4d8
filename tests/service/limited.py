"""A process at its limits: programs for `test_process_limits`, each run in a process of its own by name."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cudnn_actor import CudnnRef, OutOfMemory
from cudnn_actor.engines import choose_engine
from cudnn_actor.errors import OutOfDescriptors
from cudnn_actor.isolation import staging
from cudnn_actor.memory.memory_table import MemoryTable
from cudnn_actor.messages import Ping, Upload
from cudnn_actor.options import make_options
from cudnn_actor.service import Spawning
from cudnn_actor.service.service import CudnnService

from ..patience import PATIENCE_S

ARENA_BYTES = 16 << 20
"""Of an arena, and of a segment of staging memory: less than a service has, so that less fills them."""
LARGE = (1, 1, 1536, 4096)
"""Of float32: 24 MiB, so that two do not lie in one arena, nor in one segment of staging memory."""
NEEDS_NOTHING = {
    ("thread", "descriptors", "download"),
    ("process", "descriptors", "download"),
    ("apart", "memory", "empty"),
}
"""What this process needs neither memory nor a descriptor for."""
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3
"""Of mallopt(3)."""
_START_BYTES = 128 << 20
"""Bytes of address space that a service's threads and its worker's take for themselves, about."""
_ROOM = 16 << 20
"""Bytes of address space that the limit leaves: for an interpreter, and for no large array."""


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Let this process have no more address space than it has, but for a little (`ulimit -v`)."""
    with _limited(resource.RLIMIT_AS, _address_space() + _ROOM):
        yield


def _address_space() -> int:
    """Bytes that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open no more files (`ulimit -n`)."""
    with open(os.devnull) as null:
        open_now = {int(name) for name in os.listdir("/proc/self/fd")}
        with _limited(resource.RLIMIT_NOFILE, max(open_now) + 1):
            held = []
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(null.fileno()))
            try:
                yield
            finally:
                for descriptor in held:
                    os.close(descriptor)


@contextlib.contextmanager
def _limited(what: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


LIMITS: dict[str, tuple[Any, type[Exception]]] = {
    "descriptors": (no_descriptors, OutOfDescriptors),
    "memory": (little_memory, OutOfMemory),
}


def _service(place: str) -> CudnnService:
    """On a thread, in a process, or in one whose arenas are not this process's to map, as on a GPU."""
    isolation = "thread" if place == "thread" else "process"
    options = make_options({"device": "cpu", "isolation": isolation})
    return CudnnService(options, engine=choose_engine("cpu")._replace(host_arenas=place != "apart"))


async def _check(place: str, limit: str) -> None:
    """Send requests past a limit; see that they alone have failed, and that they work without the limit."""
    narrow, refusal = LIMITS[limit]
    ones = np.ones(LARGE, np.float32)
    async with Spawning(_service(place)) as gpu:
        worker = gpu.worker_pid
        kept, full = await gpu.upload(2 * ones[..., :1]), await gpu.upload(3 * ones)
        other = await gpu.upload(ones[..., :1])
        held: list[Any] = []
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "empty": lambda: gpu.empty(LARGE, dtype="float32"),
            "upload": lambda: gpu.upload(ones),
            "download": lambda: gpu.download(full),
        }
        for name, call in calls.items():
            if (place, limit, name) in NEEDS_NOTHING:
                continue
            held.append(await gpu.download(full))  # in the segment of staging memory that is kept, if one is
            await gpu.ping()  # the actor lets go of the last message
            gc.collect()
            with narrow():
                said = await _refused(call(), refusal)
                assert (await gpu.ping(), gpu.worker_pid) == (1, worker)
            assert "ulimit" in said, said
            held.append(await _check_that_all_is_well(gpu, kept, full))
            held.append(await call())  # so that the next needs memory of its own
            await gpu.ask(Upload(dst=other, data=5 * ones[..., :1]))
            assert (await gpu.download(other)).min() == 5.0
        await _check_that_all_is_well(gpu, kept, full)
        assert ((await gpu.statistics()).restarts, gpu.worker_pid) == (0, worker)


async def _refused(call: Awaitable[Any], refusal: type[Exception]) -> str:
    """What the error says that a call ends in."""
    try:
        await call
    except refusal as error:
        return str(error)
    raise AssertionError("it was not refused")


async def _check_that_all_is_well(gpu: CudnnRef, kept: Any, full: Any) -> np.ndarray:
    assert (await gpu.download(kept)).max() == 2.0
    down = await gpu.download(full)
    assert (down.min(), down.max()) == (3.0, 3.0)
    return down


async def _fill_up(place: str) -> None:
    """Under a limit that holds for workers too, take buffers until there is no room; then go on with less."""
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + _START_BYTES + 9 * (24 << 20), -1))
    ones = np.ones(LARGE, np.float32)
    async with Spawning(_service(place)) as gpu:
        worker = gpu.worker_pid
        kept, full = await gpu.upload(2 * ones[..., :1]), await gpu.upload(3 * ones)
        taken = []
        with contextlib.suppress(OutOfMemory):
            while True:
                taken.append(await gpu.empty(LARGE, dtype="float32"))
        for buffer in taken:
            await gpu.free(buffer)
        await _check_that_all_is_well(gpu, kept, full)
        again = await gpu.upload(ones)
        assert (await gpu.download(again)).min() == 1.0
        assert ((await gpu.statistics()).restarts, gpu.worker_pid) == (0, worker)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Let this process have no 64 KiB in one piece any more; smaller pieces there are."""
    small: list[bytes | bytearray] = [bytes(size) for size in range(16, 512, 16) for _ in range(400)]
    pieces: list[bytes | bytearray] = [bytearray(32 << 10) for _ in range(256)]
    held: list[bytearray] = []
    with _limited(resource.RLIMIT_AS, _address_space()):
        for size in (1 << 20, 256 << 10, 64 << 10):
            with contextlib.suppress(MemoryError):
                while True:
                    held.append(bytearray(size))
        for some in (pieces, small):  # every other, so that no two make a larger one
            for place in range(0, len(some), 2):
                some[place] = b""
        try:
            yield
        finally:
            held.clear()


async def _starve(place: str) -> None:
    """Have no memory to read what the worker says while it says it, then have some again."""
    async with Spawning(_service(place)) as gpu:
        worker = gpu.worker_pid
        for _ in range(100):
            await gpu.ping()
        with nothing_left():
            asked = [gpu.submit(Ping()) for _ in range(8)]
            await asyncio.wait(asked, timeout=0.5)
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.gather(*asked) == [1] * len(asked)
        assert ((await gpu.statistics()).restarts, gpu.worker_pid) == (0, worker)


def have_one_heap() -> None:
    """Each further one that the C library has for a thread, of workers too, has address space set aside.

    And large arrays are in no heap, whose space would stay when they are freed.
    """
    for option, variable, value in (
        (_M_ARENA_MAX, "MALLOC_ARENA_MAX", 1),
        (_M_MMAP_THRESHOLD, "MALLOC_MMAP_THRESHOLD_", 1 << 20),
    ):
        assert ctypes.CDLL(None).mallopt(option, value) == 1
        os.environ[variable] = str(value)


def have_small_arenas() -> None:
    """Let less memory fill an arena, and a segment of staging memory."""
    MemoryTable.__init__.__kwdefaults__["arena_bytes"] = ARENA_BYTES  # type: ignore[index]
    staging.SEGMENT_BYTES = ARENA_BYTES


if __name__ == "__main__":
    have_one_heap()
    have_small_arenas()
    what, place = sys.argv[1:]
    match what:
        case "starve":
            asyncio.run(_starve(place))
        case "fill_up":
            asyncio.run(_fill_up(place))
        case "check":
            staging._IDLE_BYTES = 0  # one segment is kept nevertheless
            for limit in LIMITS:
                asyncio.run(_check(place, limit))
        case _:
            raise SystemExit(f"there is no program {what!r}")
