"""Loops through the service: what they compute, what is refused, and what a crash does to them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from cudnn_actor import (
    BufferRef,
    CudnnRef,
    DeadlineExceeded,
    DType,
    ExecutionFailed,
    Fault,
    FaultPlan,
    GraphBuilder,
    InvalidRequest,
    Loop,
    QuarantinedRequest,
    RunLoop,
    StaleBufferError,
    spawn,
)
from cudnn_actor.engines.base import EngineFailure, no_progress
from cudnn_actor.messages import Fill
from cudnn_actor.service import Spawning

from ..inside import isolation_of, service_behind
from ..isolation.device_engine import DeviceEngine
from ..loop_clock import LONG_S, pass_time
from ..patience import PATIENCE_S
from ..whole import more
from .loop_bodies import Case, cases, counting, recurrence, run_case
from .rigs import Gate, in_thread, outcome, service_on, spawn_gated, spawn_mortal, spawn_on, spawn_poisoned
from .worker_rigs import FAULTY, POISON, ExecutingEngine


async def _message(gpu: CudnnRef, loop: Loop, turns: int, **inputs: np.ndarray) -> RunLoop:
    """A message with buffers for all ports, and its scratch."""
    specs = loop.specs(turns)
    buffers: dict[str, BufferRef] = {}
    for port in loop.body.ports:
        spec = specs[port.name]
        if port.name in inputs:
            buffers[port.name] = await gpu.upload(inputs[port.name])
        else:
            buffers[port.name] = await gpu.empty(spec.dims, dtype=spec.dtype)
    scratch = await gpu.empty(loop.scratch.dims, dtype="uint8")
    return RunLoop.bind(loop, buffers, turns=turns, scratch=scratch)


ZERO = np.zeros(1, np.float64)


class TestValues:
    """What a loop computes."""

    @pytest.mark.parametrize("exact", [False, True])
    def test_a_loop_computes_what_its_body_does_turn_by_turn(self, exact: bool) -> None:
        @settings(max_examples=more(60), deadline=None)
        @given(cases())
        def check(case: Case) -> None:
            asyncio.run(run(case))

        async def run(case: Case) -> None:
            async with spawn(device="cpu", isolation="thread", exact=exact) as gpu:
                await run_case(gpu, case)

        check()

    async def test_ten_thousand_turns_run_as_one_request(self, device: str) -> None:
        async with spawn(device=device, isolation="process") as gpu:
            count = await gpu.upload(ZERO)
            before = (await gpu.statistics()).finished
            counted, rows = await gpu.loop(counting(), turns=10_000, count=count)
            assert (await gpu.statistics()).finished - before <= 6, "allocations, the loop, and this"
            assert (await gpu.download(counted)).tolist() == [10_000.0]
            np.testing.assert_array_equal((await gpu.download(rows))[:, 0], np.arange(1, 10_001))

    async def test_an_input_is_left_as_it_was(self, device: str) -> None:
        async with spawn(device=device, isolation="thread") as gpu:
            count = await gpu.upload(ZERO)
            await gpu.loop(counting(), turns=3, count=count)
            assert (await gpu.download(count)).tolist() == [0.0]

    async def test_the_same_message_may_be_sent_again(self, device: str) -> None:
        async with spawn(device=device) as gpu:
            message = await _message(gpu, counting(), 5, count=ZERO)
            for _ in range(3):
                receipt = await gpu.ask(message)
                assert receipt.plan.endswith("/loop")
            assert (await gpu.download(message.buffers[1])).tolist() == [5.0]

    async def test_rows_of_turns_that_did_not_run_stay_as_they_were(self, device: str) -> None:
        g = GraphBuilder()
        count = g.input("count", (1,), "float64") + 1.0
        g.input("go", (1, 1), "bool")
        body = g.build(counted=count, on=(count < 3.0).reshape(1, 1), row=count * 10.0)
        loop = Loop(body=body, carried={"count": "counted", "go": "on"}, condition="go")
        async with spawn(device=device) as gpu:
            row = await gpu.upload(np.full((6, 1), -1.0))
            go, count_ref = await gpu.upload(np.array([[True]])), await gpu.upload(ZERO)
            outputs = await gpu.loop(loop, turns=6, count=count_ref, go=go, row=row)
            assert (await gpu.download(outputs.row))[:, 0].tolist() == [10.0, 20.0, 30.0, -1.0, -1.0, -1.0]
            assert (await gpu.download(outputs.counted)).tolist() == [3.0]

    async def test_plans_of_bodies_are_warmed_and_explained(self) -> None:
        async with spawn(device="cpu") as gpu:
            message = await _message(gpu, counting(), 2, count=ZERO)
            assert await gpu.warm([message]) == 1
            assert await gpu.explain(message) == await gpu.explain(message.graph)
            await gpu.ask(message)
            assert (await gpu.statistics()).plans.misses == 1


class _Paced(ExecutingEngine):
    """The CPU engine as a device that has finished nothing until it was asked twice, and then one fence."""

    synchronous = False

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note
        self._fenced = self._finished = self._asked = 0
        self.most_behind = 0

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        self.on_progress = no_progress  # a device's work is no progress while it is enqueued
        super().execute(plan, buffers, scalars)

    def fence(self) -> Any:
        self._fenced += 1
        self.most_behind = max(self.most_behind, self._fenced - self._finished)
        return self._fenced

    def has_passed(self, fence: Any) -> bool:
        self._note()
        self._asked += 1
        if self._asked % 2 == 0:
            self._finished = max(self._finished, fence)
        return bool(fence <= self._finished)


class TestAsynchronousEngines:
    """Turns are enqueued while the device works on earlier ones."""

    def test_a_loop_computes_what_its_body_does_turn_by_turn(self) -> None:
        @settings(max_examples=20, deadline=None)
        @given(cases())
        def check(case: Case) -> None:
            asyncio.run(run(case))

        async def run(case: Case) -> None:
            async with spawn_on(DeviceEngine, isolation="thread") as gpu:
                await run_case(gpu, case)

        check()

    async def test_each_turn_is_progress_and_the_device_is_not_far_behind(self) -> None:
        seen: list[float] = []
        engine = _Paced(lambda: seen.append(isolation_of(service).progress().last_s))
        service = service_on(lambda: engine)
        async with Spawning(service) as gpu:
            message = await _message(gpu, counting(), 200, count=ZERO)
            await gpu.ask(message)
            assert (await gpu.download(message.buffers[1])).tolist() == [200.0]
        assert len(set(seen)) >= 200
        assert engine.most_behind <= 34, "32 turns, and what came before and comes behind"

    async def test_a_failure_names_all_turns_that_have_not_finished(self) -> None:
        class Late(_Paced):
            """A device that has finished nothing when the sixth turn fails."""

            runs = 0

            def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
                self.runs += 1
                if self.runs == 6:
                    raise EngineFailure("FAULTY", "a run that fails")
                super().execute(plan, buffers, scalars)

            def has_passed(self, fence: Any) -> bool:
                return self.runs not in range(1, 6)

        async with spawn_on(lambda: Late(lambda: None), isolation="thread") as gpu:
            message = await _message(gpu, counting(), 9, count=ZERO)
            with pytest.raises(ExecutionFailed, match=r"a run that fails, in one of turns 0 to 5\b"):
                await gpu.ask(message)

    async def test_what_was_sent_before_a_loop_is_answered_before_its_end(self) -> None:
        answered = threading.Event()

        class Ahead(_Paced):
            """A device that is as fast as the host, but at last begins only when ten runs are enqueued."""

            late = False
            runs = 0

            def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
                super().execute(plan, buffers, scalars)
                self.runs += 1
                assert self.runs < 100 or answered.wait(PATIENCE_S)

            def has_passed(self, fence: Any) -> bool:
                return not self.late or self.runs >= 10

        engine = Ahead(lambda: None)
        async with spawn_on(lambda: engine, isolation="thread") as gpu:
            message = await _message(gpu, counting(), 200, count=ZERO)
            engine.late = True
            before = gpu.submit(Fill(dst=message.buffers[1], value=3.0))
            before.add_done_callback(lambda _: answered.set())
            await gpu.ask(message)
            assert before.done()


async def _peak(gpu: CudnnRef, message: RunLoop) -> int:
    """How many bytes more than before were in use at a time, while a message ran."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    await gpu.ask(message)
    return tracemalloc.get_traced_memory()[1] - before


class TestMemory:
    """Memory does not grow with the turns, beyond the rows that a loop writes."""

    async def test_the_scratch_buffer_is_as_large_for_any_number_of_turns(self) -> None:
        async with spawn(device="cpu", isolation="thread") as gpu:
            for turns in (1, 4000):
                message = await _message(gpu, counting(), turns, count=ZERO)
                assert message.scratch.spec == counting().scratch
                await gpu.ask(message)

    async def test_more_turns_take_no_more_memory(self) -> None:
        g = GraphBuilder()
        body = g.build(y=g.input("x", (64,)) * 0.5)
        loop = Loop(body=body, carried={"x": "y"})
        async with spawn(device="cpu", isolation="thread") as gpu:
            x = np.ones(64, np.float32)
            first = await _message(gpu, loop, 10, x=x)
            second = await _message(gpu, loop, 4000, x=x)
            await gpu.ask(first)
            await gpu.ask(second)
            tracemalloc.start()
            try:
                # What other threads allocate meanwhile, such as the watchdog's, is counted, too. So the least
                # of some tries counts, and one is enough if it is good.
                grown = [await _peak(gpu, second) - await _peak(gpu, first)]
                while min(grown) >= 20_000 and len(grown) < 5:
                    grown.append(await _peak(gpu, second) - await _peak(gpu, first))
            finally:
                tracemalloc.stop()
            assert min(grown) < 20_000, "of 3,990 turns more, not one leaves 5 bytes"

    async def test_buffers_that_the_call_allocates_for_itself_are_freed(self) -> None:
        async with spawn(device="cpu") as gpu:
            count = await gpu.upload(ZERO)
            counted, rows = await gpu.loop(counting(), turns=3, count=count)
            await gpu.drain()
            assert (await gpu.statistics()).live_buffers == 3
            with pytest.raises(InvalidRequest, match=r"^count="):
                await gpu.loop(counting(), turns=3, count=rows)
            await gpu.drain()
            assert (await gpu.statistics()).live_buffers == 3
            assert counted != rows


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize("way", ["timeout", "cancelled"])
async def test_a_loop_ends_between_two_turns_once_its_caller_has_left(way: str) -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        turns = 10_000
        message = await _message(gpu, counting(), turns, count=ZERO, row=np.zeros((turns, 1)))
        with gate.closed():
            asked = asyncio.ensure_future(gpu.ask(message, timeout=LONG_S))
            await in_thread(gate.wait_for_arrival)
            if way == "timeout":
                pass_time()
            else:
                asked.cancel()
            error = await outcome(asked)
        if way == "timeout":
            assert isinstance(error, DeadlineExceeded)
            assert error.started
        await gpu.drain()
        rows = await gpu.download(message.buffers[2])
        assert 0.0 < rows.max() < turns
        assert (await gpu.download(message.buffers[0])).tolist() == [0.0], "an input stays as it is"
        counted, _ = await gpu.loop(counting(), turns=6, count=message.buffers[0])
        assert (await gpu.download(counted)).tolist() == [6.0]


class TestCrashes:
    """A loop is pure: it runs again from its first turn."""

    async def test_a_loop_whose_worker_dies_in_the_middle_runs_again(self) -> None:
        loop = recurrence(4)
        rng = np.random.default_rng(5)
        inputs = {
            "h": rng.uniform(-1, 1, (1, 4)).astype(np.float32),
            "w": rng.uniform(-1, 1, (4, 4)).astype(np.float32),
            "x": rng.uniform(-1, 1, (20, 1, 4)).astype(np.float32),
        }
        # A loop of 20 turns is 61 calls, so a worker dies within the second loop that it runs.
        async with spawn_mortal(calls=90) as gpu:
            message = await _message(gpu, loop, 20, **inputs)
            results = []
            for _ in range(3):
                await gpu.ask(message)
                results.append([await gpu.download(ref) for ref in message.buffers[-2:]])
            assert gpu.generation >= 2
            assert (await gpu.statistics()).replayed >= 1
        for result in results[1:]:
            for got, first in zip(result, results[0], strict=True):
                np.testing.assert_array_equal(got, first)

    async def test_a_loop_runs_again_after_a_kill(self, device: str) -> None:
        faults = FaultPlan().at(2, Fault.KILL, of=RunLoop)
        async with spawn(device=device, isolation="process", standby=1, faults=faults) as gpu:
            message = await _message(gpu, counting(), 7, count=ZERO)
            for _ in range(3):
                await gpu.ask(message)
                assert (await gpu.download(message.buffers[1])).tolist() == [7.0]
            assert gpu.generation == 2

    async def test_a_loop_that_runs_again_runs_to_its_end_though_its_caller_has_left(self) -> None:
        turns = 4_000
        async with spawn(device="cpu", isolation="process") as gpu:
            message = await _message(gpu, counting(), turns, count=ZERO, row=np.zeros((turns, 1)))
            await gpu.warm(counting().body)
            begun: Callable[[], int] = service_behind(gpu).state.mailbox.begun
            before = begun()
            asked = asyncio.ensure_future(gpu.ask(message))
            async with asyncio.timeout(PATIENCE_S):
                while begun() == before:  # noqa: ASYNC110 - a word in shared memory says it
                    await asyncio.sleep(0)
            assert gpu.worker_pid is not None
            os.kill(gpu.worker_pid, signal.SIGSTOP)  # in one of its turns
            asked.cancel()
            await outcome(asked)
            os.kill(gpu.worker_pid, signal.SIGKILL)
            await gpu.drain()
            assert gpu.generation == 2
            assert (await gpu.download(message.buffers[1])).tolist() == [turns]
            rows = await gpu.download(message.buffers[2])
            np.testing.assert_array_equal(rows[:, 0], np.arange(1, turns + 1))

    @pytest.mark.usefixtures("isolation")
    async def test_a_loop_that_kills_twice_is_quarantined_with_its_body(self) -> None:
        g = GraphBuilder()
        x = g.input("x", (1,))
        loop = Loop(body=g.build(y=x + 1.0), carried={"x": "y"})
        async with spawn_poisoned() as gpu:
            x_ref = await gpu.upload(np.array([POISON - 3.0], np.float32))  # fatal in the fourth turn
            with pytest.raises(QuarantinedRequest):
                await gpu.loop(loop, turns=8, x=x_ref)
            with pytest.raises(QuarantinedRequest):
                await gpu.apply(loop.body, x=x_ref)


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize(("start", "turn"), [(FAULTY, 0), (FAULTY - 3.0, 3), (FAULTY - 7.0, 7)])
async def test_a_loop_that_fails_names_the_turn(start: float, turn: int) -> None:
    g = GraphBuilder()
    x = g.input("x", (1,))
    loop = Loop(body=g.build(y=x + 1.0), carried={"x": "y"})
    async with spawn_poisoned() as gpu:
        x_ref = await gpu.upload(np.array([start], np.float32))
        with pytest.raises(ExecutionFailed, match=rf"a value that fails, in turn {turn}\b"):
            await gpu.loop(loop, turns=8, x=x_ref)


class TestRefusals:
    """What is refused, by name."""

    async def test_buffers_that_do_not_fit(self) -> None:
        loop = recurrence(4)
        async with spawn(device="cpu") as gpu:
            h, w = await gpu.empty((1, 4), dtype="float32"), await gpu.empty((4, 4), dtype="float32")
            x = await gpu.empty((3, 1, 4), dtype="float32")
            for turns, problem in (
                (2, r"^x=float32\[3x1x4\] NCHW: is not one row for each of 2 turns; .*\(2, 1, 4\)"),
                (-1, r"^turns=-1: must be a whole number from 0 to 1048576"),
                (1 << 21, r"^turns=2097152: must be"),
                (True, r"^turns=True: must be"),
                (1.0, r"^turns=1.0: must be"),
            ):
                with pytest.raises(InvalidRequest, match=problem):
                    await gpu.loop(loop, turns=turns, h=h, w=w, x=x)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match=r"^w=None: is an input of the graph and has no buffer"):
                await gpu.loop(loop, turns=3, h=h, x=x)
            with pytest.raises(InvalidRequest, match=r"^v=.*did you mean|^v=.*: is no input or output"):
                await gpu.loop(loop, turns=3, h=h, x=x, w=w, v=w)
            with pytest.raises(InvalidRequest, match=r"^new_h=.*is also h, and"):
                await gpu.loop(loop, turns=3, h=h, x=x, w=w, new_h=h)
            with pytest.raises(InvalidRequest, match=r"^loop=.* where a Loop belongs"):
                await gpu.loop(loop.body, turns=3, h=h, x=x, w=w)  # type: ignore[arg-type]
            await gpu.free(x)
            with pytest.raises(StaleBufferError):
                await gpu.loop(loop, turns=3, h=h, x=x, w=w)

    async def test_scratch_that_is_too_small_or_of_another_dtype(self) -> None:
        async with spawn(device="cpu") as gpu:
            message = await _message(gpu, counting(), 2, count=ZERO)
            wanted = counting().scratch.dims
            uint8, int8 = DType.UINT8, DType.INT8
            for dims, dtype in (((wanted[0] - 1,), uint8), (wanted, int8), ((1, *wanted), uint8)):
                scratch = await gpu.empty(dims, dtype=dtype)
                given = {
                    port.name: ref for port, ref in zip(message.graph.ports, message.buffers, strict=True)
                }
                wrong = RunLoop.bind(message.loop, given, turns=2, scratch=scratch)
                with pytest.raises(InvalidRequest, match=r"^scratch=.*does not hold what the loop works in"):
                    await gpu.ask(wrong)

    async def test_a_loop_where_a_message_belongs_says_what_to_do(self) -> None:
        async with spawn(device="cpu") as gpu:
            with pytest.raises(InvalidRequest, match=r"run it: await gpu.loop\(loop, turns=100, x=x\)"):
                await gpu.ask(counting())  # type: ignore[call-overload]
            with pytest.raises(InvalidRequest, match=r"run it: await gpu.loop\(loop"):
                await gpu.apply(counting())  # type: ignore[arg-type]

    def test_a_loop_has_no_gradients(self) -> None:
        g = GraphBuilder()
        x = g.input("x", (1,))
        with pytest.raises(InvalidRequest, match=r"^outputs=Loop: has no gradients"):
            g.grad(counting(), x)  # type: ignore[call-overload]
