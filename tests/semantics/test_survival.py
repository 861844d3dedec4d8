"""The first table under "What survives a failure" of docs/failures.md, row by row."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

from cudnn_actor import CudnnActorError, ExecutionFailed, Fault, FaultPlan, Receipt, ServiceStopped
from cudnn_actor.messages import Fill

from ..forked_programs import Program
from ..isolation.crash_rigs import gone, kill
from ..service.rigs import in_thread, outcome
from .hung_thread import hung_thread
from .scenarios import IN_PROCESS, ON_THREAD, REPLACED, Case, Logs, Scenarios
from .scripted_workers import scripted_workers
from .setups import Setup, open_session

SURVIVAL = Scenarios("What survives a failure", "failure")


@SURVIVAL.row("a request fails")
async def a_request_fails(setup: Setup, _: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=FaultPlan().at(1, Fault.FAIL_EXECUTION, of=Fill)) as session:
        with pytest.raises(ExecutionFailed):
            await session.gpu.fill(session.trio.y, 2)
        return await session.survivors()


@SURVIVAL.row("the device context dies")
async def the_context_dies(setup: Setup, _: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, faults=FaultPlan().at(1, Fault.STICKY, of=Fill)) as session:
        await outcome(session.gpu.submit(Fill(dst=session.trio.y, value=2)))
        return await session.survivors()


@SURVIVAL.row("the worker is killed, or exits", columns=IN_PROCESS)
async def the_worker_is_killed(setup: Setup, _: Fault, logs: Logs) -> str:
    async with open_session(setup, logs) as session:
        await gone(kill(session.gpu))
        return await session.survivors()


@SURVIVAL.row("the worker breaks the protocol", columns=IN_PROCESS)
async def the_worker_breaks_the_protocol(setup: Setup, _: Fault, logs: Logs) -> str:
    async with scripted_workers(setup, logs) as (session, points):
        points.order("fill", "say noise")
        assert isinstance(await outcome(session.gpu.submit(Fill(dst=session.trio.y, value=2))), Receipt)
        return await session.survivors()


@SURVIVAL.row("the actor hangs")
async def the_actor_hangs(setup: Setup, _: Fault, logs: Logs) -> str:
    faults = FaultPlan().at(1, Fault.HANG, of=Fill)
    async with open_session(setup, logs, faults=faults) as session:
        await outcome(session.gpu.submit(Fill(dst=session.trio.y, value=2)))
        return await session.survivors()


@SURVIVAL.row("the actor's thread hangs and does not end", columns=ON_THREAD)
async def the_thread_hangs(setup: Setup, _: Fault, logs: Logs) -> str:
    async with hung_thread(setup, logs) as (session, _product):
        return await session.survivors()


@SURVIVAL.row("the next incarnation fails to start", columns=REPLACED)
async def the_next_incarnation_fails(setup: Setup, _: Fault, logs: Logs) -> str:
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill).at_start(2)
    async with open_session(setup, logs, faults=faults) as session:
        await session.gpu.fill(session.trio.y, 2)
        assert session.gpu.generation == 3
        return await session.survivors()


@SURVIVAL.row("the standby dies", columns=IN_PROCESS)
async def the_standby_dies(setup: Setup, _: Fault, logs: Logs) -> str:
    async with open_session(setup, logs, standby=1) as session:
        ready = await session.line("standby.ready")
        os.kill(ready["pid"], signal.SIGKILL)
        assert (await session.line("standby.died"))["pid"] == ready["pid"]
        return await session.survivors()


@SURVIVAL.row("no restart is left")
async def no_restart_is_left(setup: Setup, _: Fault, logs: Logs) -> str:
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill)
    async with open_session(setup, logs, faults=faults, max_restarts=0) as session:
        assert isinstance(
            await outcome(session.gpu.submit(Fill(dst=session.trio.y, value=2))), CudnnActorError
        )
        return await session.survivors()


@SURVIVAL.row("the service is stopped")
async def the_service_is_stopped(setup: Setup, _: Fault, logs: Logs) -> str:
    async with open_session(setup, logs) as session:
        await session.gpu.aclose()
        with pytest.raises(ServiceStopped):
            await session.gpu.fill(session.trio.y, 2)
        return await session.survivors()


@SURVIVAL.row("your process is killed", replaces_cuda=False)
async def the_process_is_killed(setup: Setup, _: Fault, logs: Logs) -> str:
    survivors: str = await in_thread(lambda: survivors_of_a_killed_process(setup))
    assert not logs, "the service was not in this process"
    return survivors


PROGRAM = """
import json, sys
import cudnn_actor
service = cudnn_actor.start(device=sys.argv[1], isolation=sys.argv[2])
print(json.dumps(service.worker_pid), file=sys.stderr, flush=True)
sys.stdin.read()
"""


def survivors_of_a_killed_process(setup: Setup) -> str:
    """Kill a process with a service. Wait for the processes that it started: "nothing" if all end. Blocks."""
    words = ["-c", PROGRAM, setup.device, setup.isolation]
    pipe = subprocess.PIPE
    with Program(words, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, spare=True) as process:
        worker = json.loads(process.stderr.readline())
        started = descendants(process.pid)
        assert (worker in started) == setup.in_process
        pidfds = [os.pidfd_open(pid) for pid in started]
        try:
            process.kill()
            process.wait()
            return "nothing" if all(ends(pidfd) for pidfd in pidfds) else "something"
        finally:
            for pidfd in pidfds:
                os.close(pidfd)


def descendants(pid: int) -> set[int]:
    """The children of a process, and their descendants."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                found |= {child, *descendants(child)}
    return found


def ends(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(10_000))


@pytest.mark.parametrize("case", SURVIVAL.cases())
async def test_what_survives(case: Case, logs: Logs) -> None:
    await case.check(logs)


def test_every_cell_of_the_table_has_a_scenario_and_every_scenario_a_cell() -> None:
    SURVIVAL.check()
