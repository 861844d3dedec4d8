"""`gpu.batched`: requests of many tasks run together, and each ends as if it had run by itself."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from cudnn_actor import (
    BatchedModel,
    CudnnActorError,
    CudnnRef,
    DeadlineExceeded,
    ExecutionFailed,
    Fault,
    FaultPlan,
    InvalidRequest,
    MailboxFull,
    OutOfMemory,
    QuarantinedRequest,
    ServiceStopped,
)
from cudnn_actor.messages import RunModel
from tests.log_lines import capture_logs
from tests.onnx.small_models import FLOAT, image_model, model_of, node

from ..inside import is_waking
from ..loop_clock import LONG_S, pass_time
from ..patience import PATIENCE_S
from .rigs import Gate, in_thread, spawn, spawn_gated, spawn_poisoned
from .worker_rigs import POISON

pytestmark = pytest.mark.usefixtures("isolation")
FOR_EVER_US = 1e12
"""A delay that no test waits for."""


def doubling(length: int | str = 3) -> Any:
    """y = 2 x, of rows; and their sums."""
    return model_of(
        [node("Add", "x x", "y"), node("ReduceSum", "x axis", "sum")],
        {"x": (FLOAT, ["N", length])},
        {"y": (FLOAT, ["N", length]), "sum": (FLOAT, ["N", 1])},
        {"axis": np.array([1])},
    )


def rows(value: float, count: int = 1, length: int = 3) -> np.ndarray:
    return np.full((count, length), value, np.float32)


def check(answer: dict[str, np.ndarray], value: float, count: int = 1, length: int = 3) -> None:
    assert list(answer) == ["y", "sum"]
    np.testing.assert_array_equal(answer["y"], rows(2 * value, count, length))
    np.testing.assert_array_equal(answer["sum"], np.full((count, 1), value * length, np.float32))


@asynccontextmanager
async def batched(
    service: Any = None, model: Any = None, **options: Any
) -> AsyncIterator[tuple[CudnnRef, BatchedModel]]:
    """An endpoint for `doubling`, on a service that ends after it."""
    async with (
        spawn() if service is None else service as gpu,
        await gpu.load(model or doubling()) as loaded,
        gpu.batched(loaded, **options) as endpoint,
    ):
        yield gpu, endpoint


@asynccontextmanager
async def held(**options: Any) -> AsyncIterator[tuple[CudnnRef, BatchedModel, Gate, asyncio.Future[Any]]]:
    """The same, with a batch of one request that runs until the gate is opened."""
    gate = Gate()
    async with batched(spawn_gated(gate), **options) as (gpu, endpoint):
        gate.forget_arrivals()
        gate.shut()
        first = endpoint.submit(x=rows(100.0))
        await in_thread(gate.wait_for_arrival)
        try:
            yield gpu, endpoint, gate, first
        finally:
            gate.open()


async def until(happened: Callable[[], bool]) -> None:
    """Give the event loop turns until something has happened in it."""
    async with asyncio.timeout(PATIENCE_S):
        while not happened():  # noqa: ASYNC110 - there is no event: what is awaited happens in the loop's turns
            await asyncio.sleep(0)


def sent(gpu: CudnnRef) -> int:
    """How many messages the service has that are not answered."""
    metrics = gpu.metrics()
    return metrics.queued + metrics.in_flight


# Answers.


async def test_what_a_request_held_is_freed_with_its_answer_without_a_garbage_collection() -> None:
    async with batched(max_batch=2) as (_, endpoint):
        gc.collect()
        gc.disable()
        try:
            arrays = [rows(1), rows(2)]
            freed = [weakref.ref(each) for each in arrays]
            answers = await asyncio.gather(*(endpoint(x=each) for each in arrays))
            del arrays
            assert [each() for each in freed] == [None, None]
        finally:
            gc.enable()
        for value, answer in enumerate(answers, 1):
            check(answer, value)


async def test_each_request_gets_its_own_answer_and_nothing_is_built_any_more() -> None:
    async with batched(max_batch=8) as (gpu, endpoint):
        before = await gpu.statistics()
        counts = [1 + number % 3 for number in range(60)]
        answers = await asyncio.gather(*(endpoint(x=rows(n, count)) for n, count in enumerate(counts)))
        for number, (answer, count) in enumerate(zip(answers, counts, strict=True)):
            check(answer, number, count)
        after, mine = await gpu.statistics(), endpoint.statistics()
        assert after.plans.misses == before.plans.misses
        assert after.live_buffers == before.live_buffers
        assert mine.samples == sum(counts)
        assert mine.batches == after.finished - before.finished - 1  # the first of the two statistics
        assert mine.batches < len(counts) / 2
        assert mine.mean_batch == mine.samples / mine.batches
        assert (mine.waiting, mine.running, mine.divided) == (0, 0, 0)


async def test_a_network_gives_the_same_batched_as_by_itself() -> None:
    rng = np.random.default_rng(7)
    images = [rng.standard_normal((1, 3, 8, 8)).astype(np.float32) for _ in range(12)]
    async with spawn() as gpu, await gpu.load(image_model()) as model:
        alone = [await gpu.run(model, image=image) for image in images]
        async with gpu.batched(model, sizes=(1, 8)) as endpoint:
            together = await asyncio.gather(*(endpoint({"image": image}) for image in images))
    for one, other in zip(alone, together, strict=True):
        for name, value in one.items():
            np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-6)


async def test_large_samples_are_put_together_and_divided_too() -> None:
    length = 100_000
    async with batched(model=doubling(length), max_batch=4) as (_, endpoint):
        answers = await asyncio.gather(*(endpoint(x=rows(n, 1, length)) for n in range(8)))
        for number, answer in enumerate(answers):
            check(answer, number, 1, length)


async def test_an_array_that_is_reshaped_while_it_waits_spoils_no_batch() -> None:
    async with held(max_batch=4) as (_, endpoint, gate, first):
        given = [rows(n, 2) for n in range(2)]
        waiting = [endpoint.submit(x=x) for x in given]
        given[1].shape = (3, 2)
        gate.open()
        check(await first, 100.0)
        for number, answer in enumerate(await asyncio.gather(*waiting)):
            check(answer, number, 2)


async def test_a_number_is_no_sample_of_a_model_of_rows_without_dims() -> None:
    model = model_of([node("Add", "x x", "y")], {"x": (FLOAT, ["N"])}, {"y": (FLOAT, ["N"])})
    async with batched(model=model, max_batch=4) as (_, endpoint):
        with pytest.raises(InvalidRequest, match="0 dims"):
            await endpoint(x=np.array(3.0, np.float32))
        np.testing.assert_array_equal((await endpoint(x=np.ones(2, np.float32)))["y"], [2.0, 2.0])


async def test_requests_of_other_dims_do_not_share_a_batch() -> None:
    async with batched(model=doubling("L"), max_batch=4, dims={"L": (3, 5)}) as (_, endpoint):
        lengths = [3, 5] * 8
        answers = await asyncio.gather(*(endpoint(x=rows(n, 1, lengths[n])) for n in range(16)))
        for number, answer in enumerate(answers):
            check(answer, number, 1, lengths[number])
        with pytest.raises(InvalidRequest, match=r"x: \(1, 4\).* have dims that were not warmed"):
            await endpoint(x=rows(1, 1, 4))


async def test_answers_are_arrays_of_their_own() -> None:
    async with held() as (_, endpoint, gate, first):
        futures = [endpoint.submit(x=rows(n)) for n in range(3)]
        gate.open()
        answer, *others = await asyncio.gather(first, *futures)
        for other in others:
            for value in other.values():
                assert value.flags.owndata
                value.fill(0)
        check(answer, 100.0)


# When a batch starts.


async def test_while_a_batch_runs_the_next_is_collected() -> None:
    async with held(max_delay_us=FOR_EVER_US) as (_, endpoint, gate, first):
        waiting = [endpoint.submit(x=rows(n)) for n in range(5)]
        await until(lambda: not is_waking(endpoint))
        assert (endpoint.statistics().running, endpoint.statistics().waiting) == (1, 5)
        gate.open()
        for number, answer in enumerate(await asyncio.gather(*waiting)):
            check(answer, number)
        check(await first, 100.0)
        mine = endpoint.statistics()
        assert (mine.batches, mine.samples, mine.padded) == (2, 6, 3)


async def test_a_full_batch_is_sent_beside_one_that_runs_a_third_is_put_together_and_others_wait() -> None:
    async with held(max_batch=4, max_delay_us=FOR_EVER_US) as (gpu, endpoint, gate, _first):
        waiting = [endpoint.submit(x=rows(n)) for n in range(14)]
        await until(lambda: endpoint.statistics().batches == 3)
        await until(lambda: sent(gpu) == 2)
        assert (endpoint.statistics().running, endpoint.statistics().waiting) == (3, 6)
        gate.open()
        for number, answer in enumerate(await asyncio.gather(*waiting)):
            check(answer, number)
        assert endpoint.statistics().batches == 5


async def test_a_request_that_has_waited_long_enough_starts_beside_a_batch_that_runs() -> None:
    async with held(max_delay_us=1000) as (_, endpoint, gate, _first):
        waiting = [endpoint.submit(x=rows(n)) for n in range(3)]
        await until(lambda: endpoint.statistics().running == 2)
        gate.open()
        for number, answer in enumerate(await asyncio.gather(*waiting)):
            check(answer, number)


async def test_a_full_batch_is_put_together_once_the_only_request_before_it_is_withdrawn() -> None:
    async with held(
        model=doubling("L"), dims={"L": (3, 4)}, sizes=(1, 2), in_flight=1, max_delay_us=FOR_EVER_US
    ) as (_, endpoint, gate, first):
        earlier = endpoint.submit(x=rows(1.0, length=4))
        full = endpoint.submit(x=rows(2.0, count=2))
        await asyncio.sleep(0)  # the loop's turn in which the endpoint looks for batches
        assert (endpoint.statistics().waiting, endpoint.statistics().running) == (2, 1)
        earlier.cancel()
        await until(lambda: endpoint.statistics().running == 2)
        assert endpoint.statistics().waiting == 0
        gate.open()
        check(await first, 100.0)
        check(await full, 2.0, count=2)


async def test_with_one_batch_in_flight_all_others_wait() -> None:
    async with held(max_batch=2, in_flight=1, max_delay_us=0) as (gpu, endpoint, gate, _first):
        waiting = [endpoint.submit(x=rows(n)) for n in range(4)]
        await until(lambda: endpoint.statistics().batches == 2)
        assert (endpoint.statistics().running, endpoint.statistics().waiting) == (2, 2)
        assert sent(gpu) == 1, "the other is put together, and not sent"
        gate.open()
        await asyncio.gather(*waiting)


# Deadlines, cancellation, back-pressure.


async def test_a_request_that_expires_is_dropped_from_its_batch_alone() -> None:
    async with held(max_delay_us=FOR_EVER_US) as (_, endpoint, gate, _first):
        waiting = [endpoint.submit(x=rows(n), timeout=0.01 if n == 1 else PATIENCE_S) for n in range(3)]
        with pytest.raises(DeadlineExceeded) as expired:
            await waiting[1]
        assert (expired.value.timeout_s, expired.value.started) == (0.01, False)
        assert endpoint.statistics().waiting == 2
        gate.open()
        check(await waiting[0], 0)
        check(await waiting[2], 2)
        assert endpoint.statistics().samples == 3


async def test_a_request_that_expires_while_its_batch_runs_had_started() -> None:
    async with held() as (_, endpoint, gate, first):
        late = asyncio.ensure_future(endpoint(x=rows(5.0), timeout=2 * LONG_S))
        short = endpoint.submit(x=rows(6.0), timeout=LONG_S)
        await until(lambda: endpoint.statistics().running == 2)
        pass_time()
        with pytest.raises(DeadlineExceeded) as expired:
            await short
        assert expired.value.started
        gate.open()
        check(await late, 5.0)
        check(await first, 100.0)


async def test_a_cancelled_request_takes_only_its_own_samples_back() -> None:
    async with held(max_delay_us=FOR_EVER_US) as (_, endpoint, gate, _first):
        waiting = [asyncio.ensure_future(endpoint(x=rows(n))) for n in range(3)]
        await until(lambda: endpoint.statistics().waiting == 3)
        waiting[0].cancel()
        await until(waiting[0].cancelled)
        await until(lambda: endpoint.statistics().waiting == 2)
        gate.open()
        check(await waiting[1], 1)
        check(await waiting[2], 2)
        assert endpoint.statistics().samples == 3


async def test_a_caller_that_is_cancelled_once_its_answer_is_there_takes_no_other_answer_away() -> None:
    async with batched(max_batch=4, max_delay_us=FOR_EVER_US) as (_, endpoint):
        callers = [asyncio.create_task(endpoint(x=rows(value))) for value in range(4)]
        endpoint.on_batch = lambda _: callers[1].cancel()  # before any of them has run
        answers = await asyncio.gather(*callers, return_exceptions=True)
        assert isinstance(answers.pop(1), asyncio.CancelledError)
        for value, answer in zip((0, 2, 3), answers, strict=True):
            assert not isinstance(answer, BaseException)
            check(answer, value)
        assert (endpoint.statistics().waiting, endpoint.statistics().running) == (0, 0)


async def test_a_caller_that_raises_once_it_is_woken_keeps_no_other_from_its_answer() -> None:
    async with batched(max_batch=4, max_delay_us=FOR_EVER_US) as (_, endpoint):

        async def call(value: int) -> dict[str, np.ndarray]:
            answer = await endpoint(x=rows(value))
            if value == 1:
                raise LookupError
            return answer

        answers = await asyncio.gather(*(call(value) for value in range(4)), return_exceptions=True)
        assert isinstance(answers.pop(1), LookupError)
        for value, answer in zip((0, 2, 3), answers, strict=True):
            assert not isinstance(answer, BaseException)
            check(answer, value)


async def test_a_batch_that_nobody_waits_for_any_more_is_withdrawn() -> None:
    async with held(max_delay_us=0) as (gpu, endpoint, gate, first):
        waiting = [endpoint.submit(x=rows(n)) for n in range(3)]
        await until(lambda: endpoint.statistics().running == 2)
        for future in waiting:
            future.cancel()
        await until(lambda: endpoint.statistics().running == 1)
        gate.open()
        check(await first, 100.0)
        await gpu.drain()
        assert (await gpu.statistics()).withdrawn == 1


async def test_submit_is_refused_where_a_call_waits() -> None:
    async with held(max_waiting=2, max_batch=4, max_delay_us=FOR_EVER_US) as (_, endpoint, gate, _first):
        waiting = [endpoint.submit(x=rows(n)) for n in range(2)]
        with pytest.raises(MailboxFull, match=r"2 requests wait for a batch; .* raise max_waiting") as full:
            endpoint.submit(x=rows(2))
        assert full.value.retry_safe
        waiting.append(asyncio.ensure_future(endpoint(x=rows(2))))
        await until(lambda: endpoint.statistics().waiting == 3)
        gate.open()
        for number, answer in enumerate(await asyncio.gather(*waiting)):
            check(answer, number)


# Crashes and failures.


@pytest.mark.parametrize("place", [0, 3, 7])
async def test_a_sample_that_kills_the_worker_is_quarantined_alone(place: int) -> None:
    with capture_logs() as logs:
        async with batched(spawn_poisoned(), max_batch=8) as (gpu, endpoint):
            values = [float(n) for n in range(8)]
            values[place] = POISON
            answers = await asyncio.gather(
                *(endpoint(x=rows(value)) for value in values), return_exceptions=True
            )
            for number, answer in enumerate(answers):
                if number == place:
                    assert isinstance(answer, QuarantinedRequest)
                else:
                    check(answer, number)  # type: ignore[arg-type]
            statistics = await gpu.statistics()
            assert statistics.restarts == 2, "as many as for a request by itself"
            for count in (1, 3, 8):  # no size is quarantined
                check(await endpoint(x=rows(5.0, count)), 5.0, count)
            assert endpoint.statistics().divided == 1
    (line,) = [entry for entry in logs if entry["event"] == "batch.divided"]
    assert (line["requests"], line["samples"], line["size"]) == (8, 8, 8)
    assert re.fullmatch(r"a crash ended it \(.*\); its requests run one by one", line["error"])


async def test_a_poisonous_request_by_itself_does_not_stop_those_after_it() -> None:
    async with batched(spawn_poisoned(), max_batch=4) as (gpu, endpoint):
        with pytest.raises(QuarantinedRequest):
            await endpoint(x=rows(POISON))
        check(await endpoint(x=rows(2.0)), 2.0)
        assert (await gpu.statistics()).restarts == 2


@pytest.mark.parametrize("when", [1, 2, 3, 4])
async def test_a_crash_that_no_sample_has_caused_loses_none(when: int) -> None:
    faults = FaultPlan().at(3 + when, Fault.STICKY, of=RunModel)
    async with batched(spawn(faults=faults), max_batch=4) as (gpu, endpoint):
        answers = await asyncio.gather(*(endpoint(x=rows(n)) for n in range(16)))
        for number, answer in enumerate(answers):
            check(answer, number)
        assert gpu.generation == 2


async def test_a_size_that_kills_every_worker_is_left_out_before_the_service_ends() -> None:
    faults = FaultPlan()
    for number in (4, 9, 14):  # each time that a batch of four runs; the first three runs are on entry
        faults = faults.at(number, Fault.STICKY, of=RunModel)
    with capture_logs() as logs:
        async with batched(spawn(faults=faults), max_batch=4) as (gpu, endpoint):
            for _ in range(5):
                answers = await asyncio.gather(*(endpoint(x=rows(n)) for n in range(4)))
                for number, answer in enumerate(answers):
                    check(answer, number)
            assert gpu.generation == 4
            mine = endpoint.statistics()
            assert mine.divided == 4  # three crashes, and the refusal after them
            with pytest.raises(QuarantinedRequest):
                await endpoint(x=rows(1.0, 4))
    (line,) = [entry for entry in logs if entry["event"] == "batch.size_left_out"]
    assert line["size"] == 4


async def test_a_request_of_a_size_that_another_has_just_had_quarantined_runs_in_another_size() -> None:
    async with batched(spawn_poisoned(), max_batch=2, max_delay_us=0) as (gpu, endpoint):
        with pytest.raises(QuarantinedRequest):
            await endpoint(x=rows(POISON))
        third = endpoint.submit(x=rows(POISON))  # the third crash in a row: its graph is quarantined
        await asyncio.sleep(0)
        beside = endpoint.submit(x=rows(2.0))
        with pytest.raises(QuarantinedRequest):
            await third
        check(await beside, 2.0)
        check(await endpoint(x=rows(3.0)), 3.0)
        assert (await gpu.statistics()).restarts == 3


@pytest.mark.parametrize(
    ("fault", "error"),
    [(Fault.FAIL_EXECUTION, ExecutionFailed), (Fault.OUT_OF_MEMORY, OutOfMemory)],
)
async def test_a_batch_that_fails_runs_again_one_by_one(fault: Fault, error: type[CudnnActorError]) -> None:
    faults = FaultPlan().at(4, fault, of=RunModel).at(6, fault, of=RunModel)
    async with batched(spawn(faults=faults), max_batch=4) as (_, endpoint):
        answers = await asyncio.gather(*(endpoint(x=rows(n)) for n in range(4)), return_exceptions=True)
        assert isinstance(answers[1], error)
        for number in (0, 2, 3):
            check(answers[number], number)  # type: ignore[arg-type]


# Its life.


async def test_it_answers_what_it_has_accepted_and_then_refuses() -> None:
    async with spawn() as gpu, await gpu.load(doubling()) as model:
        async with gpu.batched(model, max_batch=2, max_delay_us=FOR_EVER_US) as endpoint:
            accepted = [endpoint.submit(x=rows(n)) for n in range(9)]
        assert all(future.done() for future in accepted)
        for number, future in enumerate(accepted):
            check(future.result(), number)
        with pytest.raises(InvalidRequest, match="is closed; make another"):
            await endpoint(x=rows(1.0))
        await endpoint.aclose()
        with pytest.raises(InvalidRequest, match="was entered before"):
            await endpoint.__aenter__()
        with pytest.raises(InvalidRequest, match="is not open; use it in: async with"):
            await gpu.batched(model)(x=rows(1.0))


async def test_a_request_that_waits_for_others_to_come_is_answered_at_a_close() -> None:
    async with batched(max_delay_us=FOR_EVER_US) as (_, endpoint):
        await asyncio.gather(*(endpoint(x=rows(n)) for n in range(3)))
        alone = endpoint.submit(x=rows(3.0))
        await endpoint.aclose()
        check(await alone, 3.0)


async def test_a_close_that_is_cancelled_leaves_nobody_waiting() -> None:
    async with held(max_batch=1, max_delay_us=0) as (_, endpoint, gate, first):
        waiting = [endpoint.submit(x=rows(n)) for n in range(5)]
        closing = asyncio.ensure_future(endpoint.aclose())
        await until(lambda: not is_waking(endpoint) and endpoint.statistics().running == 3)
        closing.cancel()
        outcomes = await asyncio.gather(first, *waiting, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in outcomes)
        gate.open()


async def test_a_service_that_stops_answers_all_who_wait() -> None:
    async with held(max_batch=2, max_delay_us=0) as (gpu, endpoint, gate, first):
        waiting = [endpoint.submit(x=rows(n)) for n in range(7)]
        await until(lambda: endpoint.statistics().running == 3)
        stopping = asyncio.ensure_future(gpu.aclose(drain_s=0.0))
        gate.open()
        outcomes = await asyncio.gather(first, *waiting, return_exceptions=True)
        await stopping
        # How many are still waiting when it stops depends on who is faster.
        assert all(isinstance(each, dict | ServiceStopped) for each in outcomes)


async def test_its_graphs_are_given_back_with_the_model() -> None:
    async with spawn() as gpu:
        async with await gpu.load(doubling()) as model, gpu.batched(model, max_batch=4) as endpoint:
            check(await endpoint(x=rows(1.0)), 1.0)
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 0


async def test_it_belongs_to_the_event_loop_that_entered_it() -> None:
    async with batched() as (_, endpoint):

        def elsewhere() -> None:
            asyncio.run(endpoint(x=rows(1.0)))

        with pytest.raises(InvalidRequest, match="belongs to another event loop; make one in each loop"):
            await in_thread(elsewhere)


# What does not fit.


async def test_a_batch_whose_last_caller_leaves_before_it_has_begun_ends() -> None:
    async with batched(max_batch=1, max_delay_us=0) as (_, endpoint):
        for number in range(4):  # more than may be started at a time
            with pytest.raises(DeadlineExceeded):
                await endpoint(x=rows(number), timeout=1e-9)  # which ends in the loop's turn that starts it
        async with asyncio.timeout(PATIENCE_S):
            check(await endpoint(x=rows(1.0)), 1.0)
        assert endpoint.statistics().running == 0
