"""Products of rows that are reshaped: what follows is in the product's piece all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.reshaped_products import reshape_products
from cudnn_actor.protocol import Graph, GraphBuilder, Tensor

from .test_partition import check

ROWS, TOKENS, WIDTH = 6, (2, 3), 8


def titles(graph: Graph) -> list[list[str]]:
    """The operations of each piece of a graph that computes the same in pieces."""
    return [[each.title for each in piece.graph.operations] for piece in check(graph).pieces]


def multiplied(g: GraphBuilder, x: Tensor, name: str, columns: int = WIDTH) -> Tensor:
    """Rows times weights, with a bias, as files have it."""
    product = x @ g.input(name, (x.dims[-1], columns))
    return product + g.reshape(g.input(f"{name}_bias", (columns,)), (1, columns))


def block() -> Graph:
    """A transformer's feed-forward layer with its residual."""
    g = GraphBuilder()
    x = g.input("x", (*TOKENS, WIDTH))
    wide = g.reshape(multiplied(g, g.reshape(x, (ROWS, WIDTH)), "up", 16), (*TOKENS, 16))
    rows = g.reshape(g.pointwise("gelu_tanh", wide), (ROWS, 16))
    y = x + g.reshape(multiplied(g, rows, "down"), (*TOKENS, WIDTH))
    return g.build(y=y, z=g.layer_norm(y, g.input("scale", (WIDTH,)), g.input("shift", (WIDTH,))))


def test_a_layer_has_a_piece_for_each_product_with_what_follows_it() -> None:
    assert titles(block()) == [["matmul", "add", "gelu_tanh"], ["matmul", "add", "add"], ["layer_norm"]]


def test_operations_have_the_numbers_that_they_have_in_the_graph() -> None:
    graph = block().body
    parts = cut(graph)
    assert parts is not None
    for piece in parts.pieces:
        kinds = [graph.operations[number].title for number in piece.numbers]
        assert kinds == [each.title for each in piece.graph.operations]


Make = Callable[[GraphBuilder, Tensor], dict[str, Tensor]]


def of_rows(make: Make) -> Graph:
    """What follows rows of a product, x @ w."""
    g = GraphBuilder()
    return g.build(make(g, g.input("x", (ROWS, WIDTH)) @ g.input("w", (WIDTH, WIDTH))))


SAME: dict[str, tuple[Make, list[list[str]]]] = {
    "a number": (
        lambda g, y: {"y": g.relu(g.reshape(y * 2.0, (*TOKENS, WIDTH)))},
        [["matmul", "mul", "relu"]],
    ),
    "rows to add": (
        lambda g, y: {"y": g.relu(g.reshape(y + g.input("c", (ROWS, WIDTH)), (*TOKENS, WIDTH)))},
        [["matmul", "add", "relu"]],
    ),
    "one for each row": (
        lambda g, y: {"y": g.relu(g.reshape(y + g.input("c", (ROWS, 1)), (*TOKENS, WIDTH)))},
        [["matmul", "add", "relu"]],
    ),
    "what is read again behind the reshape": (
        lambda g, y: {"y": g.relu(z := g.reshape(y, (*TOKENS, WIDTH))), "s": g.sum(z, 2)},
        [["matmul"], ["relu", "sum"]],
    ),
}
OTHERS: dict[str, Make] = {
    "columns change": lambda g, y: {"y": g.relu(g.reshape(y, (*TOKENS, 2, 4)))},
    "rows are read before, too": lambda g, y: {"y": g.relu(g.reshape(y, (*TOKENS, WIDTH))), "s": g.sum(y, 1)},
    "nothing is computed behind": lambda g, y: {"y": g.reshape(y, (*TOKENS, WIDTH))},
    "one dim is left": lambda g, y: {"y": g.relu(g.reshape(y, (ROWS * WIDTH,)))},
    "the bias is computed": lambda g, y: {
        "y": g.relu(g.reshape(y + g.exp(g.input("c", (1, WIDTH))), (*TOKENS, WIDTH)))
    },
    "the product is a result": lambda g, y: {"p": y, "y": g.relu(g.reshape(y, (*TOKENS, WIDTH)))},
}


@pytest.mark.parametrize("name", SAME)
def test_what_stands_before_a_reshape_has_the_dims_behind_it(name: str) -> None:
    make, pieces = SAME[name]
    graph = of_rows(make)
    assert reshape_products(graph.body) is not None
    assert titles(graph) == pieces


@pytest.mark.parametrize("name", OTHERS)
def test_other_reshapes_stay(name: str) -> None:
    graph = of_rows(OTHERS[name])
    assert reshape_products(graph.body) is None
    if cut(graph.body) is not None:
        check(graph)


def test_a_turned_operand_needs_no_copy() -> None:
    g = GraphBuilder()
    x, w = g.input("x", (WIDTH, ROWS)), g.input("w", (WIDTH, WIDTH))
    graph = g.build(y=g.relu(g.reshape(g.transpose(x, (1, 0)) @ w, (*TOKENS, WIDTH))))
    assert titles(graph) == [["matmul", "relu"]]


def test_an_operand_that_is_overwritten_later_is_copied_before() -> None:
    g = GraphBuilder()
    x = g.input("x", (ROWS, WIDTH))
    y = g.relu(g.reshape(x @ g.input("w", (WIDTH, WIDTH)), (*TOKENS, WIDTH)))
    graph = g.build(y=y, updates={"x": x + 1.0})
    assert ["matmul", "relu"] in titles(graph)
