"""Max, average and Lp pooling give what ONNX's definition gives, one window and one element at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_actor.engines.base import Engine
from cudnn_actor.protocol import (
    BufferRef,
    DType,
    GraphBuilder,
    InvalidRequest,
    Layout,
    Tensor,
    TensorSpec,
)
from cudnn_actor.protocol.operations import AdaptiveWindow, AvgPool, LpPool, MaxPool, Window

from ...in_one_test import cases_in_one_test
from ...whole import WHOLE, some
from ..pooling_oracle import Windows, avg_pool, flat_position, lp_pool, max_pool, output_dims
from ..problems import FLOATS, integers, normal
from ..references import assert_close
from ..workbench import Workbench, spread, workbench

INTEGERS = (DType.UINT8, DType.INT8, DType.INT32, DType.INT64)


def window(
    size: tuple[int, ...],
    pre: tuple[int, ...] | None = None,
    post: tuple[int, ...] | None = None,
    stride: tuple[int, ...] | None = None,
    dilation: tuple[int, ...] | None = None,
) -> Window:
    zeros, ones = (0,) * len(size), (1,) * len(size)
    return Window(
        size=size,
        pre_padding=pre or zeros,
        post_padding=post or zeros,
        stride=stride or ones,
        dilation=dilation or ones,
    )


POOLINGS: dict[str, tuple[tuple[int, ...], Windows]] = {
    "side by side": ((2, 3, 6, 8), Window.symmetric(2, size=2)),
    "overlapping": ((2, 3, 7, 6), Window.symmetric(2, size=3, pad=1, stride=2)),
    "asymmetric": ((1, 2, 6, 7), window((3, 3), pre=(0, 2), post=(2, 1))),
    "strided past the window": ((1, 2, 9, 11), window((2, 1), stride=(3, 4))),
    "dilated": ((2, 2, 9, 10), window((3, 2), pre=(2, 0), post=(1, 3), dilation=(2, 3), stride=(1, 2))),
    "unused elements at the end": ((1, 1, 8, 5), Window.symmetric(2, size=3, stride=3)),
    "whole input": ((2, 3, 4, 5), Window.symmetric(2, size=(4, 5))),
    "one of everything": ((1, 1, 1, 1), Window.symmetric(2, size=1)),
    "one dimension": ((2, 3, 13), Window.symmetric(1, size=4, pad=2, stride=3)),
    "three dimensions": (
        (2, 2, 4, 5, 6),
        window((2, 3, 2), pre=(1, 0, 0), post=(0, 2, 1), stride=(1, 2, 3), dilation=(2, 1, 1)),
    ),
    "adaptive": ((2, 3, 7, 10), AdaptiveWindow(output=(3, 4))),
    "adaptive, to one": ((2, 3, 5, 4), AdaptiveWindow(output=(1, 1))),
    "adaptive, to more": ((1, 2, 4, 3), AdaptiveWindow(output=(7, 5))),
    "adaptive, of a line": ((2, 2, 11), AdaptiveWindow(output=(4,))),
    "adaptive, of a volume": ((1, 2, 3, 5, 4), AdaptiveWindow(output=(2, 5, 6))),
}
each_pooling = pytest.mark.parametrize(("dims", "pool"), POOLINGS.values(), ids=POOLINGS)
EXPONENTS = (1.0, 2.0, 3.5)


def exponents(dims: tuple[int, ...], layout: Layout) -> tuple[float, ...]:
    """Those of a norm that is tested in this layout: in `make test`, each of them in one of the layouts."""
    turn = [*Layout].index(layout) + [*POOLINGS].index(next(n for n, of in POOLINGS.items() if of[0] == dims))
    return EXPONENTS if WHOLE else EXPONENTS[turn % 3 :][:1]


def values(dims: tuple[int, ...], dtype: DType, seed: int = 0) -> np.ndarray:
    return normal(dims, dtype, seed) if dtype.is_floating else integers(dims, dtype, seed)


def lying(dims: tuple[int, ...], dtype: DType, layout: Layout) -> TensorSpec:
    return spread(dims, dtype) if layout is Layout.STRIDED else TensorSpec.packed(dims, dtype, layout)


def pooled(bench: Workbench, x: np.ndarray, pool: Windows, layout: Layout = Layout.NCHW) -> list[np.ndarray]:
    """The largest elements, and where they were found, with all three buffers in a layout."""
    dtype = DType.of(x.dtype)
    assert dtype is not None
    dims = pool.output_dims(x.shape)
    given = bench.place(x, lying(x.shape, dtype, layout))
    y = bench.empty(lying(dims, dtype, layout))
    index = bench.empty(lying(dims, DType.INT64, layout))
    largest = bench.run(MaxPool(x=given, y=y, index=index, window=pool))
    alone = bench.run(MaxPool(x=given, y=bench.empty(y.spec), window=pool))
    assert alone.tobytes() == largest.tobytes()  # NumPy knows no NaN of bfloat16
    return [largest, bench.read(index)]


def assert_largest(bench: Workbench, x: np.ndarray, pool: Windows, layout: Layout = Layout.NCHW) -> None:
    got, wanted = pooled(bench, x, pool, layout), max_pool(x, pool)
    assert got[0].dtype == x.dtype
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one.astype(other.dtype), other)


def mean(bench: Workbench, x: BufferRef, y: BufferRef, pool: Windows, *, include_padding: bool) -> np.ndarray:
    return bench.run(AvgPool(x=x, y=y, window=pool, include_padding=include_padding))


@cases_in_one_test
@pytest.mark.each_value
@each_pooling
@pytest.mark.parametrize("layout", list(Layout))
def test_the_largest_element_and_its_index_in_any_layout(
    bench: Workbench, dims: tuple[int, ...], pool: Windows, layout: Layout
) -> None:
    assert_largest(bench, values(dims, DType.FLOAT32), pool, layout)


@cases_in_one_test
@pytest.mark.pairwise
@each_pooling
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("include_padding", [False, True])
def test_the_mean_in_any_layout(
    bench: Workbench, dims: tuple[int, ...], pool: Windows, layout: Layout, include_padding: bool
) -> None:
    x, wanted = values(dims, DType.FLOAT64), pool.output_dims(dims)
    given, y = bench.place(x, lying(dims, DType.FLOAT64, layout)), lying(wanted, DType.FLOAT64, layout)
    got = mean(bench, given, bench.empty(y), pool, include_padding=include_padding)
    assert_close(got, avg_pool(x, pool, include_padding=include_padding))


@cases_in_one_test
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_the_largest_of_every_dtype(bench: Workbench, dtype: DType) -> None:
    assert_largest(bench, values((2, 3, 7, 6), dtype), POOLINGS["overlapping"][1])


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("include_padding", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_mean_of_every_floating_dtype(bench: Workbench, dtype: DType, include_padding: bool) -> None:
    dims, pool = POOLINGS["overlapping"]
    x = values(dims, dtype)
    got = mean(
        bench,
        bench.place(x),
        bench.empty(TensorSpec.packed(pool.output_dims(dims), dtype)),
        pool,
        include_padding=include_padding,
    )
    assert got.dtype == x.dtype
    assert_close(got, avg_pool(x.astype(np.float64), pool, include_padding=include_padding))


def test_a_large_int64_loses_no_digit(bench: Workbench) -> None:
    x = np.array([[[2**62, 2**62 + 1, -(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1]]])
    largest, index = pooled(bench, x, Window.symmetric(1, size=2))
    assert largest.ravel().tolist() == [2**62 + 1, -(2**63) + 1, 2**63 - 1]
    assert index.ravel().tolist() == [1, 3, 5]


@cases_in_one_test
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_of_equal_elements_the_first_of_the_window_is_found(bench: Workbench, dtype: DType) -> None:
    x = np.zeros((2, 2, 5, 6), dtype.numpy)
    largest, index = pooled(bench, x, Window.symmetric(2, size=3, pad=1, stride=1))
    assert not largest.any()
    for place in np.ndindex(index.shape):
        n, c, row, column = place
        assert index[place] == flat_position((n, c, max(row - 1, 0), max(column - 1, 0)), x.shape)


def test_few_different_values_have_many_ties(bench: Workbench) -> None:
    x = np.random.default_rng(5).integers(0, 2, (2, 3, 7, 8)).astype(np.float32)
    assert_largest(bench, x, Window.symmetric(2, size=3, pad=1, stride=2))


def test_the_index_counts_in_row_major_order_whatever_the_layout(bench: Workbench) -> None:
    x = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4)  # each element is its own number
    for layout in Layout:
        largest, index = pooled(bench, x, Window.symmetric(2, size=2), layout)
        np.testing.assert_array_equal(index, largest)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_first_nan_is_larger_than_any_number(bench: Workbench, dtype: DType) -> None:
    x = np.array([[[np.inf, np.nan, 1, np.nan, -np.inf, 7]]]).astype(dtype.numpy)
    largest, index = pooled(bench, x, Window.symmetric(1, size=3, stride=1, pad=1))
    np.testing.assert_array_equal(largest.astype(float).ravel(), [np.nan] * 5 + [7])
    assert index.ravel().tolist() == [1, 1, 1, 3, 3, 5]


@pytest.mark.parametrize("dtype", FLOATS)
def test_padding_is_never_the_largest(bench: Workbench, dtype: DType) -> None:
    for lowest in (-np.inf, float(np.finfo(np.float16).min), -1.0):
        x = np.full((1, 2, 3, 3), lowest).astype(dtype.numpy)
        assert_largest(bench, x, Window.symmetric(2, size=3, pad=2))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_padding_is_never_the_largest_of_integers(bench: Workbench, dtype: DType) -> None:
    x = np.full((1, 2, 3, 3), np.iinfo(dtype.value).min, dtype.numpy)
    assert_largest(bench, x, Window.symmetric(2, size=3, pad=2))


def test_a_mean_takes_infinity_and_nan_from_its_own_window_only(bench: Workbench) -> None:
    x = np.array([[[1, np.inf, 2, 3, np.nan, 4, 5, 7, -np.inf, np.inf]]])
    y = bench.empty(TensorSpec.packed((1, 1, 5), DType.FLOAT64))
    got = mean(bench, bench.place(x), y, Window.symmetric(1, size=2), include_padding=False)
    np.testing.assert_array_equal(got, [[[np.inf, 2.5, np.nan, 6, np.nan]]])


def test_padding_counts_as_zeros_only_if_it_is_included(bench: Workbench) -> None:
    x, y = bench.place(np.full((1, 1, 3), 6.0)), bench.empty(TensorSpec.packed((1, 1, 3), DType.FLOAT64))
    pool = Window.symmetric(1, size=3, pad=1, stride=1)
    np.testing.assert_array_equal(mean(bench, x, y, pool, include_padding=False), [[[6, 6, 6]]])
    np.testing.assert_array_equal(mean(bench, x, y, pool, include_padding=True), [[[4, 6, 4]]])


def powers(
    bench: Workbench, x: np.ndarray, pool: Windows, p: float, layout: Layout = Layout.NCHW
) -> np.ndarray:
    dtype = DType.of(x.dtype)
    assert dtype is not None
    y = bench.empty(lying(pool.output_dims(x.shape), dtype, layout))
    return bench.run(LpPool(x=bench.place(x, lying(x.shape, dtype, layout)), y=y, window=pool, p=p))


@cases_in_one_test
@pytest.mark.each_value
@each_pooling
@pytest.mark.parametrize("layout", list(Layout))
def test_the_norm_in_any_layout(
    bench: Workbench, dims: tuple[int, ...], pool: Windows, layout: Layout
) -> None:
    x = values(dims, DType.FLOAT64)
    for p in exponents(dims, layout):
        assert_close(powers(bench, x, pool, p, layout), lp_pool(x, pool, p))


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_norm_of_every_dtype(bench: Workbench, dtype: DType, p: float) -> None:
    dims, pool = POOLINGS["overlapping"]
    x = values(dims, dtype)
    got = powers(bench, x, pool, p)
    assert got.dtype == x.dtype
    assert_close(got, lp_pool(x.astype(np.float64), pool, p))


def test_no_power_of_a_norm_overflows_or_vanishes(bench: Workbench) -> None:
    x = np.array([[[3e150, 4e150, -3e-200, 4e-200, 0, 0, np.inf, 1, np.nan, 1]]])
    for p, five in ((2.0, 5.0), (9.0, (3**9 + 4**9) ** (1 / 9))):
        got = powers(bench, x, Window.symmetric(1, size=2), p)
        wanted = [[[five * 1e150, five * 1e-200, 0, np.inf, np.nan]]]
        np.testing.assert_allclose(got, wanted, rtol=1e-12)


@pytest.mark.parametrize("p", [0.5, 0.0, -1.0, math.nan, math.inf])
def test_an_exponent_below_one_is_refused(bench: Workbench, p: float) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        powers(bench, np.ones((1, 1, 4)), Window.symmetric(1, size=2), p)
    assert refusal.value.field == "p"


@pytest.mark.parametrize("output", [(), (0,), (2, -1), (1, 1, 1, 1), (1.5,), 3])
def test_an_impossible_number_of_adaptive_windows_is_refused(output: object) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        AdaptiveWindow(output=output)  # type: ignore[arg-type]
    assert refusal.value.field == "output"


def test_adaptive_windows_are_of_the_spatial_dims_of_x() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        AdaptiveWindow(output=(2, 2)).output_dims((1, 1, 5))
    assert refusal.value.field == "x"


def test_every_number_of_adaptive_windows_over_every_number_of_elements(bench: Workbench) -> None:
    for size, count in itertools.product(range(1, 9), repeat=2):
        x, pool = values((1, 1, size), DType.FLOAT64), AdaptiveWindow(output=(count,))
        assert_largest(bench, x, pool)
        y = bench.empty(TensorSpec.packed((1, 1, count), DType.FLOAT64))
        assert_close(
            mean(bench, bench.place(x), y, pool, include_padding=False),
            avg_pool(x, pool, include_padding=False),
        )


FUNCTIONS: dict[str, tuple[Callable[[GraphBuilder, Tensor], Tensor], Callable[[np.ndarray], np.ndarray]]] = {
    "lp_pool": (
        lambda g, x: g.lp_pool(x, 3, 3.0, pad=1, stride=2, dilation=1),
        lambda x: lp_pool(x, Window.symmetric(2, size=3, pad=1, stride=2), 3.0),
    ),
    "adaptive_max_pool": (
        lambda g, x: g.adaptive_max_pool(x, (3, 2)),
        lambda x: max_pool(x, AdaptiveWindow(output=(3, 2)))[0],
    ),
    "adaptive_avg_pool": (
        lambda g, x: g.adaptive_avg_pool(x, 3),
        lambda x: avg_pool(x, AdaptiveWindow(output=(3, 3)), include_padding=False),
    ),
    "global_max_pool": (lambda g, x: g.global_max_pool(x), lambda x: x.max((2, 3), keepdims=True)),
    "global_avg_pool": (lambda g, x: g.global_avg_pool(x), lambda x: x.mean((2, 3), keepdims=True)),
    "global_lp_pool of 1": (
        lambda g, x: g.global_lp_pool(x, 1.0),
        lambda x: np.abs(x).sum((2, 3), keepdims=True),
    ),
    "global_lp_pool of 2": (
        lambda g, x: g.global_lp_pool(x),
        lambda x: np.sqrt((x * x).sum((2, 3), keepdims=True)),
    ),
    "global_lp_pool of 3": (
        lambda g, x: g.global_lp_pool(x, 3.0),
        lambda x: np.cbrt((np.abs(x) ** 3).sum((2, 3), keepdims=True)),
    ),
}


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
def test_functions_of_a_graph(bench: Workbench, name: str, layout: Layout) -> None:
    function, wanted = FUNCTIONS[name]
    x = values((2, 3, 7, 5), DType.FLOAT64)
    g = GraphBuilder()
    body = g.build(y=function(g, g.input("x", x.shape, DType.FLOAT64, layout=layout))).body
    (uid,) = (uid for uid in body.bound if uid not in body.written)
    (got,) = bench.run_graph(body, {uid: x}).values()
    assert_close(got, wanted(x))


@pytest.mark.parametrize("name", ["global_max_pool", "global_avg_pool", "global_lp_pool"])
def test_a_global_pooling_needs_spatial_dims(name: str) -> None:
    g = GraphBuilder()
    with pytest.raises(InvalidRequest) as refusal:
        getattr(g, name)(g.input("x", (2, 3)))
    assert refusal.value.field == "x"


def refused(pool: Windows, dims: tuple[int, ...]) -> bool:
    """Whether the windows do not fit; if they do, there are as many as the loops find."""
    wanted = output_dims(pool, dims)
    if wanted is not None:
        assert pool.output_dims(dims) == wanted
        return False
    with pytest.raises(InvalidRequest) as refusal:
        pool.output_dims(dims)
    assert refusal.value.field.startswith("window.")
    return True


def test_exactly_the_windows_without_an_element_are_refused() -> None:
    each = itertools.product(
        range(1, 5), range(1, 4), range(7), range(7), range(1, 4), range(1, 5)
    )  # every one of them: what is wrong here is wrong for few
    answers = [
        refused(window((taps,), (pre,), (post,), (step,), (gap,)), (1, 1, size))
        for size, taps, pre, post, step, gap in each
    ]
    assert {True, False} == set(answers)


@st.composite
def poolings(draw: st.DrawFn) -> tuple[tuple[int, ...], Windows]:
    """Any dims and windows, also those that do not fit."""
    rank = draw(st.integers(1, 3))

    def each(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(least, most)) for _ in range(rank))

    pool: Windows = window(each(1, 3), each(0, 3), each(0, 3), each(1, 3), each(1, 3))
    if draw(st.integers(0, 3)) == 0:
        pool = AdaptiveWindow(output=each(1, 8))
    return (draw(st.integers(1, 2)), draw(st.integers(1, 3)), *each(1, 6)), pool


FUZZ = settings(max_examples=some(100), print_blob=True)


@FUZZ
@given(data=st.data(), case=poolings(), dtype=st.sampled_from([*FLOATS, *INTEGERS]))
def test_any_windows_that_fit_give_what_the_loops_give(
    engine: Engine, data: st.DataObject, case: tuple[tuple[int, ...], Windows], dtype: DType
) -> None:
    dims, pool = case
    if refused(pool, dims):
        return
    x, layout = values(dims, dtype, math.prod(dims)), data.draw(st.sampled_from(Layout))
    if data.draw(st.booleans()):
        x = np.sign(x).astype(x.dtype)  # ties
    with workbench(engine) as bench:
        assert_largest(bench, x, pool, layout)
        if dtype.is_floating:
            include_padding = data.draw(st.booleans())
            y = bench.empty(lying(pool.output_dims(dims), dtype, layout))
            given = bench.place(x, lying(dims, dtype, layout))
            got = mean(bench, given, y, pool, include_padding=include_padding)
            wanted = avg_pool(x.astype(np.float64), pool, include_padding=include_padding)
            assert_close(got, wanted)
