"""What programs that fork are made of: a load with known answers, what a child finds, and ways to fork."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import pykka

from cudnn_actor import BufferRef, ConvFwd, ConvSpec, CudnnRef, CudnnService, ServiceStopped
from cudnn_actor.messages import Fill, Ping

from ..patience import PATIENCE_S

DIMS = (1, 1, 64, 64)
ONE_BY_ONE = ConvSpec.symmetric(2)


def plane(value: float) -> np.ndarray:
    return np.full(DIMS, value, np.float32)


class Load:
    """Work on a thread with an event loop of its own, whose answers are known.

    `pause_s`: between rounds, so that children get on while the load does.
    """

    def __init__(self, service: CudnnService, pause_s: float = 0.005) -> None:
        self.wrong: list[str] = []
        self._pause_s = pause_s
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
            await asyncio.sleep(self._pause_s)
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
        return await gpu.submit(Fill(dst=kept, value=1000.0), timeout=PATIENCE_S)

    return {
        "ask": lambda: gpu.ask(Fill(dst=kept, value=1000.0), timeout=PATIENCE_S),
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
    async with asyncio.timeout(PATIENCE_S):
        return await request


def look_around(service: CudnnService, kept: BufferRef, rounds: int = 3, *, alone: bool = True) -> None:
    """Check, in a child, all that is promised there; raise what is not so. `alone`: it has no service."""
    signal.alarm(PATIENCE_S)
    complaints = Complaints()
    gpu = CudnnRef(service)
    for shown in (repr(gpu), repr(service), gpu._repr_html_(), service._repr_html_()):
        complaints.unless("of a parent process" in shown, f"shown as {shown}")
    for _ in range(rounds):
        ask_without_a_loop(complaints, gpu, kept)
        asyncio.run(_ask_on_a_loop(complaints, gpu, kept))
        ask_from_a_thread(complaints, service, kept)
    _close(complaints, service, gpu)
    if alone:
        complaints.unless(
            not any(pykka.ActorRegistry.stop_all(timeout=PATIENCE_S)), "stop_all has stopped something"
        )
    signal.alarm(0)
    if complaints:
        raise AssertionError("\n".join(complaints))


def ask_without_a_loop(complaints: Complaints, gpu: CudnnRef, kept: BufferRef) -> None:
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


def ask_from_a_thread(complaints: Complaints, service: CudnnService, kept: BufferRef) -> None:
    ref = service.actor_ref
    with complaints.unless_refused("actor_ref.ask"):
        ref.ask(Fill(dst=kept, value=1000.0), timeout=PATIENCE_S)
    with complaints.unless_refused("actor_ref.ask, not blocking"):
        ref.ask(Ping(), block=False).get(timeout=PATIENCE_S)
    with complaints.unless_refused("actor_ref.tell"):
        ref.tell(Fill(dst=kept, value=1000.0))
    with complaints.unless_refused("values"):
        service.values(plane(1000.0))
    with complaints.unless_refused("health"):
        CudnnRef(service).health()
    with complaints.unless_refused("metrics"):
        CudnnRef(service).metrics()
    complaints.unless(not CudnnRef(service).alive, "the service is alive")
    complaints.unless(not CudnnRef(service).ready, "the service is ready")
    complaints.unless(not ref.is_alive(), "actor_ref is alive")
    complaints.unless(service.worker_pid is None, "there is a worker")


def _close(complaints: Complaints, service: CudnnService, gpu: CudnnRef) -> None:
    complaints.unless(not service.actor_ref.stop(timeout=PATIENCE_S), "actor_ref.stop has stopped something")
    service.end().result(PATIENCE_S)
    service.stop(5)
    complaints.unless(is_done_at_once(gpu.aclose()), "aclose waits")
    asyncio.run(within(gpu.aclose()))


def is_done_at_once(coroutine: Coroutine[Any, Any, Any]) -> bool:
    try:
        coroutine.send(None)
    except StopIteration:
        return True
    return False


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
        end_at_once(child)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def end_at_once(child: Callable[[], None]) -> NoReturn:
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
