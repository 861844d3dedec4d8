"""Killing or stopping any process but the worker that serves is not noticed by requests."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from cudnn_actor import CudnnRef, CudnnService, spawn
from cudnn_actor.engines import EngineChoice, WorkerEngine
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.messages import Ping
from cudnn_actor.options import make_options
from cudnn_actor.processes.forkserver import NAME
from cudnn_actor.service import Spawning
from tests.service.rigs import Trio, in_thread

from ..inside import service_behind
from ..patience import PATIENCE_S
from . import dies_in_import
from .crash_rigs import gone, kill, pid_of

MANY = 200
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
AT_ONCE_S = 25.0
"""Far longer than an answer takes, also on a slow machine, and shorter than a wait for a helper that does not
answer."""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def heirs_of(server: int) -> set[int]:
    """The forkservers that one has forked."""
    return {pid for pid in children_of(server) if Path(f"/proc/{pid}/comm").read_text() == f"{NAME}\n"}


async def helpers_of(gpu: CudnnRef, standbys: int) -> tuple[int, set[int]]:
    """The forkserver, and its heir and the standbys, once they are there."""
    worker = pid_of(gpu)
    server = parent_of(worker)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            others = children_of(server) - {worker}
            if len(others) > standbys and len(heirs_of(server)) == 1:
                return server, others
            await asyncio.sleep(0.01)


@asynccontextmanager
async def load(gpu: CudnnRef) -> AsyncIterator[list[int]]:
    """Requests all the time, from a task and from a thread; how many each has had answered."""
    trio = await Trio.on(gpu)
    answered = [0, 0]
    ends = threading.Event()

    async def ask() -> None:
        while not ends.is_set():
            await asyncio.wait_for(gpu.ask(trio.product()), AT_ONCE_S)
            answered[0] += 1

    def call() -> None:
        while not ends.is_set():
            service_behind(gpu).actor_ref.ask(Ping(), timeout=AT_ONCE_S)
            answered[1] += 1

    asking = [asyncio.create_task(ask()), asyncio.create_task(asyncio.to_thread(call))]
    try:
        yield answered
    finally:
        ends.set()
        await asyncio.gather(*asking)


async def go_on(answered: list[int], times: int) -> None:
    """Until so many more requests of each kind have been answered."""
    wanted = [count + times for count in answered]
    async with asyncio.timeout(PATIENCE_S):
        while any(have < want for have, want in zip(answered, wanted, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@contextmanager
def cleared_away(pids: set[int]) -> Iterator[None]:
    """Whatever is still stopped at the end is killed."""
    pidfds = [os.pidfd_open(pid) for pid in pids]
    try:
        yield
    finally:
        for pidfd in pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


async def heir_of(server: int) -> int:
    """The heir of a forkserver, which it may start after the worker that was asked of it."""
    async with asyncio.timeout(PATIENCE_S):
        while not (heirs := heirs_of(server)):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
    (heir,) = heirs
    return heir


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("standbys", [0, 1])
async def test_requests_do_not_notice_what_becomes_of_the_helpers(
    number: signal.Signals, standbys: int
) -> None:
    async with spawn(device="cpu", isolation="process", standby=standbys) as gpu:
        server, others = await helpers_of(gpu, standbys)
        worker = pid_of(gpu)
        with cleared_away({server, *others}):
            async with load(gpu) as answered:
                await go_on(answered, MANY)
                for pid in (server, *others):
                    os.kill(pid, number)
                await go_on(answered, MANY)
                assert pid_of(gpu) == worker
            assert (await gpu.statistics()).restarts == 0
            assert gpu.generation == 1
            kill(gpu)  # and the service recovers, without any of them
            async with asyncio.timeout(PATIENCE_S):
                assert await gpu.ping() == 2
            assert parent_of(pid_of(gpu)) != server
            assert (await gpu.statistics()).restarts == 1


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_forkserver_s_heir_takes_over_and_has_an_heir_of_its_own(number: signal.Signals) -> None:
    async with spawn(device="cpu", isolation="process") as gpu:
        server, others = await helpers_of(gpu, 0)
        (heir,) = others
        with cleared_away({server}):
            os.kill(server, number)
            await gone(kill(gpu))
            assert await gpu.ping() == 2
            assert parent_of(pid_of(gpu)) == heir
            another = await heir_of(heir)
            os.kill(heir, number)
            with cleared_away({heir}):
                await gone(kill(gpu))
                assert await gpu.ping() == 3
                assert parent_of(pid_of(gpu)) == another


async def test_a_forkserver_that_was_killed_is_followed_by_its_heir_before_anybody_needs_it() -> None:
    async with spawn(device="cpu", isolation="process") as gpu:
        server, others = await helpers_of(gpu, 0)
        (heir,) = others
        os.kill(server, signal.SIGKILL)
        await heir_of(heir)
        assert await gpu.ping() == 1


async def test_a_standby_s_start_by_a_stopped_forkserver_holds_nobody_up() -> None:
    async with spawn(device="cpu", isolation="process", standby=1) as gpu:
        server, others = await helpers_of(gpu, 1)
        (standby,) = others - heirs_of(server)
        with cleared_away({server}):
            async with load(gpu) as answered:
                os.kill(server, signal.SIGSTOP)
                os.kill(standby, signal.SIGKILL)
                await gone(server)  # which was given up, since a standby was wanted
                await go_on(answered, MANY)
            assert (await gpu.statistics()).restarts == 0


async def test_closing_ends_a_worker_that_has_outlived_its_forkserver() -> None:
    async with spawn(device="cpu", isolation="process") as gpu:
        worker = pid_of(gpu)
        server = parent_of(worker)
        os.kill(server, signal.SIGKILL)
        await gone(server)
        assert await in_thread(lambda: service_behind(gpu).actor_ref.ask(Ping(), timeout=PATIENCE_S)) == 1
    await gone(worker)


async def test_a_service_starts_and_recovers_although_every_forkserver_is_killed_in_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(dies_in_import.VARIABLE, "1")
    chosen = EngineChoice(
        "cpu",
        CpuEngine,
        True,
        worker=WorkerEngine("cudnn_actor.engines.cpu.engine:CpuEngine"),
        preload=(dies_in_import.__name__,),
        host_arenas=True,
    )
    service = CudnnService(make_options({"device": "cpu", "isolation": "process"}), engine=chosen)
    async with Spawning(service) as gpu:
        first = await gpu.ping()
        assert first == 1, "no start has failed"
        assert parent_of(pid_of(gpu)) == os.getpid()
        kill(gpu)
        async with asyncio.timeout(PATIENCE_S):
            assert await gpu.ping() == first + 1
