"""Softmax, its logarithm and their gradients, in the fast CPU engine."""

from __future__ import annotations

import numpy as np
import pytest

from cudnn_actor.engines.cpu.fast.softmax import softmax, softmax_backward
from cudnn_actor.protocol import DType, TensorSpec
from cudnn_actor.protocol.operations import Softmax, SoftmaxBackward

from .kernel_cases import check
from .kernel_runs import run

MAKES = {Softmax: softmax, SoftmaxBackward: softmax_backward}


def test_random_problems_are_right_within_their_bounds_on_any_number_of_lanes() -> None:
    check("softmax", MAKES, 120)


@pytest.mark.each_value
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dims", [(1, 1_500_001), (1_500_001, 2)])
def test_scratch_of_long_lines_is_bounded(dims: tuple[int, int], log: bool) -> None:
    axis = int(dims[1] > 2)
    spec = TensorSpec.packed(dims, DType.FLOAT32)
    kernel = softmax(Softmax(x=0, y=1, axis=axis, log=log), {"x": spec, "y": spec})
    assert kernel is not None
    assert kernel.footprint(64) <= 4 << 20
    x = np.random.default_rng(1).normal(size=dims).astype(np.float32)
    y = np.empty_like(x)
    run(kernel, {"x": x}, {"y": y}, 2)
    powers = np.exp(x.astype(np.float64))
    wanted = powers / powers.sum(axis, keepdims=True)
    np.testing.assert_allclose(y, np.log(wanted) if log else wanted, rtol=1e-5)
