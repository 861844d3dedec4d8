"""Reductions, arg-reductions and running sums and products, against NumPy, SciPy and Python's integers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import scipy.special

from cudnn_actor.engines.cpu.exact.evaluation import NumPy, exact, round_into
from cudnn_actor.protocol import (
    ArgReduction,
    BufferRef,
    Cumulative,
    DType,
    GraphBuilder,
    InvalidRequest,
    Reduction,
    ReductionMode,
    TensorSpec,
)
from cudnn_actor.protocol.messages.lowering import lower

from ...in_one_test import cases_in_one_test
from ...whole import pairwise
from ..problems import normal
from ..references import TOLERANCES
from ..remembered import remembered
from ..workbench import Workbench, spread

Mode = ReductionMode
FLOATS = [dtype for dtype in DType if dtype.is_floating]
WHOLE = [dtype for dtype in DType if not dtype.is_floating]
EXACT = [mode for mode in Mode if mode.is_exact]
BOTH = (False, True)
OF_FLOATS: dict[ReductionMode, Callable[[Any], Any]] = {
    Mode.SUM: math.fsum,
    Mode.PRODUCT: math.prod,
    Mode.MIN: min,
    Mode.MAX: max,
    Mode.ABSOLUTE_MAX: lambda x: max(map(abs, x)),
    Mode.L1: lambda x: np.linalg.norm(x, 1),
    Mode.SUM_OF_SQUARES: lambda x: np.dot(x, x),
    Mode.L2: np.linalg.norm,
    Mode.MEAN: lambda x: math.fsum(x) / len(x),
    Mode.LOG_SUM: lambda x: math.log(math.fsum(x)),
    Mode.LOG_SUM_EXP: scipy.special.logsumexp,
}
"""Of one group, a vector of float64."""
OF_INTEGERS: dict[ReductionMode, Callable[[list[int]], int]] = {
    Mode.SUM: sum,
    Mode.PRODUCT: math.prod,
    Mode.MIN: min,
    Mode.MAX: max,
    Mode.ABSOLUTE_MAX: lambda x: min(max(map(abs, x)), max(2**63 - 1, *x)),
    Mode.L1: lambda x: sum(map(abs, x)),
    Mode.SUM_OF_SQUARES: lambda x: sum(value * value for value in x),
}
OF_NOTHING = {
    Mode.PRODUCT: 1,
    Mode.MIN: math.inf,
    Mode.MAX: -math.inf,
    Mode.MEAN: math.nan,
    Mode.LOG_SUM: -math.inf,
    Mode.LOG_SUM_EXP: -math.inf,
}
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = [
    ((6, 37), (-1,)),
    ((6, 37), (0,)),
    ((3, 4, 5, 2), (1, -1)),
    ((2, 3, 4, 5), (1, 2)),
    ((2, 3, 4), None),
    ((2, 3), ()),
    ((), None),
    ((2, 1, 4100), (2,)),
]


def of(bench: Workbench, array: Any, *, gaps: bool = False) -> BufferRef:
    array = np.asarray(array)
    dtype = DType(array.dtype.name)
    return bench.place(array, spread(array.shape, dtype) if gaps else TensorSpec.packed(array.shape, dtype))


def result_of(bench: Workbench, message: Any, dtype: DType | None = None) -> np.ndarray:
    """What a message without a result computes, into one of the inferred spec, or of another dtype."""
    spec = message.infer({"x": message.x.spec})["y"]
    y = bench.empty(TensorSpec.packed(spec.dims, dtype or spec.dtype))
    return bench.run(msgspec.structs.replace(message, y=y))


@remembered
def reduced(x: np.ndarray, axes: tuple[int, ...] | None, function: Any, *, keep: bool) -> np.ndarray:
    """Each group's result, one group after the other."""
    along = {axis % x.ndim for axis in (range(x.ndim) if axes is None else axes)}
    dims = [1 if axis in along else size for axis, size in enumerate(x.shape)]
    result = np.empty(dims)
    for place in np.ndindex(*dims):
        group = tuple(slice(None) if axis in along else at for axis, at in enumerate(place))
        result[place] = function(np.ravel(x[group]))
    return result if keep else result.reshape([s for axis, s in enumerate(dims) if axis not in along])


def close(got: np.ndarray, wanted: np.ndarray, terms: int = 1) -> None:
    """Within the rounding of the result, and of a sum of float32."""
    error = TOLERANCES[DType(got.dtype.name)]
    np.testing.assert_allclose(
        got.astype(np.float64), wanted.astype(np.float64), rtol=4 * error, atol=terms * error / 4
    )


def some_integers(dtype: DType, dims: tuple[int, ...]) -> np.ndarray:
    if dtype is DType.BOOL:
        return np.random.default_rng(5).random(dims) < 0.9
    limits = np.iinfo(dtype.value)
    x = np.random.default_rng(3).integers(limits.min, limits.max, dims, dtype.numpy, endpoint=True)
    x[0] = np.clip(x[0], 0, 3)  # some that do not wrap around
    x[1, 2:] = 1
    return x


def wide(dtype: DType) -> DType:
    return DType.UINT64 if dtype is DType.UINT64 else DType.INT64


def wrapped(value: int, dtype: DType) -> int:
    value %= 1 << 64
    return value - (1 << 64) if wide(dtype) is DType.INT64 and value >= 1 << 63 else value


def saturated(value: int, dtype: DType) -> int | bool:
    if dtype is DType.BOOL:
        return value != 0
    limits = np.iinfo(dtype.value)
    return min(max(value, int(limits.min)), int(limits.max))


# Reductions.


@cases_in_one_test
@pytest.mark.parametrize("mode", Mode)
def test_floats(bench: Workbench, mode: Mode) -> None:
    kinds = zip(FLOATS, itertools.cycle(BOTH), strict=False)
    cases = pairwise(itertools.product(SHAPES, kinds, BOTH), lambda case: case)
    for (dims, axes), (dtype, keep), gaps in cases:
        x = normal(dims, dtype, 1)
        if mode is Mode.LOG_SUM:
            x = (np.abs(x) + 0.5).astype(x.dtype)
        elif mode is Mode.PRODUCT:
            x = (np.sign(x) * (1 + np.abs(x) / 1024)).astype(x.dtype)
        message = Reduction(x=of(bench, x, gaps=gaps), mode=mode, axes=axes, keep_dims=keep)
        got = result_of(bench, message)
        assert got.dtype == x.dtype
        close(got, reduced(x.astype(np.float64), axes, OF_FLOATS[mode], keep=keep), x.size)


@cases_in_one_test
@pytest.mark.parametrize("dtype", WHOLE)
def test_integers_are_exact_wrap_around_and_saturate(bench: Workbench, dtype: DType) -> None:
    x = some_integers(dtype, (3, 130))
    for mode, given in itertools.product(EXACT, (None, dtype, DType.UINT8, DType.BOOL)):
        wanted = [wrapped(OF_INTEGERS[mode]([int(value) for value in row]), dtype) for row in x]
        got = result_of(bench, Reduction(x=of(bench, x), mode=mode, axes=(1,)), given)
        if given is None:
            assert got.dtype == (dtype if mode.selects else wide(dtype)).numpy
        assert got.tolist() == [saturated(value, DType(got.dtype.name)) for value in wanted]


def test_the_least_int64_has_the_largest_magnitude(bench: Workbench) -> None:
    x = of(bench, np.array([5, -(2**63), 7]))
    assert int(result_of(bench, Reduction(x=x, mode=Mode.ABSOLUTE_MAX))) == 2**63 - 1


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("axis", [0, 1])
def test_nan_is_handed_on_from_anywhere(bench: Workbench, dtype: DType, axis: int) -> None:
    x = np.full((4, 33), 1.5, dtype.numpy)
    x[0, 0] = x[1, 32] = x[2, 16] = np.nan
    for mode in Mode:
        got = result_of(bench, Reduction(x=of(bench, x if axis else x.T), mode=mode, axes=(axis,)))
        np.testing.assert_array_equal(np.isnan(got), [True, True, True, False], mode)


@cases_in_one_test
@pytest.mark.parametrize(
    ("group", "wanted"),
    [
        ([-math.inf, -math.inf], -math.inf),
        ([math.inf, math.inf, 0.0], math.inf),
        ([-math.inf, 3.0], 3.0),
        ([math.inf, -math.inf], math.inf),
        ([1e4, 1e4], 1e4 + math.log(2)),
        ([-1e4, -1e4], -1e4 + math.log(2)),
        ([math.nan, math.inf], math.nan),
    ],
)
def test_log_sum_exp_of_extremes(bench: Workbench, group: list[float], wanted: float) -> None:
    x = of(bench, np.array(group, np.float32))
    np.testing.assert_allclose(result_of(bench, Reduction(x=x, mode=Mode.LOG_SUM_EXP)), wanted, rtol=1e-6)


@cases_in_one_test
@pytest.mark.parametrize("mode", Mode)
def test_of_no_elements(bench: Workbench, mode: Mode) -> None:
    x = of(bench, np.empty((2, 0, 3), np.float32))
    got = result_of(bench, Reduction(x=x, mode=mode, axes=(1,)))
    np.testing.assert_array_equal(got, np.full((2, 3), OF_NOTHING.get(mode, 0)))
    assert result_of(bench, Reduction(x=x, mode=mode, axes=(0,))).shape == (0, 3)
    if mode.is_exact:
        message = Reduction(x=of(bench, np.empty((2, 0), np.int8)), mode=mode, axes=(1,))
        wanted = {Mode.PRODUCT: 1, Mode.MIN: 127, Mode.MAX: -128}.get(mode, 0)
        assert result_of(bench, message, DType.INT8).tolist() == [wanted] * 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_float_result_may_be_wider_or_narrower(bench: Workbench, dtype: DType) -> None:
    x = normal((4, 50), DType.BFLOAT16, 2)
    got = result_of(bench, Reduction(x=of(bench, x), mode=Mode.MEAN, axes=(1,)), dtype)
    wanted = x.astype(np.float64).mean(axis=1)
    np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=TOLERANCES[dtype] + 1e-5)


# Places.


@cases_in_one_test
@pytest.mark.parametrize("dtype", DType)
def test_places_of_extremes(bench: Workbench, dtype: DType) -> None:
    x = np.random.default_rng(4).integers(0, 5, (3, 40, 6)).astype(dtype.numpy)  # full of equals
    if dtype is DType.UINT64:
        x += np.uint64(2**63)
    for mode, axis, keep in itertools.product((Mode.MAX, Mode.MIN), (0, 1, -1), BOTH):
        find: Any = np.argmax if mode is Mode.MAX else np.argmin
        message = ArgReduction(x=of(bench, x, gaps=keep), mode=mode, axis=axis, keep_dims=keep)
        got = result_of(bench, message)
        np.testing.assert_array_equal(got, find(x, axis=axis, keepdims=keep))
        assert got.dtype == np.int64


@pytest.mark.parametrize("mode", [Mode.MAX, Mode.MIN])
def test_the_first_nan_is_found_before_any_number(bench: Workbench, mode: Mode) -> None:
    x = np.arange(400, dtype=np.float32).reshape(4, 100)
    x[0, 99] = x[1, 40] = x[1, 70] = x[2, 0] = np.nan
    x[3, 50:52] = np.inf if mode is Mode.MAX else -np.inf
    assert result_of(bench, ArgReduction(x=of(bench, x), mode=mode, axis=1)).tolist() == [99, 40, 0, 50]


# Running sums and products.


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("mode", [Mode.SUM, Mode.PRODUCT])
def test_running_sums_and_products(bench: Workbench, dtype: DType, mode: Mode) -> None:
    dims = (2, 70, 3)
    if dtype.is_floating:
        x = (1 + normal(dims, dtype, 6).astype(np.float64) / 64).astype(dtype.numpy)
    else:
        x = some_integers(dtype, dims)
    for axis, exclusive, reverse in itertools.product((0, 1, -1), BOTH, BOTH):
        message = Cumulative(
            x=of(bench, x, gaps=bool(axis)), mode=mode, axis=axis, exclusive=exclusive, reverse=reverse
        )
        got = result_of(bench, message)
        wanted = one_by_one(x, axis, mode, exclusive=exclusive, reverse=reverse)
        if dtype.is_floating:
            close(got, wanted, dims[axis])
        else:
            assert got.dtype == wide(dtype).numpy
            assert got.ravel().tolist() == [wrapped(value, dtype) for value in wanted.ravel()]


@remembered
def one_by_one(x: np.ndarray, axis: int, mode: Mode, *, exclusive: bool, reverse: bool) -> np.ndarray:
    lines = np.moveaxis(x, axis, -1)
    result = np.empty(lines.shape, object)
    number = int if x.dtype.kind in "iub" else float
    for place in np.ndindex(lines.shape[:-1]):
        total: Any = 0 if mode is Mode.SUM else 1
        along = range(x.shape[axis])
        for j in reversed(along) if reverse else along:
            value, before = number(lines[(*place, j)]), total
            total = total + value if mode is Mode.SUM else total * value
            result[(*place, j)] = before if exclusive else total
    return np.moveaxis(result, -1, axis)


@pytest.mark.parametrize("dims", [(0,), (2, 0), (0, 3)])
def test_running_sums_of_no_elements(bench: Workbench, dims: tuple[int, ...]) -> None:
    for exclusive in BOTH:
        message = Cumulative(x=of(bench, np.empty(dims)), mode=Mode.SUM, axis=0, exclusive=exclusive)
        assert result_of(bench, message).shape == dims


def test_an_infinite_element_does_not_reach_what_is_before_it(bench: Workbench) -> None:
    x = of(bench, np.array([1, np.inf, 2, np.nan, 3], np.float32))
    got = result_of(bench, Cumulative(x=x, mode=Mode.SUM, axis=0, exclusive=True))
    np.testing.assert_array_equal(got, [0, 1, np.inf, np.inf, np.nan])


# Mistakes, and the values of a check.


@cases_in_one_test
@pytest.mark.parametrize(
    ("operation", "fields", "field"),
    [
        (Reduction, {"mode": Mode.SUM, "axes": (2,)}, "axes"),
        (Reduction, {"mode": Mode.SUM, "axes": (1, -1)}, "axes"),
        (Reduction, {"mode": "median", "axes": (1,)}, "mode"),
        (Reduction, {"mode": Mode.SUM, "axes": (0,)}, "y"),
        (Reduction, {"mode": Mode.SUM, "axes": (1,), "keep_dims": True}, "y"),
        (ArgReduction, {"mode": Mode.SUM, "axis": 0}, "mode"),
        (ArgReduction, {"mode": Mode.MAX, "axis": -3}, "axis"),
        (Cumulative, {"mode": Mode.MAX, "axis": 0}, "mode"),
        (Cumulative, {"mode": Mode.SUM, "axis": 2}, "axis"),
    ],
)
def test_a_mistake_names_its_field(
    bench: Workbench, operation: Any, fields: dict[str, Any], field: str
) -> None:
    x, y = (bench.empty(TensorSpec.packed(dims)) for dims in ((3, 5), (3,)))
    with pytest.raises(InvalidRequest) as caught:
        lower(operation(x=x, y=y, **fields))
    assert caught.value.field == field


def test_a_mistake_in_dtypes_names_its_field(bench: Workbench) -> None:
    def of_dims(dims: tuple[int, ...], dtype: DType) -> BufferRef:
        return bench.empty(TensorSpec.packed(dims, dtype))

    whole, real, none = of_dims((4,), DType.INT32), of_dims((4,), DType.FLOAT32), of_dims((0,), DType.INT32)
    one_whole, one_real = of_dims((), DType.INT32), of_dims((), DType.FLOAT32)
    given: list[tuple[Any, str]] = [
        (Reduction(x=whole, y=one_real, mode=Mode.MEAN), "x"),
        (Reduction(x=whole, y=one_real, mode=Mode.SUM), "y"),
        (Reduction(x=real, y=one_whole, mode=Mode.SUM), "y"),
        (ArgReduction(x=real, y=one_whole, mode=Mode.MAX, axis=0), "y"),
        (ArgReduction(x=none, y=one_whole, mode=Mode.MAX, axis=0), "x"),
    ]
    for message, field in given:
        with pytest.raises(InvalidRequest) as caught:
            lower(message)
        assert caught.value.field == field


@cases_in_one_test
@pytest.mark.parametrize("mode", Mode)
def test_elements_of_samples_follow_from_the_numbers_in_their_places_where_it_is_said(mode: Mode) -> None:
    operation = Reduction(x=0, y=1, mode=mode, axes=(1,))
    drawn, numbers = np.random.default_rng(5).integers(-3, 5, (3, 5000)), np.arange(-3.0, 5.0)
    specs = {"x": TensorSpec.packed(drawn.shape)}
    (whole,) = operation.samples(NumPy(), specs, lambda _: drawn.astype(np.float64)).values()
    if operation.samples_of_each:
        (each,) = operation.samples(np, specs, lambda _: numbers).values()
        np.testing.assert_array_equal(each[drawn + 3], whole)
    else:
        assert len({*zip(drawn.flat, whole.flat, strict=True)}) > len(numbers)


@cases_in_one_test
@pytest.mark.parametrize("mode", Mode)
def test_a_check_sees_what_a_plan_leaves_out_or_mixes_up(mode: Mode) -> None:
    """In groups of any length; and the values have a finite result."""
    numpy, rng = NumPy(), np.random.default_rng(8)
    operation = Reduction(x=0, y=1, mode=mode, axes=(1,))
    for dtype, length in itertools.product(DType if mode.is_exact else FLOATS, (2, 40, 5000)):
        spec = TensorSpec.packed((48, length), dtype)
        specs = {"x": spec} | operation.infer({"x": spec})
        values = operation.samples(numpy, specs, lambda s: rng.integers(-3, 5, s.dims).astype(np.float64))
        x = np.empty(spec.dims, dtype.numpy)
        round_into(values["x"], dtype, x)
        x = exact(x)
        wanted, first, second = (
            operation.evaluate(numpy, {"x": part}, specs)["y"]
            for part in (x, x[:, : length // 2], x[:, length // 2 :])
        )
        assert np.isfinite(wanted.astype(specs["y"].dtype.numpy).astype(np.float64)).all()
        assert (first != wanted).any()
        assert (second != wanted).any()
        assert (np.roll(wanted, 1) != wanted).any()


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("dims", [(4, 5), (4, 0), (0, 5)])
@pytest.mark.parametrize("dtype", DType)
def test_all_and_any_are_numpys(bench: Workbench, dtype: DType, dims: tuple[int, int]) -> None:
    rows = np.array([[0, 0, 0, 0, 0], [1, 2, 3, 4, 5], [0, 3, 0, 0, 0], [-1, 0, 1, 1, 1]])
    x = rows[: dims[0], : dims[1]].astype(np.float64).astype(dtype.numpy)
    if dtype.is_floating and x.size:
        x[1, 2] = math.nan  # is not 0
    g = GraphBuilder()
    given = g.input("x", dims, dtype)
    made = {
        "all": g.all(given, 1),
        "any": g.any(given, 1, keepdims=True),
        "every": given.all(),
        "some": given.any(axis=(0, 1)),
    }
    graph = g.build(made)
    wanted = {"all": x.all(1), "any": x.any(1, keepdims=True), "every": x.all(), "some": x.any()}
    given_x = {port.uid: x for port in graph.inputs if port.uid is not None}
    found = {graph.names_of[uid]: y for uid, y in bench.run_graph(graph.body, given_x).items()}
    assert [port.spec.dtype for port in graph.outputs] == [DType.BOOL] * 4
    for name, y in wanted.items():
        np.testing.assert_array_equal(found[name], y, err_msg=name)
