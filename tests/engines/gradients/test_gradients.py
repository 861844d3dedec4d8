"""Gradients of each operation, and of random graphs, against finite differences in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_actor.protocol import (
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvSpec,
    DType,
    GraphBuilder,
    Pad,
    ReductionMode,
    Slice,
    SoftmaxBackward,
    Tensor,
)

from ...in_one_test import cases_in_one_test
from ...whole import some
from ..differences import Function, check_gradients, computed, gradients
from ..problems import normal

F64 = DType.FLOAT64


def values(**dims: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: np.asarray(normal(of, F64, n)) for n, (name, of) in enumerate(dims.items())}


def twice(function: Function, name: str = "x") -> Function:
    """The gradient of a function, as a function."""

    def gradient(g: GraphBuilder, **inputs: Tensor) -> Tensor:
        y = function(g, **inputs)
        assert isinstance(y, Tensor)
        return g.grad(g.square(y) if y.rank else y, inputs[name])

    return gradient


# Functions of each element.


@cases_in_one_test
@pytest.mark.parametrize("power", [0, 1, 2, 3, -1])
@pytest.mark.parametrize("of_tensor", [False, True])
def test_derivatives_of_powers_at_0_too(power: int, of_tensor: bool) -> None:
    g, points, factor, wanted = GraphBuilder(), np.array([0.0, 1.0, -2.0]), 1.0, {}
    x, n, orders = g.input("x", (3,), F64), g.input("n", (1,), F64), dict[str, Tensor]()
    y: Tensor = x ** (n if of_tensor else power)
    for order in range(3):
        y = orders[f"order{order}"] = g.grad(y, x)
        factor *= power - order
        with np.errstate(divide="ignore"):
            wanted[f"order{order}"] = factor * points ** (power - order - 1) if factor else np.zeros(3)
    got = computed(g.build(orders), {"x": points, "n": np.array([float(power)])})
    for name, found in got.items():
        np.testing.assert_array_equal(found, wanted[name])


def test_derivatives_by_base_and_exponent_where_the_exponent_is_0() -> None:
    g = GraphBuilder()
    a, b = g.input("a", (4,), F64), g.input("b", (4,), F64)
    da, db = g.grad(a**b, [a, b])
    graph = g.build(da=da, dab=g.grad(da, b), daa=g.grad(da, a), dba=g.grad(db, a))
    found = computed(graph, {"a": np.array([2.0, 0.5, 1e-310, np.nan]), "b": np.zeros(4)})
    np.testing.assert_array_equal(found["da"], np.zeros(4))
    np.testing.assert_array_equal(found["daa"], np.zeros(4))
    np.testing.assert_array_equal(found["dab"], [0.5, 2.0, np.inf, 0.0])
    np.testing.assert_array_equal(found["dba"][:3], [0.5, 2.0, np.inf])


@cases_in_one_test
@pytest.mark.parametrize("mode", ["mul", "div", "pow", "max", "sub", "prelu", "fmod"])
@pytest.mark.parametrize(
    ("of_a", "of_b"), [((2, 3), (3,)), ((2, 1), (4, 1, 3)), ((3,), ()), ((2, 3), (2, 3))]
)
def test_broadcast_operands(mode: str, of_a: tuple[int, ...], of_b: tuple[int, ...]) -> None:
    given_ = values(a=of_a, b=of_b)
    if mode in ("pow", "fmod"):
        given_ = {name: np.asarray(np.abs(array) + 0.5) for name, array in given_.items()}
    check_gradients(lambda g, a, b: g.pointwise(mode, a, b), given_)


@pytest.mark.parametrize("mode", ["exp", "tanh", "sigmoid", "gelu", "mish", "sqrt", "erf", "softsign"])
def test_functions_have_gradients_of_gradients(mode: str) -> None:
    def function(g: GraphBuilder, x: Tensor) -> Tensor:
        return g.pointwise(mode, x)

    given_ = {"x": np.abs(normal((5,), F64, 1)) + 0.3}
    for of in (function, twice(function), twice(twice(function))):
        check_gradients(of, given_, tolerance=1e-6)


def test_a_tensor_that_is_used_often_has_the_sum_of_its_gradients() -> None:
    def function(g: GraphBuilder, x: Tensor) -> list[Tensor]:
        y = x * x * x + x
        return [y, y * x, x]

    check_gradients(function, values(x=(4,)))


def test_selection_and_numbers() -> None:
    check_gradients(lambda g, x, y: g.where(x > y, x * 2.0, 1.0 - y), values(x=(3, 4), y=(4,)))
    check_gradients(lambda g, x: 2.0 ** g.abs(x) + x**3 / 2.0 - g.clip(x, -0.5, 0.5), values(x=(3, 4)))


def test_what_is_constant_between_jumps_or_not_reached_has_gradients_of_zero() -> None:
    def function(g: GraphBuilder, x: Tensor, y: Tensor) -> list[Tensor]:
        truth = (x > 0.0).astype(F64)
        return [g.floor(x), truth, x.astype("int32").astype(F64), g.sign(x)]

    _, found = gradients(function, values(x=(3,), y=(2, 1)))
    np.testing.assert_array_equal(found["x"], np.zeros(3))
    np.testing.assert_array_equal(found["y"], np.zeros((2, 1)))


def test_without_upstream_it_is_the_gradient_of_the_sum() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 3), F64)
    graph = g.build(dx=g.grad(g.square(x), x), ones=g.grad(x, x), loss=g.grad(g.square(x).sum(), x))
    given_ = values(x=(2, 3))
    found = computed(graph, given_)
    np.testing.assert_array_equal(found["ones"], np.ones((2, 3)))
    np.testing.assert_allclose(found["dx"], 2 * given_["x"])
    np.testing.assert_array_equal(found["dx"], found["loss"])


# Convolutions.

CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], ConvSpec]] = {
    "line": ((2, 2, 7), (3, 2, 3), ConvSpec.symmetric(1, 1)),
    "strided, with elements left over": ((1, 2, 6, 5), (2, 2, 3, 2), ConvSpec.symmetric(2, 1, stride=2)),
    "groups": ((1, 4, 4, 4), (4, 2, 3, 3), ConvSpec.symmetric(2, 1, groups=2)),
    "dilated": ((1, 1, 7, 7), (2, 1, 2, 2), ConvSpec.symmetric(2, dilation=3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_and_their_gradients(name: str) -> None:
    of_x, of_w, conv = CONVOLUTIONS[name]
    dims = {"x": of_x, "w": of_w, "dy": conv.output_dims(of_x, of_w)}
    pad, common = conv.pre_padding, {"stride": conv.stride, "dilation": conv.dilation, "groups": conv.groups}

    def forward(g: GraphBuilder, x: Tensor, w: Tensor) -> Tensor:
        return g.conv(x, w, pad=pad, **common)  # type: ignore[arg-type]

    def data(g: GraphBuilder, dy: Tensor, w: Tensor) -> Tensor:
        x = g.input("like", of_x, F64)
        found: Tensor = g.apply(ConvolutionBackwardData(dy=dy, w=w, conv=conv), like={"dx": x})
        return found

    def filters(g: GraphBuilder, x: Tensor, dy: Tensor) -> Tensor:
        w = g.input("like", of_w, F64)
        found: Tensor = g.apply(ConvolutionBackwardFilter(x=x, dy=dy, conv=conv), like={"dw": w})
        return found

    for function, names in ((forward, "x w"), (data, "dy w"), (filters, "x dy")):
        check_gradients(function, values(**{n: dims[n] for n in names.split()}))
    check_gradients(twice(forward), values(x=of_x, w=of_w), tolerance=1e-6)


# Reductions.

each_reduction = pytest.mark.parametrize("mode", ReductionMode)


def reduction(mode: ReductionMode, axes: tuple[int, ...] | None, *, keep: bool) -> Function:
    return lambda g, x: g.reduce(mode, x, axes, keepdims=keep)


def for_reduction(mode: ReductionMode, dims: tuple[int, ...]) -> dict[str, np.ndarray]:
    x = normal(dims, F64, 3)
    return {"x": np.abs(x) + 0.1 if mode is ReductionMode.LOG_SUM else x}


@cases_in_one_test
@each_reduction
@pytest.mark.parametrize(("axes", "keep"), [(None, False), ((1,), False), ((-1, 0), True), ((), False)])
def test_reductions(mode: ReductionMode, axes: tuple[int, ...] | None, keep: bool) -> None:
    check_gradients(reduction(mode, axes, keep=keep), for_reduction(mode, (2, 3, 4)))


@cases_in_one_test
@each_reduction
def test_reductions_have_gradients_of_gradients(mode: ReductionMode) -> None:
    check_gradients(twice(reduction(mode, (1,), keep=False)), for_reduction(mode, (3, 4)), tolerance=1e-5)


@cases_in_one_test
@pytest.mark.parametrize(
    ("mode", "x", "wanted"),
    [
        ("max", [1, 3, 3, 2], [0, 0.5, 0.5, 0]),
        ("min", [1, 1, 1, 2], [1 / 3, 1 / 3, 1 / 3, 0]),
        ("absolute_max", [1, 3, -3, 2], [0, 0.5, -0.5, 0]),
        ("absolute_max", [0, 0], [0, 0]),
        ("product", [2, 0, 3], [0, 6, 0]),
        ("product", [2, 0, 3, 0], [0, 0, 0, 0]),
        ("l1", [0, -2], [0, -1]),
        ("l2", [0, 0], [0, 0]),
        ("log_sum_exp", [-math.inf, -math.inf], [0, 0]),
        ("log_sum_exp", [1000, 1000], [0.5, 0.5]),
    ],
)
def test_reductions_at_ties_and_zeros(mode: str, x: list[float], wanted: list[float]) -> None:
    g = GraphBuilder()
    given_ = np.array(x, F64)
    of = g.input("x", given_.shape, F64)
    graph = g.build(dx=g.grad(g.reduce(ReductionMode(mode), of), of))
    np.testing.assert_allclose(computed(graph, {"x": given_})["dx"], wanted)


def test_gradients_of_the_gradients_of_products_are_right_at_zeros() -> None:
    given_ = {"x": np.array([[2.0, 0.0, 3.0, -1.0], [0.0, 1.5, 0.0, 2.0], [1.0, 2.0, 3.0, 4.0]])}
    check_gradients(lambda g, x: g.prod(x, 1), given_)
    check_gradients(twice(lambda g, x: g.prod(x, 1)), given_, tolerance=1e-6)


def test_equal_shares_of_many_half_elements_are_exact() -> None:
    """Their number is more than a sum of the type can hold."""
    g = GraphBuilder()
    x = g.input("x", (5000,), "bfloat16")
    graph = g.build(dx=g.grad(g.max(x) * 5000.0, x))
    found = computed(graph, {"x": np.ones(5000, graph.inputs[0].spec.dtype.numpy)})["dx"]
    np.testing.assert_array_equal(found.astype(np.float32), np.ones(5000))


@pytest.mark.pairwise
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("product", [False, True])
def test_running_sums_and_products(product: bool, exclusive: bool, reverse: bool) -> None:
    def function(g: GraphBuilder, x: Tensor) -> Tensor:
        return (g.cumprod if product else g.cumsum)(x, 1, exclusive=exclusive, reverse=reverse)

    given_ = values(x=(2, 5, 2))
    check_gradients(function, given_)
    check_gradients(twice(function), given_, tolerance=1e-6)
    given_["x"][0, 2], given_["x"][0, 4], given_["x"][1, 1, 0], given_["x"][1, ::2, 1] = 0, 0, 0, 0
    check_gradients(function, given_)
    check_gradients(twice(function), given_, tolerance=1e-6)


# Softmax.


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("axis", [0, -1])
def test_softmax_and_its_gradient(log: bool, axis: int) -> None:
    def function(g: GraphBuilder, x: Tensor) -> Tensor:
        return (g.log_softmax if log else g.softmax)(x, axis)

    def backward(g: GraphBuilder, dy: Tensor, y: Tensor) -> Any:
        return g.apply(SoftmaxBackward(dy=dy, y=y, axis=axis, log=log))

    given_ = values(x=(3, 4))
    for of in (function, twice(function)):
        check_gradients(of, given_, tolerance=1e-6)
    check_gradients(backward, values(dy=(3, 4), y=(3, 4)))


# Movement.

MOVEMENTS: dict[str, Callable[[GraphBuilder, Tensor], Any]] = {
    "reshape": lambda g, x: x.reshape(6, -1),
    "transpose": lambda g, x: x.transpose(2, 0, 1),
    "slice": lambda g, x: x[1:, ::-2, 2],
    "repeated": lambda g, x: x[None, 0, ..., ::3],
    "reversed": lambda g, x: g.apply(Slice(x=x, starts=(1, 2, 4), steps=(-1, -1, -2), sizes=(2, 3, 2))),
    "one of each": lambda g, x: g.apply(Slice(x=x, starts=(1, 0, 3), steps=(-7, 5, 1), sizes=(1, 1, 1))),
    "pad": lambda g, x: g.pad(x, 2, value=3.0),
    "pad with gaps": lambda g, x: g.apply(Pad(x=x, before=(0, 1, 2), after=(1, 0, 3), steps=(-2, 3, -1))),
    "broadcast": lambda g, x: g.broadcast_to(x, (3, 2, 3, 5)),
    "sum to": lambda g, x: g.sum_to(x, (1, 5)),
}


@cases_in_one_test
@pytest.mark.parametrize("name", MOVEMENTS)
def test_movements(name: str) -> None:
    check_gradients(MOVEMENTS[name], values(x=(2, 3, 5)))
    check_gradients(twice(MOVEMENTS[name]), values(x=(2, 3, 5)), tolerance=1e-6)


# Any graph.

STEPS: dict[str, Callable[[GraphBuilder, Tensor, Tensor], Any]] = {
    "add": lambda g, a, b: a + b,
    "mul": lambda g, a, b: a * b,
    "div": lambda g, a, b: a / (g.square(b) + 1.0),
    "row": lambda g, a, b: a - b[:1],
    "tanh": lambda g, a, b: g.tanh(a),
    "gelu": lambda g, a, b: g.gelu(a + b),
    "numbers": lambda g, a, b: 0.5 - a * 1.5,
    "transpose": lambda g, a, b: a.T,
    "reverse": lambda g, a, b: a[::-1],
    "reshape": lambda g, a, b: a.reshape(2, 8).reshape(4, 4),
    "pad": lambda g, a, b: g.pad(a[1:-1, ::2], [(1, 1), (2, 0)], 0.5),
    "mean": lambda g, a, b: a - g.mean(b, 1, keepdims=True),
    "norm": lambda g, a, b: a / (g.reduce(ReductionMode.L2, b, 0) + 1.0),
    "sums": lambda g, a, b: g.cumsum(a, 0, reverse=True) * 0.5,
    "softmax": lambda g, a, b: g.softmax(a, 0) + b,
    "conv": lambda g, a, b: g.conv(a.reshape(1, 1, 4, 4), b[:3, :3].reshape(1, 1, 3, 3), pad=1).reshape(4, 4),
}


@given(st.data())
@settings(max_examples=some(60), deadline=None)
def test_any_graph(data: st.DataObject) -> None:
    steps = data.draw(
        st.lists(st.tuples(st.sampled_from(sorted(STEPS)), *[st.integers(0, 7)] * 2), max_size=8)
    )
    outputs = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=3))

    def function(g: GraphBuilder, a: Tensor, b: Tensor) -> list[Tensor]:
        known = [a, b]
        for name, one, other in steps:
            known.append(STEPS[name](g, known[one % len(known)], known[other % len(known)]))
        return [known[-1 - place % len(known)] for place in outputs]

    rng = np.random.default_rng(len(steps))
    given_ = {name: rng.uniform(-1, 1, (4, 4)) for name in "ab"}
    check_gradients(function, given_, tolerance=1e-6)
