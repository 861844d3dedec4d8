"""Integers of every width keep every digit on their way, and a bool is 0 or 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import DType, InvalidRequest, Layout, OperationGraph, TensorSpec
from cudnn_actor.protocol.operations import GraphTensor, MaxPool, Pointwise, PointwiseMode, Window

from ...in_one_test import cases_in_one_test
from ..workbench import Workbench, spread

INTEGERS = [dtype for dtype in DType if not dtype.is_floating and dtype is not DType.BOOL]
DIMS = (2, 3, 70, 41)
"""More than what is permuted on the host."""


def extremes(dtype: DType) -> list[int]:
    """The numbers at both ends of an integer type, and around what float64 and float32 hold exactly."""
    limits = np.iinfo(dtype.value)
    least, largest = int(limits.min), int(limits.max)
    near = [least, least + 1, largest - 1, largest, 2**53 + 1, 2**24 + 1, -(2**53) - 1, -(2**24) - 1, 0, 1]
    return [number for number in near if least <= number <= largest]


def values_of(dtype: DType, dims: tuple[int, ...] = DIMS) -> np.ndarray:
    return np.resize(np.array(extremes(dtype), dtype.numpy), dims)


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("dtype", INTEGERS)
def test_no_integer_loses_a_digit_in_any_layout(bench: Workbench, dtype: DType, layout: Layout) -> None:
    spec = spread(DIMS, dtype) if layout is Layout.STRIDED else TensorSpec.packed(DIMS, dtype, layout)
    values = values_of(dtype)
    src, dst = bench.place(values), bench.empty(spec)
    np.testing.assert_array_equal(bench.read(bench.place(values, spec)), values)
    bench.engine.copy(bench.binding(src), bench.binding(dst))
    np.testing.assert_array_equal(bench.read(dst), values)


@cases_in_one_test
@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_fill_is_exact(bench: Workbench, dtype: DType) -> None:
    ref = bench.empty(spread((2, 3, 4), dtype))
    for number in extremes(dtype):
        bench.engine.fill(bench.binding(ref), number)
        assert bench.read(ref).ravel().tolist() == [number] * 24


@cases_in_one_test
@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_fill_with_the_next_number_out_of_range_is_refused(bench: Workbench, dtype: DType) -> None:
    ref, limits = bench.empty(TensorSpec.packed((2,), dtype)), np.iinfo(dtype.value)
    outside: list[Any] = [int(limits.min) - 1, int(limits.max) + 1, 0.5, float("nan"), float("-inf")]
    for value in [*outside, float(2**64)]:
        with pytest.raises(InvalidRequest, match="use a whole number from") as refusal:
            bench.engine.fill(bench.binding(ref), value)
        assert refusal.value.field == "value"
    assert bench.read(ref).tolist() == [77, 77]


@cases_in_one_test
@pytest.mark.parametrize("dtype", INTEGERS)
def test_numbers_of_another_width_are_taken_if_they_fit(bench: Workbench, dtype: DType) -> None:
    for other in INTEGERS:
        limits, own = np.iinfo(dtype.value), np.iinfo(other.value)
        fitting = [number for number in extremes(other) if limits.min <= number <= limits.max]
        ref = bench.place(np.array(fitting, other.numpy), TensorSpec.packed((len(fitting),), dtype))
        assert bench.read(ref).tolist() == fitting
        for number in (int(own.min), int(own.max)):
            if limits.min <= number <= limits.max:
                continue
            with pytest.raises(InvalidRequest, match=f"data={number}: does not fit {dtype}"):
                bench.engine.write(bench.binding(ref), np.full(len(fitting), number, other.numpy))


@pytest.mark.parametrize("layout", list(Layout))
def test_bools_are_bytes_of_0_and_1(bench: Workbench, layout: Layout) -> None:
    spec = spread(DIMS, "bool") if layout is Layout.STRIDED else TensorSpec.packed(DIMS, "bool", layout)
    values = np.random.default_rng(0).random(DIMS) < 0.5
    ref, other = bench.place(values, spec), bench.empty(TensorSpec.packed(DIMS, "bool"))
    bench.engine.copy(bench.binding(ref), bench.binding(other))
    for buffer in (ref, other):
        got = bench.read(buffer)
        assert got.dtype == np.bool_
        np.testing.assert_array_equal(got, values)
    np.testing.assert_array_equal(bench.bytes_of(other).reshape(DIMS), values.astype(np.uint8))


@cases_in_one_test
@pytest.mark.parametrize("value", [False, True, 0, 1, 0.0, 1.0, np.True_, np.int64(1)])
def test_a_bool_is_filled_with_a_bool_or_0_or_1(bench: Workbench, value: Any) -> None:
    ref = bench.empty(TensorSpec.packed((3, 2), "bool", "NCHW"))
    bench.engine.fill(bench.binding(ref), value)
    assert bench.bytes_of(ref).tolist() == [int(value)] * 6


@cases_in_one_test
@pytest.mark.parametrize("value", [2, -1, 0.5, 1.5, float("nan"), float("inf")])
def test_a_bool_is_filled_with_nothing_else(bench: Workbench, value: float) -> None:
    ref = bench.empty(TensorSpec.packed((3,), "bool"))
    with pytest.raises(InvalidRequest, match="cannot be held by bool; use a whole number from 0 to 1"):
        bench.engine.fill(bench.binding(ref), value)


def test_bools_and_zeros_and_ones_are_taken_for_bools_and_nothing_else(bench: Workbench) -> None:
    ref = bench.empty(TensorSpec.packed((2,), "bool"))
    for dtype in INTEGERS:
        bench.engine.write(bench.binding(ref), np.array([0, 1], dtype.numpy))
        assert bench.read(ref).tolist() == [False, True]
    for values, problem in (
        (np.array([0, 2]), "data=2: does not fit bool, which holds 0 to 1"),
        (np.array([-1, 0], np.int8), "data=-1: does not fit bool"),
        (np.array([0.0, 1.0]), "floats would lose their fractions in a buffer of bool"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            bench.engine.write(bench.binding(ref), values)
    assert bench.read(ref).tolist() == [False, True]


@cases_in_one_test
@pytest.mark.parametrize("dtype", list(DType))
def test_bools_are_0_and_1_of_every_dtype(bench: Workbench, dtype: DType) -> None:
    ref = bench.place(np.array([True, False]), TensorSpec.packed((2,), dtype))
    assert bench.read(ref).astype(np.float64).tolist() == [1, 0]


@cases_in_one_test
@pytest.mark.parametrize("dtype", [*INTEGERS, DType.BOOL])
def test_the_largest_is_found_without_losing_a_digit(bench: Workbench, dtype: DType) -> None:
    near = [0, 1] if dtype is DType.BOOL else extremes(dtype)
    pairs = np.array([[a, b] for a in near for b in near], dtype.numpy).reshape(1, 1, -1)
    x, y = bench.place(pairs), bench.empty(TensorSpec.packed((1, 1, pairs.size // 2), dtype))
    got = bench.run(MaxPool(x=x, y=y, window=Window.symmetric(1, size=2)))
    assert got.ravel().tolist() == [max(a, b) for a in near for b in near]


def test_a_result_of_bools_is_true_unless_it_is_0(bench: Workbench) -> None:
    x = np.array([0.0, -0.0, 0.25, -3.0, np.nan, np.inf])
    given, written = (
        GraphTensor(uid=uid, dims=(6,), strides=(1,), dtype=dtype)
        for uid, dtype in enumerate((DType.FLOAT64, DType.BOOL))
    )
    adds: Pointwise[int] = Pointwise(mode=PointwiseMode.ADD, operands=(0, 0), result=1)
    got = bench.run_graph(OperationGraph(tensors=(given, written), operations=(adds,)), {0: x})
    assert got[1].tolist() == [False, False, True, True, True, True]
