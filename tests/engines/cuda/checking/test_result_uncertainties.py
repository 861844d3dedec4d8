"""How far from the definition a checked result may be, where operations magnify the roundings of others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cudnn_actor.engines.cuda.checking.comparison import Accuracy, difference
from cudnn_actor.engines.cuda.checking.evaluated_reference import OnHost, evaluate_graph, result_uncertainties
from cudnn_actor.protocol import DType, GraphBuilder, Tensor

X = np.array([-3.0, -1.0, 0.0, 1.0, 4.0, 12.0])
ACCURACY = Accuracy(DType.FLOAT32)
Function = Callable[[GraphBuilder, Tensor], Tensor]


def uncertainty(function: Function, x: np.ndarray = X) -> np.ndarray:
    g = GraphBuilder()
    body = g.build(y=function(g, g.input("x", x.shape))).body
    graph = body, OnHost, lambda _: x, ()
    (found,) = result_uncertainties(*graph, evaluate_graph(*graph)).values()
    return np.asarray(found)


def test_roundings_that_are_magnified_are_allowed_where_they_are() -> None:
    """A float32 of the sigmoid of 12 is off by 2**-25, and the result by 80,000 times as much."""
    found = uncertainty(lambda g, x: g.pointwise("atanh", g.sigmoid(x)))
    sigmoid = 1 / (1 + np.exp(-X))
    wanted, got = np.arctanh(sigmoid), np.arctanh(sigmoid.astype(np.float32).astype(np.float64))
    assert difference(wanted, got, ACCURACY) is not None
    assert difference(wanted, got, ACCURACY, found) is None
    for place in range(len(X) - 1):
        wrong = got.copy()
        wrong[place] += 0.01
        assert difference(wanted, wrong, ACCURACY, found) is not None


def test_what_may_overflow_may_be_anything() -> None:
    """Of the sigmoid of 20, float32 holds 1."""
    x = np.array([0.0, 20.0])
    found = uncertainty(lambda g, x: g.log(1.0 - g.sigmoid(x)), x)
    wanted = np.log(1 - 1 / (1 + np.exp(-x)))
    for anything in (-np.inf, np.nan, 0.0):
        assert difference(wanted, np.array([wanted[0], anything]), ACCURACY, found) is None
    assert difference(wanted, np.array([np.nan, wanted[1]]), ACCURACY, found) is not None


@pytest.mark.parametrize(
    "function",
    [
        lambda g, x: g.relu(x * 2.0 + 1.0),
        lambda g, x: g.tanh(x),
        lambda g, x: g.floor(x + 0.5),
        lambda g, x: g.sign(x * 1.0) * 3.0,
        lambda g, x: (x * 1.0 % 5.0) + 1.0,
        lambda g, x: g.where(x * 1.0 > 0.5, 3.0, x),
        lambda g, x: g.take(x, g.argmax(x * 1.0, 0), 0),
        lambda g, x: g.softmax(g.where(x > 100.0, x, -1e30)),
        lambda g, x: g.softmax(x - 1e30),
    ],
)
def test_what_magnifies_nothing_is_as_certain_as_before(function: Function) -> None:
    assert uncertainty(function).max() < 1e-3


def test_what_is_left_of_terms_that_cancel_is_as_uncertain_as_the_others() -> None:
    """A sum of floats that is almost 0 may be on either side of it."""
    x = np.array([[3.0, -3.0, 1e-6], [3.0, 3.0, 2.5]])
    found = uncertainty(lambda g, x: g.sum(x, [1]) % -1.0, x).ravel()
    np.testing.assert_allclose(found, [1, 0], atol=1e-4)


@pytest.mark.parametrize(
    "norm",
    [
        lambda g, x: g.layer_norm(x, axis=0),
        lambda g, x: g.instance_norm(x.reshape((1, 1, -1))),
        lambda g, x: g.group_norm(x.reshape((1, 1, -1)), groups=1),
    ],
    ids=["layer_norm", "instance_norm", "group_norm"],
)
def test_what_is_left_of_an_element_and_its_mean_is_as_uncertain_as_these(norm: Function) -> None:
    """The last element is one unit in the last place of float32 above the mean of the others."""
    x = np.array([141.0, 137.4, 136.6, 136.2, 137.80002]).astype(np.float32).astype(np.float64)
    found = uncertainty(lambda g, x: norm(g, x) % -1.0, x).ravel()
    np.testing.assert_allclose(found, [0, 0, 0, 0, 1], atol=1e-3)


def test_a_jump_is_uncertain_where_a_rounding_decides() -> None:
    """Each of many: none may depend on what was drawn for it."""
    found = uncertainty(lambda g, x: g.floor(x / 3.0), np.tile([2.0, 3.0, 4.0, 6.0], 100))
    np.testing.assert_allclose(found, np.tile([0.0, 1.0, 0.0, 1.0], 100), atol=1e-5)
