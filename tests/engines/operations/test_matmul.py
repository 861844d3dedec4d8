"""Products of matrices against sums of products written out, and what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import DType, InvalidRequest, Layout, MatMul, TensorSpec
from cudnn_actor.protocol.messages.lowering import lower

from ...in_one_test import cases_in_one_test
from ..problems import integers, normal
from ..references import assert_close
from ..workbench import Workbench, spread

F64, F32 = DType.FLOAT64, DType.FLOAT32
SHAPES = [
    ((5, 7), (7, 3)),
    ((1, 1), (1, 1)),
    ((1, 9), (9, 1)),
    ((3, 5, 7), (3, 7, 4)),
    ((3, 5, 7), (7, 4)),
    ((5, 7), (3, 7, 4)),
    ((2, 3, 5, 7), (2, 1, 7, 4)),
    ((2, 1, 5, 7), (3, 7, 4)),
    ((2, 1, 3, 4), (1, 5, 4, 2)),
    ((2, 1, 2, 1, 1, 2, 3, 2), (3, 1, 2, 2, 1, 2, 2)),
]
each_shape = pytest.mark.parametrize(("of_a", "of_b"), SHAPES, ids=str)
RESULTS = [
    *((dtype, dtype) for dtype in DType if dtype.is_floating),
    (DType.FLOAT16, F32),
    (DType.BFLOAT16, F32),
    (DType.INT8, DType.INT32),
    (DType.UINT8, DType.INT32),
]


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum of the products of rows and columns, written out, in float64 or of Python's integers."""
    kind: Any = np.float64 if a.dtype.kind not in "iu" else object
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (np.broadcast_to(m.astype(kind), (*batch, *m.shape[-2:])) for m in (a, b))
    y = np.zeros((*batch, a.shape[-2], b.shape[-1]), kind)
    for k in range(a.shape[-1]):
        y = y + a[..., :, k, None] * b[..., None, k, :]
    return y


def check(got: np.ndarray, wanted: np.ndarray) -> None:
    """Integers are exact."""
    if got.dtype.kind in "iu":
        np.testing.assert_array_equal(got, wanted.astype(np.int64))
    else:
        assert_close(got, wanted)


def draw(dims: tuple[int, ...], dtype: DType, seed: int) -> np.ndarray:
    return normal(dims, dtype, seed) if dtype.is_floating else integers(dims, dtype, seed)


def lying(dims: tuple[int, ...], dtype: DType, how: str) -> TensorSpec:
    """A spec of dims: packed, with gaps, or with the last two dims swapped in memory."""
    if how == "gaps":
        return spread(dims, dtype)
    packed = TensorSpec.packed((*dims[:-2], dims[-1], dims[-2]), dtype)
    swapped = (*packed.strides[:-2], packed.strides[-1], packed.strides[-2])
    return TensorSpec.strided(dims, swapped, dtype) if how == "swapped" else TensorSpec.packed(dims, dtype)


@cases_in_one_test
@pytest.mark.pairwise
@each_shape
@pytest.mark.parametrize(("dtype", "result"), RESULTS)
def test_products(
    bench: Workbench, of_a: tuple[int, ...], of_b: tuple[int, ...], dtype: DType, result: DType
) -> None:
    a, b = draw(of_a, dtype, 0), draw(of_b, dtype, 1)
    y = bench.empty(TensorSpec.packed(np.matmul(a.astype(float), b.astype(float)).shape, result))
    bench.run(MatMul(a=bench.place(a), b=bench.place(b), y=y))
    check(bench.read(y), product(a, b))


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("how", [*itertools.product(("packed", "swapped", "gaps"), repeat=3)], ids="-".join)
@pytest.mark.parametrize("dtype", [F32, DType.INT8])
def test_operands_and_results_may_lie_in_any_way(bench: Workbench, how: Any, dtype: DType) -> None:
    a, b = draw((2, 5, 8), dtype, 0), draw((2, 8, 3), dtype, 1)
    refs = (
        bench.place(array, lying(array.shape, dtype, one)) for array, one in zip((a, b), how, strict=False)
    )
    y = bench.empty(lying((2, 5, 3), dtype if dtype.is_floating else DType.INT32, how[2]))
    first, second = refs
    bench.run(MatMul(a=first, b=second, y=y))
    check(bench.read(y), product(a, b))


def test_a_matrix_may_be_both_operands(bench: Workbench) -> None:
    a = bench.place(draw((4, 4), F64, 0))
    y = bench.empty(TensorSpec.packed((4, 4), F64))
    bench.run(MatMul(a=a, b=a, y=y))
    check(bench.read(y), product(bench.read(a), bench.read(a)))


def test_a_sum_beyond_int32_becomes_its_largest_or_least_value(bench: Workbench) -> None:
    a = np.full((1, 140_000), -128, np.int8)
    b = np.stack([np.full(140_000, -128, np.int8), np.full(140_000, 127, np.int8)], axis=1)
    y = bench.empty(TensorSpec.packed((1, 2), DType.INT32))
    bench.run(MatMul(a=bench.place(a), b=bench.place(b), y=y))
    np.testing.assert_array_equal(bench.read(y), [[2**31 - 1, -(2**31)]])


def test_numbers_that_are_not_finite_go_where_ieee_says(bench: Workbench) -> None:
    a = np.array([[1.0, math.inf], [math.nan, 0.0], [0.0, 1.0]], np.float32)
    b = np.array([[1.0, 0.0], [2.0, 0.0]], np.float32)
    y = bench.empty(TensorSpec.packed((3, 2)))
    bench.run(MatMul(a=bench.place(a), b=bench.place(b), y=y))
    np.testing.assert_array_equal(bench.read(y), [[math.inf, math.nan], [math.nan] * 2, [2.0, 0.0]])


def test_a_product_without_terms_is_zero() -> None:
    """Whatever specs such tensors may have."""
    values = {"a": np.zeros((2, 3, 0)), "b": np.zeros((2, 0, 4))}
    found = MatMul(a=0, b=1, y=2).evaluate(np, values, {})
    np.testing.assert_array_equal(found["y"], np.zeros((2, 3, 4)))


@pytest.mark.parametrize(("dtype", "wanted"), [*dict(reversed(RESULTS)).items()])
def test_the_result_that_is_allocated(dtype: DType, wanted: DType) -> None:
    a, b = TensorSpec.packed((2, 1, 5, 7), dtype, Layout.NHWC), TensorSpec.packed((3, 7, 4), dtype)
    found = MatMul(a=0, b=1).infer({"a": a, "b": b})
    assert found == {"y": TensorSpec.packed((2, 3, 5, 4), wanted)}


def of(*dims: int, dtype: DType = F32) -> TensorSpec:
    return TensorSpec.packed(dims, dtype)


@cases_in_one_test
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"a": of(7)}, "a"),
        ({"b": of(7)}, "b"),
        ({"b": of(6, 4)}, "b"),
        ({"a": of(2, 5, 7), "b": of(3, 7, 4)}, "b"),
        ({"b": of(7, 4, dtype=DType.FLOAT16)}, "b"),
        ({"a": of(5, 7, dtype=DType.INT32), "b": of(7, 4, dtype=DType.INT32)}, "a"),
        ({"y": of(4, 5)}, "y"),
        ({"y": of(1, 5, 4)}, "y"),
        ({"y": of(5, 4, dtype=F64)}, "y"),
        ({"y": of(5, 4, dtype=DType.FLOAT16)}, "y"),
    ],
)
def test_a_mistake_names_its_field(bench: Workbench, changes: dict[str, TensorSpec], field: str) -> None:
    specs = {"a": of(5, 7), "b": of(7, 4), "y": of(5, 4)} | changes
    made: dict[str, Any] = {name: bench.empty(spec) for name, spec in specs.items()}
    with pytest.raises(InvalidRequest) as caught:
        lower(MatMul(**made))
    assert caught.value.field == field
