"""Who owns a worker's socket: one event loop, until anybody else asks; then the monitor, for good.

Whatever loops and threads do, in whatever order, everyone whose own loop runs is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pykka
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from cudnn_actor import (
    CudnnRef,
    CudnnService,
    DeadlineExceeded,
    GraphBuilder,
    QuarantinedRequest,
    RunGraph,
    StaleBufferError,
    start,
)
from cudnn_actor.isolation.process.parent.dispatcher import Dispatcher
from cudnn_actor.messages import Free, Ping

from ..patience import PATIENCE_S
from ..whole import more

LOOPS = 3
some_loop = st.integers(0, LOOPS - 1)


@pytest.fixture
def service() -> Iterator[CudnnService]:
    service = start(device="cpu", isolation="process", max_restarts=10_000)
    yield service
    service.stop(PATIENCE_S)


def dispatcher_of(service: CudnnService) -> Dispatcher:
    mailbox = service.state.mailbox
    assert isinstance(mailbox, Dispatcher)
    return mailbox


def make_new(service: CudnnService) -> None:
    """Let nobody have asked yet."""
    dispatcher = dispatcher_of(service)
    with dispatcher._lock:
        owner, dispatcher.owner, dispatcher.needs_thread = dispatcher.owner, None, False
    if owner is not None:
        owner.follow_soon()


class Loop:
    """An event loop on a thread of its own that a test can block."""

    def __init__(self, service: CudnnService) -> None:
        self._gpu = CudnnRef(service)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._asked: list[asyncio.Future[int]] = []
        self._go_on: threading.Event | None = None

    @property
    def is_blocked(self) -> bool:
        return self._go_on is not None

    def do(self, job: Callable[[], Any]) -> Any:
        """Call it on the loop; where that is blocked, as soon as it is not."""

        async def call() -> Any:
            return job()

        future = asyncio.run_coroutine_threadsafe(call(), self.loop)
        return None if self.is_blocked else future.result(PATIENCE_S)

    def ask(self) -> None:
        self.do(lambda: self._asked.append(self._gpu.submit(Ping())))

    def block(self) -> None:
        if self._go_on is None:
            blocked, go_on = threading.Event(), threading.Event()

            def stay() -> None:
                blocked.set()
                go_on.wait()

            self.loop.call_soon_threadsafe(stay)
            assert blocked.wait(PATIENCE_S)
            self._go_on = go_on

    def unblock(self) -> None:
        if self._go_on is not None:
            self._go_on.set()
            self._go_on = None

    def settle(self) -> None:
        """Have every answer."""

        async def gather() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*self._asked, return_exceptions=True)

        if not self.is_blocked:
            asyncio.run_coroutine_threadsafe(gather(), self.loop).result(2 * PATIENCE_S)
            self._asked.clear()

    def close(self) -> None:
        self.unblock()
        self.settle()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()


class Senders(RuleBasedStateMachine):
    """Loops and threads that send to one service."""

    service: CudnnService

    def __init__(self) -> None:
        super().__init__()
        make_new(self.service)
        self.loops = [Loop(self.service) for _ in range(LOOPS)]
        self.asked: list[pykka.Future[int]] = []

    @rule(index=some_loop, times=st.sampled_from([1, 2, 40]))
    def a_loop_asks(self, index: int, times: int) -> None:
        for _ in range(times):
            self.loops[index].ask()

    @rule(index=some_loop)
    def a_loop_tells(self, index: int) -> None:
        self.loops[index].do(lambda: self.service.actor_ref.tell(Ping()))

    @rule()
    def a_thread_tells(self) -> None:
        self.service.actor_ref.tell(Ping())

    @rule()
    def a_thread_asks(self) -> None:
        self.asked.append(self.service.actor_ref.ask(Ping(), block=False))

    @rule(index=some_loop)
    def a_loop_blocks(self, index: int) -> None:
        self.loops[index].block()

    @rule(index=some_loop)
    def a_loop_goes_on(self, index: int) -> None:
        self.loops[index].unblock()

    @rule(index=some_loop)
    def a_loop_closes_and_another_comes(self, index: int) -> None:
        self.loops[index].close()
        self.loops[index] = Loop(self.service)

    @rule(index=some_loop)
    def a_loop_gets_its_answers(self, index: int) -> None:
        self.loops[index].settle()

    @rule()
    def the_thread_gets_its_answers(self) -> None:
        for future in self.asked:
            with contextlib.suppress(QuarantinedRequest):
                future.get(timeout=PATIENCE_S)
        self.asked.clear()

    @rule()
    def the_worker_is_killed(self) -> None:
        pid = CudnnRef(self.service).worker_pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it was killed before, and has not been missed yet
                os.kill(pid, signal.SIGKILL)

    def teardown(self) -> None:
        for loop in self.loops:
            loop.close()
        self.the_thread_gets_its_answers()


def test_everybody_is_answered(service: CudnnService) -> None:
    class Here(Senders):
        pass

    Here.service = service
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=more(60),
            stateful_step_count=20,
            suppress_health_check=list(HealthCheck),
        ),
    )


async def test_one_loop_is_the_owner_and_tells_and_asks_without_another_thread(service: CudnnService) -> None:
    dispatcher = dispatcher_of(service)
    gpu = CudnnRef(service)
    await gpu.ping()
    owner = dispatcher.owner
    assert owner is not None
    service.actor_ref.tell(Ping())
    await gpu.ping()
    assert dispatcher.owner is owner
    assert owner.reads(dispatcher.channel)
    assert not dispatcher.monitor_reads()


@pytest.mark.parametrize("count", [6, 7, 64])
async def test_a_graph_with_many_buffers_wakes_no_other_thread(
    service: CudnnService, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    dispatcher, memory, gpu = dispatcher_of(service), service.state.memory, CudnnRef(service)
    g = GraphBuilder()
    terms = [g.input(f"x{number}", (1,)) for number in range(count - 1)]
    graph = g.build(y=functools.reduce(operator.add, terms))
    refs = [await gpu.upload(np.full(1, number, np.float32)) for number in range(count - 2)]
    *xs, y = (*refs, refs[-1], await gpu.empty((1,), dtype="float32"))  # one buffer for two inputs
    run = RunGraph.bind(graph, {f"x{number}": ref for number, ref in enumerate(xs)}, y=y)
    await gpu.ask(run)  # now the worker has the graph
    slots = [memory.resolve(ref) for ref in (*refs, y)]
    with monkeypatch.context() as patched:
        patched.setattr(dispatcher, "wake_monitor", lambda: pytest.fail("the monitor was woken"))
        for _ in range(3):
            await gpu.ask(run)
        future = gpu.submit(run)
        await asyncio.sleep(0)  # the loop's next turn sends it, and a later one reads the answer
        assert [slot.users for slot in slots] == [1] * (count - 3) + [2, 1]
        await future
    assert [slot.users for slot in slots] == [0] * (count - 1)
    asked: list[asyncio.Future[Any]] = [
        gpu.submit(run),
        gpu.submit(Free(buffer=xs[0])),
        gpu.submit(run),
    ]
    *_, late = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(late, StaleBufferError)
    await gpu.drain()
    assert [slot.users for slot in slots] == [0] * (count - 1)
    assert memory.live_buffers == count - 2
    assert await gpu.download(y) == sum(range(count - 2)) + count - 3


async def test_a_thread_that_tells_takes_nothing_from_the_owner(service: CudnnService) -> None:
    dispatcher = dispatcher_of(service)
    gpu = CudnnRef(service)
    await gpu.ping()
    owner = dispatcher.owner
    await asyncio.to_thread(service.actor_ref.tell, Ping())
    assert dispatcher.owner is owner


async def test_a_pykka_caller_makes_the_monitor_the_owner_for_good(service: CudnnService) -> None:
    dispatcher = dispatcher_of(service)
    gpu = CudnnRef(service)
    await gpu.ping()
    service.actor_ref.ask(Ping(), block=False).get(timeout=PATIENCE_S)  # blocks the loop that read
    assert dispatcher.monitor_reads()
    await gpu.ping()
    assert dispatcher.owner is None


def test_a_loop_that_follows_a_closed_one_is_the_next_owner(service: CudnnService) -> None:
    dispatcher = dispatcher_of(service)
    gpu = CudnnRef(service)
    owners = []
    for _ in range(2):
        asyncio.run(gpu.ping())
        owners.append(dispatcher.owner)
    assert None not in owners
    assert owners[0] is not owners[1]


def test_a_pykka_caller_who_asked_before_the_first_loop_is_answered_after_that_has_stopped(
    service: CudnnService,
) -> None:
    gpu = CudnnRef(service)
    pid = gpu.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # so that nothing is answered before the loop has stopped
    asked = [service.actor_ref.ask(Ping(), block=False) for _ in range(600)]
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(DeadlineExceeded):
            loop.run_until_complete(gpu.ask(Ping(), timeout=0.05))
        os.kill(pid, signal.SIGCONT)
        assert {future.get(timeout=PATIENCE_S) for future in asked} == {1}
    finally:
        loop.close()


def test_what_threads_tell_is_sent_while_the_owner_is_blocked(service: CudnnService) -> None:
    dispatcher, loop = dispatcher_of(service), Loop(service)
    loop.ask()
    loop.settle()
    loop.block()
    for _ in range(900):
        service.actor_ref.tell(Ping())
    sent = threading.Event()

    def look() -> None:
        while len(dispatcher):  # what is told last is in flight, whether it is answered or not
            os.sched_yield()
        sent.set()

    threading.Thread(target=look, daemon=True).start()
    assert sent.wait(PATIENCE_S)
    loop.close()


def test_an_exception_while_the_socket_changes_hands_leaves_it_with_a_reader(
    service: CudnnService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler raises as the owner is told to let go: the loop's own answers are read all the same."""

    class Raised(BaseException):
        pass

    dispatcher, loop = dispatcher_of(service), Loop(service)
    loop.ask()
    loop.settle()
    owner = dispatcher.owner
    assert owner is not None
    follow_soon = owner.follow_soon

    def interrupted() -> None:
        follow_soon()
        raise Raised

    monkeypatch.setattr(owner, "follow_soon", interrupted)
    gpu = CudnnRef(service)
    pid = gpu.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    for _ in range(40):
        loop.ask()
    with pytest.raises(Raised):
        service.actor_ref.ask(Ping(), block=False)
    loop.do(lambda: None)  # the loop has let go by now
    os.kill(pid, signal.SIGCONT)
    loop.settle()
    loop.close()
