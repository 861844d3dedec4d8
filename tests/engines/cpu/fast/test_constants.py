"""Weights of half types that the engine keeps in float32."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cudnn_actor.engines.cpu.fast.plan import FastPlan
from cudnn_actor.memory import container
from cudnn_actor.protocol import Graph, GraphBuilder

from .test_plans import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.engine.close()


def network(g: GraphBuilder) -> Graph:
    """Of weights that are filters, seen in other dims, read twice, and of float32."""
    x = g.input("x", (2, 4, 9, 8), "bfloat16")
    w, v = g.input("w", (6, 4, 3, 3), "bfloat16"), g.input("v", (12, 10), "float16")
    y = g.relu(g.conv(x, w, pad=1))
    y = g.mean(y, axis=(2, 3)) + g.input("b", (6,), "float32")
    z = g.matmul(g.astype(y, "float16"), g.reshape(v, (6, 20)))
    return g.build({"y": z, "sum": g.sum(v, axis=0)})


def places_of(graph: Graph, *names: str) -> list[int]:
    """Where the buffers of these inputs stand."""
    return [graph.body.bound.index(graph.ports[graph.places[name]].uid) for name in names]


def test_runs_with_kept_weights_give_the_same_and_read_them_once(bench: Bench) -> None:
    graph = network(GraphBuilder())
    buffers = bench.bound(graph)
    plan = bench.engine.build(graph.body, workspace_limit=None)
    assert isinstance(plan, FastPlan)
    results = [place for place, uid in enumerate(graph.body.bound) if uid in graph.body.written]

    def read() -> list[np.ndarray]:
        return [bench.engine.read(buffers[place]).copy() for place in results]

    bench.engine.execute(plan, buffers, [])
    wanted = read()
    assert bench.engine.converted_bytes == 0
    places = places_of(graph, "w", "v", "b")
    launch = bench.engine.expect(plan, buffers, [], places)
    assert bench.engine.converted_bytes == 896 + 512  # whole cache lines, of w and of v
    for _ in range(2):
        for place in results:
            bench.engine.fill(buffers[place], 0.0)
        launch()
        for got, right in zip(read(), wanted, strict=True):
            np.testing.assert_array_equal(got, right)
        bench.engine.fill(buffers[places[0]], 0.0)  # nothing reads these any more
        bench.engine.fill(buffers[places[1]], 0.0)
    del launch
    gc.collect()
    assert bench.engine.converted_bytes == 0


def test_weights_that_do_not_fit_into_the_free_memory_are_converted_in_each_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = network(GraphBuilder())
    buffers = bench.bound(graph)
    plan = bench.engine.build(graph.body, workspace_limit=None)
    monkeypatch.setattr(container, "available", lambda: 4000)
    launch = bench.engine.expect(plan, buffers, [], places_of(graph, "w", "v", "b"))
    assert bench.engine.converted_bytes == 0
    launch()
    before = bench.engine.read(buffers[-1]).copy()
    bench.engine.fill(buffers[places_of(graph, "v")[0]], 0.0)
    launch()
    assert before.any()
    assert not bench.engine.read(buffers[-1]).any()


def test_the_weights_of_all_graphs_share_a_bound(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = network(GraphBuilder())
    buffers = bench.bound(graph)
    plan = bench.engine.build(graph.body, workspace_limit=None)
    of_one = 896 + 512
    monkeypatch.setattr(container, "room_in_container", lambda: None)
    monkeypatch.setattr(container, "available", lambda: 10 * of_one - bench.engine.converted_bytes)
    places = places_of(graph, "w", "v")
    others = [bench.bound(graph, seed) for seed in range(1, 3)]
    launches = [bench.engine.expect(plan, each, [], places) for each in (buffers, *others)]
    assert bench.engine.converted_bytes == 2 * of_one
    del launches[0]
    gc.collect()
    launches.append(bench.engine.expect(plan, others[1], [], places))
    assert bench.engine.converted_bytes == 2 * of_one


def test_kept_weights_outlive_a_workspace_that_grows(bench: Bench) -> None:
    graph = network(GraphBuilder())
    buffers = bench.bound(graph)
    plan = bench.engine.build(graph.body, workspace_limit=None)
    launch = bench.engine.expect(plan, buffers, [], places_of(graph, "w", "v"))
    launch()
    wanted = bench.engine.read(buffers[-1]).copy()
    g = GraphBuilder()
    x, w = g.input("x", (1, 64, 64, 64)), g.input("w", (64, 64, 3, 3))
    bench.results(g.build({"y": g.softmax(g.conv(x, w, pad=1), axis=1)}))
    bench.engine.fill(buffers[-1], 0.0)
    launch()
    np.testing.assert_array_equal(bench.engine.read(buffers[-1]), wanted)


def product(g: GraphBuilder, rows: int) -> Graph:
    x, w = g.input("x", (rows, 16)), g.input("w", (16, 16), "bfloat16")
    return g.build({"y": g.matmul(x, w.astype("float32"))})


def test_graphs_for_other_dims_share_weights_of_the_same_values(bench: Bench) -> None:
    graphs = [product(GraphBuilder(), rows) for rows in (2, 3, 5)]
    all_buffers = [bench.bound(graph) for graph in graphs]
    place = places_of(graphs[0], "w")[0]
    weights = all_buffers[0][place]
    for buffers in all_buffers:
        buffers[place] = weights
    plans = [bench.engine.build(graph.body, workspace_limit=None) for graph in graphs]
    of_one = 16 * 16 * 4

    def expect(number: int) -> Callable[[], None]:
        return bench.engine.expect(plans[number], all_buffers[number], [], [place])

    def result(number: int, launch: Callable[[], None]) -> np.ndarray:
        launch()
        return bench.engine.read(all_buffers[number][-1]).copy()

    launches = [expect(0), expect(1)]
    assert bench.engine.converted_bytes == of_one
    before = [result(number, launch) for number, launch in enumerate(launches)]
    bench.engine.fill(weights, 2.0)
    later = expect(2)  # the others have not been made anew
    assert bench.engine.converted_bytes == 2 * of_one
    x = bench.engine.read(all_buffers[2][places_of(graphs[2], "x")[0]])
    np.testing.assert_allclose(result(2, later), np.repeat(2 * x.sum(1, keepdims=True), 16, 1), rtol=1e-5)
    for number, launch in enumerate(launches):
        np.testing.assert_array_equal(result(number, launch), before[number])
    launches[:] = [expect(0), expect(1)]
    del launch
    gc.collect()
    assert bench.engine.converted_bytes == of_one
