"""The gradients of max and average pooling: against loops, finite differences and PyTorch."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_actor.engines.base import Engine
from cudnn_actor.protocol import DType, Layout, TensorSpec
from cudnn_actor.protocol.operations import AvgPool, AvgPoolBackward, MaxPool, MaxPoolBackward, Window

from .pooling_oracle import avg_pool_backward, max_pool, max_pool_backward, output_dims
from .problems import FLOATS, normal
from .references import assert_close
from .test_pooling import FUZZ, each_pooling, lying, pooled, poolings
from .workbench import Workbench, workbench

F64 = DType.FLOAT64


def max_gradient(
    bench: Workbench,
    dy: np.ndarray,
    index: np.ndarray,
    pool: Window,
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
    pool: Window,
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


def means(bench: Workbench, x: np.ndarray, pool: Window, *, include_padding: bool) -> np.ndarray:
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


IMAGES: dict[str, tuple[tuple[int, ...], Window]] = {
    "overlapping": ((1, 2, 5, 4), Window.symmetric(2, size=3, pad=1, stride=1)),
    "strided": ((1, 1, 6, 7), Window.symmetric(2, size=(2, 3), pad=(0, 1), stride=2)),
    "dilated": ((1, 2, 9), Window.symmetric(1, size=3, pad=1, stride=2, dilation=2)),
    "volume": ((1, 1, 3, 4, 3), Window.symmetric(3, size=2, pad=1, stride=1)),
}


@pytest.mark.parametrize(("dims", "pool"), IMAGES.values(), ids=IMAGES)
def test_the_gradient_of_the_largest_is_its_slope(
    bench: Workbench, dims: tuple[int, ...], pool: Window
) -> None:
    # Elements differ by 1 or more, and no step changes which one is the largest.
    x = np.random.default_rng(3).permutation(math.prod(dims)).reshape(dims).astype(np.float64)
    dy = normal(pool.output_dims(dims), F64, 1)
    moved, _ = pooled(bench, in_all_directions(x, 0.25), pool)
    _, index = pooled(bench, x, pool)
    got = max_gradient(bench, dy, index, pool, dims)
    np.testing.assert_allclose(got, differences(moved, dy, dims, 0.25), rtol=0, atol=1e-11)


@pytest.mark.parametrize("include_padding", [False, True])
@pytest.mark.parametrize(("dims", "pool"), IMAGES.values(), ids=IMAGES)
def test_the_gradient_of_the_mean_is_its_slope(
    bench: Workbench, dims: tuple[int, ...], pool: Window, include_padding: bool
) -> None:
    x, dy = normal(dims, F64, 0), normal(pool.output_dims(dims), F64, 1)
    moved = means(bench, in_all_directions(x, 0.25), pool, include_padding=include_padding)
    got = avg_gradient(bench, dy, pool, dims, include_padding=include_padding)
    np.testing.assert_allclose(got, differences(moved, dy, dims, 0.25), rtol=0, atol=1e-11)


@each_pooling
@pytest.mark.parametrize("layout", list(Layout))
def test_both_gradients_in_any_layout(
    bench: Workbench, dims: tuple[int, ...], pool: Window, layout: Layout
) -> None:
    dy = normal(pool.output_dims(dims), F64, 1)
    _, index = max_pool(normal(dims, F64, 0), pool)
    got = max_gradient(bench, dy, index, pool, dims, layout=layout)
    assert_close(got, max_pool_backward(dy, index, pool, dims))
    for include in (False, True):
        got = avg_gradient(bench, dy, pool, dims, include_padding=include, layout=layout)
        assert_close(got, avg_pool_backward(dy, pool, dims, include_padding=include))


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
    engine: Engine, case: tuple[tuple[int, ...], Window], layout: Layout, include_padding: bool
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
