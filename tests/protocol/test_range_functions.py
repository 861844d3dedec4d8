"""Ranges, diagonals, triangles and one-hot vectors against NumPy's, and element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_actor.protocol import DType, GraphBuilder, InvalidRequest, Tensor

from ..engines.differences import check_gradients, computed
from ..in_one_test import cases_in_one_test


def result(y: Tensor, **values: np.ndarray) -> np.ndarray:
    return computed(y.builder.build(y=y), values)["y"]


@cases_in_one_test
@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.BOOL])
def test_ranges_of_every_dtype(dtype: DType) -> None:
    wanted = (3 + 5 * np.arange(20)).astype(dtype.numpy)
    np.testing.assert_array_equal(result(GraphBuilder().arange(3, 100, 5, dtype=dtype)), wanted, strict=True)


@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(-7, 7).filter(bool))
def test_ranges_of_whole_numbers(start: int, stop: int, step: int) -> None:
    found = result(GraphBuilder().arange(start, stop, step))
    wanted = np.array(range(start, stop, step), np.int64)
    np.testing.assert_array_equal(found, wanted, strict=True)


@pytest.mark.parametrize(
    "given_", [(5,), (2.5,), (0, 1, 0.1), (1, -2.0, -0.25), (3, 3.0), (0.5, 7), (7, 0, 2), (0, -1e-3)]
)
def test_ranges_of_floats(given_: Any) -> None:
    count = np.arange(*given_).size
    start, step = (0 if len(given_) == 1 else given_[0]), (given_[2] if len(given_) == 3 else 1)
    wanted = np.array([start + number * step for number in range(count)])
    for dtype in (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16):
        found = result(GraphBuilder().arange(*given_, dtype=dtype))
        np.testing.assert_array_equal(found, wanted.astype(dtype.numpy), strict=True)


def test_large_whole_numbers_are_exact() -> None:
    start = (1 << 62) + 1
    found = result(GraphBuilder().arange(start, start + 7, 3))
    assert found.tolist() == [start, start + 3, start + 6]


def test_the_dtype_follows_from_the_numbers() -> None:
    g = GraphBuilder()
    assert (g.arange(3).dtype, g.arange(3.0).dtype) == (DType.INT64, DType.FLOAT32)
    assert g.arange(0, 3, dtype="int8").dtype is DType.INT8


@cases_in_one_test
@pytest.mark.parametrize("dtype", DType)
def test_diagonals_of_every_dtype(dtype: DType) -> None:
    for rows, columns, k in ((3, 3, 0), (4, 2, -1), (2, 5, 2), (3, 3, 9), (0, 2, 0)):
        found = result(GraphBuilder().eye(rows, columns, k, dtype=dtype))
        np.testing.assert_array_equal(found, np.eye(rows, columns, k, dtype.numpy), strict=True)
    np.testing.assert_array_equal(result(GraphBuilder().eye(3)), np.eye(3, dtype=np.float32), strict=True)


@cases_in_one_test
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("dims", [(4, 4), (2, 3, 5), (2, 1, 5, 2)])
def test_triangles_of_every_dtype(dtype: DType, dims: tuple[int, ...]) -> None:
    x = (np.arange(np.prod(dims)) + 1).reshape(dims).astype(dtype.numpy)
    for k in (0, 1, -2, 9, -9):
        for name in ("tril", "triu"):
            g = GraphBuilder()
            found = result(getattr(g, name)(g.input("x", dims, dtype), k), x=x)
            np.testing.assert_array_equal(found, getattr(np, name)(x, k), strict=True)


def test_what_is_outside_of_a_triangle_may_be_anything() -> None:
    g = GraphBuilder()
    x = np.array([[1, np.nan], [2, np.inf]], np.float32)
    found = result(g.tril(g.input("x", (2, 2)), -1), x=x)
    np.testing.assert_array_equal(found, [[0, 0], [2, 0]])


def test_gradients_of_triangles() -> None:
    values = {"x": np.random.default_rng(0).uniform(-1, 1, (2, 3, 4))}
    check_gradients(lambda g, x: g.square(g.tril(x, 1) + g.triu(x)), values)


def hot(indices: np.ndarray, depth: int, axis: int, on: Any, off: Any) -> np.ndarray:
    """Element by element."""
    y = np.full((*indices.shape, depth), off)
    for place in np.ndindex(indices.shape):
        index = int(indices[place])
        if -depth <= index < depth:
            y[(*place, index)] = on
    return np.moveaxis(y, -1, axis)


@cases_in_one_test
@pytest.mark.parametrize("axis", [-1, 0, 1, 2, -3])
@pytest.mark.parametrize("dtype", ["int64", "int8", "uint8", "float32", "uint64"])
def test_one_hot(axis: int, dtype: Any) -> None:
    signed = not dtype.startswith("u")
    indices = np.array([[0, 2, 3], [-1 if signed else 1, -3 if signed else 4, -4 if signed else 9]], dtype)
    indices = indices + np.float32(0.5) * np.sign(indices) if dtype == "float32" else indices
    g = GraphBuilder()
    found = result(g.one_hot(g.input("i", (2, 3), dtype), 3, axis, on=7, off=-2), i=indices)
    wanted = hot(np.trunc(indices), 3, axis, 7, -2).astype(np.float32)
    np.testing.assert_array_equal(found, wanted, strict=True)


@cases_in_one_test
@pytest.mark.parametrize("dtype", DType)
def test_one_hot_of_every_dtype(dtype: DType) -> None:
    g = GraphBuilder()
    indices = np.array([1, -1, 5])
    found = result(g.one_hot(g.input("i", (3,), "int64"), 3, dtype=dtype), i=indices)
    np.testing.assert_array_equal(found, hot(indices, 3, -1, 1, 0).astype(dtype.numpy), strict=True)


@pytest.mark.parametrize(
    ("function", "field"),
    [
        (lambda g, x: g.arange(0, 3, 0), "step"),
        (lambda g, x: g.arange(0.0, float("inf")), "stop"),
        (lambda g, x: g.arange(0, 300, dtype="int8"), "stop"),
        (lambda g, x: g.arange(0, 1, 0.5, dtype="int8"), "stop"),
        (lambda g, x: g.tril(x[0]), "x"),
        (lambda g, x: g.one_hot(x, -1), "depth"),
        (lambda g, x: g.one_hot(x, 3, 4), "axis"),
        (lambda g, x: g.one_hot(x, 3, on=300, dtype="uint8"), "on"),
    ],
)
def test_what_does_not_fit_is_refused(function: Any, field: str) -> None:
    g = GraphBuilder()
    with pytest.raises(InvalidRequest) as caught:
        function(g, g.input("x", (2, 3)))
    assert caught.value.field == field
