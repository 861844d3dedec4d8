"""Plans are built once, the least recently used go first, refusals are remembered, a crash forgets all."""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest

from cudnn_actor import (
    BufferRef,
    ConvBwdData,
    ConvFwd,
    ConvSpec,
    CudnnRef,
    ExecutionFailed,
    Explanation,
    Fault,
    FaultPlan,
    InvalidRequest,
    Receipt,
    UnsupportedGraph,
    spawn,
)
from cudnn_actor.messages import ClearPlans, Fill
from cudnn_actor.plan_store.cache import PLAN_CAPACITY, PlanCache
from cudnn_actor.protocol import OperationGraph

from .rigs import ONE_BY_ONE, Gate, Trio, in_thread, outcome, spawn_gated


class Built(NamedTuple):
    tag: str
    workspace: int = 0
    checked: bool = True
    provisional: bool = False

    def explain(self, graph: OperationGraph) -> Explanation:
        return Explanation(plan=self.tag, digest=graph.digest(), pieces=())


class Workshop:
    """Builds plans, and keeps a list of them."""

    def __init__(self) -> None:
        self.built: list[str] = []

    def into(self, cache: PlanCache, digest: str) -> Built:
        def build() -> Built:
            self.built.append(digest)
            return Built(digest)

        plan = cache.get(digest, build)
        assert isinstance(plan, Built)
        assert plan.tag == digest
        return plan


# The cache.


def test_a_plan_is_built_once() -> None:
    cache, workshop = PlanCache(), Workshop()
    assert workshop.into(cache, "a") is workshop.into(cache, "a")
    assert workshop.built == ["a"]
    statistics = cache.statistics()
    assert (statistics.hits, statistics.misses, statistics.size) == (1, 1, 1)
    assert statistics.build_s > 0


def test_it_holds_256_plans_and_the_257th_costs_the_oldest() -> None:
    assert PLAN_CAPACITY == 256
    cache, workshop = PlanCache(), Workshop()
    for number in range(256):
        workshop.into(cache, str(number))
    assert cache.statistics().evictions == 0
    workshop.into(cache, "one more")
    assert "0" not in cache
    assert all(str(number) in cache for number in range(1, 256))
    assert (len(cache), cache.statistics().evictions) == (256, 1)


def test_a_hit_makes_a_plan_the_youngest() -> None:
    cache, workshop = PlanCache(), Workshop()
    for number in range(256):
        workshop.into(cache, str(number))
    workshop.into(cache, "0")
    workshop.into(cache, "one more")
    assert "0" in cache
    assert "1" not in cache


def test_looking_whether_a_plan_is_there_is_no_use_of_it() -> None:
    cache, workshop = PlanCache(capacity=2), Workshop()
    workshop.into(cache, "a")
    workshop.into(cache, "b")
    assert "a" in cache
    workshop.into(cache, "c")
    assert "a" not in cache


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_requests_leaves_the_most_recently_used(seed: int) -> None:
    chance = random.Random(seed)
    cache, workshop = PlanCache(capacity=16), Workshop()
    model: OrderedDict[str, None] = OrderedDict()
    hits = 0
    for _ in range(2000):
        digest = str(int(chance.expovariate(0.08)))
        hits += digest in model
        workshop.into(cache, digest)
        model[digest] = None
        model.move_to_end(digest)
        if len(model) > 16:
            model.popitem(last=False)
        assert all(known in cache for known in model)
    statistics = cache.statistics()
    assert (statistics.hits, statistics.misses, statistics.size) == (hits, 2000 - hits, len(model))
    assert statistics.evictions == statistics.misses - statistics.size
    assert len(workshop.built) == statistics.misses


def test_a_refusal_is_remembered_and_each_is_an_error_of_its_own() -> None:
    cache, tries = PlanCache(), []

    def refuse() -> Built:
        tries.append(1)
        raise UnsupportedGraph(engine="cpu", digest="d", detail="no")

    errors = []
    for _ in range(3):
        with pytest.raises(UnsupportedGraph, match="no") as caught:
            cache.get("d", refuse)
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 3
    assert len(tries) == 1
    statistics = cache.statistics()
    assert (statistics.misses, statistics.hits, statistics.refused, statistics.size) == (1, 2, 1, 1)


def test_refusals_are_evicted_like_plans() -> None:
    cache, workshop = PlanCache(capacity=1), Workshop()

    def refuse() -> Built:
        raise UnsupportedGraph(engine="cpu", digest="d", detail="no")

    with pytest.raises(UnsupportedGraph):
        cache.get("d", refuse)
    workshop.into(cache, "a")
    assert "d" not in cache
    assert (cache.statistics().refused, cache.statistics().evictions) == (0, 1)


def test_a_build_that_fails_otherwise_is_tried_again() -> None:
    cache, workshop = PlanCache(), Workshop()

    def fail() -> Built:
        raise ExecutionFailed(status="NOT_NOW", detail="", plan="build")

    with pytest.raises(ExecutionFailed):
        cache.get("a", fail)
    assert "a" not in cache
    workshop.into(cache, "a")
    assert cache.statistics().misses == 2


# Through a service.


async def of_width(gpu: CudnnRef, w: BufferRef, width: int) -> ConvFwd:
    """A convolution whose shape, and so whose plan, is one width's own."""
    dims = (1, 1, 1, width)
    x, y = await asyncio.gather(gpu.empty(dims), gpu.empty(dims))
    return ConvFwd(x=x, w=w, y=y, conv=ONE_BY_ONE)


async def test_a_service_keeps_the_256_shapes_that_were_used_last() -> None:
    async with spawn(device="cpu") as gpu:
        w = await gpu.upload(np.ones((1, 1, 1, 1), np.float32))
        shapes = [await of_width(gpu, w, width) for width in range(1, 301)]
        for message in shapes:
            await gpu.ask(message)
        plans = (await gpu.statistics()).plans
        assert (plans.capacity, plans.size, plans.misses, plans.evictions) == (256, 256, 300, 44)
        for message in shapes[44:]:  # those that are left
            await gpu.ask(message)
        assert (await gpu.statistics()).plans.hits == 256
        await gpu.ask(shapes[0])  # gone long ago: costs the oldest, which is now shape 44
        await gpu.ask(shapes[45])
        plans = (await gpu.statistics()).plans
        assert (plans.misses, plans.evictions, plans.hits) == (301, 45, 257)
        await gpu.ask(shapes[44])
        assert (await gpu.statistics()).plans.misses == 302


async def test_a_hundred_first_requests_at_once_build_one_plan() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            asked = [asyncio.ensure_future(gpu.ask(trio.product())) for _ in range(100)]
            await in_thread(gate.wait_for_arrival)
        receipts = await asyncio.gather(*asked)
        plans = (await gpu.statistics()).plans
        assert (plans.misses, plans.hits, plans.size) == (1, 99, 1)
        assert len({receipt.plan for receipt in receipts}) == 1


async def test_the_same_shape_in_other_buffers_with_other_scalars_is_the_same_plan() -> None:
    async with spawn(device="cpu") as gpu:
        one, other = await Trio.on(gpu), await Trio.on(gpu)
        await gpu.ask(one.product(alpha=2.0))
        await gpu.ask(other.product(alpha=3.0))
        assert (await one.result(), await other.result()) == (12.0, 18.0)
        plans = (await gpu.statistics()).plans
        assert (plans.misses, plans.hits) == (1, 1)


async def backward_of_integers(gpu: CudnnRef) -> ConvBwdData:
    """What the CPU engine does not do; docs/numerics.md says so."""
    dy, w, dx = [await gpu.upload(np.ones((1, 1, 1, 1), np.int8)) for _ in range(3)]
    return ConvBwdData(dy=dy, w=w, dx=dx, conv=ConvSpec.symmetric(2))


async def test_a_graph_that_is_refused_is_tried_once_and_each_caller_gets_an_error_of_its_own() -> None:
    async with spawn(device="cpu") as gpu:
        message = await backward_of_integers(gpu)
        ends = [await outcome(gpu.submit(message)) for _ in range(2)]
        ends += await asyncio.gather(*[gpu.ask(message) for _ in range(2)], return_exceptions=True)
        assert all(isinstance(end, UnsupportedGraph) for end in ends)
        assert len({id(end) for end in ends}) == 4
        assert len({str(end) for end in ends}) == 1
        plans = (await gpu.statistics()).plans
        assert (plans.misses, plans.hits, plans.refused, plans.size) == (1, 3, 1, 1)


async def test_warm_counts_what_it_built_and_runs_nothing() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        w = trio.w
        others = [await of_width(gpu, w, width) for width in (5, 6, 7)]
        gate.forget_arrivals()
        passed = gate.passed
        assert await gpu.warm([trio.product(), others[0], others[0]]) == 2
        assert await gpu.warm([trio.product(), *others]) == 2
        assert await gpu.warm([trio.product(), *others]) == 0
        assert await gpu.warm([]) == 0
        assert gate.passed == passed
        assert await trio.result() == 1.0
        assert isinstance(await gpu.ask(trio.product()), Receipt)
        plans = (await gpu.statistics()).plans
        assert (plans.misses, plans.hits, plans.size) == (4, 1, 4)


async def test_warm_does_not_count_what_cannot_be_built_and_remembers_it() -> None:
    async with spawn(device="cpu") as gpu:
        trio, refused = await Trio.on(gpu), await backward_of_integers(gpu)
        assert await gpu.warm([refused, trio.product()]) == 1
        with pytest.raises(UnsupportedGraph):
            await gpu.ask(refused)
        plans = (await gpu.statistics()).plans
        assert (plans.misses, plans.hits, plans.refused) == (2, 1, 1)


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_a_service_keeps_as_many_plans_as_it_is_told_to(isolation: Any) -> None:
    async with spawn(device="cpu", isolation=isolation, plan_capacity=2) as gpu:
        w = await gpu.upload(np.ones((1, 1, 1, 1), np.float32))
        for message in [await of_width(gpu, w, width) for width in (1, 2, 3)]:
            await gpu.ask(message)
        plans = (await gpu.statistics()).plans
        assert (plans.capacity, plans.size, plans.evictions) == (2, 2, 1)


@pytest.mark.parametrize("capacity", [0, -1, 2.5, None])
def test_a_capacity_is_a_whole_number_from_1_on(capacity: Any) -> None:
    with pytest.raises(InvalidRequest, match="plan_capacity"):
        spawn(device="cpu", plan_capacity=capacity)


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_cleared_plans_and_refusals_are_built_and_tried_again(isolation: Any) -> None:
    async with spawn(device="cpu", isolation=isolation) as gpu:
        trio, refused = await Trio.on(gpu), await backward_of_integers(gpu)
        assert await gpu.clear_plans() == 0
        for message in (trio.product(), trio.sum()):
            await gpu.ask(message)
        assert isinstance(await outcome(gpu.submit(refused)), UnsupportedGraph)
        assert await gpu.clear_plans() == 3
        plans = (await gpu.statistics()).plans
        assert (plans.size, plans.nbytes, plans.refused, plans.evictions) == (0, 0, 0, 0)
        await gpu.ask(trio.product())
        assert await trio.result() == 6.0
        assert isinstance(await outcome(gpu.submit(refused)), UnsupportedGraph)
        plans = (await gpu.statistics()).plans
        assert (plans.size, plans.refused, plans.misses, plans.hits) == (2, 1, 5, 0)


async def test_plans_are_cleared_in_turn() -> None:
    """Requests that were sent before run on the plans that they have found, and find none behind it."""
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        await gpu.ask(trio.product())
        with gate.closed():
            first = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            cleared, second = gpu.submit(ClearPlans()), gpu.submit(trio.product())
        assert (await first).plan == (await second).plan
        assert await cleared == 1
        plans = (await gpu.statistics()).plans
        assert (plans.misses, plans.hits, plans.size) == (2, 1, 1)


async def test_a_crash_empties_the_cache_and_the_next_request_builds_again() -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(1, Fault.STICKY, of=Fill)) as gpu:
        trio = await Trio.on(gpu)
        message = await backward_of_integers(gpu)
        await gpu.warm([trio.product(), message])
        assert (await gpu.statistics()).plans.size == 2
        await gpu.fill(trio.y, 0.0)
        plans = (await gpu.statistics()).plans
        assert (plans.size, plans.refused, plans.misses, plans.hits) == (0, 0, 0, 0)
        await gpu.ask(trio.product())
        assert await trio.result() == 6.0
        with pytest.raises(UnsupportedGraph):
            await gpu.ask(message)
        plans = (await gpu.statistics()).plans
        assert (plans.size, plans.refused, plans.misses) == (2, 1, 2)
