"""Loops that come and go, take turns, upload, block and idle: none of it costs another loop its answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cudnn_actor import ConvFwd, CudnnRef, CudnnService, Receipt
from cudnn_actor.messages import Ping, Upload

from ..patience import PATIENCE_S
from .rigs import Gate, Trio, gated_service, start

pytestmark = pytest.mark.usefixtures("isolation")

PROCESS_ONLY = pytest.mark.parametrize("isolation", ["process"], indirect=True)
LONG_S = 60.0
"""How long a whole load may take on a machine that others use too: some fifty times what it takes alone."""


@pytest.fixture
def busy_switching() -> Iterator[None]:
    """Threads take turns every few microseconds, so that a race of a few instructions is lost soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def on_threads(*jobs: Callable[[], Any], within_s: float = LONG_S) -> list[Any]:
    """What jobs give, each on a thread of its own; an error of one is raised here."""
    answers = [concurrent.futures.Future[Any]() for _ in jobs]

    def work(job: Callable[[], Any], answer: concurrent.futures.Future[Any]) -> None:
        try:
            answer.set_result(job())
        except BaseException as error:  # noqa: BLE001 - for the test's own thread to raise
            answer.set_exception(error)

    for job, answer in zip(jobs, answers, strict=True):
        threading.Thread(target=work, args=(job, answer), daemon=True).start()
    return [answer.result(within_s) for answer in answers]


# Many short loops.


@pytest.mark.usefixtures("busy_switching")
def test_six_threads_that_run_loop_after_loop_get_every_answer_and_each_runs_once() -> None:
    """Every thread that brings a new loop looks for links of loops that have closed: all at the same time."""
    threads, rounds = 6, 100
    service = start(device="cpu")
    gpu = CudnnRef(service)
    trio = asyncio.run(Trio.on(gpu, x=1.0, w=1.0, y=0.0))

    def ask_on_loops_of_its_own() -> int:
        return sum(isinstance(asyncio.run(gpu.ask(trio.sum())), Receipt) for _ in range(rounds))

    acknowledged = sum(on_threads(*[ask_on_loops_of_its_own] * threads))
    applied = asyncio.run(trio.result())
    service.stop(PATIENCE_S)
    assert acknowledged == threads * rounds
    assert applied == acknowledged


def test_two_loops_used_in_turns_on_one_thread_take_no_descriptors() -> None:
    service = start(device="cpu")
    gpu = CudnnRef(service)
    with asyncio.Runner() as one, asyncio.Runner() as other:

        def use_both() -> int:
            for runner in (one, other):
                runner.run(gpu.ping())
            return len(os.listdir("/proc/self/fd"))

        use_both()  # the first loop's reader goes when the other one asks
        first = use_both()
        assert [use_both() for _ in range(20)] == [first] * 20
    service.stop(PATIENCE_S)


# Arrays that event loops leave to another thread.


class SlowLoop(asyncio.SelectorEventLoop):
    """Takes its time over each answer that it is told of, so that its turns last."""

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        select.select((), (), (), 1e-4)
        return super().call_soon(callback, *args, context=context)


@PROCESS_ONLY
@pytest.mark.usefixtures("busy_switching")
def test_large_uploads_among_the_requests_of_six_loops_are_made() -> None:
    """The copy is left to a thread. Whoever has a turn at that moment, it is made all the same."""
    uploads, tasks = 200, 32
    service = start(device="cpu")
    gpu = CudnnRef(service)
    trio = asyncio.run(Trio.on(gpu))
    large = np.zeros((1, 1, 260, 256), np.float32)
    target = asyncio.run(gpu.upload(large))
    enough = threading.Event()

    async def load() -> None:
        async def ask_on() -> None:
            while not enough.is_set():
                assert isinstance(await gpu.ask(trio.product()), Receipt)

        await asyncio.gather(*[ask_on() for _ in range(tasks)])

    async def upload() -> int:
        done = 0
        try:
            for _ in range(uploads):
                async with asyncio.timeout(PATIENCE_S):
                    await gpu.ask(Upload(dst=target, data=large))
                done += 1
        finally:
            enough.set()
        return done

    def run(job: Callable[[], Any]) -> Any:
        with asyncio.Runner(loop_factory=SlowLoop) as runner:
            return runner.run(job())

    done = on_threads(*[lambda: run(load)] * 6, lambda: run(upload), within_s=3 * LONG_S)[-1]
    service.stop(PATIENCE_S)
    assert done == uploads


# Loops that read nothing.


class LoopThread:
    """An event loop on a thread of its own, that a test can block, or take away from it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._go_on = threading.Event()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def submit(self, gpu: CudnnRef, message: ConvFwd) -> asyncio.Future[Any]:
        async def send() -> asyncio.Future[Any]:
            return gpu.submit(message)

        return asyncio.run_coroutine_threadsafe(send(), self.loop).result(PATIENCE_S)

    def block(self) -> None:
        """Keep the loop's thread in one callback, until `close`."""
        blocked = threading.Event()

        def stay() -> None:
            blocked.set()
            self._go_on.wait()

        self.loop.call_soon_threadsafe(stay)
        assert blocked.wait(PATIENCE_S)

    def idle(self) -> None:
        """Let the loop stop, as between two `run_until_complete`."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)

    def close(self) -> None:
        self._go_on.set()
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(PATIENCE_S)
        self.loop.close()


@PROCESS_ONLY
@pytest.mark.parametrize("how", ["block", "idle"])
def test_a_pykka_caller_is_answered_after_a_crash_while_the_loop_that_reads_does_not(how: str) -> None:
    """His request waits behind one of the loop's, which was running: its answer must be read for him."""
    gate, other = Gate(), LoopThread()
    service = _launched(gate)
    gpu = CudnnRef(service)
    trio = asyncio.run(Trio.on(gpu))
    try:
        gate.shut()
        running = other.submit(gpu, trio.product())
        gate.wait_for_arrival()
        behind = service.actor_ref.ask(Ping(), block=False)
        _kill_worker(gpu)
        gate.wait_for_arrival()  # it runs again, alone, and the loop has the new worker's socket
        assert gpu.generation == 2
        getattr(other, how)()
        gate.open()
        behind.get(timeout=PATIENCE_S)
        assert not running.done(), "the loop was not kept from reading"
    finally:
        gate.open()
        other.close()
        service.stop(PATIENCE_S)


def _launched(gate: Gate) -> CudnnService:
    service = gated_service(gate)
    service.launch()
    service.started.result(PATIENCE_S)
    return service


def _kill_worker(gpu: CudnnRef) -> None:
    assert gpu.worker_pid is not None
    os.kill(gpu.worker_pid, signal.SIGKILL)
