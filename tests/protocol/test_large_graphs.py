"""Large graphs: no recursion, work in proportion to the operations, and limits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.compiler import compile_plan
from cudnn_actor.engines.cpu.scratch import aligned_bytes
from cudnn_actor.engines.cuda.planning.composition import compose, scratch_bytes
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.steps import finish
from cudnn_actor.protocol import Graph, GraphBuilder, GraphLimits, InvalidRequest, Tensor
from cudnn_actor.protocol.graphs.reproduction import token


def chain(count: int) -> Graph:
    """Functions of each element, one behind the other."""
    g = GraphBuilder()
    x: Tensor = g.input("x", (2,))
    for number in range(count):
        x = g.maximum(x, float(number))
    return g.build(y=x)


def layers(count: int) -> Graph:
    """Layers with skips over one and over all of them, one weight for all, and views."""
    g = GraphBuilder()
    x, w = g.input("x", (4, 4)), g.input("w", (4, 4))
    y, skip = x, x
    for number in range(count // 7):
        h = g.relu(y @ w) + y
        y = g.softmax(h * 0.5) + h
        y = y.T
        skip = skip + y if number % 5 == 0 else skip
    return g.build(y=y + skip)


def wide(count: int) -> Graph:
    """Many outputs of one input."""
    g = GraphBuilder()
    x = g.input("x", (4,))
    return g.build({f"y{number}": g.exp(g.softmax(x)) for number in range(count // 2)})


def everything(graph: Graph) -> None:
    """What becomes of a graph, up to what only a device can do."""
    body = graph.body
    assert Graph.from_json(graph.to_json()).digest() == graph.digest()
    graph.to_dot()
    plan = compile_plan(body, None)
    graph.to_svg(plan.explain(body))
    parts = cut(body)
    assert parts is not None
    assert scratch_bytes(parts) >= 0
    composed = compose(body, parts, lambda piece: finish(piece, [], [], 0, None))
    str(composed.explain(body))


SHAPES: dict[str, Callable[[int], Graph]] = {"chain": chain, "layers": layers, "wide": wide}


def test_thousands_of_operations_in_a_row_meet_no_limit_of_the_interpreter() -> None:
    everything(chain(1500))
    graph = chain(5000)
    assert Graph.from_json(graph.to_json()) == graph
    plan = compile_plan(graph.body, None)
    x, y = np.zeros(2, np.float32), np.zeros(2, np.float32)
    plan.bind(aligned_bytes(plan.workspace)).run([x, y], [])
    np.testing.assert_array_equal(y, 4999)


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_work_grows_as_the_graph_does(make: Callable[[int], Graph]) -> None:
    """Counted in lines that run, so that it depends on no clock."""
    small, large = (lines_run(everything, make, count) for count in (70, 280))
    assert large < 4.9 * small


def lines_run(work: Callable[[Graph], object], make: Callable[[int], Graph], count: int) -> int:
    lines = 0

    def tracer(_frame: Any, event: str, _argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        work(make(count))
    finally:
        sys.settrace(before)
    return lines


# Limits.


def test_the_operation_that_is_one_too_many_is_refused_at_its_line() -> None:
    g = GraphBuilder(limits=GraphLimits(operations=2))
    x = g.abs(g.abs(g.input("x", (3,))))
    with pytest.raises(InvalidRequest, match=r"3 operations: are over .*GraphLimits\.operations, .* 2;"):
        g.abs(x)
    assert len(g.build(y=x).body.operations) == 2


def test_what_a_gradient_does_not_need_is_not_counted() -> None:
    def loss(limits: GraphLimits) -> tuple[GraphBuilder, Tensor, Tensor]:
        g = GraphBuilder(limits=limits)
        x: Tensor = g.input("x", (3,))
        y = x
        for _ in range(20):
            y = y * 1.5  # with respect to 1.5: a product and a sum
        return g, x, g.layer_norm(y, scale=g.input("scale", (3,))).sum()

    g, x, y = loss(GraphLimits())
    graph = g.build(y=y, dx=g.grad(y, x))
    count = len(graph.body.operations)
    g, x, y = loss(GraphLimits(operations=count))
    assert g.build(y=y, dx=g.grad(y, x)) == graph
    with pytest.raises(InvalidRequest, match="over the limit"):
        x + 1.0
    g, x, y = loss(GraphLimits(operations=count - 1))
    with pytest.raises(InvalidRequest, match=f"{count} operations: are over the limit"):
        g.grad(y, x)


def test_a_file_over_a_limit_is_refused() -> None:
    text = chain(20).to_json()
    with pytest.raises(InvalidRequest, match=r"20 operations.*GraphLimits\.operations, which is 19"):
        Graph.from_json(text, limits=GraphLimits(operations=19))
    with pytest.raises(InvalidRequest, match=r"bytes: .*GraphLimits\.nbytes, which is 1,000;"):
        Graph.from_json(text, limits=GraphLimits(nbytes=1000))
    assert Graph.from_json(text, limits=GraphLimits(operations=20, nbytes=len(text))) == chain(20)


@pytest.mark.parametrize("limits", [{"operations": 0}, {"nbytes": 1.5}, {"operations": True}])
def test_a_limit_is_a_whole_number(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(limits))):
        GraphLimits(**limits)


def test_a_token_that_no_command_line_takes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    body = chain(20).body
    length = len(token(body))
    monkeypatch.setattr("cudnn_actor.protocol.graphs.reproduction._LONGEST", length)
    assert len(token(body)) == length
    monkeypatch.setattr("cudnn_actor.protocol.graphs.reproduction._LONGEST", length - 1)
    assert token(body) == ""
