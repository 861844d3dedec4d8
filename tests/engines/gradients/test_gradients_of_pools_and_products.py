"""Gradients of poolings and of products of matrices, against finite differences in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import (
    AdaptiveWindow,
    AvgPool,
    AvgPoolBackward,
    GraphBuilder,
    GroupedMatMulBackwardWeights,
    LpPool,
    MatMul,
    MaxPool,
    Reduction,
    Tensor,
    Window,
)

from ...in_one_test import cases_in_one_test
from ..differences import check_gradients, gradients
from .test_gradients import twice, values

OVERLAPPING = Window.symmetric(2, size=3, pad=1, stride=2)
DILATED = Window.symmetric(2, size=2, stride=1, dilation=2)
WINDOWS = {
    "overlapping": OVERLAPPING,
    "dilated": DILATED,
    "adaptive": AdaptiveWindow(output=(3, 2)),
    "more windows than elements": AdaptiveWindow(output=(7, 6)),
}
each_window = pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
IMAGE = (2, 2, 5, 4)


@each_window
def test_poolings(window: Window | AdaptiveWindow) -> None:
    def pools(g: GraphBuilder, x: Tensor) -> list[Tensor]:
        made = [MaxPool(x=x, window=window), AvgPool(x=x, window=window)]
        made += [LpPool(x=x, window=window, p=p) for p in (1.0, 2.0, 3.5)]
        return [g.apply(each) for each in made]

    given = values(x=IMAGE)
    given["x"] += np.sign(given["x"]) / 4  # no step reaches 0, or another element
    check_gradients(pools, given)


@pytest.mark.parametrize("include_padding", [False, True])
def test_the_gradient_of_a_mean_has_a_gradient(include_padding: bool) -> None:
    given: dict[str, Any] = {"window": OVERLAPPING, "include_padding": include_padding}
    check_gradients(twice(lambda g, x: g.apply(AvgPool(x=x, **given))), values(x=IMAGE))

    def backward(g: GraphBuilder, dy: Tensor) -> Tensor:
        made: Tensor = g.apply(AvgPoolBackward(dy=dy, **given), like={"dx": g.full(IMAGE, 0, "float64")})
        return made

    check_gradients(backward, values(dy=(2, 2, 3, 2)))


def test_the_index_is_added_to_a_max_pooling_only_where_its_gradient_is_wanted() -> None:
    g = GraphBuilder()
    x = g.input("x", IMAGE)
    y = g.max_pool(x, 2)
    assert len(g.build(y=y).body.operations[0].writes) == 1
    dx = g.grad(y, x)
    assert len(g.build(y=y, dx=dx).body.operations[0].writes) == 2


FUNCTIONS: dict[str, Callable[[GraphBuilder, Tensor], Tensor]] = {
    "max_pool": lambda g, x: g.max_pool(x, 2, pad=1),
    "avg_pool": lambda g, x: g.avg_pool(x, 2),
    "lp_pool": lambda g, x: g.lp_pool(x, 2, 3.0, stride=1),
    "adaptive_max_pool": lambda g, x: g.adaptive_max_pool(x, 3),
    "adaptive_avg_pool": lambda g, x: g.adaptive_avg_pool(x, (2, 3)),
    "global_max_pool": lambda g, x: g.global_max_pool(x),
    "global_avg_pool": lambda g, x: g.global_avg_pool(x),
    "global_lp_pool, L1": lambda g, x: g.global_lp_pool(x, 1.0),
    "global_lp_pool, L2": lambda g, x: g.global_lp_pool(x),
    "global_lp_pool, L3": lambda g, x: g.global_lp_pool(x, 3.0),
}


@cases_in_one_test
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_the_builder(name: str) -> None:
    check_gradients(FUNCTIONS[name], values(x=IMAGE))


@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        ((3, 4), (4, 2)),
        ((2, 3, 4), (2, 4, 5)),
        ((2, 3, 4), (4, 5)),
        ((3, 4), (1, 1, 4, 5)),
        ((3, 4), (2, 4, 5)),
        ((2, 1, 3, 4), (3, 4, 2)),
        ((1, 2, 3, 4), (3, 1, 4, 2)),
    ],
)
def test_products(of_a: tuple[int, ...], of_b: tuple[int, ...]) -> None:
    check_gradients(lambda g, a, b: g.apply(MatMul(a=a, b=b)), values(a=of_a, b=of_b))
    check_gradients(twice(lambda g, a, b: g.matmul(a, b), "b"), values(a=of_a, b=of_b), tolerance=1e-6)


def test_one_matrix_for_all_of_a_batch_has_one_product_as_its_gradient() -> None:
    g = GraphBuilder()
    a, b = g.input("a", (8, 3, 4)), g.input("b", (4, 5))
    body = g.build(db=g.grad(a @ b, b)).body
    (product,) = (op for op in body.operations if isinstance(op, MatMul))
    assert body.tensor(product.y).dims == (4, 5)
    assert not any(isinstance(op, Reduction) for op in body.operations)


OFFSETS = [[2, 4, 4, 6], [5, 1, -2, 3], [9, 9, 9, 9], [0, 0, 0, 0]]


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_grouped_products(offsets: list[int]) -> None:
    def product(g: GraphBuilder, tokens: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        return g.grouped_matmul(tokens, weights, offsets)

    given = values(tokens=(8, 3), weights=(4, 3, 2)) | {"offsets": np.array(offsets, np.int32)}
    check_gradients(product, given)
    for name in ("tokens", "weights"):
        check_gradients(twice(product, name), given, tolerance=1e-6)

    def backward(g: GraphBuilder, tokens: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
        made: Tensor = g.apply(GroupedMatMulBackwardWeights(tokens=tokens, dy=dy, offsets=offsets))
        return made

    check_gradients(backward, values(tokens=(8, 3), dy=(8, 2)) | {"offsets": given["offsets"]})


def test_gradients_of_half_types_have_their_dtype() -> None:
    rng = np.random.default_rng(0)
    given = {"tokens": rng.normal(size=(8, 3)), "weights": rng.normal(size=(4, 3, 2))}
    narrow = {name: array.astype(np.float16) for name, array in given.items()}
    narrow["offsets"] = np.array([2, 4, 4, 6], np.int32)
    _, found = gradients(
        lambda g, tokens, weights, offsets: g.grouped_matmul(tokens, weights, offsets), narrow
    )
    assert {name: array.dtype for name, array in found.items()} == dict.fromkeys(given, np.float16)
