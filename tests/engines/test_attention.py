"""Attention, forward and backward, against its formula position by position, and finite differences."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from scipy.special import logsumexp

from cudnn_actor.protocol import (
    Attention,
    AttentionBackward,
    BufferRef,
    DType,
    InvalidRequest,
    TensorSpec,
)
from cudnn_actor.protocol.lowering import lower

from .problems import normal
from .references import assert_close
from .workbench import Workbench, spread

F64, F32, BF16 = DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16
FLOATS = [dtype for dtype in DType if dtype.is_floating]
HALF_TYPES = (DType.FLOAT16, BF16)


@dataclass(frozen=True)
class Problem:
    """What is computed: dims, and which options."""

    batch: int = 2
    heads: int = 4
    groups: int = 2
    rows: int = 9
    columns: int = 13
    features: int = 8
    values: int = 16
    causal: bool = False
    scale: float | None = None
    bias: str = ""
    lengths_q: tuple[int, ...] = ()
    lengths_kv: tuple[int, ...] = ()
    by_position: bool = False
    """Whether a position's heads are neighbours in memory, not a head's positions."""
    gaps: bool = False

    def dims(self, name: str) -> tuple[int, ...]:
        """Dims of the operand with that name; of a gradient, those of what it belongs to."""
        name = name if name in ("dy", "y") else name.removeprefix("d")
        of_q, of_k = (self.batch, self.heads, self.rows), (self.batch, self.groups, self.columns)
        sizes = {"b": self.batch, "h": self.heads, "i": self.rows, "1": 1}
        return {
            "q": (*of_q, self.features),
            "k": (*of_k, self.features),
            "v": (*of_k, self.values),
            "y": (*of_q, self.values),
            "dy": (*of_q, self.values),
            "statistics": (*of_q, 1),
            "bias": (*(sizes[letter] for letter in self.bias), self.columns),
            "lengths_q": (self.batch,),
            "lengths_kv": (self.batch,),
        }[name]

    def spec(self, name: str, dtype: DType) -> TensorSpec:
        dims = self.dims(name)
        if self.gaps and len(dims) == 4:
            return spread(dims, dtype)
        if self.by_position and name not in ("bias", "dbias", "statistics") and len(dims) == 4:
            _, h, s, d = dims
            return TensorSpec.strided(dims, (h * s * d, d, h * d, 1), dtype)
        return TensorSpec.packed(dims, dtype)


PROBLEMS = {
    "plain": Problem(),
    "one head": Problem(groups=4),
    "causal": Problem(causal=True),
    "causal, more rows": Problem(causal=True, rows=15),
    "many keys for one head": Problem(groups=1, rows=5, columns=70),
    "scale": Problem(scale=0.75),
    "odd features": Problem(features=5, values=35),
    "lengths": Problem(lengths_q=(4, 9), lengths_kv=(13, 7)),
    "lengths of keys alone": Problem(lengths_kv=(5, 11)),
    "lengths of queries alone": Problem(lengths_q=(5, 1)),
    "lengths of 0 and below": Problem(lengths_q=(-3, 9), lengths_kv=(4, 0)),
    "lengths beyond the end": Problem(lengths_q=(100, 9), lengths_kv=(99, 2**31 - 1)),
    "bias": Problem(bias="bhi"),
    "one bias for all samples": Problem(bias="1hi"),
    "a bias of keys alone": Problem(bias="b11"),
    "one bias for all": Problem(bias="111", causal=True),
    "everything": Problem(bias="1hi", causal=True, lengths_q=(9, 6), lengths_kv=(12, 13), scale=0.3),
    "heads side by side": Problem(by_position=True, causal=True, lengths_kv=(12, 13)),
    "gaps": Problem(gaps=True, bias="1hi"),
    "a tile and a bit": Problem(
        rows=65, columns=129, features=64, values=64, lengths_q=(65, 3), lengths_kv=(129, 128)
    ),
    "one query": Problem(rows=1, columns=40),
    "one position": Problem(rows=1, columns=1),
}
each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))


@dataclass
class Case:
    """A problem with random operands: their values as float64 after rounding, and their buffers."""

    bench: Workbench
    problem: Problem
    dtype: DType
    values: dict[str, np.ndarray] = field(default_factory=dict)
    refs: dict[str, BufferRef] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for seed, name in enumerate(("q", "k", "v", "dy", *(["bias"] if self.problem.bias else []))):
            self.place(name, normal(self.problem.dims(name), self.dtype, seed), self.dtype)
        for name in ("lengths_q", "lengths_kv"):
            if lengths := getattr(self.problem, name):
                self.place(name, np.array(lengths, np.int32), DType.INT32)

    @property
    def statistics_dtype(self) -> DType:
        return F64 if self.dtype is F64 else F32

    @property
    def options(self) -> dict[str, Any]:
        given: dict[str, Any] = {
            name: self.refs[name] for name in ("bias", "lengths_q", "lengths_kv") if name in self.refs
        }
        return {"causal": self.problem.causal, "scale": self.problem.scale, **given}

    def place(self, name: str, array: np.ndarray, dtype: DType) -> BufferRef:
        self.values[name] = array.astype(np.float64)
        self.refs[name] = self.bench.place(array, self.problem.spec(name, dtype))
        return self.refs[name]

    def empty(self, name: str, dtype: DType | None = None) -> BufferRef:
        return self.bench.empty(self.problem.spec(name, dtype or self.dtype))

    def forward(self, **others: Any) -> Attention[BufferRef]:
        operands: dict[str, Any] = {name: self.refs[name] for name in "qkv"}
        return Attention(**operands, **self.options, **others)

    def backward(self, **others: Any) -> AttentionBackward[BufferRef]:
        operands: dict[str, Any] = {name: self.refs[name] for name in ("q", "k", "v", "dy")}
        return AttentionBackward(**operands, **self.options, **others)

    def close(self, ref: BufferRef, wanted: np.ndarray) -> None:
        """Compare. Of half types the weights are rounded too: errors are relative to the largest value."""
        got, finite = self.bench.read(ref), np.isfinite(wanted)
        np.testing.assert_array_equal(got[~finite].astype(np.float64), wanted[~finite])
        got, wanted = got[finite], wanted[finite]
        if self.dtype not in HALF_TYPES:
            assert_close(got, wanted)
            return
        error = 2.0 ** (-8 if self.dtype is BF16 else -11)
        atol = 8 * error * float(np.abs(wanted).max(initial=0.0)) + 1e-6
        np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=4 * error, atol=atol)


def seen(problem: Problem, b: int, i: int) -> int:
    """How many keys a position sees."""
    if problem.lengths_q and i >= problem.lengths_q[b]:
        return 0
    count = problem.columns
    if problem.lengths_kv:
        count = min(count, max(problem.lengths_kv[b], 0))
    return min(count, i + 1) if problem.causal else count


def weights(
    problem: Problem, values: dict[str, np.ndarray], b: int, h: int, i: int
) -> tuple[np.ndarray, float]:
    """The weights of the keys that a position sees, and the logarithm of what they were divided by."""
    count = seen(problem, b, i)
    keys = values["k"][b, h * problem.groups // problem.heads, :count]
    scale = 1 / math.sqrt(problem.features) if problem.scale is None else problem.scale
    scores = keys @ values["q"][b, h, i] * scale
    if problem.bias:
        places: list[Any] = [
            0 if letter == "1" else {"b": b, "h": h, "i": i}[letter] for letter in problem.bias
        ]
        scores = scores + values["bias"][(*places, slice(count))]
    if not count:
        return scores, -math.inf
    logarithm = float(logsumexp(scores))
    return np.exp(scores - logarithm), logarithm


def positions(problem: Problem) -> Any:
    return np.ndindex(problem.batch, problem.heads, problem.rows)


def attend(problem: Problem, values: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    y, statistics = np.zeros(problem.dims("y")), np.zeros(problem.dims("statistics"))
    for b, h, i in positions(problem):
        weight, statistics[b, h, i, 0] = weights(problem, values, b, h, i)
        y[b, h, i] = weight @ values["v"][b, h * problem.groups // problem.heads, : len(weight)]
    return y, statistics


def gradients(problem: Problem, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Position by position, through the Jacobian of softmax."""
    names = ["q", "k", "v", *(["bias"] if problem.bias else [])]
    found = {name: np.zeros(problem.dims(name)) for name in names}
    scale = 1 / math.sqrt(problem.features) if problem.scale is None else problem.scale
    for b, h, i in positions(problem):
        weight, _ = weights(problem, values, b, h, i)
        count, g, dy = len(weight), h * problem.groups // problem.heads, values["dy"][b, h, i]
        slope = (np.diag(weight) - np.outer(weight, weight)) @ (values["v"][b, g, :count] @ dy)
        found["q"][b, h, i] += slope @ values["k"][b, g, :count] * scale
        found["k"][b, g, :count] += np.outer(slope, values["q"][b, h, i]) * scale
        found["v"][b, g, :count] += np.outer(weight, dy)
        if problem.bias:
            places: list[Any] = [
                0 if letter == "1" else {"b": b, "h": h, "i": i}[letter] for letter in problem.bias
            ]
            found["bias"][(*places, slice(count))] += slope
    return found


@each_problem
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_forward_pass(bench: Workbench, problem: Problem, dtype: DType) -> None:
    case = Case(bench, problem, dtype)
    y, statistics = case.empty("y"), case.empty("statistics", case.statistics_dtype)
    bench.run(case.forward(y=y, statistics=statistics))
    wanted = attend(problem, case.values)
    case.close(y, wanted[0])
    case.close(statistics, wanted[1])
    alone = case.empty("y")
    bench.run(case.forward(y=alone))
    case.close(alone, wanted[0])


@each_problem
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_backward_pass(bench: Workbench, problem: Problem, dtype: DType) -> None:
    case = Case(bench, problem, dtype)
    y, statistics = attend(problem, case.values)
    given = {
        "y": case.place("y", y.astype(dtype.numpy), dtype),
        "statistics": case.place(
            "statistics", statistics.astype(case.statistics_dtype.numpy), case.statistics_dtype
        ),
    }
    wanted = gradients(problem, case.values)
    outputs = {f"d{name}": case.empty(f"d{name}") for name in wanted}
    bench.run(case.backward(**given, **outputs))
    for name, array in wanted.items():
        case.close(outputs[f"d{name}"], array)


def test_the_bias_may_have_another_type(bench: Workbench) -> None:
    problem = Problem(bias="1hi")
    case = Case(bench, problem, BF16)
    bias = normal(problem.dims("bias"), F32, 9)
    case.place("bias", bias, F32)
    y, statistics = case.empty("y"), case.empty("statistics", F32)
    bench.run(case.forward(y=y, statistics=statistics))
    case.close(y, attend(problem, case.values)[0])
    outputs = {name: case.empty(name) for name in ("dq", "dk", "dv")} | {"dbias": case.empty("dbias", F32)}
    bench.run(case.backward(y=y, statistics=statistics, **outputs))
    case.close(outputs["dbias"], gradients(problem, case.values)["bias"])


def test_gradients_are_those_of_finite_differences(bench: Workbench) -> None:
    problem = Problem(
        batch=1,
        heads=2,
        groups=1,
        rows=3,
        columns=4,
        features=2,
        values=3,
        bias="1hi",
        causal=True,
        lengths_kv=(3,),
    )
    case = Case(bench, problem, F64)
    y, statistics = case.empty("y"), case.empty("statistics")
    bench.run(case.forward(y=y, statistics=statistics))
    names = ("q", "k", "v", "bias")
    outputs = {f"d{name}": case.empty(f"d{name}") for name in names}
    bench.run(case.backward(y=y, statistics=statistics, **outputs))
    step = 1e-6
    for name in names:
        got = bench.read(outputs[f"d{name}"])
        for place in np.ndindex(got.shape):
            sides = []
            for sign in (1, -1):
                moved = {key: array.copy() for key, array in case.values.items()}
                moved[name][place] += sign * step
                sides.append(float((attend(problem, moved)[0] * case.values["dy"]).sum()))
            assert got[place] == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-5, abs=1e-8)


def test_large_scores_overflow_nothing(bench: Workbench) -> None:
    problem = Problem(scale=400.0)
    case = Case(bench, problem, F32)
    y, statistics = case.empty("y"), case.empty("statistics", F32)
    bench.run(case.forward(y=y, statistics=statistics))
    assert np.isfinite(bench.read(y)).all()
    np.testing.assert_allclose(bench.read(statistics), attend(problem, case.values)[1], rtol=1e-5)


def test_a_bias_of_minus_infinity_hides_keys_and_queries(bench: Workbench) -> None:
    case = Case(bench, Problem(bias="bhi"), F32)
    bias = case.values["bias"].copy()
    bias[:, :, 3] = -math.inf  # this position sees nothing
    bias[:, :, :, 5] = -math.inf  # this key is seen by nobody
    case.place("bias", bias.astype(np.float32), F32)
    y, statistics = case.empty("y"), case.empty("statistics")
    bench.run(case.forward(y=y, statistics=statistics))
    assert not bench.read(y)[:, :, 3].any()
    assert (bench.read(statistics)[:, :, 3] == -math.inf).all()
    outputs = {name: case.empty(name) for name in ("dq", "dk", "dv", "dbias")}
    bench.run(case.backward(y=y, statistics=statistics, **outputs))
    found = {name: bench.read(ref) for name, ref in outputs.items()}
    assert all(np.isfinite(array).all() for array in found.values())
    for hidden in (found["dq"][:, :, 3], found["dbias"][:, :, 3], found["dk"][:, :, 5], found["dv"][:, :, 5]):
        assert not hidden.any()
    assert found["dq"].any()
    assert found["dv"].any()


@pytest.mark.parametrize("scale", [1e-30, 1e-5, 1.0, -0.5, 1e5])
def test_samples_are_finite_whatever_the_scale(scale: float) -> None:
    operation = Attention(q=0, k=1, v=2, y=3, scale=scale)
    specs = {name: TensorSpec.packed((1, 1, 8, 16), "float16") for name in ("q", "k", "v", "y")}
    numbers = np.random.default_rng(0)
    samples = operation.samples(np, specs, lambda spec: numbers.integers(-3, 5, spec.dims).astype(np.float64))
    assert np.isfinite(samples["q"].astype(np.float16)).all()
    assert samples["q"].any()


@pytest.mark.parametrize(
    ("changes", "field_"),
    [
        ({"q": (2, 9, 8)}, "q"),
        ({"k": (2, 3, 13, 8)}, "k"),
        ({"k": (2, 2, 13, 4)}, "k"),
        ({"k": (1, 2, 13, 8)}, "k"),
        ({"v": (2, 2, 12, 16)}, "v"),
        ({"y": (2, 4, 9, 8)}, "y"),
        ({"statistics": (2, 4, 9)}, "statistics"),
        ({"bias": (9, 13)}, "bias"),
        ({"bias": (2, 4, 9, 1)}, "bias"),
        ({"bias": (3, 4, 9, 13)}, "bias"),
        ({"lengths_q": (2,)}, "lengths_q"),
        ({"scale": float("nan")}, "scale"),
        ({"causal": 1}, "causal"),
    ],
)
def test_a_mistake_names_its_field(bench: Workbench, changes: dict[str, Any], field_: str) -> None:
    fields: dict[str, Any] = {"q": (2, 4, 9, 8), "k": (2, 2, 13, 8), "v": (2, 2, 13, 16), "y": (2, 4, 9, 16)}
    made: dict[str, Any] = {
        name: bench.empty(TensorSpec.packed(value)) if isinstance(value, tuple) else value
        for name, value in (fields | changes).items()
    }
    with pytest.raises(InvalidRequest) as caught:
        lower(Attention(**made))
    assert caught.value.field == field_


def test_a_gradient_of_a_bias_needs_a_bias(bench: Workbench) -> None:
    case = Case(bench, Problem(), F32)
    outputs = {name: case.empty(name) for name in ("dq", "dk", "dv")}
    dbias = bench.empty(TensorSpec.packed((1, 1, 1, 13)))
    with pytest.raises(InvalidRequest) as caught:
        lower(case.backward(y=case.empty("y"), statistics=case.empty("statistics"), dbias=dbias, **outputs))
    assert caught.value.field == "dbias"
