"""Ints that meet tensors of integers: compared by their value, else in the dtype's range or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import GraphBuilder, InvalidRequest, Tensor

from ...in_one_test import cases_in_one_test
from ..differences import computed

DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
NUMBERS = (-(2**70), -(2**63) - 1, -(2**63), -3, -1, 0, 300, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70)
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")


def extremes(dtype: str) -> np.ndarray:
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    return np.array([least, 0, 1, 5, most], dtype)


def of(x: np.ndarray, function: Any) -> np.ndarray:
    """What a function of a builder and a tensor gives of x."""
    g = GraphBuilder()
    made: Tensor = function(g, g.input("x", x.shape, x.dtype))
    return computed(g.build(y=made), {"x": x})["y"]


@cases_in_one_test
@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_comparison_with_any_int_is_that_of_its_value(dtype: str, name: str) -> None:
    x, compare = extremes(dtype), getattr(np, name)
    for number in NUMBERS:
        exact = [int(one) for one in x]
        forward = of(x, lambda g, t, number=number: getattr(g, name)(t, number))
        np.testing.assert_array_equal(forward, [compare(one, number) for one in exact], str(number))
        back = of(x, lambda g, t, number=number: getattr(g, name)(number, t))
        np.testing.assert_array_equal(back, [compare(number, one) for one in exact], str(number))
    np.testing.assert_array_equal(of(x, lambda _, t: t < -3), [int(one) < -3 for one in x])


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "maximum", "minimum", "mod", "bitwise_and"])
def test_a_negative_int_in_arithmetic_with_uint64_is_refused_as_numpy_refuses_it(name: str) -> None:
    x = extremes("uint64")
    with pytest.raises(OverflowError):
        getattr(np, name)(x, -3)
    with pytest.raises(
        InvalidRequest, match=r"^b=-3: is no number of uint64; use one ≥ 0, or convert the te"
    ):
        of(x, lambda g, t: getattr(g, name)(t, -3))
    with pytest.raises(InvalidRequest, match=r"^a=-3: is no number of uint64; use one"):
        of(x, lambda g, t: getattr(g, name)(-3, t))


def test_a_negative_int_is_no_choice_among_uint64_but_may_be_a_condition_or_a_divisor() -> None:
    x = extremes("uint64")
    with pytest.raises(InvalidRequest, match=r"^a=-3: is no number of uint64"):
        of(x, lambda g, t: g.where(t > 1, -3, t))
    np.testing.assert_array_equal(of(x, lambda g, t: g.logical_and(t, -3)), x != 0)
    np.testing.assert_allclose(of(x, lambda _, t: t / -3), x / -3, rtol=1e-6)
    np.testing.assert_allclose(of(x, lambda _, t: t / 2**63), x / 2**63, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_integers_saturate_where_numpy_raises(dtype: str) -> None:
    x = extremes(dtype)
    if np.iinfo(dtype).bits == 64:
        return
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    for number in (most + 1, least - 1, 3):
        wanted = [max(least, min(int(one) + number, most)) for one in x]
        np.testing.assert_array_equal(of(x, lambda _, t, number=number: t + number), wanted)


@cases_in_one_test
@pytest.mark.parametrize("dtype", ["int64", "uint64", "int32"])
@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        (2**53 + 1, None),
        (None, 2**53 + 1),
        (2**53 + 1, 2**53 + 3),
        (-3, 2**53 + 1),
        (-(2**60) - 1, None),
        (2**63 - 1, None),
        (None, 2**70),
        (-3, 300),
    ],
)
def test_integers_are_clipped_exactly_at_any_ints(dtype: str, lower: int | None, upper: int | None) -> None:
    x = np.concatenate([extremes(dtype), np.array([2**53, 2**53 + 1, 2**53 + 2]).astype(dtype)])
    least, most = -(2**80) if lower is None else lower, 2**80 if upper is None else upper
    limits = np.iinfo(dtype)
    wanted = [max(limits.min, min(max(least, min(int(one), most)), limits.max)) for one in x]
    assert of(x, lambda g, t: g.clip(t, lower, upper)).tolist() == wanted


def test_bounds_in_the_wrong_order_are_refused_of_integers_too() -> None:
    with pytest.raises(InvalidRequest, match=r"^lower=.*: is above the upper bound"):
        of(extremes("int64"), lambda g, t: g.clip(t, 2**53 + 3, 2**53 + 1))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda g, _: g.full((2,), -3, "uint64"),
            r"^value=-3: is no number of uint64; choose one that it holds",
        ),
        (lambda g, _: g.full((2,), 2**63, "int64"), r"^value=9223372036854775808: is no number of int64"),
        (lambda g, t: g.pad(t, 1, -1), r"^value=-1.0: must be a finite number of uint64"),
        (
            lambda g, t: g.pad(t, 1, 2**53 + 1),
            r"^value=9007199254740993: is beyond 2\*\*53, and what is around",
        ),
        (lambda _, t: t + 2**64, r"^b=18446744073709551616: is beyond the range of numbers in graphs"),
    ],
)
def test_a_number_that_the_dtype_does_not_hold_is_refused(function: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        of(extremes("uint64"), function)
