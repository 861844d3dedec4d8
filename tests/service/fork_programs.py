"""Programs that fork, each run by itself: `python -m tests.service.fork_programs NAME ISOLATION ...`.

A program ends with status 0 and says nothing on stderr when all was right, in its children too.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pykka

from cudnn_actor import BufferRef, CudnnRef, CudnnService, spawn, start
from cudnn_actor.engines import EngineChoice, WorkerEngine
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.isolation.process.parent import in_flight
from cudnn_actor.messages import Fill, Ping
from cudnn_actor.options import Isolation, make_options
from cudnn_actor.processes.launching import Launcher

from ..inside import launchers, service_behind
from ..patience import PATIENCE_S
from ..whole import some
from .fork_rigs import (
    WAYS,
    Complaints,
    Load,
    ask_from_a_thread,
    ask_without_a_loop,
    by_fork_and_exit,
    end_at_once,
    end_well,
    is_done_at_once,
    look_around,
    plane,
)


def children_look_around(isolation: Isolation, loop: str = "asyncio") -> None:
    """A child of each way to fork, of a process whose load goes on, on event loops of asyncio or uvloop."""
    if loop == "uvloop":
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    service = start(device="cpu", isolation=isolation)
    load = Load(service)
    end_well([fork(lambda: look_around(service, load.kept)) for fork in WAYS.values()])
    load.end()
    service.stop(PATIENCE_S)


def many_children(isolation: Isolation) -> None:
    """Children that are forked in whatever step the load's threads are."""
    service = start(device="cpu", isolation=isolation)
    load = Load(service, pause_s=0.0)
    for _ in range(some(10)):
        end_well([by_fork_and_exit(lambda: look_around(service, load.kept, rounds=1)) for _ in range(3)])
        load.goes_on(1)
    load.end()
    service.stop(PATIENCE_S)


def children_serve_themselves(isolation: Isolation, *ways: str) -> None:
    """Children start services of their own, beside their parent's."""
    service = start(device="cpu", isolation=isolation)
    load = Load(service)

    def child() -> None:
        signal.alarm(2 * PATIENCE_S)
        assert not pykka.ActorRegistry.get_all()
        for mine in ("thread", "process"):
            own = start(device="cpu", isolation=mine)
            beside = Load(own)
            complaints = Complaints()
            ask_without_a_loop(complaints, CudnnRef(service), load.kept)
            ask_from_a_thread(complaints, service, load.kept)
            assert not complaints, complaints
            service.stop(5)
            beside.end()
            assert any(pykka.ActorRegistry.stop_all(timeout=PATIENCE_S))
            own.stop(PATIENCE_S)
        asyncio.run(_spawns())
        signal.alarm(0)

    end_well([WAYS[way](child) for way in ways])
    load.end()
    service.stop(PATIENCE_S)


async def _spawns() -> None:
    async with spawn(device="cpu", isolation="process", standby=1) as gpu:
        buffer = await gpu.upload(plane(7.0))
        assert (await gpu.download(buffer) == 7.0).all()


def fork_in_a_body(isolation: Isolation) -> None:
    """A child that is forked in the body of `async with spawn(...)`, and leaves the body."""

    async def main() -> None:
        spawning = spawn(device="cpu", isolation=isolation)
        async with spawning as gpu:
            kept = await gpu.upload(plane(42.0))
            sent = [gpu.submit(Fill(dst=kept, value=42.0)) for _ in range(50)]
            pid = os.fork()
            if pid == 0:
                end_at_once(lambda: _leave_the_body(spawning, gpu, kept))
            await asyncio.gather(*sent)
            status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert os.waitstatus_to_exitcode(status[1]) == 0
            await asyncio.gather(*[gpu.fill(kept, 42.0) for _ in range(50)])
            assert (await gpu.download(kept) == 42.0).all()
            statistics = await gpu.statistics()
            assert (statistics.restarts, statistics.generation, statistics.dropped_replies) == (0, 1, 0)

    asyncio.run(main())


def _leave_the_body(spawning: Any, gpu: CudnnRef, kept: BufferRef) -> None:
    complaints = Complaints()
    complaints.unless(is_done_at_once(spawning.__aexit__(None, None, None)), "__aexit__ waits")
    complaints.unless(is_done_at_once(gpu.aclose()), "aclose waits")
    assert not complaints
    look_around(service_behind(gpu), kept, rounds=1)


def child_gives_up_its_copies() -> None:
    """A child ends its copies of requests that its parent waits for: the parent's run all the same."""

    async def main() -> None:
        async with spawn(device="cpu", isolation="process") as gpu:
            kept = await gpu.upload(plane(0.0))
            await gpu.fill(kept, 0.0)
            assert gpu.worker_pid is not None
            os.kill(gpu.worker_pid, signal.SIGSTOP)
            tasks = [asyncio.create_task(gpu.ask(Fill(dst=kept, value=1.0 * n))) for n in range(50)]
            await asyncio.sleep(0)  # each has sent its request
            await asyncio.sleep(0)  # and all have gone to the worker
            pid = os.fork()
            if pid == 0:
                for task in tasks:
                    if (coroutine := task.get_coro()) is not None:
                        coroutine.close()
                os._exit(0)
            await asyncio.to_thread(os.waitpid, pid, 0)
            os.kill(gpu.worker_pid, signal.SIGCONT)
            await within_patience(asyncio.gather(*tasks))
            assert (await gpu.download(kept) == 49.0).all()
            statistics = await gpu.statistics()
            assert (statistics.withdrawn, statistics.restarts, statistics.generation) == (0, 0, 1)

    asyncio.run(main())


def locks_are_held(isolation: Isolation) -> None:
    """Children of a process whose other threads have a lock in hand: each of those that a child may meet.

    No public call stops a thread there, so the locks are taken here, as those threads do.
    """
    service = start(device="cpu", isolation=isolation)
    load = Load(service)
    kept = load.kept
    children = [
        *[(lock, lambda: look_around(service, kept, rounds=1)) for lock in _locks_of(service)],
        *[(lock, lambda: _looks_and_serves(service, kept, isolation)) for lock in _locks_of_all_services()],
    ]
    for lock, child in children:
        taken, done = threading.Event(), threading.Event()
        thread = threading.Thread(target=_holds, args=(lock, taken, done))
        thread.start()
        assert taken.wait(PATIENCE_S)
        try:
            end_well([by_fork_and_exit(child)])
        finally:
            done.set()
            thread.join()
        load.goes_on()
    load.end()
    service.stop(PATIENCE_S)


def _locks_of(service: CudnnService) -> list[Any]:
    return [service.state.mailbox._lock, service.events._lock, service._turning]


def _locks_of_all_services() -> list[Any]:
    """Those that a child's own services take too."""
    return [
        pykka.ActorRegistry._actor_refs_lock,
        in_flight.claims_lock,
        Launcher._shared_lock,
        *[launcher._lock for launcher in launchers()],
    ]


def _holds(lock: Any, taken: threading.Event, done: threading.Event) -> None:
    with lock:
        taken.set()
        done.wait(PATIENCE_S)


def _looks_and_serves(service: CudnnService, kept: BufferRef, isolation: Isolation) -> None:
    look_around(service, kept, rounds=1)
    signal.alarm(PATIENCE_S)
    own = start(device="cpu", isolation=isolation)
    assert own.actor_ref.ask(Ping(), timeout=PATIENCE_S) == 1
    own.stop(PATIENCE_S)
    signal.alarm(0)


def services_come_and_go(isolation: Isolation) -> None:
    """Children of a process that starts and stops services all the time; some start one of their own."""
    ends, rounds, forks = threading.Event(), threading.Semaphore(0), threading.Event()
    forks.set()

    def come_and_go() -> None:
        while not ends.is_set():
            service = start(device="cpu", isolation=isolation)
            assert service.actor_ref.ask(Ping(), timeout=PATIENCE_S) == 1
            service.stop(PATIENCE_S)
            rounds.release()
            forks.wait(0.05)  # at once while children are forked; else a pause, in which they get on

    first = start(device="cpu", isolation=isolation)
    load = Load(first)
    thread = threading.Thread(target=come_and_go, daemon=True)
    thread.start()
    for _ in range(some(3)):
        children = [
            by_fork_and_exit(lambda: look_around(first, load.kept, rounds=1)),
            by_fork_and_exit(lambda: _looks_and_serves(first, load.kept, isolation)),
        ]
        forks.clear()
        end_well(children)
        forks.set()
        assert rounds.acquire(timeout=PATIENCE_S)
    ends.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    load.end()
    first.stop(PATIENCE_S)


def directory_of_plans() -> None:
    """Workers on a device share a directory of plans, which goes with the service and not with a child.

    The CPU engine's arenas pass for a device's, since only those have plans that are worth keeping.
    """
    device = EngineChoice(
        "cpu",
        CpuEngine,
        outlives_context=True,
        worker=WorkerEngine("cudnn_actor.engines.cpu.engine:CpuEngine"),
        preload=("cudnn_actor.engines.cpu.engine",),
        host_arenas=False,
    )
    service = CudnnService(make_options({"device": "cpu", "isolation": "process"}), engine=device)
    service.launch()
    service.started.result(PATIENCE_S)
    (directory,) = Path(tempfile.gettempdir()).glob("cudnn-actor-plans-*")
    end_well([fork(lambda: None) for fork in WAYS.values()])
    assert directory.is_dir(), "a child has deleted it"
    service.stop(PATIENCE_S)
    assert not directory.exists()


async def within_patience(request: Awaitable[Any]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return await request


if __name__ == "__main__":
    faulthandler.register(signal.SIGALRM, chain=True)  # a child that hangs says where
    globals()[sys.argv[1]](*sys.argv[2:])
