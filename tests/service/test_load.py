"""Thousands of requests in flight: none is lost, none runs twice, and the event loop is never kept.

How long our code keeps the loop is measured in calls that the loop's thread makes within one callback or one
step of a task: a number that is the same on an idle machine, a loaded one, and under a coverage tool. Seconds
are not, CPU seconds included: what others do to the caches and the clock is in them. Calls do not show one
call that is long in itself, so copies of whole arrays are looked for in CPU time after all, but in relation
to such a copy, made in the same place. Code of ours that waits shows in neither; for that the suite has
blockbuster, which raises.
"""

from __future__ import annotations

import asyncio
import gc
import random
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from types import FrameType
from typing import Any, TypeVarTuple

import numpy as np
import pytest

from cudnn_actor import MailboxFull, Receipt, TensorSpec
from cudnn_actor.messages import Allocate, Drain

from ..patience import PATIENCE_S
from ..whole import WHOLE
from .rigs import Gate, Trio, in_thread, remove_gate, spawn, spawn_gated

pytestmark = pytest.mark.usefixtures("isolation")

Ts = TypeVarTuple("Ts")
IN_FLIGHT = 18_000 if WHOLE else 3_000
AT_ONCE = 6_000
"""Of requests where each call is counted, which takes its time."""
LONGEST_STEP_CALLS = 10_000
"""Of any callback, the test's own included. What handles 6,000 requests in one step makes more."""
LONGEST_DELIVERY_CALLS = 5_000
"""Of a callback that is ours alone: 256 replies make 1,100, or 2,900 to tasks that wait for them."""
A_FEW = 100
"""What the test itself sends in one step: its own steps are measured, too."""
SPEC = TensorSpec.packed((1, 1, 1, 1))


class MeasuringLoop(asyncio.SelectorEventLoop):
    """An event loop that knows how much each of its callbacks and task steps kept it, in some measure."""

    def __init__(self, measure: Callable[[], float]) -> None:
        super().__init__()
        self._measure = measure
        self.steps = 0
        self.longest = 0.0
        self.longest_step: object = None
        self.longest_of_ours = 0.0

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._measured, callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon_threadsafe(self._measured, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._measured, callback, *args, context=context)

    def _measured(self, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        before = self._measure()
        try:
            callback(*args)
        finally:
            took = self._measure() - before
            self.steps += 1
            if (getattr(callback, "__module__", None) or "").startswith("cudnn_actor."):
                self.longest_of_ours = max(self.longest_of_ours, took)
            if took > self.longest:
                self.longest, self.longest_step = took, callback


@contextmanager
def counted_calls() -> Iterator[Callable[[], int]]:
    """How many calls, of Python and of C, this thread has made."""
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield lambda: calls
    finally:
        sys.setprofile(before)


def measured(job: Callable[[], Coroutine[Any, Any, None]], measure: Callable[[], float]) -> MeasuringLoop:
    """The loop that has run a job, with its measurements.

    Without the garbage collector: it takes tens of milliseconds of whatever step it comes in.
    """
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=lambda: MeasuringLoop(measure)) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, MeasuringLoop)
            runner.run(job())
            return loop
    finally:
        gc.enable()


@pytest.fixture
def seed() -> int:
    """Another one each time; what failed is repeated by returning its seed here."""
    chosen = secrets.randbelow(1 << 32)
    print(f"seed {chosen}")  # noqa: T201 - pytest shows it with a failure
    return chosen


async def test_of_thousands_of_requests_with_a_third_cancelled_each_settles_once_and_runs_at_most_once(
    seed: int,
) -> None:
    chance = random.Random(seed)
    async with spawn(device="cpu", mailbox=16) as gpu:
        trio = await Trio.on(gpu, x=1.0, w=1.0, y=0.0)
        before = await gpu.statistics()
        asks = []
        for _ in range(IN_FLIGHT):
            asks.append(asyncio.ensure_future(gpu.ask(trio.sum())))  # each run adds one to y
            if chance.random() < 1e-3:
                await asyncio.sleep(0)  # let the actor have some of them
        for ask in chance.sample(asks, IN_FLIGHT // 3):
            if chance.random() < 1e-2:
                await asyncio.sleep(0)
            ask.cancel()
        async with asyncio.timeout(PATIENCE_S):
            ends = await asyncio.gather(*asks, return_exceptions=True)
            runs = await trio.result()
        results = [end for end in ends if isinstance(end, Receipt)]
        cancelled = [end for end in ends if isinstance(end, asyncio.CancelledError)]
        assert len(results) + len(cancelled) == IN_FLIGHT
        assert len({receipt.request_id for receipt in results}) == len(results)
        after = await gpu.statistics()
        finished = after.finished - before.finished - 2  # the first question, and the Download
        assert finished == runs  # what was counted as finished ran, once
        assert finished >= len(results)
        admitted = finished + after.withdrawn - before.withdrawn
        never_sent = IN_FLIGHT - admitted  # cancelled before their first step
        assert 0 <= never_sent <= len(cancelled)
        assert admitted >= len(results)
        assert (after.failed, after.expired, after.queued, after.dropped_replies) == (0, 0, 0, 0)
        assert after.live_buffers == 3


async def test_of_thousands_of_admitted_requests_with_a_third_cancelled_the_counters_add_up(
    seed: int,
) -> None:
    chance, gate = random.Random(seed), Gate()
    async with spawn_gated(gate, mailbox=16) as gpu:
        trio = await Trio.on(gpu, x=1.0, w=1.0, y=0.0)
        before = await gpu.statistics()
        with gate.closed():
            asks = [asyncio.ensure_future(gpu.ask(trio.sum())) for _ in range(IN_FLIGHT)]
            await in_thread(gate.wait_for_arrival)
            await asyncio.sleep(0)
            with pytest.raises(MailboxFull):
                gpu.submit(trio.sum())  # all of them are in flight, far more than there is room for
            doomed = set(chance.sample(range(1, IN_FLIGHT), IN_FLIGHT // 3))  # the first is running
            for number in doomed:
                asks[number].cancel()
            await asyncio.sleep(0)  # for the cancelled to notice
        remove_gate(gate)
        async with asyncio.timeout(PATIENCE_S):
            ends = await asyncio.gather(*asks, return_exceptions=True)
            runs = await trio.result()
        for number, end in enumerate(ends):
            assert isinstance(end, asyncio.CancelledError if number in doomed else Receipt)
        numbers = [end.request_id for end in ends if isinstance(end, Receipt)]
        assert numbers == sorted(numbers)  # in the order in which they were sent
        after = await gpu.statistics()
        assert runs == IN_FLIGHT - len(doomed)
        assert after.finished - before.finished - 2 == runs
        assert after.withdrawn == len(doomed)
        assert (after.failed, after.expired, after.queued, after.dropped_replies) == (0, 0, 0, 0)


async def test_of_thousands_of_allocations_with_a_third_cancelled_only_those_received_are_live(
    seed: int,
) -> None:
    chance = random.Random(seed)
    async with spawn(device="cpu", mailbox=16) as gpu:
        asks = [asyncio.ensure_future(gpu.ask(Allocate(spec=SPEC))) for _ in range(IN_FLIGHT)]
        for ask in chance.sample(asks, IN_FLIGHT // 3):
            if chance.random() < 1e-2:
                await asyncio.sleep(0)
            ask.cancel()
        async with asyncio.timeout(PATIENCE_S):
            ends = await asyncio.gather(*asks, return_exceptions=True)
            await gpu.drain()  # and so every Free of a buffer that nobody received
        received = [end for end in ends if not isinstance(end, BaseException)]
        assert len(received) >= IN_FLIGHT - IN_FLIGHT // 3
        assert len({(buffer.slot, buffer.generation) for buffer in received}) == len(received)
        statistics = await gpu.statistics()
        assert (statistics.live_buffers, statistics.live_bytes) == (len(received), 4 * len(received))


# How long the loop is kept.


def test_the_loop_is_never_kept_while_6_000_requests_come_and_go() -> None:
    async def load() -> None:
        async with spawn(device="cpu", mailbox=16) as gpu:
            trio = await Trio.on(gpu)
            asks: list[asyncio.Task[Receipt]] = []
            while len(asks) < AT_ONCE:
                asks += [asyncio.ensure_future(gpu.ask(trio.product())) for _ in range(A_FEW)]
                await asyncio.sleep(0)
            for number in range(0, AT_ONCE, 3):
                asks[number].cancel()
                if number % A_FEW == 0:
                    await asyncio.sleep(0)
            while asks:
                await asyncio.wait(asks[:A_FEW])
                del asks[:A_FEW]  # all at once, at the test's end, they would keep the loop
                await asyncio.sleep(0)

    with counted_calls() as calls:
        loop = measured(load, calls)
    assert loop.steps > AT_ONCE
    assert loop.longest < LONGEST_STEP_CALLS, loop.longest_step


def test_the_loop_is_never_kept_by_6_000_replies_that_are_there_at_once(isolation: str) -> None:
    async def load() -> None:
        gate = Gate()
        async with spawn_gated(gate, mailbox=2 * AT_ONCE) as gpu:
            trio = await Trio.on(gpu)
            sent: list[asyncio.Future[Any]] = []
            with gate.closed():
                while len(sent) < AT_ONCE:
                    sent += [gpu.submit(trio.product()) for _ in range(A_FEW)]
                    await asyncio.sleep(0)
            remove_gate(gate)
            # The test's own fault, and one call: the loop stands still until all have been answered.
            gpu.actor_ref.ask(Drain(), timeout=PATIENCE_S)
            for future in sent:
                assert isinstance(await future, Receipt)

    with counted_calls() as calls:
        loop = measured(load, calls)
    # With a worker, who blocks a loop's thread in an ask also takes turns on it: that step is the test's own.
    assert isolation == "process" or loop.longest < LONGEST_STEP_CALLS, loop.longest_step
    assert 0 < loop.longest_of_ours < LONGEST_DELIVERY_CALLS


def test_the_loop_copies_no_array_on_its_way_to_a_buffer_or_from_one() -> None:
    image = np.ones((1, 8, 2048, 1024), np.float32)

    async def load() -> None:
        async with spawn(device="cpu") as gpu:
            for layout in ("NCHW", "NHWC"):
                buffer = await gpu.upload(image, layout=layout)
                await gpu.write(buffer, image)
                await gpu.download(buffer)
                await gpu.free(buffer)

    one_copy_s = _cpu_seconds_of_a_copy(image)
    # A step takes long in some runs for other reasons, such as a collection of garbage; a copy is in all.
    loop = min((measured(load, time.thread_time) for _ in range(3)), key=lambda loop: loop.longest)
    assert loop.longest < one_copy_s / 2, loop.longest_step


def _cpu_seconds_of_a_copy(image: np.ndarray) -> float:
    """The least that a copy can take: into memory that is there already."""
    elsewhere = image.copy()
    began = time.thread_time()
    np.copyto(elsewhere, image)
    return time.thread_time() - began
