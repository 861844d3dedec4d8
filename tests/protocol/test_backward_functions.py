"""Functions of a graph builder that are backward passes, and factors of operands."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import DType, GraphBuilder, InvalidRequest
from cudnn_actor.protocol.operations import FUNCTIONS, PointwiseMode
from cudnn_actor.protocol.operations.gradients import GRADIENTS

from ..engines.differences import check_gradients
from ..engines.problems import normal
from ..in_one_test import cases_in_one_test
from .test_graph_functions import computed

X = np.array([[-3.0, -0.5, -0.0], [0.25, 1.5, 30.0]])
DY = np.array([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]])


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def normal_share(x: Any) -> Any:
    share = np.array([math.erfc(-one / math.sqrt(2)) / 2 for one in x.ravel()]).reshape(x.shape)
    return share + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def gelu_tanh(x: Any) -> Any:
    inner, slope = (
        math.sqrt(2 / math.pi) * (x + 0.044715 * x**3),
        math.sqrt(2 / math.pi) * (1 + 0.134145 * x**2),
    )
    return 0.5 * (1 + np.tanh(inner)) + 0.5 * x * (1 - np.tanh(inner) ** 2) * slope


SLOPES: dict[str, tuple[str, dict[str, float], Any]] = {
    "RELU_BWD": ("relu", {}, lambda x: x > 0),
    "RELU_BWD of a leaky one": ("relu", {"parameter": 0.1}, lambda x: np.where(x > 0, 1, 0.1)),
    "RELU_BWD with bounds": ("relu", {"lower": -1.0, "upper": 6.0}, lambda x: (x > -1) & (x < 6)),
    "TANH_BWD": ("tanh", {}, lambda x: 1 - np.tanh(x) ** 2),
    "SIGMOID_BWD": ("sigmoid", {}, lambda x: sigmoid(x) * (1 - sigmoid(x))),
    "ELU_BWD": ("elu", {"parameter": 0.7}, lambda x: np.where(x > 0, 1, 0.7 * np.exp(x))),
    "GELU_BWD": ("gelu", {}, normal_share),
    "GELU_APPROX_TANH_BWD": ("gelu_tanh", {}, gelu_tanh),
    "SOFTPLUS_BWD": ("softplus", {"parameter": 2.0}, lambda x: sigmoid(2 * x)),
    "SWISH_BWD": (
        "swish",
        {"parameter": 1.5},
        lambda x: sigmoid(1.5 * x) * (1 + 1.5 * x * (1 - sigmoid(1.5 * x))),
    ),
}


@cases_in_one_test
@pytest.mark.parametrize(("mode", "options", "slope"), SLOPES.values(), ids=SLOPES)
def test_a_backward_function_of_elements_is_dy_times_the_derivative(
    mode: str, options: Any, slope: Any
) -> None:
    got = computed(lambda g, dy, x: g.pointwise_backward(mode, dy, x, **options), DY, X)
    np.testing.assert_allclose(got, DY * slope(X), rtol=1e-12, atol=1e-15)


@cases_in_one_test
@pytest.mark.parametrize("mode", [mode for mode in GRADIENTS if FUNCTIONS[mode].arity == 1])
def test_every_function_of_one_operand_with_a_derivative_has_a_backward_one(mode: PointwiseMode) -> None:
    g = GraphBuilder()
    x, dy = g.input("x", (2, 3), "bfloat16"), g.input("dy", (2, 3), "float32")
    dx = g.pointwise_backward(mode, dy, x)
    assert (dx.dims, dx.dtype) == ((2, 3), DType.BFLOAT16)


def test_the_function_itself_runs_only_where_its_gradient_reads_it() -> None:
    def modes(name: str) -> list[str]:
        g = GraphBuilder()
        x, dy = g.input("x", (2, 3)), g.input("dy", (2, 3))
        before = g.added
        dx = g.pointwise_backward(name, dy, x)
        assert g.added - before == len(g.build(dx=dx).body.operations)
        return [one.title for one in g.build(dx=dx).body.operations]

    assert "relu" not in modes("relu")
    assert "tanh" in modes("tanh")


POOLS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 12), {"size": 3, "pad": 1, "stride": 2}),
    ((2, 3, 8, 7), {"size": 3, "pad": 1, "stride": 2}),
    ((1, 2, 6, 6), {"size": 2, "stride": 1}),
    ((1, 2, 5, 4, 6), {"size": 2}),
]


@pytest.mark.parametrize(("dims", "options"), POOLS)
@pytest.mark.parametrize("kind", ["max", "avg"])
def test_a_pooling_has_a_backward_function_of_dy_and_x(kind: str, dims: Any, options: dict[str, Any]) -> None:
    x = np.asarray(normal(dims, DType.FLOAT64, 0))
    gradients = check_gradients(lambda g, x: getattr(g, f"{kind}_pool")(x, **options), {"x": x})
    g = GraphBuilder()
    pooled = getattr(g, f"{kind}_pool")(g.input("x", dims), **options)
    dy = np.random.default_rng(1000).uniform(0.5, 1.5, pooled.dims)  # as `check_gradients` has it
    got = computed(lambda g, dy, x: getattr(g, f"{kind}_pool_backward")(dy, x, **options), dy, x)
    np.testing.assert_array_equal(got, gradients["x"])


def test_of_equal_elements_the_first_of_a_window_has_the_gradient() -> None:
    x = np.array([[1.0, 1, 0], [1, 2, 2], [2, 2, 1]])[None, None]
    dy = np.array([[1.0, 10], [100, 1000]])[None, None]
    got = computed(lambda g, dy, x: g.max_pool_backward(dy, x, 2, stride=1), dy, x)
    np.testing.assert_array_equal(got[0, 0], [[0, 0, 0], [0, 1111, 0], [0, 0, 0]])
    same = computed(lambda g, dy, x: g.max_pool_backward(dy, x, 2, stride=1), dy, np.zeros_like(x))
    np.testing.assert_array_equal(same[0, 0], [[1, 10, 0], [100, 1000, 0], [0, 0, 0]])


# Factors of operands.


def test_operands_are_multiplied_with_their_factors_first() -> None:
    got = computed(lambda g, a, b: g.pointwise("max", a, b, alphas=(2, -0.5)), X, DY)
    np.testing.assert_array_equal(got, np.maximum(2 * X, -0.5 * DY))
    got = computed(lambda g, a: g.pointwise("sub", a, 3.0, alphas=(1, 2)), X)
    np.testing.assert_array_equal(got, X - 6)
    got = computed(lambda g, a: g.pointwise("relu", a, lower=1.0, alphas=(-1.0,)), X)
    np.testing.assert_array_equal(got, np.maximum(-X, 1))
    check_gradients(lambda g, a, b: g.pointwise("mul", a, b, alphas=(2.0, 3.0)), {"a": X, "b": DY})


def test_factors_round_nothing_and_keep_integers() -> None:
    """60000 * 4 is no float16."""
    x = np.full((2, 2), 6e4)
    got = computed(lambda g, a: g.pointwise("mul", a, 0.25, alphas=(4.0, 1)), x, dtype="float16")
    np.testing.assert_array_equal(got, 6e4)
    assert (
        computed(lambda g, a: g.pointwise("add", a, a, alphas=(3, 1)), np.ones(2), dtype="int8").dtype
        == np.int8
    )


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda g, x: g.pointwise_backward("nope", x, x), "mode='nope': is no pointwise mode"),
        (lambda g, x: g.pointwise_backward([], x, x), "mode=[]: is no pointwise mode"),
        (
            lambda g, x: g.pointwise_backward("add", x, x),
            "mode='add': is a function of 2 operands; use g.grad",
        ),
        (lambda g, x: g.pointwise_backward("is_nan", x, x), "mode='is_nan': gives truth values"),
        (lambda g, x: g.pointwise_backward("relu", x[0], x), "dy=<reshape at test_backward_functions.py:"),
        (
            lambda g, x: g.pointwise_backward("elu", x, x, lower=0.0),
            "lower=0.0: is given, but elu has no lower",
        ),
        (lambda g, x: g.pointwise_backward("relu", x, x.astype("int32")), "x="),
        (lambda g, x: g.max_pool_backward(x, x[None, None], 2), "dy=<x: float32 (2, 3)>: is not a gradient"),
        (lambda g, x: g.pointwise("add", x, x, alphas=(1,)), "alphas=(1,): must have a factor for each of 2"),
        (lambda g, x: g.pointwise("add", x, x, alphas=(1, "a")), "alphas[1]='a': is neither a tensor nor"),
    ],
)
def test_a_wrong_use_names_the_argument(use: Any, text: str) -> None:
    g = GraphBuilder()
    with pytest.raises(InvalidRequest) as caught:
        use(g, g.input("x", (2, 3)))
    assert str(caught.value).startswith(text)
