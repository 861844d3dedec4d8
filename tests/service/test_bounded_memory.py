"""What a service keeps of graphs and plans has a bound in bytes, in each of its processes."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from cudnn_actor import BufferRef, CudnnRef, Graph, GraphBuilder, InvalidRequest, Statistics
from cudnn_actor.messages import Warm

from .rigs import in_process, spawn

pytestmark = pytest.mark.usefixtures("isolation")

LIMIT = 300_000
"""Room for some ten of the graphs here."""
OPERATIONS = 20
SIZES = 40


def graph(size: int) -> Graph:
    g = GraphBuilder()
    y = x = g.input("x", (size,))
    for _ in range(OPERATIONS):
        y = g.tanh(y) + x
    return g.build(y=y)


async def run(gpu: CudnnRef, size: int, given: Graph | None = None) -> None:
    """Run a graph that is made anew, and check that it has run."""
    x = await gpu.upload(np.zeros(size, np.float32))
    y: BufferRef = await gpu.apply(graph(size) if given is None else given, x=x)
    np.testing.assert_array_equal(await gpu.download(y), np.zeros(size))
    await gpu.free(x)
    await gpu.free(y)


def alive() -> int:
    gc.collect()
    return sum(isinstance(each, Graph) for each in gc.get_objects())


def assert_bounded(found: Statistics) -> None:
    caches: list[Any] = [found.graphs, found.plans]
    assert (found.worker_graphs is not None) is in_process()
    caches += [found.worker_graphs] if found.worker_graphs is not None else []
    for cache in caches:
        assert cache.nbytes <= cache.capacity_nbytes
        assert cache.capacity_nbytes in (LIMIT, 2 * LIMIT)


async def test_graphs_of_ever_new_sizes_take_no_more_than_the_limit() -> None:
    before = alive()
    async with spawn(device="cpu", cache_limit=LIMIT) as gpu:
        for size in range(1, SIZES + 1):
            await run(gpu, size)
            assert_bounded(await gpu.statistics())
        found = await gpu.statistics()
        assert found.graphs.evictions
        assert found.plans.evictions
        assert alive() - before < 30
    assert alive() == before, "the handle of a service that has ended keeps nothing"


async def test_what_is_used_again_and_again_stays_while_others_come_and_go() -> None:
    async with spawn(device="cpu", cache_limit=LIMIT) as gpu:
        hot = graph(1000)
        for size in range(1, SIZES + 1):
            await run(gpu, 1000, hot)
            await run(gpu, size)
        assert (await gpu.statistics()).plans.misses == SIZES + 1


async def test_a_limit_of_no_bytes_keeps_the_latest_alone() -> None:
    async with spawn(device="cpu", cache_limit=0) as gpu:
        for size in (1, 2, 1, 2):
            await run(gpu, size)
        found = await gpu.statistics()
        assert (found.plans.size, found.plans.misses) == (1, 4)
        assert found.graphs.size == 2  # by its message, and by its graph
        assert found.worker_graphs is None or found.worker_graphs.size <= 2


async def test_warmed_graphs_count_like_those_that_run() -> None:
    async with spawn(device="cpu", cache_limit=LIMIT) as gpu:
        for first in range(1, SIZES + 1, 10):
            await gpu.ask(Warm(graphs=tuple(graph(size) for size in range(first, first + 10))))
            assert_bounded(await gpu.statistics())


@pytest.mark.parametrize("limit", [-1, 0.5, None, True])
def test_a_limit_that_is_no_number_of_bytes_is_refused(limit: Any) -> None:
    with pytest.raises(InvalidRequest, match="cache_limit"):
        spawn(device="cpu", cache_limit=limit)
