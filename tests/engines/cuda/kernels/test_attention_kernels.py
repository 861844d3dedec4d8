"""Our own kernels of attention, on the host: see `host_cuda`. What they give is what the formula gives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cuda.operations import flash_attention
from cudnn_actor.protocol import (
    Attention,
    AttentionBackward,
    DType,
    GraphTensor,
    TensorSpec,
    alibi_slopes,
)

from ...host_cuda import compile_together, launched, sources_of, use
from ...operations.test_attention import PROBLEMS, STATE, Problem, attend, gradients
from ...problems import normal

Arrays = dict[str, np.ndarray]
Launch = tuple[Any, dict[str, TensorSpec], Arrays]
F64, F32, F16, BF16 = DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16
ERRORS = {F64: 1e-14, F32: 1e-6, F16: 2.0**-10, BF16: 2.0**-7}
"""Of each dtype, in terms of the largest value: sums of float32 are of a hundred terms."""
LONG: dict[str, Any] = {"batch": 1, "heads": 2, "groups": 1, "rows": 70, "columns": 133}
"""More than a tile of queries and of keys, of any size."""
CASES: list[tuple[DType, Problem]] = [
    *((dtype, PROBLEMS["everything"]) for dtype in (F16, BF16)),
    (F64, Problem(rows=1, columns=1, features=3, values=1)),
    (F32, Problem(rows=1, columns=129, features=80, values=3)),
    (F64, Problem(**LONG, features=3, values=80, causal=True)),
    (F64, Problem(**LONG, features=80, values=3, window=(40, 3), bias="1h1")),
    (F32, Problem(**LONG, features=80, values=65, causal=True, lengths_q=(67,), bias="bhi")),
    (F32, Problem(**LONG, features=8, values=144, window=(1, 1), lengths_kv=(101,), slopes=(0.5, -0.1))),
    *((F32, Problem(**LONG, window=window)) for window in ((62, None), (None, 62))),
    (BF16, Problem(**LONG, features=24, values=8, by_position=True, window=(None, 5), bias="1hi")),
    (F32, Problem(batch=1, heads=1, groups=1, rows=3, columns=5, features=1024, values=1100, causal=True)),
    (F64, Problem(window=(3, None), rows=17, columns=5, slopes=alibi_slopes(4), scale=0.3, gaps=True)),
    (F64, Problem(dropout=0.3, bias="1h1", lengths_kv=(13, 0), lengths_q=(-1, 100), slopes=alibi_slopes(4))),
    (F32, Problem(dropout=0.5, window=(35, 3), groups=1, rows=39, columns=68)),
]
SMALL_TILES = [
    (F64, Problem(**LONG, features=5, values=8, causal=True, bias="b11")),
    (F32, Problem(**LONG, features=24, values=40, window=(20, 9), dropout=0.2)),
]
LARGE, SMALL = 1, 1 << 30
"""Numbers of blocks that are enough for tiles as of large problems, and as of small ones."""


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Most sources in one go."""
    sources: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for enough, cases in ((LARGE, CASES), (SMALL, SMALL_TILES)):
            patch.setattr(flash_attention, "_ENOUGH_BLOCKS", enough)
            for dtype, problem in cases:
                given = operands(problem, dtype)
                results = (np.zeros(problem.dims(name)) for name in ("y", "statistics"))
                for operation, specs, _ in (forward(problem, given), backward(problem, given, *results)):
                    tensors = [
                        GraphTensor(uid=uid, dims=spec.dims, strides=spec.strides, dtype=spec.dtype)
                        for uid, spec in enumerate(specs.values())
                    ]
                    sources += sources_of(operation, tensors)
    compile_together(sources)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    monkeypatch.setattr(flash_attention, "_ENOUGH_BLOCKS", LARGE)


def operands(problem: Problem, dtype: DType) -> Arrays:
    names = ("q", "k", "v", "dy", *(["bias"] if problem.bias else []))
    found = {name: normal(problem.dims(name), dtype, seed) for seed, name in enumerate(names)}
    lengths = {name: getattr(problem, name) for name in ("lengths_q", "lengths_kv")}
    found |= {name: np.array(of, np.int32) for name, of in lengths.items() if of}
    return found | ({"state": np.array(STATE)} if problem.dropout else {})


def forward(problem: Problem, given: Arrays) -> Launch:
    given = {name: array for name, array in given.items() if name != "dy"}
    return described(Attention, problem, given, "y", "statistics")


def backward(problem: Problem, given: Arrays, y: np.ndarray, statistics: np.ndarray) -> Launch:
    wide = np.float64 if given["q"].dtype == np.float64 else np.float32
    given = given | {"y": y.astype(given["q"].dtype), "statistics": statistics.astype(wide)}
    return described(
        AttentionBackward, problem, given, *(f"d{n}" for n in ("q", "k", "v", "bias") if n in given)
    )


def described(kind: Any, problem: Problem, given: Arrays, *outputs: str) -> Launch:
    """What `launched` takes. Gradients have the dtypes of what they belong to."""
    dtypes: dict[str, Any] = {name: DType.of(array.dtype) for name, array in given.items()}
    for name in outputs:
        wide = F64 if dtypes["q"] is F64 else F32
        dtypes[name] = wide if name == "statistics" else dtypes.get(name.removeprefix("d"), dtypes["q"])
    options = {name: getattr(problem, name) for name in ("causal", "scale", "slopes", "dropout")}
    options |= {"window_left": problem.window[0], "window_right": problem.window[1]}
    operation = kind(**{name: name for name in dtypes}, **options)
    return operation, {name: problem.spec(name, dtypes[name]) for name, _ in operation.named()}, given


def assert_near(got: np.ndarray, wanted: np.ndarray, dtype: DType) -> None:
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(got[~finite].astype(np.float64), wanted[~finite])
    error = ERRORS[dtype]
    largest = float(np.abs(wanted[finite]).max(initial=0.0))
    np.testing.assert_allclose(
        got[finite].astype(np.float64), wanted[finite], rtol=8 * error, atol=8 * error * largest + 1e-14
    )


@pytest.mark.parametrize(("dtype", "problem"), CASES, ids=[str(n) for n in range(len(CASES))])
def test_the_formula_s_values(dtype: DType, problem: Problem) -> None:
    given = operands(problem, dtype)
    values = {name: array.astype(np.float64) for name, array in given.items()}
    y, statistics = attend(problem, values)
    got = launched(*forward(problem, given))
    assert_near(got["y"], y, dtype)
    assert_near(got["statistics"], statistics, F64 if dtype is F64 else F32)
    found = launched(*backward(problem, given, y, statistics))
    for name, wanted in gradients(problem, values).items():
        assert_near(found[f"d{name}"], wanted, dtype)


@pytest.mark.parametrize(("dtype", "problem"), SMALL_TILES, ids=["causal", "dropout"])
def test_the_formula_s_values_by_many_blocks(
    monkeypatch: pytest.MonkeyPatch, dtype: DType, problem: Problem
) -> None:
    monkeypatch.setattr(flash_attention, "_ENOUGH_BLOCKS", 1 << 30)
    test_the_formula_s_values(dtype, problem)


def test_a_bias_of_another_type_that_hides_keys_and_queries() -> None:
    problem = Problem(bias="bhi", batch=1, heads=2, groups=2)
    given = operands(problem, BF16)
    given["bias"] = normal(problem.dims("bias"), F32, 9)
    given["bias"][:, :, 3] = -math.inf  # this position sees nothing
    given["bias"][:, :, :, 5] = -math.inf  # nobody sees this key
    got = launched(*forward(problem, given))
    assert not got["y"][:, :, 3].any()
    assert (got["statistics"][:, :, 3] == -math.inf).all()
    found = launched(*backward(problem, given, got["y"], got["statistics"]))
    assert all(np.isfinite(array.astype(np.float64)).all() and array.any() for array in found.values())
    for hidden in (found["dq"][:, :, 3], found["dbias"][:, :, 3], found["dk"][:, :, 5], found["dv"][:, :, 5]):
        assert not hidden.any()


def test_padding_that_is_not_finite_changes_nothing() -> None:
    """Kernels do not read it, neither of queries nor of keys."""
    dtype, problem = CASES[0]
    given = operands(problem, dtype)
    values = {name: array.astype(np.float64) for name, array in given.items()}
    for b, (of_q, of_kv) in enumerate(zip(problem.lengths_q, problem.lengths_kv, strict=True)):
        given["q"][b, :, of_q:] = given["dy"][b, :, of_q:] = math.nan
        given["k"][b, :, of_kv:] = given["v"][b, :, of_kv:] = math.nan
    got = launched(*forward(problem, given))
    assert_near(got["y"], attend(problem, values)[0], dtype)
    found = launched(*backward(problem, given, got["y"], got["statistics"]))
    for name, wanted in gradients(problem, values).items():
        assert_near(found[f"d{name}"], wanted, dtype)


def test_values_that_nobody_sees_may_be_as_large_as_they_like() -> None:
    dtype, problem = CASES[6]
    given = operands(problem, dtype)
    values = {name: array.astype(np.float64) for name, array in given.items()}
    assert problem.causal
    given["v"][:, :, problem.rows :] = np.finfo(np.float32).max
    found = launched(*backward(problem, given, *attend(problem, values)))
    for name, wanted in gradients(problem, values).items():
        assert_near(found[f"d{name}"], wanted, dtype)


def test_scores_that_are_not_finite_are_seen() -> None:
    problem = Problem(batch=1, heads=1, groups=1)
    given = operands(problem, F32)
    given["q"][0, 0, 4] = math.nan
    got = launched(*forward(problem, given))
    for array in got.values():
        assert np.isnan(array[0, 0, 4]).all()
        assert np.isfinite(np.delete(array, 4, axis=2)).all()


def test_results_have_the_same_bits_each_time() -> None:
    dtype, problem = CASES[6]
    given = operands(problem, dtype)
    got = launched(*forward(problem, given))
    found = [launched(*backward(problem, given, got["y"], got["statistics"])) for _ in range(2)]
    for name, array in found[0].items():
        assert array.tobytes() == found[1][name].tobytes()
