"""Places of the largest and smallest elements, and running sums, in the fast CPU engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.fast.scans import arg_reduction, cumulative
from cudnn_actor.protocol import DType, TensorSpec
from cudnn_actor.protocol.operations import ArgReduction, Cumulative, ReductionMode

from .kernel_cases import Make, check
from .kernel_runs import run

MAKES: dict[Any, Make] = {ArgReduction: arg_reduction, Cumulative: cumulative}


def test_random_problems_are_right_within_their_bounds_on_any_number_of_lanes() -> None:
    check("reduction", MAKES, 120)


@pytest.mark.parametrize("dims", [(1, 1_500_001), (1_500_001, 2), (3, 1_500_001, 2)])
def test_scratch_of_long_lines_is_bounded(dims: tuple[int, ...]) -> None:
    axis = dims.index(1_500_001)
    kept = tuple(1 if other == axis else size for other, size in enumerate(dims))
    specs = {"x": TensorSpec.packed(dims, DType.FLOAT32), "y": TensorSpec.packed(kept, DType.INT64)}
    node = ArgReduction(x=0, y=1, axis=axis, mode=ReductionMode.MAX, keep_dims=True)
    kernel = arg_reduction(node, specs)
    assert kernel is not None
    assert kernel.footprint(64) <= 4 << 20
    x = np.random.default_rng(1).normal(size=dims).astype(np.float32)
    y = np.empty(kept, np.int64)
    run(kernel, {"x": x}, {"y": y}, 2)
    np.testing.assert_array_equal(y, x.argmax(axis, keepdims=True))


@pytest.mark.parametrize("mode", [ReductionMode.MAX, ReductionMode.MIN])
@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.INT8])
def test_the_first_of_equal_elements_is_found_in_a_long_line_with_gaps(
    mode: ReductionMode, dtype: DType
) -> None:
    """Equal elements lie in several pieces of a line; the first line has its only one in the last piece."""
    dims = (1_100_001, 3)
    specs = {"x": TensorSpec.packed(dims, dtype), "y": TensorSpec.packed((3,), DType.INT64)}
    kernel = arg_reduction(ArgReduction(x=0, y=1, axis=0, mode=mode, keep_dims=False), specs)
    assert kernel is not None
    x, y = np.zeros(dims, dtype.numpy), np.empty(3, np.int64)
    best = 1 if mode is ReductionMode.MAX else -1
    x[[1_100_000, 700_000, 1_090_000], [0, 1, 1]] = best
    x[[300_000, 450_000, 1_060_000], 2] = np.nan if dtype is DType.FLOAT64 else best
    run(kernel, {"x": x}, {"y": y}, 2)
    np.testing.assert_array_equal(y, [1_100_000, 700_000, 300_000])
