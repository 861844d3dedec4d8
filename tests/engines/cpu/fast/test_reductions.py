"""Reductions in the fast CPU engine."""

from __future__ import annotations

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import round_into
from cudnn_actor.engines.cpu.fast.folding import Folding
from cudnn_actor.engines.cpu.fast.reductions import reduction
from cudnn_actor.protocol import DType, TensorSpec
from cudnn_actor.protocol.operations import Reduction, ReductionMode

from ....in_one_test import cases_in_one_test
from .kernel_cases import check
from .kernel_runs import LANES, run_kernel

MAKES = {Reduction: reduction}


def test_random_problems_are_right_within_their_bounds_on_any_number_of_lanes() -> None:
    check("reduction", MAKES, 100)


@cases_in_one_test
@pytest.mark.parametrize("mode", ReductionMode)
@pytest.mark.parametrize(("dims", "axes"), [((2, 90_000), (1,)), ((6000, 30), (0,)), ((3, 7, 9000), None)])
def test_long_lines_are_cut_into_pieces(
    mode: ReductionMode, dims: tuple[int, ...], axes: tuple[int, ...] | None
) -> None:
    x = np.random.default_rng(7).standard_normal(dims, np.float32)
    if mode is ReductionMode.LOG_SUM:
        x = np.abs(x)
    elif mode is ReductionMode.PRODUCT:
        x = np.where(np.abs(x) < 4, np.sign(x), np.float32(1.5))
    operation = Reduction(x="x", y="y", mode=mode, axes=axes, keep_dims=True)
    specs = {"x": TensorSpec.packed(dims)}
    specs |= operation.infer(specs)
    first, *others = (run_kernel(reduction, operation, specs, {"x": x}, lanes)["y"] for lanes in LANES)
    assert all(np.array_equal(first, other) for other in others)
    wanted = operation.evaluate(np, {"x": x.astype(np.float64)}, specs)["y"]
    size = np.sqrt(x.size) if mode in (ReductionMode.SUM, ReductionMode.MEAN) else 1.0
    np.testing.assert_allclose(first, wanted, rtol=1e-5, atol=1e-6 * size)


@cases_in_one_test
@pytest.mark.parametrize(
    "values", [[np.inf, 1], [-np.inf, -np.inf], [np.nan, 1], [np.inf, -np.inf], [-np.inf, 2]]
)
@pytest.mark.parametrize("mode", ReductionMode)
def test_infinity_and_nan_give_what_they_give_in_the_definition(
    mode: ReductionMode, values: list[float]
) -> None:
    x = np.tile(np.array(values, np.float32), (20, 1))
    operation = Reduction(x="x", y="y", mode=mode, axes=(1,))
    specs = {"x": TensorSpec.packed((20, 2)), "y": TensorSpec.packed((20,))}
    found = run_kernel(reduction, operation, specs, {"x": x}, 1)["y"]
    with np.errstate(all="ignore"):
        wanted = operation.evaluate(np, {"x": x.astype(np.float64)}, specs)["y"]
    np.testing.assert_array_equal(found, wanted.astype(np.float32))


def test_short_lines_take_no_scratch_for_parts_of_lines() -> None:
    assert Folding((4_000_000, 1), (1,), np.dtype(np.float32)).footprint() <= 4 << 20


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("mode", [ReductionMode.MEAN, ReductionMode.MAX, ReductionMode.LOG_SUM_EXP])
def test_float64_is_rounded_once_on_its_way_to_a_half_type(mode: ReductionMode, dtype: DType) -> None:
    numbers = np.random.default_rng(3).integers(0, 1 << 16, 5000, dtype=np.uint16).view(dtype.numpy)
    with np.errstate(all="ignore"):
        below = numbers.astype(np.float64)
        above = np.nextafter(numbers, np.array(np.inf, dtype.numpy)).astype(np.float64)
        ties = ((below + above) / 2)[np.abs(below) >= 2.0**-126]
        x = np.concatenate([ties, ties * (1 + 2.0**-50), ties * (1 - 2.0**-50), ties * 1.001])
        x = np.concatenate([x, [0.0, -0.0, np.inf, -np.inf, np.nan, 1e300, -1e300]])
        rounded = np.empty(x.shape, dtype.numpy)
        round_into(x, dtype, rounded)
        wanted = rounded.astype(np.float32)
    specs = {"x": TensorSpec.packed((len(x), 1), "float64"), "y": TensorSpec.packed((len(x),), dtype)}
    operation = Reduction(x="x", y="y", mode=mode, axes=(1,))
    for lanes in (1, 2):
        found = run_kernel(reduction, operation, specs, {"x": x[:, None]}, lanes)["y"]
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(found.astype(dtype.numpy).astype(np.float32), wanted)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.FLOAT32])
def test_powers_of_float64_are_taken_below_an_element_that_the_result_does_not_hold(dtype: DType) -> None:
    x = np.array([[1e300, -1e300], [-1e300, -1e300], [1e38 + 1e20, 1e38], [-np.inf, 3.0]])
    specs = {"x": TensorSpec.packed((4, 2), "float64"), "y": TensorSpec.packed((4,), dtype)}
    operation = Reduction(x="x", y="y", mode=ReductionMode.LOG_SUM_EXP, axes=(1,))
    found = run_kernel(reduction, operation, specs, {"x": x}, 1)["y"]
    with np.errstate(all="ignore"):
        wanted = np.array([np.inf, -np.inf, 1e38, 3.0]).astype(dtype.numpy)
        np.testing.assert_array_equal(found.astype(dtype.numpy), wanted)


@cases_in_one_test
@pytest.mark.parametrize("keep_dims", [False, True])
@pytest.mark.parametrize("mode", ReductionMode)
def test_without_reduced_dims_each_element_is_a_line(mode: ReductionMode, keep_dims: bool) -> None:
    x = np.random.default_rng(5).uniform(0.5, 2, (3, 70, 11))
    operation = Reduction(x="x", y="y", mode=mode, axes=(), keep_dims=keep_dims)
    specs = {"x": TensorSpec.packed(x.shape, "float64")}
    specs |= operation.infer(specs)
    found = run_kernel(reduction, operation, specs, {"x": x}, 2)["y"]
    np.testing.assert_allclose(found, operation.evaluate(np, {"x": x}, specs)["y"], rtol=1e-14)
