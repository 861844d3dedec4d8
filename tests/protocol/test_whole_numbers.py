"""NumPy's whole numbers are taken wherever ints are: the graphs are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import GraphBuilder, InvalidRequest

from ..in_one_test import cases_in_one_test

Int = Callable[[int], Any]


def square(g: GraphBuilder) -> Any:
    return g.input("x", (4, 4))


def image(g: GraphBuilder, channels: int = 4) -> Any:
    return g.input("x", (1, channels, 4, 4))


def state(g: GraphBuilder) -> Any:
    return g.input("state", (2,), "int64")


def several_heads(g: GraphBuilder, heads: Any) -> Any:
    x = g.input("x", (2, 3, 8))
    weights = {"in_proj_weight": g.input("w", (24, 8)), "out_proj.weight": g.input("o", (8, 8))}
    return g.multi_head_attention(x, x, x, weights=weights, heads=heads)


TAKEN: dict[str, Callable[[GraphBuilder, Int], Any]] = {
    "advance": lambda g, of: g.advance(state(g), of(3)),
    "tril": lambda g, of: g.tril(square(g), of(1)),
    "triu": lambda g, of: g.triu(square(g), of(-1)),
    "eye": lambda g, of: g.eye(of(3), of(4), of(1)),
    "one_hot": lambda g, of: g.one_hot(g.input("i", (3,), "int64"), of(5)),
    "roll": lambda g, of: g.roll(square(g), (of(1), of(2)), (0, 1)),
    "roll by one number": lambda g, of: g.roll(square(g), of(1), 0),
    "repeat": lambda g, of: g.repeat(square(g), of(2), 0),
    "tile": lambda g, of: g.tile(square(g), of(2)),
    "tile of several": lambda g, of: g.tile(square(g), (of(2), of(1))),
    "split": lambda g, of: g.split(square(g), of(2))[1],
    "array_split": lambda g, of: g.array_split(square(g), of(3))[0],
    "depth_to_space": lambda g, of: g.depth_to_space(image(g), of(2)),
    "space_to_depth": lambda g, of: g.space_to_depth(image(g), of(2)),
    "pad": lambda g, of: g.pad(square(g), of(1)),
    "pad with a number": lambda g, of: g.pad(g.input("x", (4, 4), "int32"), 1, value=of(7)),
    "conv": lambda g, of: g.conv(image(g), g.input("w", (4, 2, 3, 3)), pad=of(1), groups=of(2)),
    "max_pool": lambda g, of: g.max_pool(image(g), of(2), stride=of(1)),
    "cross_entropy": lambda g, of: g.cross_entropy(square(g), g.input("t", (4,), "int64"), ignore=of(2)),
    "multi_head_attention": lambda g, of: several_heads(g, of(2)),
    "top_k": lambda g, of: g.top_k(square(g), of(2))[0],
    "group_norm": lambda g, of: g.group_norm(image(g), of(2)),
    "dropout": lambda g, of: g.dropout(square(g), 0.5 if of is int else np.float64(0.5), state(g)),
}


@cases_in_one_test
@pytest.mark.parametrize("name", TAKEN)
def test_numpys_whole_numbers_are_taken_as_ints(name: str) -> None:
    graphs = []
    for of in (int, np.int64, np.uint8 if name != "triu" else np.int8):
        g = GraphBuilder()
        graphs.append(g.build(y=TAKEN[name](g, of)))
    assert len({graph.to_json() for graph in graphs}) == 1


@pytest.mark.parametrize("other", [True, 1.0, np.float64(1), np.bool_(True), "1", None])
def test_other_numbers_are_not(other: Any) -> None:
    g = GraphBuilder()
    with pytest.raises(InvalidRequest, match="repeats"):
        g.repeat(square(g), other, 0)


@pytest.mark.parametrize("probability", [1, -0.1, float("nan"), True, "0.5", None])
def test_a_dropout_is_refused_by_the_check_of_all_dropouts(probability: Any) -> None:
    g = GraphBuilder()
    with pytest.raises(InvalidRequest, match="from 0 to below 1") as refused:
        g.dropout(square(g), probability, state(g))
    assert refused.value.field == "probability"
