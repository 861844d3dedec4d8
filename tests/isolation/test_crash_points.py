"""A worker that is killed at each point of a request's way: what its callers get, what its buffers hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cudnn_actor import (
    BufferRef,
    ConvBwdData,
    ConvBwdFilter,
    CudnnRef,
    CudnnService,
    OutcomeUnknown,
    QuarantinedRequest,
    Receipt,
    StaleBufferError,
    TensorSpec,
)
from cudnn_actor.errors import StaleReason
from cudnn_actor.messages import (
    Allocate,
    ClearPlans,
    Copy,
    Download,
    Drain,
    Fill,
    GetStatistics,
    Ping,
    Upload,
    Warm,
)
from cudnn_actor.protocol.messages.messages import Message
from cudnn_actor.service import Spawning
from tests.service.rigs import ONE_BY_ONE, Trio, in_thread, outcome, single

from ..patience import PATIENCE_S
from .crash_rigs import Points, after, freeze, gone, kill, sent, service_of, workers

pytestmark = pytest.mark.usefixtures("a_forkserver")
SPEC = TensorSpec.packed((1, 1, 1, 1))


class World:
    """A service, a `Trio` on it (x = 3, w = 2, y = 1), and a bystander that nobody writes."""

    def __init__(self, gpu: CudnnRef, points: Points, trio: Trio, bystander: BufferRef) -> None:
        self.gpu, self.points, self.trio, self.bystander = gpu, points, trio, bystander

    async def value(self, ref: BufferRef) -> float:
        return float((await self.gpu.download(ref)).item())

    async def check_bystanders(self) -> None:
        """What nobody wrote is what it was."""
        values = [await self.value(ref) for ref in (self.trio.x, self.trio.w, self.bystander)]
        assert values == [3.0, 2.0, 7.0]


@asynccontextmanager
async def world(engine: str = "BarrierEngine", **options: Any) -> AsyncIterator[World]:
    async with workers(engine, **{"max_restarts": 9, **options}) as (gpu, points):
        yield World(gpu, points, await Trio.on(gpu), await gpu.upload(single(7.0)))


class Case:
    """A request, where the engine is called for it, and what must have come of it."""

    def __init__(
        self, name: str, call: str, make: Callable[[World], Message], wrote: float | None = None
    ) -> None:
        self.name, self.call, self.make, self.wrote = name, call, make, wrote

    async def check(self, world: World, answer: Any) -> None:
        """The answer is the right one, and y what the request makes of it."""
        match self.name:
            case "allocate":
                assert isinstance(answer, BufferRef)
                assert await world.value(answer) == 4.0
            case "download":
                assert float(answer.item()) == 1.0
            case "warm":
                assert answer == 1
            case _:
                assert isinstance(answer, Receipt), answer
                assert answer.generation == 2
        assert await world.value(world.trio.y) == (1.0 if self.wrote is None else self.wrote)


def dgrad(world: World) -> Message:
    trio = world.trio
    return ConvBwdData(dy=trio.x, w=trio.w, dx=trio.y, conv=ONE_BY_ONE)


def wgrad(world: World) -> Message:
    trio = world.trio
    return ConvBwdFilter(x=trio.x, dy=trio.w, dw=trio.y, conv=ONE_BY_ONE)


PURE = [
    Case("forward", "execute", lambda world: world.trio.product(), 6.0),
    Case("dgrad", "execute", dgrad, 6.0),
    Case("wgrad", "execute", wgrad, 6.0),
    Case("upload", "write", lambda world: Upload(dst=world.trio.y, data=single(5.0)), 5.0),
    Case("allocate", "write", lambda _: Allocate(spec=SPEC, data=single(4.0))),
    Case("download", "read", lambda world: Download(src=world.trio.y)),
    Case("copy", "copy", lambda world: Copy(src=world.trio.w, dst=world.trio.y), 2.0),
    Case("fill", "fill", lambda world: Fill(dst=world.trio.y, value=8.0), 8.0),
    Case("warm", "build", lambda world: Warm(messages=(world.trio.product(),))),
]
pure_cases = pytest.mark.parametrize("case", PURE, ids=lambda case: case.name)
accumulating = pytest.mark.parametrize("kind", ["forward", "dgrad", "wgrad"])


def accumulate(world: World, kind: str) -> Message:
    trio = world.trio
    messages: dict[str, Message] = {
        "forward": trio.sum(),
        "dgrad": ConvBwdData(dy=trio.x, w=trio.w, dx=trio.y, conv=ONE_BY_ONE, beta=1.0),
        "wgrad": ConvBwdFilter(x=trio.x, dy=trio.w, dw=trio.y, conv=ONE_BY_ONE, beta=1.0),
    }
    return messages[kind]


# One request, each point.


@pure_cases
async def test_what_is_sent_to_a_worker_that_has_just_died_is_run_by_the_next(case: Case) -> None:
    async with world(host_arenas=False) as here:
        await gone(kill(here.gpu))
        await case.check(here, await outcome(here.gpu.submit(case.make(here))))
        await here.check_bystanders()


@pure_cases
async def test_what_was_sent_and_not_begun_is_run_by_the_next(case: Case) -> None:
    async with world(host_arenas=False) as here:
        freeze(here.gpu)
        future = here.gpu.submit(case.make(here))
        await sent(here.gpu)
        kill(here.gpu)
        await case.check(here, await outcome(future))
        assert (await here.gpu.statistics()).replayed == 0
        await here.check_bystanders()


@pure_cases
@pytest.mark.parametrize("finished", [False, True], ids=["begun", "finished and not answered"])
async def test_what_was_begun_is_run_again_where_that_changes_nothing(case: Case, finished: bool) -> None:
    async with world(host_arenas=False) as here:
        point = after(case.call) if finished else case.call
        here.points.hold(point)
        future = here.gpu.submit(case.make(here))
        stopped = await in_thread(lambda: here.points.arrival(point))
        stopped.kill()
        here.points.let_go(point)
        await case.check(here, await outcome(future))
        assert (await here.gpu.statistics()).replayed == 1
        await here.check_bystanders()


@accumulating
@pytest.mark.parametrize("finished", [False, True], ids=["begun", "finished and not answered"])
async def test_what_accumulates_and_was_begun_has_an_unknown_outcome(kind: str, finished: bool) -> None:
    async with world() as here:
        point = after("execute") if finished else "execute"
        here.points.hold(point)
        future = here.gpu.submit(accumulate(here, kind))
        stopped = await in_thread(lambda: here.points.arrival(point))
        stopped.kill()
        here.points.let_go(point)
        assert isinstance(await outcome(future), OutcomeUnknown)
        await stale(here, here.trio.y, StaleReason.TORN)
        await here.check_bystanders()


@accumulating
@pytest.mark.parametrize("when", ["before it is sent", "when it was sent"])
async def test_what_accumulates_and_was_not_begun_is_run_exactly_once(kind: str, when: str) -> None:
    async with world() as here:
        if when == "before it is sent":
            await gone(kill(here.gpu))
            future = here.gpu.submit(accumulate(here, kind))
        else:
            freeze(here.gpu)
            future = here.gpu.submit(accumulate(here, kind))
            await sent(here.gpu)
            kill(here.gpu)
        assert isinstance(await outcome(future), Receipt)
        assert await here.value(here.trio.y) == 7.0
        await here.check_bystanders()


async def stale(world: World, ref: BufferRef, reason: StaleReason) -> None:
    with pytest.raises(StaleBufferError) as caught:
        await world.gpu.download(ref)
    assert caught.value.reason is reason


async def test_what_reads_a_torn_buffer_is_refused_although_it_was_sent_before_the_crash() -> None:
    async with world() as here:
        here.points.hold("execute")
        torn = here.gpu.submit(here.trio.sum())
        reader = here.gpu.submit(Copy(src=here.trio.y, dst=here.bystander))
        stopped = await in_thread(lambda: here.points.arrival("execute"))
        await sent(here.gpu)
        stopped.kill()
        here.points.let_go()
        assert isinstance(await outcome(torn), OutcomeUnknown)
        refusal = await outcome(reader)
        assert isinstance(refusal, StaleBufferError)
        assert refusal.reason is StaleReason.TORN
        await here.check_bystanders()


# Messages that the parent answers itself, or that overtake.


@pytest.mark.parametrize(
    "message", [Ping(), GetStatistics(), ClearPlans(), Drain()], ids=lambda message: type(message).__name__
)
async def test_a_question_that_was_sent_is_answered_by_the_next(message: Message) -> None:
    async with world() as here:
        freeze(here.gpu)
        future = here.gpu.submit(message)
        await sent(here.gpu)
        kill(here.gpu)
        answer = await outcome(future)
        match message:
            case Ping():
                assert answer == 2
            case GetStatistics():
                assert (answer.generation, answer.restarts, answer.live_buffers) == (2, 1, 4)
            case ClearPlans():
                assert answer == 0
            case Drain():
                assert answer is None


async def test_a_drain_outlives_a_crash_and_waits_for_what_was_sent_before_it() -> None:
    async with world() as here:
        here.points.hold("execute")
        product, drained = here.gpu.submit(here.trio.product()), here.gpu.submit(Drain())
        (await in_thread(lambda: here.points.arrival("execute"))).kill()
        again = await in_thread(lambda: here.points.arrival("execute"))
        assert not drained.done()
        again.go_on()
        assert isinstance(await outcome(product), Receipt)
        assert await outcome(drained) is None


async def test_a_free_behind_an_unfinished_request_takes_effect_and_the_request_still_runs() -> None:
    async with world() as here:
        kept = await here.gpu.empty((1, 1, 1, 1))
        here.points.hold("execute")
        product = here.gpu.submit(here.trio.product())
        copied = here.gpu.submit(Copy(src=here.trio.y, dst=kept))
        await here.gpu.free(here.trio.y)
        stopped = await in_thread(lambda: here.points.arrival("execute"))
        others = [await here.gpu.empty((1, 1, 1, 1)) for _ in range(8)]
        assert here.trio.y.slot not in {ref.slot for ref in others}, "bytes in use were given away"
        stopped.kill()
        again = await in_thread(lambda: here.points.arrival("execute"))
        more = [here.gpu.submit(Allocate(spec=SPEC, data=single(5.0))) for _ in range(8)]
        again.go_on()
        here.points.let_go()
        assert all([isinstance(await outcome(future), BufferRef) for future in more])
        assert isinstance(await outcome(product), Receipt)
        assert isinstance(await outcome(copied), Receipt)
        assert await here.value(kept) == 6.0
        await stale(here, here.trio.y, StaleReason.FREED)
        slots = {(await here.gpu.empty((1, 1, 1, 1))).slot, *(future.result().slot for future in more)}
        assert here.trio.y.slot in slots, "bytes that nobody uses any more were not given back"


# Arenas, and the start.


async def test_a_worker_killed_while_it_takes_an_arena_costs_those_who_wait_for_it_only_time() -> None:
    async with world() as here:
        here.points.hold("create_arena")
        large = TensorSpec.packed((1, 1, 4096, 5120))
        wanted = [here.gpu.submit(Allocate(spec=large)) for _ in range(3)]
        (await in_thread(lambda: here.points.arrival("create_arena"))).kill()
        here.points.let_go()
        refs = [await outcome(future) for future in wanted]
        assert len({ref.slot for ref in refs}) == 3
        await here.gpu.fill(refs[0], 2.0)
        statistics = await here.gpu.statistics()
        assert (statistics.live_buffers, statistics.restarts) == (7, 1)
        await here.check_bystanders()


async def test_a_worker_killed_when_it_has_taken_an_arena_and_not_told_leaves_none_behind() -> None:
    async with world() as here:
        here.points.hold(after("create_arena"))
        before = (await here.gpu.statistics()).arena_bytes
        wanted = here.gpu.submit(Allocate(spec=TensorSpec.packed((1, 1, 4096, 5120))))
        (await in_thread(lambda: here.points.arrival(after("create_arena")))).kill()
        here.points.let_go()
        ref = await outcome(wanted)
        assert (await here.gpu.statistics()).arena_bytes - before == 80 << 20
        await here.gpu.fill(ref, 2.0)


@pytest.mark.parametrize("point", ["open", after("open")])
async def test_a_worker_killed_in_its_start_is_followed_by_another(point: str) -> None:
    async with starting(point) as (spawning, points):
        (await in_thread(lambda: points.arrival(point))).kill()
        points.let_go()
        gpu = await asyncio.wait_for(spawning, PATIENCE_S)
        assert await gpu.ping() == gpu.generation == 2
        await gpu.aclose()


@pytest.mark.parametrize("point", ["open", "map_arena", after("map_arena")])
async def test_a_successor_killed_in_its_start_is_followed_by_another(point: str) -> None:
    async with world() as here:
        here.points.hold(point)
        kill(here.gpu)
        product = here.gpu.submit(here.trio.sum())
        (await in_thread(lambda: here.points.arrival(point))).kill()
        here.points.let_go()
        assert isinstance(await outcome(product), Receipt)
        assert await here.value(here.trio.y) == 7.0
        assert await here.gpu.ping() == 3
        await here.check_bystanders()


@asynccontextmanager
async def starting(point: str) -> AsyncIterator[tuple[asyncio.Task[CudnnRef], Points]]:
    """A service whose first worker is held in its start."""
    points = Points()
    try:
        points.hold(point)
        yield asyncio.ensure_future(started(service_of(points))), points
    finally:
        points.close()


async def started(service: CudnnService) -> CudnnRef:
    return await Spawning(service)


# Twice in a row.


@pytest.mark.parametrize("engine", ["BarrierEngine", "LateEngine"])
async def test_a_request_that_two_workers_died_of_is_quarantined_with_its_plan(engine: str) -> None:
    async with world(engine) as here:
        culprit = here.gpu.submit(here.trio.product())
        await outcome(culprit)  # its plan is built
        here.points.hold("execute")
        culprit = here.gpu.submit(here.trio.product())
        for _ in range(2):
            (await in_thread(lambda: here.points.arrival("execute"))).kill()
        here.points.let_go()
        assert isinstance(await outcome(culprit), QuarantinedRequest)
        await stale(here, here.trio.y, StaleReason.TORN)
        fresh = await here.gpu.upload(single(1.0))
        again = here.gpu.submit(here.trio.product(y=fresh))
        assert isinstance(await outcome(again), QuarantinedRequest)
        assert await here.gpu.warm([here.trio.product(y=fresh)]) == 0
        other = ConvBwdData(dy=here.trio.x, w=here.trio.w, dx=fresh, conv=ONE_BY_ONE)
        assert isinstance(await outcome(here.gpu.submit(other)), Receipt)
        assert await here.value(fresh) == 6.0
        assert (await here.gpu.statistics()).restarts == 2
        await here.check_bystanders()


async def test_those_who_were_in_the_air_with_a_culprit_are_not_quarantined() -> None:
    async with world("LateEngine") as here:
        targets = [await here.gpu.empty((1, 1, 1, 1)) for _ in range(20)]
        here.points.hold("finished")
        innocents = [
            here.gpu.submit(ConvBwdData(dy=here.trio.x, w=here.trio.w, dx=ref, conv=ONE_BY_ONE))
            for ref in targets[:10]
        ]
        culprit = here.gpu.submit(here.trio.product())
        innocents += [here.gpu.submit(Copy(src=here.trio.x, dst=ref)) for ref in targets[10:]]
        await in_thread(lambda: here.points.wait_for_visits(after("copy"), 10))
        here.points.hold("execute", passing=10)  # of the next worker: the innocents run again before it
        kill(here.gpu)
        here.points.let_go("finished")
        (await in_thread(lambda: here.points.arrival("execute"))).kill()
        here.points.let_go()
        assert isinstance(await outcome(culprit), QuarantinedRequest)
        for future in innocents:
            assert isinstance(await outcome(future), Receipt)
        assert [await here.value(ref) for ref in targets] == 10 * [6.0] + 10 * [3.0]
        await here.check_bystanders()


# Work that is enqueued and not finished.


async def test_of_what_was_enqueued_each_piece_ends_as_it_must() -> None:
    async with world("LateEngine") as here:
        sums = [await here.gpu.upload(single(1.0)) for _ in range(5)]
        fills = [await here.gpu.upload(single(1.0)) for _ in range(5)]
        here.points.hold("finished")
        summing = [here.gpu.submit(here.trio.product(y=ref, beta=1.0)) for ref in sums]
        filling = [here.gpu.submit(Fill(dst=ref, value=9.0)) for ref in fills]
        product = here.gpu.submit(here.trio.product())
        uploaded = here.gpu.submit(Allocate(spec=SPEC, data=single(4.0)))
        downloaded = here.gpu.submit(Download(src=here.trio.y))
        await in_thread(lambda: here.points.wait_for_visits(after("execute"), 6))
        await in_thread(lambda: here.points.wait_for_visits("fetch", 1))
        kill(here.gpu)
        here.points.let_go()
        assert [type(await outcome(future)) for future in summing] == 5 * [OutcomeUnknown]
        assert [type(await outcome(future)) for future in (*filling, product)] == 6 * [Receipt]
        assert float((await outcome(downloaded)).item()) == 6.0
        assert await here.value(await outcome(uploaded)) == 4.0
        assert [await here.value(ref) for ref in fills] == 5 * [9.0]
        for ref in sums:
            await stale(here, ref, StaleReason.TORN)
        await here.check_bystanders()


async def test_hundreds_in_the_air_all_end_and_none_runs_twice() -> None:
    async with world() as here:
        here.points.hold("execute", passing=40)
        refs = [await here.gpu.upload(single(1.0)) for _ in range(400)]
        futures = [here.gpu.submit(here.trio.product(y=ref, beta=1.0)) for ref in refs]
        (await in_thread(lambda: here.points.arrival("execute"))).kill()
        here.points.let_go()
        ends = [await outcome(future) for future in futures]
        unknown = [ref for ref, end in zip(refs, ends, strict=True) if isinstance(end, OutcomeUnknown)]
        assert 1 <= len(unknown) <= 41
        for ref, end in zip(refs, ends, strict=True):
            if isinstance(end, Receipt):
                assert await here.value(ref) == 7.0
            else:
                await stale(here, ref, StaleReason.TORN)
