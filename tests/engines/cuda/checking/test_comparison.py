"""What self-checks allow results to differ by, and which elements are compared."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_actor.engines.cuda.checking.comparison import Accuracy, difference, sampling_step
from cudnn_actor.protocol import DType


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (DType.FLOAT16, [4e-10, 1e-20, 0.0]),
        (DType.BFLOAT16, [1e-39, 0.0, 0.0]),
        (DType.FLOAT32, [1e-39, -1e-44, 0.0]),
        (DType.FLOAT64, [1e-310, 0.0, 0.0]),
    ],
)
def test_a_result_that_underflows_to_zero_is_right(dtype: DType, values: list[float]) -> None:
    assert difference(np.array(values), np.zeros(3), Accuracy(dtype)) is None


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.is_floating])
def test_a_result_that_is_zero_without_underflow_is_wrong(dtype: DType) -> None:
    assert "computes 0 instead of 0.01" in (difference(np.full(3, 0.01), np.zeros(3), Accuracy(dtype)) or "")


@given(count=st.integers(1, 1 << 40))
def test_compared_elements_lie_in_every_place_of_a_row(count: int) -> None:
    step = sampling_step(count)
    assert math.gcd(step, count) == 1
    assert count // step <= 1 << 21


@pytest.mark.parametrize("dtype", [DType.INT64, DType.UINT64])
def test_a_position_in_a_large_tensor_must_be_exact(dtype: DType) -> None:
    wanted, got = np.array([10**15], dtype.numpy), np.array([10**15 + 1], dtype.numpy)
    assert "computes 1000000000000001" in (difference(wanted, got, Accuracy(dtype)) or "")


def test_an_integer_of_64_bits_may_be_the_rounding_of_a_float32() -> None:
    wanted = np.expm1(np.array([24.0]))
    got = np.rint(np.expm1(np.array([24.0], np.float32))).astype(np.int64)
    assert abs(got[0] - wanted[0]) > 100
    assert difference(wanted, got, Accuracy(DType.INT64)) is None
    assert difference(wanted, got + 2**15, Accuracy(DType.INT64)) is not None


def test_a_bool_is_right_if_it_says_whether_there_is_a_value() -> None:
    wanted = np.array([0.0, 0.25, -3.0, 1.0])
    assert difference(wanted, np.array([0.0, 1.0, 1.0, 1.0]), Accuracy(DType.BOOL)) is None
    assert "25.0%" in (difference(wanted, np.array([0.0, 0.0, 1.0, 1.0]), Accuracy(DType.BOOL)) or "")


def test_nan_is_0_as_an_integer_and_infinity_its_limit() -> None:
    wanted = np.array([np.nan, np.inf, -np.inf, 2.0])
    of_8, of_64 = Accuracy(DType.INT8), Accuracy(DType.INT64)
    assert difference(wanted, np.array([0.0, 127.0, -128.0, 2.0]), of_8) is None
    assert difference(wanted, np.array([0.0, 2.0**63, -(2.0**63), 2.0]), of_64) is None
    assert difference(wanted, np.array([0.0, 9223372036854774784.0, -(2.0**63), 2.0]), of_64) is None
    assert "25.0%" in (difference(wanted, np.array([1.0, 2.0**63, -(2.0**63), 2.0]), of_64) or "")
    assert difference(np.array([2**50]), np.array([2**50 + 1]), of_64) is not None
