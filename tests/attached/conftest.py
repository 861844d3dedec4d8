"""A service of this process, its socket, and a client of this process too."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from cudnn_actor import CudnnRef, connect, spawn
from cudnn_actor.attached import ServedSocket, serve_socket

from ..forked_programs import Program
from .raw_client import Raw

Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]


@pytest.fixture
async def gpu() -> AsyncIterator[CudnnRef]:
    async with spawn(device="cpu", isolation="thread") as service:
        yield service


@pytest.fixture
async def served(gpu: CudnnRef, tmp_path: Path) -> AsyncIterator[ServedSocket]:
    async with serve_socket(gpu, tmp_path / "gpu.sock", nbytes=64 << 20) as socket:
        yield socket


@pytest.fixture
async def client(served: ServedSocket) -> AsyncIterator[CudnnRef]:
    async with connect(served.path) as attached:
        yield attached


@pytest.fixture
async def raw(served: ServedSocket) -> AsyncIterator[Raw]:
    client = Raw(served.path)
    yield client
    client.socket.close()


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something is so; a test that waits for ever fails by its own time limit."""
    while not await condition():  # noqa: ASYNC110 - other processes know of no event
        await asyncio.sleep(0.005)  # other processes and the service's thread do the work


@contextlib.asynccontextmanager
async def client_process(*arguments: object, module: str = "client_program") -> AsyncIterator[Program]:
    """A process of such a module of the tests, once it has said that it is ready. It is killed at the end."""
    words = ["-m", f"tests.attached.{module}", *map(str, arguments)]
    with Program(words, stdout=subprocess.PIPE) as process:
        try:
            assert await said_by(process) == "ready\n"
            yield process
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)


async def said_by(process: Program) -> str:
    """The next line that a process writes to its standard output."""
    line: str = await asyncio.to_thread(process.stdout.readline)
    return line
