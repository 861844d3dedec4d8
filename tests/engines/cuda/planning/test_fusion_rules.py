"""Each rule of fusion has a graph that is cut as it says, and otherwise without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cudnn_actor.engines.cuda.planning import fusion_rules
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.protocol import Graph, GraphBuilder, Tensor

Make = Callable[[GraphBuilder, Tensor, Tensor], dict[str, Tensor]]
LISTS = ("RULES", "EPILOGUE_RULES", "GROUP_RULES")


def chain(g: GraphBuilder, x: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = g.tanh(x)
    return x


EXAMPLES: dict[str, tuple[Make, list[list[str]]]] = {
    # The first of them that has an answer decides.
    "epilogue": (
        lambda g, a, b: {"y": g.relu(a @ b)},
        [["matmul", "pointwise"]],
    ),
    "groups_of_the_operands": (
        lambda g, a, b: {"y": g.relu(g.max(a, axis=1, keepdims=True))},
        [["reduction", "pointwise"]],
    ),
    "group_that_reads_the_same": (
        lambda g, a, b: {"y": g.relu(a), "z": a * b},
        [["pointwise", "pointwise"]],
    ),
    # All of them must hold for an epilogue. Here one does not.
    "anchor_takes_epilogues": (
        lambda g, a, b: {"y": g.relu(g.cumsum(a, 1))},
        [["cumulative"], ["pointwise"]],
    ),
    "result_has_the_dims_of_the_operand": (
        lambda g, a, b: {"y": a[:1] @ b + b},
        [["matmul"], ["pointwise"]],
    ),
    "function_is_fast_in_cudnn": (
        lambda g, a, b: {"y": g.sigmoid(a @ b)},
        [["matmul"], ["pointwise"]],
    ),
    "operand_is_read_by_nothing_else": (
        lambda g, a, b: {"y": (product := a @ b), "z": g.relu(product)},
        [["matmul"], ["pointwise"]],
    ),
    "piece_stays_small": (
        lambda g, a, b: {"y": chain(g, a @ b, 65)},
        [["matmul", *["pointwise"] * 63], ["pointwise"] * 2],
    ),
    "other_operands_are_computed_before": (
        lambda g, a, b: {"y": a @ b + g.cumsum(a, 1)},
        [["matmul"], ["cumulative"], ["pointwise"]],
    ),
    "overwritten_input_is_read_by_no_other_piece": (
        lambda g, a, b: {"a": b @ b, "y": g.cumsum(a, 1)},
        [["matmul"], ["cumulative"], ["pointwise"]],
    ),
    # Any of them lets an operation be part of a group.
    "elementwise": (
        lambda g, a, b: {"y": (double := b * 2.0), "z": a + double},
        [["pointwise", "pointwise"]],
    ),
    "one_for_each_line": (
        lambda g, a, b: {"y": g.max(a, axis=1, keepdims=True) + 1.0},
        [["reduction", "pointwise"]],
    ),
    "of_a_broadcast_tree": (
        lambda g, a, b: {"y": g.relu(a[:1]) + b},
        [["pointwise", "pointwise"]],
    ),
    "along_the_same_lines": (
        lambda g, a, b: {"y": g.softmax(a + b, axis=1), "z": g.softmax(b, axis=0)},
        [["pointwise", "softmax"], ["softmax"]],
    ),
}


def graph_of(make: Make) -> Graph:
    g = GraphBuilder()
    a, b = g.input("a", (4, 4)), g.input("b", (4, 4))
    made = make(g, a, b)
    updates = {name: tensor for name, tensor in made.items() if name in "ab"}
    return g.build({name: tensor for name, tensor in made.items() if name not in updates}, updates=updates)


def kinds(graph: Graph) -> list[list[str]]:
    """The kinds of operations in each piece."""
    parts = cut(graph.body)
    pieces = [graph.body] if parts is None else [piece.graph for piece in parts.pieces]
    return [[operation.kind for operation in piece.operations] for piece in pieces]


def rule_list(name: str) -> str:
    return next(each for each in LISTS if name in {rule.__name__ for rule in getattr(fusion_rules, each)})


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_rule_decides_where_its_example_is_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, wanted = EXAMPLES[name]
    assert kinds(graph_of(make)) == wanted
    rules = getattr(fusion_rules, rule_list(name))
    others = tuple(rule for rule in rules if rule.__name__ != name)
    monkeypatch.setattr(fusion_rules, rule_list(name), others)
    assert kinds(graph_of(make)) != wanted


def test_every_rule_has_an_example() -> None:
    assert [*EXAMPLES] == [rule.__name__ for each in LISTS for rule in getattr(fusion_rules, each)]
