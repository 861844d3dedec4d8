"""Gradients in half types, where results are rounded, against differences of the same functions in float64.

What a function reads may not be rounded, while its result is: at a bound, the two fall on different sides.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import DType, GraphBuilder, Reduction, ReductionMode, Tensor
from cudnn_actor.protocol.operations import FUNCTIONS, PointwiseMode, ScatterReduction
from cudnn_actor.protocol.operations.gradients import GRADIENTS

from ...whole import pairwise
from ..differences import computed

FACTOR = float(np.float32(1.1))
HALF_TYPES = [DType.FLOAT16, DType.BFLOAT16]
BOUNDS = [-3.0, -2.5, -1.0, 0.1, 0.5, 1.0, 2.0, 3.0, 4.7]
"""What the functions below have kinks at."""
PARAMETERS: list[tuple[PointwiseMode, dict[str, float]]] = [
    *((mode, {}) for mode in GRADIENTS if FUNCTIONS[mode].arity < 3),
    (PointwiseMode.RELU, {"upper": 0.1}),
    (PointwiseMode.RELU, {"parameter": 0.3, "lower": 0.5, "upper": 2.0}),
    (PointwiseMode.RELU, {"parameter": -1.5, "upper": 2.0}),
    (PointwiseMode.CLIP, {"lower": -1.0, "upper": 2.0}),
    (PointwiseMode.CLIP, {"lower": 0.1}),
    (PointwiseMode.HARD_SIGMOID, {"parameter": 0.2}),
]
INSIDE_ONE = {PointwiseMode.ASIN, PointwiseMode.ACOS, PointwiseMode.ATANH}
STORED: dict[str, Callable[[GraphBuilder, Tensor], Tensor]] = {
    "as an output": lambda g, y: y,
    "for a sum": lambda g, y: y.sum(axis=1),
    "for a product": lambda g, y: y @ g.full((y.dims[1], 2), 1.0, y.dtype),
    "for a softmax": lambda g, y: g.softmax(y, -1),
}


def points(dtype: DType, mode: PointwiseMode) -> np.ndarray:
    """Numbers of a type, many of which are next to a bound when they are multiplied by the factor."""
    at = (np.array(BOUNDS) / FACTOR).astype(dtype.numpy).astype(np.float64)
    steps = np.arange(-4, 5) * float(np.finfo(np.float32).eps) * 2.0 ** (13 if dtype is DType.FLOAT16 else 16)
    near = (at[:, None] * (1 + steps)).reshape(-1)
    x = np.concatenate([near, np.random.default_rng(3).uniform(-4, 4, 39)])
    if mode in INSIDE_ONE:
        x = x / 8
    if mode in {PointwiseMode.LOG, PointwiseMode.SQRT, PointwiseMode.RSQRT, PointwiseMode.POW}:
        x = np.abs(x) + 0.05
    if mode in {PointwiseMode.ACOSH, PointwiseMode.LOG1P}:
        x = np.abs(x) + 1.1
    return x.reshape(8, -1).astype(dtype.numpy)


def differences(of: Callable[[np.ndarray], np.ndarray], x: np.ndarray, step: float = 1e-7) -> np.ndarray:
    """The derivative of a function of each element."""
    return np.asarray((of(x + step) - of(x - step)) / (2 * step))


def computed_wide(function: Callable[[GraphBuilder, Tensor], Tensor]) -> Callable[[np.ndarray], np.ndarray]:
    """What a function of a tensor computes in float64."""

    def values(x: np.ndarray) -> np.ndarray:
        g = GraphBuilder()
        return computed(g.build(y=function(g, g.input("x", x.shape, "float64"))), {"x": x})["y"]

    return values


RUN = pairwise(itertools.product(STORED, HALF_TYPES, range(len(PARAMETERS))), lambda case: case)
"""Where a result is stored, its type, and the number of its function."""


def function(number: int, g: GraphBuilder, x: Tensor) -> Tensor:
    mode, parameters = PARAMETERS[number]
    given: dict[str, Any] = {**parameters}
    return g.pointwise(mode, x, *[1.5] * (FUNCTIONS[mode].arity - 1), **given)


@functools.cache
def slope(number: int, dtype: DType) -> np.ndarray:
    """The derivative of a function of x times the factor, at `points`, rounded."""
    at = FACTOR * points(dtype, PARAMETERS[number][0]).astype(np.float64)
    with np.errstate(over="ignore"):
        found = FACTOR * differences(computed_wide(functools.partial(function, number)), at)
        return np.asarray(found.astype(dtype.numpy).astype(np.float64))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_derivatives_are_those_of_what_is_read_wherever_the_result_is_rounded(
    dtype: DType, stored: str
) -> None:
    numbers = [number for *case, number in RUN if case == [stored, dtype]]
    assert numbers
    for number in numbers:
        mode, parameters = PARAMETERS[number]
        g, values = GraphBuilder(), points(dtype, mode)
        x = g.input("x", values.shape, dtype)
        y = function(number, g, x * FACTOR)
        ones = g.full(y.dims, 1.0, y.dtype)
        graph = g.build(read=STORED[stored](g, y), dx=g.grad(y, x, ones))
        got = computed(graph, {"x": values})["dx"].astype(np.float64)
        rounding = 16 * float(2.0**-11 if dtype is DType.FLOAT16 else 2.0**-8)
        np.testing.assert_allclose(
            got, slope(number, dtype), rtol=rounding, atol=rounding, err_msg=f"{mode} {parameters}"
        )


def of_narrow(mode: ReductionMode) -> Callable[[GraphBuilder, Tensor], Tensor]:
    """A reduction of float32 whose result is a half type."""

    def function(g: GraphBuilder, x: Tensor) -> Tensor:
        made: Tensor = g.apply(
            Reduction(x=x, mode=mode, axes=(1,)), like={"y": g.full((x.dims[0],), 0.0, "float16")}
        )
        return made

    return function


@pytest.mark.parametrize("mode", ["max", "min", "absolute_max", "l2"])
def test_an_extreme_is_found_among_what_was_reduced_to_a_narrower_type(mode: str) -> None:
    g = GraphBuilder()
    x = g.input("x", (1, 3))
    y = of_narrow(ReductionMode(mode))(g, x)
    given = np.array([[1.001, -3.003, 2.003]], np.float32) * np.float32(1 if mode != "l2" else 1e-39)
    wanted = {"max": [0, 0, 1], "min": [0, 1, 0], "absolute_max": [0, -1, 0]}
    norm = np.sqrt((given.astype(np.float64) ** 2).sum())
    got = computed(g.build(y=y, dx=g.grad(y, x)), {"x": given})["dx"]
    np.testing.assert_allclose(got, [wanted.get(mode, [*(given[0] / norm)])], rtol=1e-3)


# Operations that read stored values.


def repeated(g: GraphBuilder, count: int) -> Tensor:
    """Indices of 3 places, each several times."""
    return g.arange(0, count) % 3


def reduced(mode: ReductionMode) -> Callable[[GraphBuilder, Tensor], Tensor]:
    return lambda g, x: g.reduce(mode, x, 1)


def written(of: ScatterReduction) -> Callable[[GraphBuilder, Tensor], Tensor]:
    return lambda g, x: g.put(x, repeated(g, 5), x[:, :5], 1, reduction=of)


OPERATIONS: dict[str, Callable[[GraphBuilder, Tensor], Tensor]] = {
    **{mode: reduced(mode) for mode in ReductionMode},
    "cumprod": lambda g, x: g.cumprod(x, 1),
    "softmax": lambda g, x: g.softmax(x),
    "layer norm": lambda g, x: g.layer_norm(x),
    "channel norm": lambda g, x: g.instance_norm(x.reshape(1, 4, 3, 2)),
    "max pool": lambda g, x: g.max_pool(x.reshape(1, 1, 4, 6), 2),
    "lp pool": lambda g, x: g.lp_pool(x.reshape(1, 1, 4, 6), 2, 3.0),
    "attention": lambda g, x: g.attention(*[x.reshape(1, 1, 4, 6)] * 3),
    "sort": lambda g, x: g.sort(x),
    **{f"put, {of}": written(of) for of in ScatterReduction},
    "maximum": lambda g, x: g.maximum(x, x[::-1]),
    "where": lambda g, x: g.where(x > 0.5, x, x * x),
}


@pytest.mark.parametrize("factor", [1.0, FACTOR])
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_gradients_of_operations_are_those_of_the_stored_values_that_they_read(
    dtype: DType, factor: float
) -> None:
    steps = np.random.default_rng(5).permutation(24).reshape(4, 6) - 11.5
    given = (steps / 8).astype(dtype.numpy)
    for name, operation in OPERATIONS.items():
        values = abs(given) if name == "log_sum" else given
        g = GraphBuilder()
        x = g.input("x", values.shape, dtype)
        y = operation(g, x * factor)
        graph = g.build(y=y, dx=g.grad(y, x, g.full(y.dims, 1.0, dtype)))
        got = computed(graph, {"x": values})["dx"].astype(np.float64)
        read = next(t.dtype for t in graph.body.tensors if t.name.startswith("mul at"))
        wide = (values.astype(np.float64) * factor).astype(read.numpy).astype(np.float64)
        g = GraphBuilder()
        x = g.input("x", wide.shape, "float64")
        wanted = factor * computed(g.build(dx=g.grad(operation(g, x), x)), {"x": wide})["dx"]
        rounding = 24 * float(2.0**-11 if dtype is DType.FLOAT16 else 2.0**-8)
        atol = rounding * max(1.0, float(abs(wanted).max()))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=atol, err_msg=name)
