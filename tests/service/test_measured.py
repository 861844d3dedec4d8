"""`explain(..., measure=True)`: how long each piece of a graph takes, measured by the service."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor import (
    ExecutionFailed,
    Explanation,
    Fault,
    FaultPlan,
    Graph,
    GraphBuilder,
    InvalidRequest,
    OutOfMemory,
    spawn,
)
from cudnn_actor.messages import Explain, Fill

from ..engines.devices import why_not
from .example_graphs import GRAPHS
from .test_explain import isolations, small


def check(found: Explanation, plain: Explanation) -> None:
    """It has a time for everything, and else is what it is without."""
    assert found.run_us
    assert found.device is not None
    assert found.device.copy_bytes_per_s > 0
    for piece in found.pieces:
        assert piece.time is not None
        assert piece.time.us >= 0
        assert piece.time.nbytes > 0
    bare = tuple(msgspec.structs.replace(piece, time=None) for piece in found.pieces)
    assert msgspec.structs.replace(found, pieces=bare, run_us=None, device=None) == plain
    assert msgspec.json.decode(msgspec.json.encode(found), type=Explanation) == found


@isolations
async def test_each_piece_has_its_time(isolation: Any) -> None:
    graph = small()
    async with spawn(device="cpu", isolation=isolation) as gpu:
        check(await gpu.explain(graph, measure=True), await gpu.explain(graph))
        check(await graph.explain(gpu, measure=True), await gpu.explain(graph))


@isolations
async def test_a_message_is_measured_and_not_run(isolation: Any) -> None:
    g = GraphBuilder()
    m = g.input("m", (3,))
    graph = g.build(updates={"m": m + 1.0})
    async with spawn(device="cpu", isolation=isolation) as gpu:
        ref = await gpu.upload(np.zeros(3, np.float32))
        before = await gpu.statistics()
        found = await gpu.explain(graph, measure=True)
        after = await gpu.statistics()
        assert found.run_us
        np.testing.assert_array_equal(await gpu.download(ref), np.zeros(3))
        assert (after.live_buffers, after.live_bytes) == (before.live_buffers, before.live_bytes)


@isolations
async def test_requests_around_a_measurement_are_answered_in_their_order(isolation: Any) -> None:
    async with spawn(device="cpu", isolation=isolation) as gpu:
        x = await gpu.upload(np.ones(3, np.float32))
        messages = [Fill(dst=x, value=1), Explain(graph=small().body, measure=True), Fill(dst=x, value=2)]
        futures: list[asyncio.Future[Any]] = [gpu.submit(message) for message in messages]
        answered: list[asyncio.Future[Any]] = []
        for future in futures:
            future.add_done_callback(answered.append)
        await asyncio.gather(*futures)
        assert answered == futures


@isolations
async def test_what_does_not_fit_twice_is_an_error_and_leaves_the_service_as_it_was(isolation: Any) -> None:
    g = GraphBuilder()
    huge = g.build(y=g.relu(g.input("x", (1 << 45,), "uint8")))
    async with spawn(device="cpu", isolation=isolation) as gpu:
        with pytest.raises(OutOfMemory, match=r"35,184,372,088,832 bytes"):
            await gpu.explain(huge, measure=True)
        assert (await gpu.explain(small(), measure=True)).run_us
        assert gpu.health().restarts == 0


@isolations
async def test_a_fault_while_it_measures_is_the_requests_own(isolation: Any) -> None:
    plan = FaultPlan().at(1, Fault.FAIL_EXECUTION, of=Explain)
    async with spawn(device="cpu", isolation=isolation, faults=plan) as gpu:
        with pytest.raises(ExecutionFailed):
            await gpu.explain(small(), measure=True)
        assert (await gpu.explain(small(), measure=True)).run_us


async def test_what_is_misspelt_is_told() -> None:
    anything: Any = "yes"
    lists: Any = ([0],)
    async with spawn(device="cpu") as gpu:
        with pytest.raises(
            InvalidRequest, match="measure='yes': is neither True nor False; pass one of them"
        ):
            await gpu.explain(small(), measure=anything)
        for weights in ((0, 9), (-1, 0)):
            with pytest.raises(InvalidRequest, match=r"pass indices in graph\.bound, below"):
                await gpu.ask(Explain(graph=small().body, measure=True, weights=weights))
        with pytest.raises(InvalidRequest, match="weights"):
            await gpu.ask(Explain(graph=small().body, measure=True, weights=lists))
        with pytest.raises(TypeError, match=r'no argument .measured.; did you mean "measure"'):
            await gpu.explain(small(), **{"measured": True})


@pytest.mark.gpu
@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("name", GRAPHS)
async def test_on_a_gpu_each_piece_has_its_time(name: str, isolation: Any) -> None:
    if (why := why_not("cuda")) is not None:
        pytest.skip(why)
    graph: Graph = GRAPHS[name]("bfloat16")
    async with spawn(device="cuda:0", isolation=isolation) as gpu:
        check(await gpu.explain(graph, measure=True), await gpu.explain(graph))
