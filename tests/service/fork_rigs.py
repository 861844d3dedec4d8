"""Programs that fork, each in a process of its own: `python -m tests.service.fork_rigs NAME ISOLATION ...`.

A program ends with status 0 and says nothing on stderr when all was right, in its children too.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pykka
import structlog

from cudnn_actor import (
    BufferRef,
    ConvFwd,
    ConvSpec,
    CudnnRef,
    CudnnService,
    Fill,
    Ping,
    ServiceStopped,
    spawn,
    start,
)
from cudnn_actor.engines import EngineChoice
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.options import Isolation, make_options
from cudnn_actor.workers import ledger
from cudnn_actor.workers.dispatcher import Dispatcher
from cudnn_actor.workers.launching import Launcher

PATIENCE_S = 60
"""How long anything may take; a child that hangs is ended by the kernel's alarm."""
DIMS = (1, 1, 64, 64)
ONE_BY_ONE = ConvSpec.symmetric(2)


def plane(value: float) -> np.ndarray:
    return np.full(DIMS, value, np.float32)


class Load:
    """Work on a thread with an event loop of its own, whose answers are known."""

    def __init__(self, service: CudnnService) -> None:
        self.wrong: list[str] = []
        self.kept: BufferRef
        self._gpu = CudnnRef(service)
        self._service = service
        self._rounds = threading.Semaphore(0)
        self._ends = threading.Event()
        self._worker = service.worker_pid
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._thread.start()
        self.goes_on()

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except BaseException as error:
            self.wrong.append(repr(error))
            raise

    async def _work(self) -> None:
        gpu = self._gpu
        self.kept = await gpu.upload(plane(42.0))
        x, y = await gpu.upload(plane(0.0)), await gpu.empty(DIMS)
        w = await gpu.upload(np.full((1, 1, 1, 1), 2.0, np.float32))
        number = 0
        while not self._ends.is_set():
            number += 1
            await gpu.write(x, plane(number))
            await gpu.ask(ConvFwd(x=x, w=w, y=y, conv=ONE_BY_ONE))
            self._expect(await gpu.download(y), 2.0 * number)
            await gpu.ask(Fill(dst=y, value=-1.0))
            self._rounds.release()
        self._expect(await gpu.download(self.kept), 42.0)
        statistics = await gpu.statistics()
        if (statistics.restarts, statistics.generation, statistics.failed) != (0, 1, 0):
            self.wrong.append(str(statistics))

    def _expect(self, found: np.ndarray, value: float) -> None:
        if not (found == value).all():
            self.wrong.append(f"{set(found.flat)} where {value} belongs")

    def goes_on(self, rounds: int = 3) -> None:
        """Until so many rounds more are done. Blocks."""
        for _ in range(rounds):
            assert self._rounds.acquire(timeout=PATIENCE_S), f"the load hangs: {self.wrong}"

    def end(self) -> None:
        """Check that nothing was wrong, to the end."""
        self.goes_on()
        self._ends.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the load hangs"
        assert self.wrong == []
        assert self._service.worker_pid == self._worker


# What a child finds.


def requests(gpu: CudnnRef, kept: BufferRef) -> dict[str, Callable[[], Awaitable[Any]]]:
    async def first_event() -> object:
        return await anext(gpu.events())

    async def told() -> None:
        gpu.tell(Fill(dst=kept, value=1000.0))

    async def submitted() -> object:
        return await gpu.submit(Fill(dst=kept, value=1000.0), timeout=5)

    return {
        "ask": lambda: gpu.ask(Fill(dst=kept, value=1000.0), timeout=5),
        "submit": submitted,
        "tell": told,
        "write": lambda: gpu.write(kept, plane(1000.0)),
        "upload": lambda: gpu.upload(plane(1000.0)),
        "empty": lambda: gpu.empty(DIMS),
        "download": lambda: gpu.download(kept),
        "view": lambda: gpu.view(kept),
        "copy": lambda: gpu.copy(kept, kept),
        "fill": lambda: gpu.fill(kept, 1000.0),
        "free": lambda: gpu.free(kept),
        "conv_fwd": lambda: gpu.conv_fwd(kept, kept, conv=ONE_BY_ONE),
        "conv_bwd_data": lambda: gpu.conv_bwd_data(kept, kept, conv=ONE_BY_ONE),
        "conv_bwd_filter": lambda: gpu.conv_bwd_filter(kept, kept, conv=ONE_BY_ONE, dims=(1, 1, 1, 1)),
        "ping": gpu.ping,
        "statistics": gpu.statistics,
        "warm": lambda: gpu.warm([]),
        "drain": gpu.drain,
        "events": first_event,
    }


class Complaints(list[str]):
    """What a child found that should not be so."""

    @contextlib.contextmanager
    def unless_refused(self, what: str) -> Iterator[None]:
        try:
            yield
        except ServiceStopped as error:
            if error.retry_safe or error.ran is not False or "spawn after the fork" not in str(error):
                self.append(f"{what}: {error} (ran {error.ran}, retry_safe {error.retry_safe})")
        except Exception as error:  # noqa: BLE001 - that is what it complains of
            self.append(f"{what}: {error!r}")
        else:
            self.append(f"{what}: was not refused")

    def unless(self, holds: bool, what: str) -> None:
        if not holds:
            self.append(what)


async def within(request: Awaitable[Any]) -> Any:
    async with asyncio.timeout(5):
        return await request


def look_around(service: CudnnService, kept: BufferRef, rounds: int = 3, *, alone: bool = True) -> None:
    """Check, in a child, all that is promised there; raise what is not so. `alone`: it has no service."""
    signal.alarm(PATIENCE_S)
    complaints = Complaints()
    gpu = CudnnRef(service)
    for _ in range(rounds):
        _ask_without_a_loop(complaints, gpu, kept)
        asyncio.run(_ask_on_a_loop(complaints, gpu, kept))
        _ask_from_a_thread(complaints, service, kept)
    _close(complaints, service, gpu)
    if alone:
        complaints.unless(not any(pykka.ActorRegistry.stop_all(timeout=5)), "stop_all has stopped something")
    signal.alarm(0)
    if complaints:
        raise AssertionError("\n".join(complaints))


def _ask_without_a_loop(complaints: Complaints, gpu: CudnnRef, kept: BufferRef) -> None:
    with complaints.unless_refused("submit without a loop"):
        gpu.submit(Fill(dst=kept, value=1000.0))
    with complaints.unless_refused("tell without a loop"):
        gpu.tell(Fill(dst=kept, value=1000.0))
    for name, request in requests(gpu, kept).items():
        with complaints.unless_refused(f"{name} without a loop"):
            waiting: Any = request()
            waiting.send(None)


async def _ask_on_a_loop(complaints: Complaints, gpu: CudnnRef, kept: BufferRef) -> None:
    for name, request in requests(gpu, kept).items():
        with complaints.unless_refused(name):
            await within(request())


def _ask_from_a_thread(complaints: Complaints, service: CudnnService, kept: BufferRef) -> None:
    ref = service.actor_ref
    with complaints.unless_refused("actor_ref.ask"):
        ref.ask(Fill(dst=kept, value=1000.0), timeout=5)
    with complaints.unless_refused("actor_ref.ask, not blocking"):
        ref.ask(Ping(), block=False).get(timeout=5)
    with complaints.unless_refused("actor_ref.tell"):
        ref.tell(Fill(dst=kept, value=1000.0))
    with complaints.unless_refused("values"):
        service.values(plane(1000.0))
    with complaints.unless_refused("health"):
        CudnnRef(service).health()
    complaints.unless(not CudnnRef(service).alive, "the service is alive")
    complaints.unless(not CudnnRef(service).ready, "the service is ready")
    complaints.unless(not ref.is_alive(), "actor_ref is alive")
    complaints.unless(service.worker_pid is None, "there is a worker")


def _close(complaints: Complaints, service: CudnnService, gpu: CudnnRef) -> None:
    complaints.unless(not service.actor_ref.stop(timeout=5), "actor_ref.stop has stopped something")
    service.end().result(5)
    service.stop(5)
    complaints.unless(_is_done_at_once(gpu.aclose()), "aclose waits")
    asyncio.run(within(gpu.aclose()))


# Ways to fork. Each returns what waits for the child and gives its exit status.


def by_fork(child: Callable[[], None]) -> Callable[[], int]:
    """A child that comes to the end of the program: exit handlers, finalizers."""
    pid = os.fork()
    if pid == 0:
        child()
        sys.exit(0)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def by_fork_and_exit(child: Callable[[], None]) -> Callable[[], int]:
    """A child that ends without any of that."""
    pid = os.fork()
    if pid == 0:
        _end_at_once(child)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _end_at_once(child: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        child()
        status = 0
    except Exception:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(status)


def by_multiprocessing(child: Callable[[], None]) -> Callable[[], int]:
    """A child of `multiprocessing`."""
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()

    def wait() -> int:
        process.join(2 * PATIENCE_S)
        assert process.exitcode is not None, "a child hangs"
        return process.exitcode

    return wait


WAYS = {"fork": by_fork, "fork_and_exit": by_fork_and_exit, "multiprocessing": by_multiprocessing}


def end_well(children: Sequence[Callable[[], int]]) -> None:
    statuses = [wait() for wait in children]
    assert statuses == [0] * len(statuses), f"exit statuses of the children: {statuses}"


# Programs.


def children_look_around(isolation: Isolation, way: str, loop: str = "asyncio") -> None:
    """Three children of a process whose load goes on, on event loops of asyncio or uvloop."""
    if loop == "uvloop":
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    service = start(device="cpu", isolation=isolation)
    load = Load(service)
    children = [WAYS[way](lambda: look_around(service, load.kept)) for _ in range(3)]
    statuses = [wait() for wait in children]
    load.end()
    assert statuses == [0, 0, 0], f"exit statuses of the children: {statuses}"
    service.stop(PATIENCE_S)


def many_children(isolation: Isolation) -> None:
    """Children that are forked in whatever step the load's threads are."""
    service = start(device="cpu", isolation=isolation)
    load = Load(service)
    for _ in range(10):
        end_well([by_fork_and_exit(lambda: look_around(service, load.kept, rounds=1)) for _ in range(3)])
        load.goes_on(1)
    load.end()
    service.stop(PATIENCE_S)


def child_serves_itself(isolation: Isolation, way: str) -> None:
    """A child starts services of its own, beside its parent's."""
    service = start(device="cpu", isolation=isolation)
    load = Load(service)

    def child() -> None:
        signal.alarm(2 * PATIENCE_S)
        assert not pykka.ActorRegistry.get_all()
        for mine in ("thread", "process"):
            own = start(device="cpu", isolation=mine)
            beside = Load(own)
            complaints = Complaints()
            _ask_without_a_loop(complaints, CudnnRef(service), load.kept)
            _ask_from_a_thread(complaints, service, load.kept)
            assert not complaints, complaints
            service.stop(5)
            beside.end()
            assert any(pykka.ActorRegistry.stop_all(timeout=PATIENCE_S))
            own.stop(PATIENCE_S)
        asyncio.run(_spawns())
        signal.alarm(0)

    end_well([WAYS[way](child)])
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
                _end_at_once(lambda: _leave_the_body(spawning, gpu, kept))
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
    complaints.unless(_is_done_at_once(spawning.__aexit__(None, None, None)), "__aexit__ waits")
    complaints.unless(_is_done_at_once(gpu.aclose()), "aclose waits")
    assert not complaints
    look_around(gpu._service, kept, rounds=1)


def _is_done_at_once(coroutine: Coroutine[Any, Any, Any]) -> bool:
    try:
        coroutine.send(None)
    except StopIteration:
        return True
    return False


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
                    task.get_coro().close()
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
    for lock in _locks(service):
        taken, done = threading.Event(), threading.Event()
        thread = threading.Thread(target=_holds, args=(lock, taken, done))
        thread.start()
        assert taken.wait(PATIENCE_S)
        try:
            end_well([by_fork_and_exit(lambda: _looks_and_serves(service, load.kept))])
        finally:
            done.set()
            thread.join()
        load.goes_on()
    load.end()
    service.stop(PATIENCE_S)


def _locks(service: CudnnService) -> list[Any]:
    held = [
        service.state.mailbox._lock,
        service.events._lock,
        service._turning,
        pykka.ActorRegistry._actor_refs_lock,
        ledger._flights,
        Launcher._shared_lock,
        *[launcher._lock for launcher in Launcher._shared.values()],
    ]
    if isinstance(service.state.mailbox, Dispatcher):
        held.append(service.state.mailbox._free)
    return held


def _holds(lock: Any, taken: threading.Event, done: threading.Event) -> None:
    with lock:
        taken.set()
        done.wait(PATIENCE_S)


def _looks_and_serves(service: CudnnService, kept: BufferRef) -> None:
    look_around(service, kept, rounds=1)
    signal.alarm(PATIENCE_S)
    own = start(device="cpu", isolation="process")
    assert own.actor_ref.ask(Ping(), timeout=PATIENCE_S) == 1
    own.stop(PATIENCE_S)
    signal.alarm(0)


def services_come_and_go(isolation: Isolation) -> None:
    """Children of a process that starts and stops services all the time."""
    ends, rounds = threading.Event(), threading.Semaphore(0)

    def come_and_go() -> None:
        while not ends.is_set():
            service = start(device="cpu", isolation=isolation)
            assert service.actor_ref.ask(Ping(), timeout=PATIENCE_S) == 1
            service.stop(PATIENCE_S)
            rounds.release()

    first = start(device="cpu", isolation=isolation)
    load = Load(first)
    thread = threading.Thread(target=come_and_go, daemon=True)
    thread.start()
    for _ in range(3):
        end_well([by_fork_and_exit(lambda: _looks_and_serves(first, load.kept)) for _ in range(2)])
        assert rounds.acquire(timeout=PATIENCE_S)
    ends.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    load.end()
    first.stop(PATIENCE_S)


def directory_of_plans(way: str) -> None:
    """Workers on a device share a directory of plans, which goes with the service and not with a child.

    The CPU engine's arenas pass for a device's, since only those have plans that are worth keeping.
    """
    device = EngineChoice(
        "cpu",
        CpuEngine,
        outlives_context=True,
        worker=("cudnn_actor.engines.cpu:CpuEngine", ()),
        preload=("cudnn_actor.engines.cpu",),
        host_arenas=False,
    )
    service = CudnnService(make_options({"device": "cpu", "isolation": "process"}), engine=device)
    service.launch()
    service.started.result(PATIENCE_S)
    (directory,) = Path(tempfile.gettempdir()).glob("cudnn-actor-plans-*")
    end_well([WAYS[way](lambda: None)])
    assert directory.is_dir(), "a child has deleted it"
    service.stop(PATIENCE_S)
    assert not directory.exists()


async def within_patience(request: Awaitable[Any]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return await request


def log_to_the_standard_library() -> None:
    """Whose locks a fork makes anew; structlog's own printer keeps them as they were, locked or not."""
    structlog.configure(logger_factory=structlog.stdlib.LoggerFactory())
    logging.getLogger().addHandler(logging.NullHandler())


if __name__ == "__main__":
    log_to_the_standard_library()
    faulthandler.register(signal.SIGALRM, chain=True)  # a child that hangs says where
    globals()[sys.argv[1]](*sys.argv[2:])
