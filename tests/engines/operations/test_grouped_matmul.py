"""Products of groups of rows against sums of products written out, one row at a time; and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_actor.engines.base import Engine
from cudnn_actor.protocol import (
    BufferRef,
    DType,
    GroupedMatMul,
    GroupedMatMulBackwardWeights,
    InvalidRequest,
    TensorSpec,
)
from cudnn_actor.protocol.messages.lowering import lower

from ...in_one_test import cases_in_one_test
from ...whole import some
from ..problems import FLOATS, normal
from ..references import assert_close
from ..workbench import Workbench, workbench
from .test_matmul import lying

F64, F32, I32 = DType.FLOAT64, DType.FLOAT32, DType.INT32
RESULTS = [*((dtype, dtype) for dtype in FLOATS), (DType.FLOAT16, F32), (DType.BFLOAT16, F32)]
OFFSETS: dict[str, list[int]] = {
    "all rows": [3, 5, 9],
    "rows of none": [2, 3, 7],
    "experts without rows": [0, 4, 4, 9, 9],
    "no rows at all": [0, 0],
    "one expert": [9],
    "not ascending": [7, 2, 5],
    "below 0": [-3, 4, 9],
    "beyond the rows": [4, 30, 2**31 - 1],
    "everything wrong": [40, -(2**31), 5, -1, 9, 3],
}
each_offsets = pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)


def expert_of(row: int, offsets: list[int]) -> int:
    """How many ends are not after the row; as many as there are experts if it is of none."""
    return sum(end <= row for end in offsets)


def product(tokens: np.ndarray, weights: np.ndarray, offsets: list[int]) -> np.ndarray:
    y = np.zeros((len(tokens), weights.shape[2]))
    for row, token in enumerate(tokens.astype(np.float64)):
        expert = expert_of(row, offsets)
        if expert < len(offsets):
            y[row] = sum(value * of for value, of in zip(token, weights[expert].astype(float), strict=True))
    return y


def gradient(tokens: np.ndarray, dy: np.ndarray, offsets: list[int]) -> np.ndarray:
    dweights = np.zeros((len(offsets), tokens.shape[1], dy.shape[1]))
    for row, (token, slope) in enumerate(zip(tokens.astype(float), dy.astype(float), strict=True)):
        expert = expert_of(row, offsets)
        if expert < len(offsets):
            dweights[expert] += token[:, None] * slope
    return dweights


class Problem:
    """Operands for 9 rows (or as many as are asked for) of 6 elements, and matrices of 6 x 4."""

    def __init__(self, offsets: list[int], dtype: DType = F64, rows: int = 9) -> None:
        self.offsets, self.dtype = offsets, dtype
        self.tokens, self.dy = normal((rows, 6), dtype, 0), normal((rows, 4), dtype, 1)
        self.weights = normal((len(offsets), 6, 4), dtype, 2)

    def forward(self, bench: Workbench, result: DType | None = None, how: str = "packed") -> np.ndarray:
        y = bench.empty(lying((len(self.tokens), 4), result or self.dtype, how))
        tokens, weights = (self._placed(bench, array, how) for array in (self.tokens, self.weights))
        ends = bench.place(np.array(self.offsets, np.int32))
        return bench.run(GroupedMatMul(tokens=tokens, weights=weights, offsets=ends, y=y))

    def backward(self, bench: Workbench, result: DType | None = None, how: str = "packed") -> np.ndarray:
        dweights = bench.empty(lying(self.weights.shape, result or self.dtype, how))
        tokens, dy = (self._placed(bench, array, how) for array in (self.tokens, self.dy))
        ends = bench.place(np.array(self.offsets, np.int32))
        return bench.run(GroupedMatMulBackwardWeights(tokens=tokens, dy=dy, offsets=ends, dweights=dweights))

    def _placed(self, bench: Workbench, array: np.ndarray, how: str) -> BufferRef:
        return bench.place(array, lying(array.shape, self.dtype, how))

    def check(self, bench: Workbench, result: DType | None = None, how: str = "packed") -> None:
        assert_close(self.forward(bench, result, how), product(self.tokens, self.weights, self.offsets))
        assert_close(self.backward(bench, result, how), gradient(self.tokens, self.dy, self.offsets))


@cases_in_one_test
@pytest.mark.pairwise
@each_offsets
@pytest.mark.parametrize(("dtype", "result"), RESULTS)
def test_each_row_is_multiplied_by_the_matrix_of_its_expert(
    bench: Workbench, offsets: list[int], dtype: DType, result: DType
) -> None:
    Problem(offsets, dtype).check(bench, result)


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("how", ["swapped", "gaps"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_operands_and_results_may_lie_in_any_way(bench: Workbench, how: str, dtype: DType) -> None:
    Problem(OFFSETS["rows of none"], dtype).check(bench, how=how)


@settings(max_examples=some(60))
@given(
    offsets=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 12), min_size=1, max_size=6),
    rows=st.integers(1, 10),
)
def test_any_offsets_have_a_meaning(engine: Engine, offsets: list[int], rows: int) -> None:
    with workbench(engine) as bench:
        Problem(offsets, rows=rows).check(bench)


def test_a_row_that_is_not_finite_changes_no_other(bench: Workbench) -> None:
    problem = Problem(OFFSETS["rows of none"])
    wanted = problem.forward(bench)
    problem.tokens[4] = np.inf
    problem.tokens[8] = np.nan  # of no expert
    got = problem.forward(bench)
    assert not np.isfinite(got[4]).any()
    np.testing.assert_array_equal(np.delete(got, 4, 0), np.delete(wanted, 4, 0))
    assert np.isfinite(np.delete(problem.backward(bench), 2, 0)).all()


def test_transposed_weights_give_the_gradient_of_the_tokens(bench: Workbench) -> None:
    problem = Problem(OFFSETS["rows of none"])
    step, moved = 1e-6, problem.tokens.copy()
    wanted = np.empty_like(moved)
    for place in np.ndindex(moved.shape):
        sums = []
        for sign in (1, -1):
            moved[place] = problem.tokens[place] + sign * step
            sums.append((product(moved, problem.weights, problem.offsets) * problem.dy).sum())
        moved[place] = problem.tokens[place]
        wanted[place] = (sums[0] - sums[1]) / (2 * step)
    weights = np.ascontiguousarray(problem.weights.transpose(0, 2, 1))
    got = bench.run(
        GroupedMatMul(
            tokens=bench.place(problem.dy),
            weights=bench.place(weights),
            offsets=bench.place(np.array(problem.offsets, np.int32)),
            y=bench.empty(TensorSpec.packed(problem.tokens.shape, F64)),
        )
    )
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-8)


def of(*dims: int, dtype: DType = F32) -> TensorSpec:
    return TensorSpec.packed(dims, dtype)


FORWARD = {"tokens": of(9, 6), "weights": of(3, 6, 4), "offsets": of(3, dtype=I32), "y": of(9, 4)}
BACKWARD = {"tokens": of(9, 6), "dy": of(9, 4), "offsets": of(3, dtype=I32), "dweights": of(3, 6, 4)}


@cases_in_one_test
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens": of(1, 9, 6)}, "tokens"),
        ({"tokens": of(9, 6, dtype=I32)}, "tokens"),
        ({"weights": of(6, 4)}, "weights"),
        ({"weights": of(3, 5, 4)}, "weights"),
        ({"weights": of(3, 6, 4, dtype=F64)}, "weights"),
        ({"offsets": of(4, dtype=I32)}, "offsets"),
        ({"offsets": of(3, 1, dtype=I32)}, "offsets"),
        ({"offsets": of(3, dtype=DType.INT64)}, "offsets"),
        ({"y": of(9, 6)}, "y"),
        ({"y": of(9, 4, dtype=F64)}, "y"),
    ],
)
def test_a_mistake_names_its_field(changes: dict[str, TensorSpec], field: str) -> None:
    refused(GroupedMatMul, FORWARD | changes, field)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens": of(9)}, "tokens"),
        ({"dy": of(8, 4)}, "dy"),
        ({"dy": of(9, 4, 1)}, "dy"),
        ({"dy": of(9, 4, dtype=DType.FLOAT16)}, "dy"),
        ({"offsets": of(3)}, "offsets"),
        ({"dweights": of(3, 4, 6)}, "dweights"),
        ({"dweights": of(2, 6, 4)}, "dweights"),
    ],
)
def test_a_mistake_in_the_gradient_names_its_field(changes: dict[str, TensorSpec], field: str) -> None:
    refused(GroupedMatMulBackwardWeights, BACKWARD | changes, field)


def refused(kind: Any, specs: dict[str, TensorSpec], field: str) -> None:
    refs = (BufferRef(slot=n, generation=1, spec=spec, device="cpu") for n, spec in enumerate(specs.values()))
    with pytest.raises(InvalidRequest) as caught:
        lower(kind(**dict(zip(specs, refs, strict=True))))
    assert caught.value.field == field


def test_a_part_of_the_columns_follows_from_that_part_of_the_weights() -> None:
    """What a self-check of a large product relies on."""
    every, some = slice(None), slice(1, None, 2)
    forward = GroupedMatMul(tokens=0, weights=1, offsets=2, y=3)
    problem = Problem(OFFSETS["not ascending"])
    values: dict[str, Any] = {
        "tokens": problem.tokens,
        "weights": problem.weights,
        "offsets": np.array(problem.offsets),
        "dy": problem.dy,
    }
    specs = {name: of(*array.shape) for name, array in values.items()} | {"y": of(9, 4)}
    assert forward.needs(specs, {"y": (some, every)}) is None
    needed = forward.needs(specs, {"y": (every, some)})
    assert needed is not None
    part = {name: values[name][region] for name, region in needed.items()}
    whole = forward.evaluate(np, values, {"y": of(9, 4)})["y"]
    np.testing.assert_allclose(forward.evaluate(np, part, {"y": of(9, 2)})["y"], whole[:, some])
    backward = GroupedMatMulBackwardWeights(tokens=0, dy=1, offsets=2, dweights=3)
    whole = backward.evaluate(np, values, {"dweights": of(3, 6, 4)})["dweights"]
    for rows, columns in itertools.product((every, some), repeat=2):
        needed = backward.needs(specs, {"dweights": (every, rows, columns)})
        assert needed is not None
        part = {name: values[name][region] for name, region in needed.items()}
        wanted = whole[:, rows, columns]
        got = backward.evaluate(np, part, {"dweights": of(*wanted.shape)})["dweights"]
        np.testing.assert_allclose(got, wanted)
    assert backward.needs(specs, {"dweights": (some, every, every)}) is None
