from __future__ import annotations

import numpy as np
import pytest
import scipy.special

from cudnn_actor.protocol import Activation, ConvFwd, ConvSpec, DType, Epilogue, Layout, TensorSpec

from ...in_one_test import cases_in_one_test
from ..problems import FLOATS, PROBLEMS, normal, smooth
from ..references import assert_close, scipy_forward
from ..workbench import Workbench

ACTIVATIONS = {
    Activation.IDENTITY: lambda x, p: x,
    Activation.RELU: lambda x, p: np.maximum(x, 0),
    Activation.LEAKY_RELU: lambda x, p: np.where(x > 0, x, p * x),
    Activation.SIGMOID: lambda x, p: scipy.special.expit(x),
    Activation.TANH: lambda x, p: np.tanh(x),
    Activation.GELU: lambda x, p: x * scipy.special.ndtr(x),
    Activation.GELU_TANH: lambda x, p: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    Activation.SWISH: lambda x, p: x * scipy.special.expit(p * x),
    Activation.ELU: lambda x, p: np.where(x > 0, x, p * scipy.special.expm1(np.minimum(x, 0))),
    Activation.SOFTPLUS: lambda x, p: np.logaddexp(0, p * x) / p,
}
DEFAULTS = {
    Activation.LEAKY_RELU: 0.01,
    Activation.SWISH: 1.0,
    Activation.ELU: 1.0,
    Activation.SOFTPLUS: 1.0,
}
ONE = ConvSpec.symmetric(2)
PROBLEM = PROBLEMS["padded"]


def activate(bench: Workbench, values: np.ndarray, epilogue: Epilogue) -> np.ndarray:
    """An activation alone: behind a convolution with 1."""
    unit = np.ones((1, 1, 1, 1), values.dtype)
    y = bench.empty(TensorSpec.like(np.ascontiguousarray(values)))
    return bench.run(ConvFwd(x=bench.place(values), w=bench.place(unit), y=y, conv=ONE, epilogue=epilogue))


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_activation_matches_its_formula(bench: Workbench, activation: Activation, dtype: DType) -> None:
    x = smooth((1, 1, 9, 11)).astype(dtype.numpy)
    got = activate(bench, x, Epilogue(activation=activation))
    assert_close(got, ACTIVATIONS[activation](x.astype("float64"), DEFAULTS.get(activation, 0.0)))


@cases_in_one_test
@pytest.mark.parametrize("activation", DEFAULTS)
def test_an_activation_takes_its_parameter(bench: Workbench, activation: Activation) -> None:
    x = smooth((1, 1, 9, 11))
    got = activate(bench, x, Epilogue(activation=activation, parameter=1.75))
    assert_close(got, ACTIVATIONS[activation](x, 1.75))


@cases_in_one_test
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_huge_arguments_give_limits_not_warnings(bench: Workbench, activation: Activation) -> None:
    x = np.array([-1e30, -1e5, -800.0, 800.0, 1e5, 1e30], np.float32).reshape(1, 1, 2, 3)
    got = activate(bench, x, Epilogue(activation=activation)).ravel()
    with np.errstate(over="ignore", under="ignore"):
        wanted = ACTIVATIONS[activation](x.astype("float64").ravel(), DEFAULTS.get(activation, 0.0))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_alpha_beta_bias_and_activation_come_in_this_order(bench: Workbench) -> None:
    x, w = normal(PROBLEM.x, DType.FLOAT32, 0), normal(PROBLEM.w, DType.FLOAT32, 1)
    before, bias = normal(PROBLEM.y, DType.FLOAT32, 2), normal((4,), DType.FLOAT32, 3)
    got = bench.run(
        ConvFwd(
            x=bench.place(x),
            w=bench.place(w),
            y=bench.place(before, TensorSpec.packed(PROBLEM.y, DType.FLOAT32, Layout.NHWC)),
            bias=bench.place(bias),
            conv=PROBLEM.conv,
            alpha=1.5,
            beta=-0.5,
            epilogue=Epilogue(activation=Activation.TANH),
        )
    )
    convolved = scipy_forward(x.astype("float64"), w.astype("float64"), PROBLEM.conv)
    assert_close(got, np.tanh(1.5 * convolved - 0.5 * before + bias.reshape(1, 4, 1, 1)))


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
@pytest.mark.parametrize("alpha", [1.0, -2.0, 0.0])
@pytest.mark.parametrize("beta", [1.0, 0.25, 0.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_alpha_scales_the_result_and_beta_what_was_there(
    bench: Workbench, alpha: float, beta: float, dtype: DType
) -> None:
    x, w, y = (normal(dims, dtype, seed) for seed, dims in enumerate((PROBLEM.x, PROBLEM.w, PROBLEM.y)))
    got = bench.run(
        ConvFwd(
            x=bench.place(x), w=bench.place(w), y=bench.place(y), conv=PROBLEM.conv, alpha=alpha, beta=beta
        )
    )
    x, w, y = (array.astype("float64") for array in (x, w, y))
    assert_close(got, alpha * scipy_forward(x, w, PROBLEM.conv) + beta * y)


def test_with_beta_0_what_the_output_held_is_not_read(bench: Workbench) -> None:
    ones = bench.place(np.ones((1, 1, 3, 3), np.float32))
    y = bench.place(np.full((1, 1, 1, 1), np.nan, np.float32))
    assert bench.run(ConvFwd(x=ones, w=ones, y=y, conv=ONE, alpha=2.0)) == 18


def test_with_beta_nan_in_the_output_stays_nan(bench: Workbench) -> None:
    ones = bench.place(np.ones((1, 1, 3, 3), np.float32))
    y = bench.place(np.full((1, 1, 1, 1), np.nan, np.float32))
    assert np.isnan(bench.run(ConvFwd(x=ones, w=ones, y=y, conv=ONE, beta=1.0)))


@cases_in_one_test
@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec.packed((4,), DType.FLOAT32),
        TensorSpec.packed((1, 4, 1, 1), DType.FLOAT32),
        TensorSpec.packed((1, 4, 1, 1), DType.FLOAT32, Layout.NHWC),
        TensorSpec.strided((4,), (3,), DType.FLOAT32),
        TensorSpec.strided((1, 4, 1, 1), (1, 5, 7, 9), DType.FLOAT32),
    ],
    ids=str,
)
def test_a_bias_is_added_per_filter_however_it_lies_in_memory(bench: Workbench, spec: TensorSpec) -> None:
    x, w = normal(PROBLEM.x, DType.FLOAT32, 0), normal(PROBLEM.w, DType.FLOAT32, 1)
    bias = normal((4,), DType.FLOAT32, 2)
    y = bench.empty(TensorSpec.packed(PROBLEM.y, DType.FLOAT32))
    bound = bench.place(bias.reshape(spec.dims), spec)
    got = bench.run(ConvFwd(x=bench.place(x), w=bench.place(w), y=y, bias=bound, conv=PROBLEM.conv))
    convolved = scipy_forward(x.astype("float64"), w.astype("float64"), PROBLEM.conv)
    assert_close(got, convolved + bias.reshape(1, 4, 1, 1))


def test_a_float16_result_too_large_becomes_infinite_without_a_warning(bench: Workbench) -> None:
    x = np.full((1, 1, 1, 2), 60000, np.float16)
    y = bench.empty(TensorSpec.packed((1, 1, 1, 1), DType.FLOAT16))
    got = bench.run(ConvFwd(x=bench.place(x), w=bench.place(np.ones_like(x)), y=y, conv=ONE))
    assert np.isposinf(got)


def test_infinities_and_nan_in_the_input_give_nan_without_a_warning(bench: Workbench) -> None:
    x = np.array([np.inf, -np.inf, np.nan, 1], np.float32).reshape(1, 1, 2, 2)
    y = bench.empty(TensorSpec.packed((1, 1, 1, 1), DType.FLOAT32))
    got = bench.run(ConvFwd(x=bench.place(x), w=bench.place(np.ones_like(x)), y=y, conv=ONE, alpha=2.0))
    assert np.isnan(got)
