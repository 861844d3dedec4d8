"""What survives what: the first table of that section of the page, brought about."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cudnn_actor import CudnnActorError, ExecutionFailed, Fault, FaultPlan, Fill, Receipt, ServiceStopped

from ..service.rigs import in_thread, outcome
from ..workers.crash_rigs import gone, kill
from .lost import lost_thread
from .places import Place, world
from .scenarios import IN_PROCESS, ON_THREAD, REPLACED, Case, Logs, Scenarios
from .told import told

SURVIVAL = Scenarios("What survives what", "failure")


@SURVIVAL.of("a request fails")
async def a_request_fails(place: Place, _: Fault, logs: Logs) -> str:
    async with world(place, logs, faults=FaultPlan().at(1, Fault.FAIL_EXECUTION, of=Fill)) as here:
        with pytest.raises(ExecutionFailed):
            await here.gpu.fill(here.trio.y, 2)
        return await here.left()


@SURVIVAL.of("the device context dies")
async def the_context_dies(place: Place, _: Fault, logs: Logs) -> str:
    async with world(place, logs, faults=FaultPlan().at(1, Fault.STICKY, of=Fill)) as here:
        await outcome(here.gpu.submit(Fill(dst=here.trio.y, value=2)))
        return await here.left()


@SURVIVAL.of("the worker is killed, or exits", columns=IN_PROCESS)
async def the_worker_is_killed(place: Place, _: Fault, logs: Logs) -> str:
    async with world(place, logs) as here:
        await gone(kill(here.gpu))
        return await here.left()


@SURVIVAL.of("the worker says what no honest one would", columns=IN_PROCESS)
async def the_worker_lies(place: Place, _: Fault, logs: Logs) -> str:
    async with told(place, logs) as (here, points):
        points.order("fill", "say noise")
        assert isinstance(await outcome(here.gpu.submit(Fill(dst=here.trio.y, value=2))), Receipt)
        return await here.left()


@SURVIVAL.of("the actor gets on no more")
async def the_actor_hangs(place: Place, _: Fault, logs: Logs) -> str:
    faults = FaultPlan().at(1, Fault.HANG, of=Fill)
    async with world(place, logs, faults=faults, hang_after_s=place.hang_after_s) as here:
        await outcome(here.gpu.submit(Fill(dst=here.trio.y, value=2)))
        return await here.left()


@SURVIVAL.of("its thread gets on no more, and nobody can end it", columns=ON_THREAD)
async def the_thread_is_lost(place: Place, _: Fault, logs: Logs) -> str:
    async with lost_thread(place, logs) as (here, _product):
        return await here.left()


@SURVIVAL.of("a successor fails in its start", columns=REPLACED)
async def a_successor_fails(place: Place, _: Fault, logs: Logs) -> str:
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill).at_start(2)
    async with world(place, logs, faults=faults) as here:
        await here.gpu.fill(here.trio.y, 2)
        assert here.gpu.generation == 3
        return await here.left()


@SURVIVAL.of("the standby dies", columns=IN_PROCESS)
async def the_standby_dies(place: Place, _: Fault, logs: Logs) -> str:
    async with world(place, logs, standby=1) as here:
        ready = await here.line("standby.ready")
        os.kill(ready["pid"], signal.SIGKILL)
        assert (await here.line("standby.died"))["pid"] == ready["pid"]
        return await here.left()


@SURVIVAL.of("the restarts are used up")
async def the_restarts_are_used_up(place: Place, _: Fault, logs: Logs) -> str:
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill)
    async with world(place, logs, faults=faults, max_restarts=0) as here:
        assert isinstance(await outcome(here.gpu.submit(Fill(dst=here.trio.y, value=2))), CudnnActorError)
        return await here.left()


@SURVIVAL.of("the service is stopped")
async def the_service_is_stopped(place: Place, _: Fault, logs: Logs) -> str:
    async with world(place, logs) as here:
        await here.gpu.aclose()
        with pytest.raises(ServiceStopped):
            await here.gpu.fill(here.trio.y, 2)
        return await here.left()


@SURVIVAL.of("your process is killed", stands_in=False)
async def the_process_is_killed(place: Place, _: Fault, logs: Logs) -> str:
    left: str = await in_thread(lambda: what_a_killed_process_leaves(place))
    assert not logs, "it is another process"
    return left


PROGRAM = """
import json, sys
import cudnn_actor
service = cudnn_actor.start(device=sys.argv[1], isolation=sys.argv[2])
print(json.dumps(service.worker_pid), file=sys.stderr, flush=True)
sys.stdin.read()
"""


def what_a_killed_process_leaves(place: Place) -> str:
    """Kill a process with a service, and wait for all that it had started. Blocks."""
    command = [sys.executable, "-c", PROGRAM, place.device, place.isolation]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe) as process:
        assert process.stderr is not None
        worker = json.loads(process.stderr.readline())
        started = descendants(process.pid)
        assert (worker in started) == place.in_process
        pidfds = [os.pidfd_open(pid) for pid in started]
        try:
            process.kill()
            process.wait()
            return "nothing" if all(ends(pidfd) for pidfd in pidfds) else "something"
        finally:
            for pidfd in pidfds:
                os.close(pidfd)


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and those that these have."""
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
    await case.holds(logs)


def test_every_cell_has_its_scenario_and_every_scenario_its_cell() -> None:
    SURVIVAL.check()
