"""Concatenations that functions of each element read: their parts are read where they lie, in one kernel."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan
from cudnn_actor.engines.cuda.planning.concatenated_reads import read_in_parts
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.protocol import Concat, Graph, GraphBuilder, Tensor

from .test_partition import check

B, H, S, D = 2, 3, 4, 8
Make = Callable[[GraphBuilder, Tensor], dict[str, Tensor]]


def of(make: Make, dims: tuple[int, ...] = (B, H, S, D)) -> Graph:
    g = GraphBuilder()
    return g.build(make(g, g.input("x", dims)))


def turned(g: GraphBuilder, x: Tensor) -> Tensor:
    """Half of the features in the place of the others, one of them negated."""
    return g.concatenate([-x[..., D // 2 :], x[..., : D // 2]], 3)


def rotary(g: GraphBuilder, x: Tensor) -> dict[str, Tensor]:
    cos, sin = (g.input(name, (1, 1, S, D)) for name in ("cos", "sin"))
    return {"y": x * cos + turned(g, x) * sin}


def titles(graph: Graph) -> list[list[str]]:
    """The operations of each piece of a graph that computes the same in pieces."""
    parts = cut(graph.body)
    pieces = [graph.body] if parts is None else [piece.graph for piece in parts.pieces]
    return [[each.title for each in piece.operations] for piece in pieces]


def test_rotary_embedding_is_one_piece() -> None:
    graph = of(rotary)
    assert cut(graph.body) is not None
    (piece,) = check(graph).pieces
    assert {each.title for each in piece.graph.operations} == {"pad", "neg", "mul", "add"}


def test_heads_of_rows_are_read_where_they_lie() -> None:
    def heads(g: GraphBuilder, x: Tensor) -> dict[str, Tensor]:
        return rotary(g, g.transpose(g.reshape(x, (B, S, H, D)), (0, 2, 1, 3)))

    assert len(titles(of(heads, (B, S, H * D)))) == 1


IN_PARTS: dict[str, Make] = {
    "of two tensors": lambda g, x: {"y": g.relu(g.concatenate([x, g.input("z", (B, 1, S, D))], 1))},
    "of three": lambda g, x: {"y": g.relu(g.concatenate([x[..., 6:], x[..., :2], -x[..., 2:6]], 3))},
    "read twice": lambda g, x: {"y": g.relu(turned(g, x)), "z": g.exp(turned(g, x))},
    "one negated for others, too": lambda g, x: {
        "y": g.relu(g.concatenate([n := -x, x], 3)),
        "n": g.exp(n),
    },
    "along a dim counted from the last": lambda g, x: {
        "y": g.relu(g.apply(Concat(operands=(x, g.input("z", (B, 1, S, D))), axis=-3)))
    },
    "along the first dim": lambda g, x: {"y": g.concatenate([x, -x], 0) * 2.0},
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_concatenations_that_functions_read_compute_the_same_in_parts(name: str) -> None:
    graph = of(IN_PARTS[name])
    found = read_in_parts(graph.body)
    assert found is not None
    assert found.graph is not None
    assert not any(each.kind == "concat" for each in found.graph.operations)
    check(graph)


OTHERS: dict[str, Make] = {
    "a result": lambda g, x: {"y": turned(g, x)},
    "read by a reduction": lambda g, x: {"y": g.sum(turned(g, x), 3)},
    "read by a function and a product": lambda g, x: {
        "y": g.relu(z := turned(g, x)),
        "z": z @ g.input("w", (D, D)),
    },
    "broadcast": lambda g, x: {
        "y": g.input("z", (2, B, H, S, D)) + g.reshape(turned(g, x), (1, B, H, S, D)),
    },
    "of many": lambda g, x: {"y": g.relu(g.concatenate([x[..., n : n + 2] for n in (6, 4, 2, 0)], 3))},
    "of one twice": lambda g, x: {"y": g.relu(g.concatenate([x, x], 3))},
    "of integers": lambda g, x: {
        "y": g.concatenate([g.input("i", (2, D), "int32"), g.input("j", (2, D), "int32")], 0) * 2
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_concatenations_that_cannot_be_read_in_parts_stay(name: str) -> None:
    assert read_in_parts(of(OTHERS[name]).body) is None


def test_a_sum_of_parts_changes_no_number() -> None:
    graph = of(
        lambda g, x: {"y": g.abs(turned(g, x)), "z": g.concatenate([-x[..., 4:], x[..., :4]], 3) * 1.0}
    )
    found = read_in_parts(graph.body)
    assert found is not None
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, -1.5, 3.0]
    x = np.broadcast_to(np.array(special, np.float32), (B, H, S, D)).copy()

    def results(body: object) -> list[np.ndarray]:
        arrays = {uid: x if uid not in body.written else np.empty(x.shape, x.dtype) for uid in body.bound}  # type: ignore[attr-defined]
        EvaluatedPlan("", body).bind(np.empty(0, np.uint8)).run([*arrays.values()], ())  # type: ignore[arg-type]
        return [arrays[uid] for uid in sorted(body.results)]  # type: ignore[attr-defined]

    for got, wanted in zip(results(found.graph), results(graph.body), strict=True):
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(wanted))
