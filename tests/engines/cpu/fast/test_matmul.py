"""Products of matrices in the fast CPU engine."""

from __future__ import annotations

import numpy as np
import pytest

from cudnn_actor.engines.cpu.fast.matmul import matmul
from cudnn_actor.engines.cpu.fast.matrices import as_blas_takes_it, blas_takes
from cudnn_actor.protocol import DType, TensorSpec
from cudnn_actor.protocol.operations import MatMul

from .kernel_cases import check
from .kernel_runs import LANES, run_kernel

MAKES = {MatMul: matmul}


def test_random_problems_are_right_within_their_bounds_on_any_number_of_lanes() -> None:
    check("matmul", MAKES, 100)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 130, 70), (70, 300)),
        ((1, 500), (500, 1100)),
        ((700, 900), (900, 3)),
        ((5, 3, 90, 80), (3, 80, 40)),
    ],
    ids=["one matrix for a batch", "one row", "few columns", "batches"],
)
@pytest.mark.parametrize("turned", [False, True], ids=["packed", "transposed"])
def test_products_in_several_blocks_do_not_depend_on_the_lanes(
    a: tuple[int, ...], b: tuple[int, ...], turned: bool
) -> None:
    rng = np.random.default_rng(5)
    given = {name: rng.standard_normal(dims, np.float32) for name, dims in (("a", a), ("b", b))}
    wanted = given["a"].astype(np.float64) @ given["b"]
    dims = {"a": a, "b": b, "y": wanted.shape}
    specs = {name: _turned(each) if turned else TensorSpec.packed(each) for name, each in dims.items()}
    found = [run_kernel(matmul, MatMul(a="a", b="b", y="y"), specs, given, lanes) for lanes in LANES]
    assert all(np.array_equal(each["y"], found[0]["y"]) for each in found)
    np.testing.assert_allclose(found[0]["y"], wanted, rtol=0, atol=3e-4)


def _turned(dims: tuple[int, ...]) -> TensorSpec:
    """Matrices of columns."""
    strides = [*TensorSpec.packed(dims).strides]
    strides[-2:] = 1, dims[-2]
    return TensorSpec.strided(dims, strides, DType.FLOAT32)


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
def test_infinity_and_nan_go_where_they_go_in_the_definition(special: float) -> None:
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((40, 33), np.float32), rng.standard_normal((33, 50), np.float32)
    a[3, 4], b[5, 6], b[4, 9] = special, special, 0
    specs = {
        name: TensorSpec.packed(dims) for name, dims in (("a", (40, 33)), ("b", (33, 50)), ("y", (40, 50)))
    }
    found = run_kernel(matmul, MatMul(a="a", b="b", y="y"), specs, {"a": a, "b": b}, 2)
    with np.errstate(all="ignore"):
        wanted = a.astype(np.float64) @ b
    np.testing.assert_allclose(found["y"], wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("dims", "strides", "taken"),
    [
        ((3, 5), (5, 1), True),
        ((3, 5), (1, 3), True),
        ((3, 5), (4, 1), False),
        ((3, 5), (10, 2), False),
        ((1, 5), (0, 2), True),
        ((1, 5), (5, 0), False),
        ((5, 1), (2, 0), True),
        ((5, 1), (0, 1), False),
        ((1, 1), (0, 0), True),
    ],
)
def test_blas_takes_neighbours_and_what_has_one_row_or_column(
    dims: tuple[int, int], strides: tuple[int, int], taken: bool
) -> None:
    array = np.lib.stride_tricks.as_strided(
        np.arange(64, dtype=np.float32), dims, tuple(4 * each for each in strides)
    )
    assert blas_takes(array) == taken
    view = as_blas_takes_it(array)
    assert (view is not None) == taken
    if view is not None:
        step, inner = (stride // 4 for stride in view.strides)
        assert (inner == 1 and step >= dims[1]) or (step == 1 and inner >= dims[0])
        np.testing.assert_array_equal(view, array)
