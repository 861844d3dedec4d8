"""Lifecycle events from first to last, for whoever listens; statistics that add up over a life."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from cudnn_actor import (
    CudnnRef,
    DeadlineExceeded,
    ExecutionFailed,
    Fault,
    FaultPlan,
    Receipt,
    ServiceStopped,
    StaleBufferError,
)
from cudnn_actor.messages import Download, Fill, Free
from cudnn_actor.supervision import (
    Escalated,
    ExitKind,
    ExitReason,
    LifecycleEvent,
    Restarted,
    Restarting,
    Started,
    Stopped,
)

from .rigs import Gate, Trio, bare, child_spec, in_thread, outcome, seen, single, spawn, spawn_gated

pytestmark = pytest.mark.usefixtures("isolation")

A_CRASH = FaultPlan().at(1, Fault.STICKY, of=Fill)


async def all_of(gpu: CudnnRef) -> list[LifecycleEvent]:
    return [event async for event in gpu.events()]


async def first(count: int, events: AsyncIterator[LifecycleEvent]) -> list[LifecycleEvent]:
    return [await anext(events) for _ in range(count)]


def kinds(events: list[LifecycleEvent]) -> list[type[LifecycleEvent]]:
    return [type(event) for event in events]


async def test_a_life_with_one_crash_is_told_from_its_start_to_its_end(isolation: str) -> None:
    async with spawn(device="cpu", faults=A_CRASH) as gpu:
        x = await gpu.upload(single(1.0))
        await gpu.fill(x, 2.0)
    started, restarting, restarted, actor_stopped, stopped = await all_of(gpu)
    assert bare(started) == Started(child="cudnn", generation=1)
    assert isinstance(restarting, Restarting)
    assert (restarting.child, restarting.generation, restarting.attempt) == ("cudnn", 1, 1)
    assert restarting.cause.kind is ExitKind.CRASH
    assert "INJECTED_STICKY_ERROR" in restarting.cause.cause
    # A worker that was ready is replaced at once: its end has cost nobody but itself anything.
    assert restarting.delay_s == 0 if isolation == "process" else 0.015 <= restarting.delay_s <= 0.02
    assert isinstance(restarted, Restarted)
    assert restarted.generation == 2
    assert restarted.downtime_s >= restarting.delay_s
    assert bare(actor_stopped) == Stopped(child="cudnn", reason=ExitReason.normal())
    assert bare(stopped) == Stopped(child=None, reason=ExitReason.shutdown("closed"))


async def test_every_event_says_whose_it_is_and_when_it_happened() -> None:
    before = time.time(), time.monotonic()
    async with spawn(device="cpu", name="left", faults=A_CRASH) as gpu:
        await gpu.fill(await gpu.upload(single(1.0)), 2.0)
    events = await all_of(gpu)
    after = time.time(), time.monotonic()
    assert {event.service for event in events} == {"left"}
    for clock, times in enumerate(([each.at for each in events], [each.monotonic for each in events])):
        assert times == sorted(times)
        assert before[clock] <= times[0] <= times[-1] <= after[clock]
    restarted = next(event for event in events if isinstance(event, Restarted))
    restarting = next(event for event in events if isinstance(event, Restarting))
    assert restarted.downtime_s == pytest.approx(restarted.monotonic - restarting.monotonic, abs=1.0)


def test_a_service_that_never_ran_says_whose_end_it_is_and_when() -> None:
    before = time.time()
    _, service = child_spec("right", device="cpu")
    service.stop()
    (event,) = service.events.all
    assert isinstance(event, Stopped)
    assert event.service == "right"
    assert before <= event.at <= time.time()


async def test_a_service_that_gives_up_says_escalated_and_then_stopped_last() -> None:
    gpu = await spawn(device="cpu", faults=A_CRASH, max_restarts=0)
    x = await gpu.upload(single(1.0))
    with pytest.raises(ServiceStopped, match="gave up"):
        await gpu.fill(x, 2.0)
    events = await all_of(gpu)
    assert kinds(events) == [Started, Stopped, Escalated, Stopped]
    last = events[-1]
    assert isinstance(last, Stopped)
    assert last.child is None
    await gpu.aclose()


async def test_the_service_s_own_end_ends_the_events_and_its_actor_s_does_not() -> None:
    gpu = await spawn(device="cpu")
    listening = asyncio.ensure_future(all_of(gpu))
    await gpu.aclose()
    events = await listening
    assert [event.child for event in events] == ["cudnn", "cudnn", None]


async def test_an_event_is_told_as_it_happens() -> None:
    async with spawn(device="cpu", faults=A_CRASH) as gpu, aclosing(gpu.events()) as events:
        assert kinds(await first(1, events)) == [Started]
        next_event = asyncio.ensure_future(anext(events))
        x = await gpu.upload(single(1.0))
        assert not next_event.done()  # nothing but a crash is worth an event
        filling = gpu.submit(Fill(dst=x, value=2.0))
        assert isinstance(await next_event, Restarting)
        assert isinstance(await anext(events), Restarted)
        await filling


async def test_each_of_several_listeners_is_told_everything_once() -> None:
    async with spawn(device="cpu", faults=A_CRASH) as gpu:
        listening = [asyncio.ensure_future(all_of(gpu)) for _ in range(7)]
        await gpu.fill(await gpu.upload(single(1.0)), 2.0)
    told = await asyncio.gather(*listening)
    assert all(events == told[0] for events in told)
    assert kinds(told[0]) == [Started, Restarting, Restarted, Stopped, Stopped]


async def test_who_listens_late_is_told_the_history_first_and_then_what_happens() -> None:
    async with spawn(device="cpu", faults=A_CRASH) as gpu:
        await gpu.fill(await gpu.upload(single(1.0)), 2.0)
        await seen(gpu, Restarted)
        late = gpu.events()
        assert kinds(await first(3, late)) == [Started, Restarting, Restarted]
    assert kinds([event async for event in late]) == [Stopped, Stopped]
    assert await all_of(gpu) == await all_of(gpu)  # and after the end as often as one likes


async def test_a_listener_that_leaves_or_dawdles_delays_nobody() -> None:
    async with spawn(device="cpu", faults=A_CRASH) as gpu:
        leaving, dawdling = gpu.events(), gpu.events()
        await first(1, leaving)
        await first(1, dawdling)
        await leaving.aclose()
        prompt = asyncio.ensure_future(all_of(gpu))
        await gpu.fill(await gpu.upload(single(1.0)), 2.0)
    assert kinds(await prompt) == [Started, Restarting, Restarted, Stopped, Stopped]
    assert kinds([event async for event in dawdling]) == [Restarting, Restarted, Stopped, Stopped]


async def test_a_listener_on_another_loop_is_told_the_same() -> None:
    async with spawn(device="cpu", faults=A_CRASH) as gpu:
        listening, there = threading.Event(), list[LifecycleEvent]()

        async def listen() -> None:
            async for event in gpu.events():
                there.append(event)
                listening.set()

        elsewhere = asyncio.ensure_future(in_thread(lambda: asyncio.run(listen())))
        await in_thread(listening.wait)
        await gpu.fill(await gpu.upload(single(1.0)), 2.0)
    await elsewhere
    assert there == await all_of(gpu)


async def test_a_listener_whose_loop_has_closed_harms_nobody() -> None:
    async with spawn(device="cpu", faults=A_CRASH) as gpu:
        loop = asyncio.new_event_loop()
        abandoned = gpu.events()

        def listen_and_leave() -> None:
            loop.run_until_complete(anext(abandoned))
            waiting = loop.create_task(first(1, abandoned))
            loop.run_until_complete(asyncio.sleep(0))
            waiting._log_destroy_pending = False  # type: ignore[attr-defined]  # it is what the test is about
            loop.close()

        await in_thread(listen_and_leave)
        await gpu.fill(await gpu.upload(single(1.0)), 2.0)
    assert kinds(await all_of(gpu)) == [Started, Restarting, Restarted, Stopped, Stopped]


async def test_the_generation_counts_the_incarnations() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill).at(3, Fault.STICKY, of=Fill)
    async with spawn(device="cpu", faults=faults) as gpu:
        x = await gpu.upload(single(1.0))
        assert gpu.generation == await gpu.ping() == 1
        # Fills 1 and 3 crash; each runs again as the next one, in the next incarnation.
        for generation in (2, 3):
            receipt = await gpu.fill(x, float(generation))
            assert receipt.generation == gpu.generation == await gpu.ping() == generation
        statistics = await gpu.statistics()
        assert (statistics.generation, statistics.restarts, statistics.replayed) == (3, 2, 2)


async def test_statistics_add_up_over_a_life_with_results_errors_cancellations_and_expiries() -> None:
    gate = Gate()
    # The first Fill fails, the second kills the actor and runs again.
    faults = FaultPlan().at(1, Fault.FAIL_EXECUTION, of=Fill).at(2, Fault.STICKY, of=Fill)
    async with spawn_gated(gate, faults=faults) as gpu:
        trio = await Trio.on(gpu)  # 3 results
        gone = await gpu.upload(single(0.0))  # 1
        await gpu.free(gone)  # 1
        with gate.closed():
            running = gpu.submit(trio.product())  # 1, once the gate is open
            await in_thread(gate.wait_for_arrival)
            cancelled = [gpu.submit(trio.sum()) for _ in range(5)]
            expired = [gpu.submit(trio.sum(), timeout=0.0) for _ in range(7)]
            for future in cancelled:
                future.cancel()
            errors = [await outcome(future) for future in expired]
        assert all(isinstance(error, DeadlineExceeded) and not error.started for error in errors)
        assert isinstance(await running, Receipt)
        with pytest.raises(ExecutionFailed):
            await gpu.fill(trio.x, 5.0)  # 1 error
        assert (await gpu.fill(trio.x, 5.0)).generation == 2  # 1 result, in its second run
        with gate.closed():
            running = gpu.submit(trio.product())  # 1
            await in_thread(gate.wait_for_arrival)
            freeing, late = (
                gpu.submit(Free(buffer=trio.w)),
                gpu.submit(Download(src=trio.w)),
            )  # 1, and 1 error
        assert await outcome(freeing) is None
        assert isinstance(await outcome(late), StaleBufferError)
        with pytest.raises(StaleBufferError):
            await gpu.download(trio.w)  # refused where it is sent: not admitted, not counted
        await running
        statistics = await gpu.statistics()
        assert statistics.finished == 3 + 1 + 1 + 1 + 1 + 1 + 1
        assert statistics.failed == 1 + 1
        assert statistics.withdrawn + statistics.expired == len(cancelled) + len(expired)
        assert (statistics.replayed, statistics.restarts, statistics.generation) == (1, 1, 2)
        assert (statistics.live_buffers, statistics.live_bytes) == (2, 8)
        assert (statistics.queued, statistics.dropped_replies) == (0, 0)
        again = await gpu.statistics()
        assert again.finished == statistics.finished + 1  # the question itself is a request with a result


async def test_plan_statistics_begin_anew_with_each_incarnation_and_the_others_do_not() -> None:
    async with spawn(device="cpu", faults=A_CRASH) as gpu:
        trio = await Trio.on(gpu)
        await gpu.ask(trio.product())
        await gpu.ask(trio.product())
        before = await gpu.statistics()
        assert (before.plans.size, before.plans.misses, before.plans.hits) == (1, 1, 1)
        await gpu.fill(trio.y, 0.0)
        after = await gpu.statistics()
        assert (after.plans.size, after.plans.misses, after.plans.hits, after.plans.build_s) == (0, 0, 0, 0.0)
        assert after.finished == before.finished + 2  # the first question and the Fill
        assert after.live_buffers == before.live_buffers == 3
