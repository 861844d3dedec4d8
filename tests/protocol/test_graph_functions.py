"""What the functions and operators of a graph builder compute, beside NumPy."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan
from cudnn_actor.protocol import DType, GraphBuilder, Tensor
from cudnn_actor.protocol.types.dtypes import DTypeName

from ..in_one_test import cases_in_one_test

A = np.array([[-2.0, -0.5, 0.0], [0.25, 1.5, 3.0]])
B = np.array([[1.0], [-2.0]])
WHOLE, OTHER = np.array([[-7, 3, 0], [5, 12, -1]]), np.array([2, 3, 1])


def computed(
    function: Callable[..., Tensor], *arrays: np.ndarray, dtype: DTypeName = "float64"
) -> np.ndarray:
    g = GraphBuilder()
    values = {f"x{n}": array.astype(DType(dtype).numpy) for n, array in enumerate(arrays)}
    graph = g.build(y=function(g, *(g.input(name, array.shape, dtype) for name, array in values.items())))
    buffers = []
    for uid in graph.body.bound:
        tensor = graph.body.tensor(uid)
        given = values.get(graph.names_of[uid])
        buffers.append(np.empty(tensor.dims, tensor.dtype.numpy) if given is None else given)
    EvaluatedPlan("", graph.body).bind(np.empty(0, np.uint8)).run(buffers, ())
    return next(b for uid, b in zip(graph.body.bound, buffers, strict=True) if uid in graph.body.written)


# fmt: off
ONE = (
    "abs", "negative", "sign", "square", "exp", "expm1", "sin", "cos", "tan", "sinh", "cosh", "tanh",
    "arctan", "arcsinh", "ceil", "floor", "trunc", "isnan", "isinf", "logical_not", "reciprocal", "round",
    "sqrt", "log", "log1p", "arcsin", "arccos", "arccosh", "arctanh",
)
TWO = (
    "add", "subtract", "multiply", "divide", "mod", "fmod", "maximum", "minimum", "power", "equal",
    "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_xor",
)
# fmt: on


@cases_in_one_test
@pytest.mark.parametrize("name", ONE)
def test_a_function_of_one_tensor_is_numpys(name: str) -> None:
    with np.errstate(all="ignore"):
        wanted = getattr(np, name)(A)
    got = computed(lambda g, x: getattr(g, name)(x), A)
    assert got.dtype == wanted.dtype
    np.testing.assert_allclose(got, wanted, rtol=1e-14)


@cases_in_one_test
@pytest.mark.parametrize("name", TWO)
def test_a_function_of_two_tensors_is_numpys(name: str) -> None:
    with np.errstate(all="ignore"):
        wanted = getattr(np, name)(A, B)
    got = computed(lambda g, a, b: getattr(g, name)(a, b), A, B)
    assert got.dtype == wanted.dtype
    np.testing.assert_allclose(got, wanted, rtol=1e-14)


@cases_in_one_test
@pytest.mark.parametrize(
    "name", ["bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift", "mod", "maximum"]
)
@pytest.mark.parametrize("dtype", ["int32", "int64", "int16"])
def test_a_function_of_two_tensors_of_integers_is_numpys(name: str, dtype: DTypeName) -> None:
    wanted = getattr(np, name)(WHOLE.astype(dtype), OTHER.astype(dtype))
    got = computed(lambda g, a, b: getattr(g, name)(a, b), WHOLE, OTHER, dtype=dtype)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "%": lambda a, b: a % b,
    "**": lambda a, b: abs(a) ** b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "numbers": lambda a, b: 2 - a * 3 + 1 / (b * b + 1) - 2.0**b,
    "sum": lambda a, b: (a + b).sum(axis=0) - (a * b).mean(axis=(0, 1)),
    "max": lambda a, b: a.max(axis=1, keepdims=True) + b.min(),
    "view": lambda a, _: -a[:, ::-2].T + abs(a.reshape(-1)[2:4]),
    "@": lambda a, b: (a @ a.T)[:, :1] @ b.T,
}


@cases_in_one_test
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_and_methods_are_numpys(name: str) -> None:
    with np.errstate(all="ignore"):
        wanted = OPERATORS[name](A, B)
    got = computed(lambda _, a, b: OPERATORS[name](a, b), A, B)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_allclose(got, wanted, rtol=1e-14)


@pytest.mark.parametrize("of", [operator.and_, operator.or_, operator.xor, lambda a, b: a + ~b])
def test_operators_of_integers_are_numpys(of: Callable[[Any, Any], Any]) -> None:
    got = computed(lambda _, a, b: of(a, b), WHOLE, OTHER, dtype="int64")
    np.testing.assert_array_equal(got, of(WHOLE, OTHER))
    np.testing.assert_array_equal(computed(lambda _, a: 1 << (a % 5), WHOLE, dtype="int64"), 1 << (WHOLE % 5))


@pytest.mark.parametrize("dtype", ["uint64", "uint8", "int32"])
def test_integers_are_divided_by_numbers_that_they_cannot_be(dtype: DTypeName) -> None:
    x = np.array([3, 4], dtype)
    for wanted, of in ((-3.0, lambda x: x / -1), (-2 / 3, lambda x: -2 / x)):
        found = computed(lambda g, x, of=of: of(x), x, dtype=dtype)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found[0], wanted, rtol=1e-6)


def _row_norm(x: np.ndarray) -> Any:
    return (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 0.5)


WITH_OPTIONS: dict[str, tuple[Callable[[GraphBuilder, Tensor], Tensor], Callable[[np.ndarray], Any]]] = {
    "relu": (lambda g, x: g.relu(x), lambda x: np.maximum(x, 0)),
    "relu6": (lambda g, x: g.relu(x, upper=1), lambda x: np.clip(x, 0, 1)),
    "leaky": (lambda g, x: g.leaky_relu(x, 0.5), lambda x: np.where(x > 0, x, x / 2)),
    "clip": (lambda g, x: g.clip(x, -1), lambda x: np.maximum(x, -1)),
    "where": (lambda g, x: g.where(x > 0, x, -1), lambda x: np.where(x > 0, x, -1)),
    "where not 0": (lambda g, x: g.where(g.floor(x) / 4, 1, -1), lambda x: np.where(np.floor(x) / 4, 1, -1)),
    "elu": (lambda g, x: g.elu(x, 2.0), lambda x: np.where(x > 0, x, 2 * np.expm1(x))),
    "softplus": (lambda g, x: g.softplus(x, 2), lambda x: np.log1p(np.exp(2 * x)) / 2),
    "swish": (lambda g, x: g.swish(x), lambda x: x / (1 + np.exp(-x))),
    "softmax": (lambda g, x: g.softmax(x, axis=0), lambda x: np.exp(x) / np.exp(x).sum(axis=0)),
    "log softmax": (
        lambda g, x: g.log_softmax(x),
        lambda x: x - np.log(np.exp(x).sum(axis=1, keepdims=True)),
    ),
    "logsumexp": (lambda g, x: g.logsumexp(x, axis=1), lambda x: np.log(np.exp(x).sum(axis=1))),
    "prod": (lambda g, x: g.prod(x, 0), lambda x: x.prod(axis=0)),
    "argmax": (lambda g, x: g.argmax(x, 1), lambda x: x.argmax(axis=1)),
    "argmin": (lambda g, x: g.argmin(x, 0, keepdims=True), lambda x: x.argmin(axis=0, keepdims=True)),
    "cumsum": (lambda g, x: g.cumsum(x, 1), lambda x: x.cumsum(axis=1)),
    "cumprod": (lambda g, x: g.cumprod(x, 0, reverse=True), lambda x: x[::-1].cumprod(axis=0)[::-1]),
    "vector": (lambda g, x: g.matmul(x[0], x.T), lambda x: x[0] @ x.T),
    "dot": (lambda g, x: g.matmul(x[0], x[1]), lambda x: np.asarray(x[0] @ x[1])),
    "layer norm": (
        lambda g, x: g.layer_norm(x, epsilon=0.5),
        lambda x: (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 0.5),
    ),
    "batch norm": (
        lambda g, x: g.batch_norm(x, x[0], x[1] * x[1], epsilon=0.5),
        lambda x: (x - x[0]) / np.sqrt(x[1] ** 2 + 0.5),
    ),
    "batch norm training": (
        lambda g, x: g.batch_norm_training(x, epsilon=0.5),
        lambda x: (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 0.5),
    ),
    "running mean": (
        lambda g, x: g.batch_norm_training(x, running_mean=x[0], momentum=0.25).new_running_mean,
        lambda x: 0.75 * x[0] + 0.25 * x.mean(axis=0),
    ),
    "instance norm": (lambda g, x: g.instance_norm(x[None], epsilon=0.5)[0], _row_norm),
    "group norm": (lambda g, x: g.group_norm(x, 1, epsilon=0.5), _row_norm),
    "response norm": (
        lambda g, x: g.local_response_norm(x, 1, alpha=2, beta=1, bias=3),
        lambda x: x / (3 + 2 * x * x),
    ),
    "rms norm": (
        lambda g, x: g.rms_norm(x, epsilon=0.5),
        lambda x: x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 0.5),
    ),
}


@cases_in_one_test
@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_functions_with_options(name: str) -> None:
    function, wanted = WITH_OPTIONS[name]
    got = computed(function, A)
    np.testing.assert_allclose(got, wanted(A), rtol=1e-13)
    assert got.shape == wanted(A).shape


def test_every_function_is_documented() -> None:
    for name, value in inspect.getmembers(GraphBuilder, callable):
        assert name.startswith("_") or value.__doc__, name
