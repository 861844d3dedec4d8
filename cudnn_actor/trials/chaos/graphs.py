"""The graphs and loops of the load, and the table of all that it computes.

A new graph is one row: a function that builds it, and its tolerance. An input that a graph updates is state:
each task has its own, and the graph must be applied to it once for each receipt, and never twice.
"""

from __future__ import annotations

from collections.abc import Callable

from cudnn_actor.protocol import Graph, GraphBuilder, Loop, MaxPool, Window
from cudnn_actor.protocol.operations.example import ROUNDED
from cudnn_actor.trials.chaos.computations import HEAVY, PROBLEMS, Problem
from cudnn_actor.trials.chaos.graph_computation import GraphComputation
from cudnn_actor.trials.chaos.loop_computation import LoopComputation

__all__ = ["GRAPHS", "LIGHT", "LOAD"]


def _several_outputs(g: GraphBuilder) -> Graph:
    """Several outputs, all of them exact, because the values are whole numbers."""
    x, w, bias = g.input("x", (2, 3, 8, 8)), g.input("w", (4, 3, 3, 3)), g.input("bias", (4,))
    y = g.relu(g.conv(x, w, pad=1, bias=bias))
    pooled = g.apply(MaxPool(x=y, window=Window.symmetric(2, size=2)), also=("index",))
    sums = y.sum((2, 3))
    return g.build(
        y=y, pooled=pooled.y, index=pooled.index, sums=sums, turned=sums.T[::-1], positive=sums > 0, same=x
    )


def _products_and_norms(g: GraphBuilder) -> Graph:
    """A chain of products, a norm and a softmax, with views between them."""
    x, w, scale = g.input("x", (6, 16)), g.input("w", (16, 24)), g.input("scale", (12,))
    hidden = g.gelu(x @ w) + 1.0  # a norm of values close to 0 would magnify their rounding
    gated = g.rms_norm(hidden[:, :12] * hidden[:, 12:], scale)
    weights = g.softmax(gated @ gated.T * 0.25)
    return g.build(y=weights @ gated, weights=weights, largest=g.argmax(hidden, -1))


def _running_statistics(g: GraphBuilder) -> Graph:
    """Running statistics, as in training: those of a batch are mixed into those of the earlier batches."""
    x, mean, square = g.input("x", (8, 6)), g.input("mean", (6,)), g.input("square", (6,))
    new_mean, new_square = mean * 0.75 + x.mean(0) * 0.25, square * 0.75 + g.square(x).mean(0) * 0.25
    y = (x - new_mean) * g.rsqrt(g.abs(new_square - g.square(new_mean)) + 1.0)
    return g.build(y=y, updates={"mean": new_mean, "square": new_square})


def _counting(g: GraphBuilder) -> Graph:
    """A state that advances with each run, like that of a random number generator."""
    x, count = g.input("x", (3, 5)), g.input("count", (1,), "int64")
    return g.build(y=x + (count % 7), before=count, updates={"count": count + 1})


def _drawing(g: GraphBuilder) -> Graph:
    """Random numbers from a state that advances with each run: dropout, and whole numbers."""
    x, state = g.input("x", (4, 9)), g.input("state", (2,), "int64")
    kept = g.dropout(x, 0.25, state)
    whole = g.randint((4, 9), g.advance(state, 36), -5, 5)
    return g.build(kept=kept, whole=whole, updates={"state": g.advance(state, 72)})


def _running_sums(g: GraphBuilder) -> Loop:
    """Sums of the rows so far, and twice each; of as many bytes as a part of scratch memory."""
    total, x = g.input("total", (8, 8)), g.input("x", (8, 8))
    after = total + x
    body = g.build(after=after, doubled=after * 2.0)
    return Loop(body=body, carried={"total": "after"}, scanned=("x",))


def _fibonacci(g: GraphBuilder) -> Loop:
    """Two values of which each turn reads both and writes both."""
    a, b = g.input("a", (8, 8)), g.input("b", (8, 8))
    return Loop(body=g.build(new_a=b * 1.0, new_b=a + b), carried={"a": "new_a", "b": "new_b"})


def _problem_of_loop(build: Callable[[GraphBuilder], Loop], turns: int) -> Problem:
    computation = LoopComputation(build(GraphBuilder()), turns)
    specs = {name: computation.specs[name] for name in computation.inputs}
    return Problem(
        dims={name: spec.dims for name, spec in specs.items()},
        dtypes={name: spec.dtype for name, spec in specs.items()},
        operations=(computation,),
    )


def _problem(build: Callable[[GraphBuilder], Graph], tolerance: float = 0.0) -> Problem:
    graph = build(GraphBuilder())
    return Problem(
        dims={port.name: port.spec.dims for port in graph.inputs},
        dtypes={port.name: port.spec.dtype for port in graph.inputs},
        operations=(GraphComputation(graph),),
        tolerance=tolerance,
    )


GRAPHS = (
    _problem(_several_outputs),
    _problem(_products_and_norms, ROUNDED),
    _problem(_running_statistics, ROUNDED),
    _problem(_counting),
    _problem(_drawing, ROUNDED),
    _problem_of_loop(_running_sums, 4),
    _problem_of_loop(_fibonacci, 5),
)

LOAD = (*PROBLEMS, *GRAPHS)
"""All problems, by number."""
LIGHT = tuple(number for number in range(len(LOAD)) if number != HEAVY)
"""All but the one with large arrays."""
