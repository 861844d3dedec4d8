from __future__ import annotations

import numpy as np
import pytest

from cudnn_actor.protocol import Activation, ConvFwd, ConvSpec, DType, Epilogue, Layout, TensorSpec

from ...in_one_test import cases_in_one_test
from ..problems import PROBLEMS, integers
from ..references import direct_forward
from ..workbench import Workbench

ONE = ConvSpec.symmetric(2)
BYTES = [DType.INT8, DType.UINT8]


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", BYTES)
def test_integer_convolutions_are_exact(bench: Workbench, name: str, dtype: DType) -> None:
    problem = PROBLEMS[name]
    x, w = integers(problem.x, dtype, 0), integers(problem.w, dtype, 1)
    y = bench.empty(TensorSpec.packed(problem.y, DType.INT32, Layout.NHWC))
    got = bench.run(ConvFwd(x=bench.place(x), w=bench.place(w), y=y, conv=problem.conv))
    np.testing.assert_array_equal(got, direct_forward(x.astype("int64"), w.astype("int64"), problem.conv))


@pytest.mark.parametrize("dtype", BYTES)
def test_results_of_8_bits_saturate(bench: Workbench, dtype: DType) -> None:
    problem = PROBLEMS["padded"]
    x, w = integers(problem.x, dtype, 0), integers(problem.w, dtype, 1) // 32
    y = bench.empty(TensorSpec.packed(problem.y, dtype))
    got = bench.run(ConvFwd(x=bench.place(x), w=bench.place(w), y=y, conv=problem.conv))
    limits = np.iinfo(dtype.value)
    exact = direct_forward(x.astype("int64"), w.astype("int64"), problem.conv)
    assert (exact > limits.max).any()
    np.testing.assert_array_equal(got, np.clip(exact, limits.min, limits.max))


def test_a_float32_result_holds_the_sum(bench: Workbench) -> None:
    problem = PROBLEMS["strided"]
    x, w = integers(problem.x, DType.INT8, 0), integers(problem.w, DType.INT8, 1)
    y = bench.empty(TensorSpec.packed(problem.y, DType.FLOAT32))
    got = bench.run(ConvFwd(x=bench.place(x), w=bench.place(w), y=y, conv=problem.conv))
    np.testing.assert_array_equal(got, direct_forward(x.astype("int64"), w.astype("int64"), problem.conv))


def test_scaled_results_round_half_to_even(bench: Workbench) -> None:
    x = np.arange(-8, 8, dtype=np.int8).reshape(1, 1, 4, 4)
    y = bench.empty(TensorSpec.packed(x.shape, DType.INT8))
    unit = bench.place(np.ones((1, 1, 1, 1), np.int8))
    got = bench.run(ConvFwd(x=bench.place(x), w=unit, y=y, conv=ONE, alpha=0.5))
    np.testing.assert_array_equal(got, np.rint(x / 2))


def test_a_quantised_layer_scales_adds_its_bias_and_rectifies(bench: Workbench) -> None:
    problem = PROBLEMS["padded"]
    x, w = integers(problem.x, DType.INT8, 0), integers(problem.w, DType.INT8, 1)
    bias = np.array([1.25, -2.5, 3.0, 100.0], np.float32)
    y = bench.empty(TensorSpec.packed(problem.y, DType.INT8))
    message = ConvFwd(
        x=bench.place(x),
        w=bench.place(w),
        y=y,
        bias=bench.place(bias),
        conv=problem.conv,
        alpha=2.0**-11,
        epilogue=Epilogue(activation=Activation.RELU),
    )
    exact = direct_forward(x.astype("int64"), w.astype("int64"), problem.conv) * 2.0**-11
    wanted = np.clip(np.rint(np.maximum(exact + bias.reshape(1, 4, 1, 1), 0)), -128, 127)
    np.testing.assert_array_equal(bench.run(message), wanted)


def test_the_extremes_of_int8_add_up_exactly(bench: Workbench) -> None:
    x = np.full((1, 4096, 1, 1), -128, np.int8)
    y = bench.empty(TensorSpec.packed((1, 1, 1, 1), DType.INT32))
    got = bench.run(ConvFwd(x=bench.place(x), w=bench.place(x), y=y, conv=ONE))
    assert got == 4096 * 128 * 128
