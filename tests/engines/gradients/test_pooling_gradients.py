"""The gradients of max, average and Lp pooling: against loops, finite differences and PyTorch."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_actor.engines.base import Engine
from cudnn_actor.protocol import DType, Layout, TensorSpec
from cudnn_actor.protocol.operations import (
    AdaptiveWindow,
    AvgPool,
    AvgPoolBackward,
    LpPool,
    LpPoolBackward,
    MaxPool,
    MaxPoolBackward,
    Window,
)

from ...in_one_test import cases_in_one_test
from ..operations.test_pooling import FUZZ, each_pooling, exponents, lying, pooled, poolings
from ..pooling_oracle import (
    Windows,
    avg_pool_backward,
    lp_pool,
    lp_pool_backward,
    max_pool,
    max_pool_backward,
    output_dims,
)
from ..problems import FLOATS, normal
from ..references import assert_close
from ..workbench import Workbench, workbench

F64 = DType.FLOAT64


def max_gradient(
    bench: Workbench,
    dy: np.ndarray,
    index: np.ndarray,
    pool: Windows,
    dims: tuple[int, ...],
    *,
    layout: Layout = Layout.NCHW,
) -> np.ndarray:
    dtype = DType.of(dy.dtype)
    assert dtype is not None
    message = MaxPoolBackward(
        dy=bench.place(dy, lying(dy.shape, dtype, layout)),
        index=bench.place(index, lying(dy.shape, DType.INT64, layout)),
        dx=bench.empty(lying(dims, dtype, layout)),
        window=pool,
    )
    return bench.run(message)


def avg_gradient(
    bench: Workbench,
    dy: np.ndarray,
    pool: Windows,
    dims: tuple[int, ...],
    *,
    include_padding: bool,
    layout: Layout = Layout.NCHW,
) -> np.ndarray:
    dtype = DType.of(dy.dtype)
    assert dtype is not None
    message = AvgPoolBackward(
        dy=bench.place(dy, lying(dy.shape, dtype, layout)),
        dx=bench.empty(lying(dims, dtype, layout)),
        window=pool,
        include_padding=include_padding,
    )
    return bench.run(message)


def means(bench: Workbench, x: np.ndarray, pool: Windows, *, include_padding: bool) -> np.ndarray:
    y = bench.empty(TensorSpec.packed(pool.output_dims(x.shape), F64))
    return bench.run(AvgPool(x=bench.place(x), y=y, window=pool, include_padding=include_padding))


def in_all_directions(x: np.ndarray, step: float) -> np.ndarray:
    """As a batch: one image with each of its elements enlarged, and then with each made smaller."""
    steps = np.eye(x.size).reshape(x.size, *x.shape[1:]) * step
    return np.concatenate([x + steps, x - steps])


def differences(y: np.ndarray, dy: np.ndarray, dims: tuple[int, ...], step: float) -> np.ndarray:
    """The gradient of sum(dy * y) from the results of `in_all_directions`."""
    sums = (y * dy).sum(axis=tuple(range(1, y.ndim)))
    larger, smaller = np.split(sums, 2)
    gradient: np.ndarray = (larger - smaller) / (2 * step)
    return gradient.reshape(dims)


IMAGES: dict[str, tuple[tuple[int, ...], Windows]] = {
    "overlapping": ((1, 2, 5, 4), Window.symmetric(2, size=3, pad=1, stride=1)),
    "strided": ((1, 1, 6, 7), Window.symmetric(2, size=(2, 3), pad=(0, 1), stride=2)),
    "dilated": ((1, 2, 9), Window.symmetric(1, size=3, pad=1, stride=2, dilation=2)),
    "volume": ((1, 1, 3, 4, 3), Window.symmetric(3, size=2, pad=1, stride=1)),
    "adaptive": ((1, 2, 5, 7), AdaptiveWindow(output=(3, 4))),
    "adaptive, to more": ((1, 1, 2, 3), AdaptiveWindow(output=(5, 2))),
}


@cases_in_one_test
@pytest.mark.parametrize(("dims", "pool"), IMAGES.values(), ids=IMAGES)
def test_the_gradient_of_the_largest_is_its_slope(
    bench: Workbench, dims: tuple[int, ...], pool: Windows
) -> None:
    # Elements differ by 1 or more, and no step changes which one is the largest.
    x = np.random.default_rng(3).permutation(math.prod(dims)).reshape(dims).astype(np.float64)
    dy = normal(pool.output_dims(dims), F64, 1)
    moved, _ = pooled(bench, in_all_directions(x, 0.25), pool)
    _, index = pooled(bench, x, pool)
    got = max_gradient(bench, dy, index, pool, dims)
    np.testing.assert_allclose(got, differences(moved, dy, dims, 0.25), rtol=0, atol=1e-11)


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("include_padding", [False, True])
@pytest.mark.parametrize(("dims", "pool"), IMAGES.values(), ids=IMAGES)
def test_the_gradient_of_the_mean_is_its_slope(
    bench: Workbench, dims: tuple[int, ...], pool: Windows, include_padding: bool
) -> None:
    x, dy = normal(dims, F64, 0), normal(pool.output_dims(dims), F64, 1)
    moved = means(bench, in_all_directions(x, 0.25), pool, include_padding=include_padding)
    got = avg_gradient(bench, dy, pool, dims, include_padding=include_padding)
    np.testing.assert_allclose(got, differences(moved, dy, dims, 0.25), rtol=0, atol=1e-11)


def lp_gradient(
    bench: Workbench,
    given: tuple[np.ndarray, ...],
    pool: Windows,
    p: float,
    layout: Layout = Layout.NCHW,
) -> np.ndarray:
    """`given`: dy, x and y."""
    dtype = DType.of(given[0].dtype)
    assert dtype is not None
    dy, x, y = (bench.place(array, lying(array.shape, dtype, layout)) for array in given)
    dx = bench.empty(lying(x.spec.dims, dtype, layout))
    return bench.run(LpPoolBackward(dy=dy, x=x, y=y, dx=dx, window=pool, p=p))


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("p", [1.0, 2.0, 3.5])
@pytest.mark.parametrize(("dims", "pool"), IMAGES.values(), ids=IMAGES)
def test_the_gradient_of_the_norm_is_its_slope(
    bench: Workbench, dims: tuple[int, ...], pool: Windows, p: float
) -> None:
    x, dy = normal(dims, F64, 0), normal(pool.output_dims(dims), F64, 1)
    x += np.sign(x) / 4  # no step reaches 0, where p = 1 has no slope
    directions = in_all_directions(x, 1e-5)
    places = pool.output_dims(directions.shape)
    given, y = bench.place(directions), bench.empty(TensorSpec.packed(places, F64))
    moved = bench.run(LpPool(x=given, y=y, window=pool, p=p))
    got = lp_gradient(bench, (dy, x, lp_pool(x, pool, p)), pool, p)
    np.testing.assert_allclose(got, differences(moved, dy, dims, 1e-5), rtol=0, atol=1e-7)


@cases_in_one_test
@pytest.mark.each_value
@each_pooling
@pytest.mark.parametrize("layout", list(Layout))
def test_the_gradient_of_the_norm_in_any_layout(
    bench: Workbench, dims: tuple[int, ...], pool: Windows, layout: Layout
) -> None:
    x, dy = normal(dims, F64, 0), normal(pool.output_dims(dims), F64, 1)
    for p in exponents(dims, layout):
        got = lp_gradient(bench, (dy, x, lp_pool(x, pool, p)), pool, p, layout)
        assert_close(got, lp_pool_backward(dy, x, pool, p))


@cases_in_one_test
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_norm_of_zeros_and_of_huge_numbers_has_a_gradient(bench: Workbench, dtype: DType) -> None:
    pool, huge = Window.symmetric(1, size=2), float(np.finfo(np.float16).max) / 2
    x = np.array([[[0, 0, huge, 0, 1, -1]]]).astype(dtype.numpy)
    dy = np.ones((1, 1, 3), dtype.numpy)
    for p in (1.0, 2.0, 30.0):
        y = lp_pool(x.astype(np.float64), pool, p).astype(dtype.numpy)
        got = lp_gradient(bench, (dy, x, y), pool, p)
        edge = (1 / float(y[0, 0, 2])) ** (p - 1)
        assert_close(got, np.array([[[0, 0, 1, 0, edge, -edge]]]))


def test_a_window_whose_norm_is_given_as_zero_adds_nothing(bench: Workbench) -> None:
    x, dy, y = np.array([[[3.0, 1.0, 2.0]]]), np.ones((1, 1, 2)), np.array([[[0.0, 4.0]]])
    got = lp_gradient(bench, (dy, x, y), Window.symmetric(1, size=2, stride=1), 2.0)
    np.testing.assert_array_equal(got, [[[0, 0.25, 0.5]]])


@cases_in_one_test
@pytest.mark.each_value
@each_pooling
@pytest.mark.parametrize("layout", list(Layout))
def test_both_gradients_in_any_layout(
    bench: Workbench, dims: tuple[int, ...], pool: Windows, layout: Layout
) -> None:
    dy = normal(pool.output_dims(dims), F64, 1)
    _, index = max_pool(normal(dims, F64, 0), pool)
    got = max_gradient(bench, dy, index, pool, dims, layout=layout)
    assert_close(got, max_pool_backward(dy, index, pool, dims))
    for include in (False, True):
        got = avg_gradient(bench, dy, pool, dims, include_padding=include, layout=layout)
        assert_close(got, avg_pool_backward(dy, pool, dims, include_padding=include))


@cases_in_one_test
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_are_of_the_results_dtype_and_rounded_once(bench: Workbench, dtype: DType) -> None:
    dims, pool = (2, 2, 6, 5), Window.symmetric(2, size=3, pad=1, stride=1)
    dy = normal(dims, dtype, 1)
    wide = dy.astype(np.float64)
    _, index = max_pool(normal(dims, F64, 0), pool)
    got = max_gradient(bench, dy, index, pool, dims)
    assert got.dtype == dy.dtype
    assert_close(got, max_pool_backward(wide, index, pool, dims))
    got = avg_gradient(bench, dy, pool, dims, include_padding=False)
    assert got.dtype == dy.dtype
    assert_close(got, avg_pool_backward(wide, pool, dims, include_padding=False))


def test_an_element_that_is_the_largest_of_many_windows_gets_all_their_gradients(bench: Workbench) -> None:
    x = np.zeros((1, 1, 3, 3))
    x[0, 0, 1, 1] = 5
    pool = Window.symmetric(2, size=3, pad=1, stride=1)
    dy = np.arange(9.0).reshape(x.shape)
    _, index = pooled(bench, x, pool)
    got = max_gradient(bench, dy, index, pool, x.shape)
    np.testing.assert_array_equal(got, np.where(x == 5, dy.sum(), 0))


def test_gradients_of_int64_keep_every_bit(bench: Workbench) -> None:
    dy = np.array([[[2**53 + 1, -(2**62) - 1]]])  # no float64
    got = max_gradient(bench, dy, np.array([[[1, 2]]]), Window.symmetric(1, size=2), (1, 1, 4))
    assert got.ravel().tolist() == [0, 2**53 + 1, -(2**62) - 1, 0]


def test_an_index_outside_its_window_is_ignored(bench: Workbench) -> None:
    dims, pool = (2, 1, 8), Window.symmetric(1, size=2)
    # Of the first image: right, of the next window, of the other image, before x; then past x, a long way
    # past it, right, of the window before.
    index = np.array([[[1, 4, 12, -1]], [[16, 2**40, 13, 13]]])
    dy = 2.0 ** np.arange(8).reshape(2, 1, 4)
    wanted = np.zeros(dims)
    wanted[0, 0, 1], wanted[1, 0, 5] = 1, 64
    np.testing.assert_array_equal(max_gradient(bench, dy, index, pool, dims), wanted)


def test_an_index_in_the_padding_is_ignored_though_it_is_in_its_window(bench: Workbench) -> None:
    dims, pool = (1, 1, 4), Window.symmetric(1, size=3, pad=1, stride=1)
    index = np.array([[[-1, 0, 3, 4]]])
    got = max_gradient(bench, np.array([[[1.0, 2.0, 4.0, 8.0]]]), index, pool, dims)
    np.testing.assert_array_equal(got, [[[2, 0, 0, 4]]])


def test_an_index_between_the_elements_of_a_dilated_window_is_ignored(bench: Workbench) -> None:
    dims, pool = (1, 1, 5), Window.symmetric(1, size=3, stride=1, dilation=2)
    got = [max_gradient(bench, np.ones((1, 1, 1)), np.full((1, 1, 1), n), pool, dims).sum() for n in range(5)]
    assert got == [1, 0, 1, 0, 1]


@FUZZ
@given(case=poolings(), layout=st.sampled_from(Layout), include_padding=st.booleans())
def test_the_gradients_of_any_windows_that_fit(
    engine: Engine, case: tuple[tuple[int, ...], Windows], layout: Layout, include_padding: bool
) -> None:
    dims, pool = case
    places = output_dims(pool, dims)
    if places is None:
        return
    rng = np.random.default_rng([*dims])
    dy = rng.normal(size=places)
    index = rng.integers(-2, math.prod(dims) + 2, places)  # right by chance
    with workbench(engine) as bench:
        got = max_gradient(bench, dy, index, pool, dims, layout=layout)
        assert_close(got, max_pool_backward(dy, index, pool, dims))
        got = avg_gradient(bench, dy, pool, dims, include_padding=include_padding, layout=layout)
        assert_close(got, avg_pool_backward(dy, pool, dims, include_padding=include_padding))


def test_the_index_of_a_forward_pass_is_what_the_backward_pass_takes(bench: Workbench) -> None:
    dims, pool = (2, 3, 6, 6), Window.symmetric(2, size=3, pad=1, stride=2)
    x = bench.place(normal(dims, F64, 0))
    places = pool.output_dims(dims)
    y, index = bench.empty(TensorSpec.packed(places, F64)), bench.empty(TensorSpec.packed(places, "int64"))
    largest = bench.run(MaxPool(x=x, y=y, index=index, window=pool))
    got = bench.run(MaxPoolBackward(dy=y, index=index, dx=bench.empty(x.spec), window=pool))
    wanted = np.zeros(math.prod(dims))
    np.add.at(wanted, bench.read(index).ravel(), largest.ravel())
    assert_close(got.ravel(), wanted)
