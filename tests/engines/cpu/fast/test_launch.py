"""Runs of fast plans on arrays of callers: which are in place, and that all are right."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from cudnn_actor.engines.base import RunAnywhere
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cpu.fast.bound_programs import AT_A_TIME
from cudnn_actor.engines.cpu.fast.launch import FastLaunch
from cudnn_actor.engines.cpu.fast.plan import FastPlan
from cudnn_actor.protocol import Graph, GraphBuilder

from ...launched import SQUARE, Launched, launched_product

RNG = np.random.default_rng(38)


@pytest.fixture
def engine() -> Iterator[CpuEngine]:
    engine = CpuEngine()
    engine.open()
    yield engine
    engine.close()


@pytest.fixture
def launched(engine: CpuEngine) -> Launched:
    return launched_product(engine)


def _expected(engine: CpuEngine, graph: Graph, buffers: list[np.ndarray]) -> object:
    return engine.expect(engine.build(graph.body, workspace_limit=None), buffers, ())


def test_arrays_where_earlier_ones_have_lain_are_read_and_written_in_place_and_not_kept(
    launched: Launched,
) -> None:
    launch, buffers, x, y, w = launched
    memory, results = np.empty(SQUARE, np.float32), np.empty(SQUARE, np.float32)
    for seed in range(4):
        given, into = memory[:], results[:]
        given[...] = np.random.default_rng(seed).standard_normal(SQUARE)
        found = launch.instead([(x, given)], [(y, into)])
        if seed == 0:
            assert not found, "nothing has lain there"
            continue
        assert found[x] is given
        assert found[y] is into
        launch.run_on(found)
        np.testing.assert_allclose(into, given @ w, rtol=1e-3, atol=1e-3)
        assert np.isnan(buffers[x]).all()
        assert np.isnan(buffers[y]).all()
        known = [weakref.ref(array) for array in (given, into)]
        del given, into, found
        assert [one() for one in known] == [None, None]


def test_results_are_right_wherever_arrays_come_to_lie(launched: Launched) -> None:
    seen: set[frozenset[int]] = set()
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    often = [RNG.standard_normal(SQUARE).astype(np.float32) for _ in range(3)]
    for turn in range(30):
        given = often[turn % 4] if turn % 4 < 3 else RNG.standard_normal(SQUARE).astype(np.float32)
        before = given.copy()
        result, places = launched.run(given)
        np.testing.assert_array_equal(given, before)
        seen.add(frozenset(places))
        kept.append((result, given @ launched.w))
        if RNG.random() < 0.7:
            del kept[RNG.integers(len(kept))]
    for result, wanted in kept:
        np.testing.assert_allclose(result, wanted, rtol=1e-3, atol=1e-3)
    assert any(launched.x in places for places in seen)


def test_arrays_that_come_round_too_seldom_are_copied(launched: Launched) -> None:
    """Else each of them would be bound anew in its turn."""
    launch, x, w = launched.launch, launched.x, launched.w
    many = [w.copy() for _ in range(AT_A_TIME + 1)]
    assert not any(launch.instead([(x, one)], []) for _ in range(3) for one in many)
    few = many[:AT_A_TIME]
    for one in few:
        launch.instead([(x, one)], [])
    assert all(launch.instead([(x, one)], []) for one in few)


def test_other_arrays_are_copied(launched: Launched) -> None:
    launch, own, x, y, w = launched
    read_only = np.empty(SQUARE, np.float32)
    read_only.flags.writeable = False
    unaligned = np.frombuffer(bytes(4 * w.size + 1), np.uint8)[1:].view(np.float32).reshape(SQUARE)
    memory, into = np.zeros((384, 256), np.float32), np.empty(SQUARE, np.float32)
    for _ in range(2):
        for source in (w.T, w.astype(np.float64), w[:16], unaligned):
            assert x not in launch.instead([(x, source)], [(y, into)])
        assert y not in launch.instead([(x, w)], [(y, read_only)])
        assert not launch.instead([(x, memory[:256])], [(y, memory[128:])])
        for view in (own[x][:], own[y][:]):
            assert x not in launch.instead([(x, view)], [(y, into)]), "a run writes there"
        assert not launch.instead([(x, w)], [(y, None), (y, None)])


def test_small_runs_large_programs_and_updates_stay_on_their_buffers(engine: CpuEngine) -> None:
    g = GraphBuilder()
    small = g.build(y=g.relu(g.input("x", (16, 16))))
    g = GraphBuilder()
    state = g.input("x", SQUARE)
    updating = g.build(y=g.matmul(state, state), updates={"x": state + 1.0})
    g = GraphBuilder()
    y = g.input("x", SQUARE)
    for _ in range(300):
        y = g.softmax(y, axis=1)
    large = g.build(y=y)
    for graph in (small, updating, large):
        buffers = [np.zeros(graph.body.tensor(uid).dims, np.float32) for uid in graph.body.bound]
        assert not isinstance(_expected(engine, graph, buffers), RunAnywhere)


def test_weights_that_are_kept_in_float32_are_there_for_runs_in_place(engine: CpuEngine) -> None:
    g = GraphBuilder()
    dims = (512, 512)
    graph = g.build(y=g.matmul(g.input("x", dims, "float16"), g.input("w", dims, "float16")))
    names = [graph.names_of[uid] for uid in graph.body.bound]
    buffers = [RNG.standard_normal(dims).astype(np.float16) for _ in names]
    x, y, w = map(names.index, ("x", "y", "w"))
    plan = engine.build(graph.body, workspace_limit=None)
    launch = engine.expect(plan, buffers, (), [w])
    assert isinstance(launch, RunAnywhere)
    wanted = buffers[x].astype(np.float32) @ buffers[w].astype(np.float32)
    buffers[w][...] = 0
    given, into = buffers[x].copy(), np.empty(dims, np.float16)
    launch.instead([(x, given)], [(y, into)])
    found = launch.instead([(x, given)], [(y, into)])
    assert {*found} == {x, y}
    launch.run_on(found)
    np.testing.assert_allclose(into, wanted, rtol=1e-2, atol=0.1)


def test_a_launch_is_in_no_reference_cycle() -> None:
    """What it keeps of an arena would else stay mapped, until garbage is collected on whatever thread."""
    buffers = [np.zeros(SQUARE, np.float32) for _ in range(3)]
    plan = SimpleNamespace(places_written=[2])
    launch = FastLaunch(cast(FastPlan, plan), buffers, lambda _: None)
    assert not launch.instead([(0, np.zeros(SQUARE, np.float32))], [(2, None)]), "nothing has lain there"
    known = weakref.ref(launch)
    gc.disable()
    try:
        del launch
        assert known() is None
    finally:
        gc.enable()
