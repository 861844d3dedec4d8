"""Attention, forward and backward, against its formula position by position, and finite differences."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import (
    Attention,
    AttentionBackward,
    BufferRef,
    DType,
    GraphBuilder,
    InvalidRequest,
    TensorSpec,
    alibi_slopes,
)
from cudnn_actor.protocol.messages.lowering import lower

from ...in_one_test import cases_in_one_test
from ..problems import normal
from ..references import TOLERANCES, assert_close
from ..remembered import read_only
from ..workbench import Workbench, spread
from .test_random import computed, word

STATE = (0x0123456789ABCDEF, (1 << 34) - 5)
"""Dropout's seed, and the number of the first weight."""
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
    window: tuple[int | None, int | None] = (None, None)
    slopes: tuple[float, ...] | None = None
    dropout: float = 0.0
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
            "state": (2,),
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
    "a window": Problem(window=(2, 3)),
    "a window to the left": Problem(window=(3, None), lengths_kv=(13, 7)),
    "a window to the right": Problem(window=(None, 2), rows=20),
    "a window of the position itself": Problem(window=(0, 0)),
    "a window that some rows leave": Problem(window=(2, 0), rows=17, columns=5, bias="1hi"),
    "a causal window": Problem(window=(4, 9), causal=True, lengths_q=(9, 6), lengths_kv=(12, 3)),
    "a window beyond the end": Problem(window=(100, 2**31 - 1)),
    "ALiBi": Problem(slopes=alibi_slopes(4), causal=True),
    "ALiBi, six heads": Problem(heads=6, slopes=alibi_slopes(6)),
    "slopes": Problem(slopes=(0.5, 0.0, -0.25, 3.0), window=(5, 5), lengths_kv=(12, 13)),
    "dropout": Problem(dropout=0.3),
    "dropout of many": Problem(dropout=0.9, causal=True, groups=1, batch=1, rows=34, columns=70),
    "dropout and all else": Problem(
        dropout=0.5, bias="1hi", lengths_q=(9, 6), lengths_kv=(12, 0), window=(3, 4), slopes=alibi_slopes(4)
    ),
}
each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))


def random_operands(problem: Problem, dtype: DType) -> dict[str, np.ndarray]:
    names = ("q", "k", "v", "dy", *(["bias"] if problem.bias else []))
    return {name: normal(problem.dims(name), dtype, seed) for seed, name in enumerate(names)}


@dataclass
class Case:
    """A problem with random operands: their values as float64 after rounding, and their buffers."""

    bench: Workbench
    problem: Problem
    dtype: DType
    values: dict[str, np.ndarray] = field(default_factory=dict)
    refs: dict[str, BufferRef] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, array in random_operands(self.problem, self.dtype).items():
            self.place(name, array, self.dtype)
        for name in ("lengths_q", "lengths_kv"):
            if lengths := getattr(self.problem, name):
                self.place(name, np.array(lengths, np.int32), DType.INT32)
        if self.problem.dropout:
            self.place("state", np.array(STATE), DType.INT64)

    @property
    def statistics_dtype(self) -> DType:
        return F64 if self.dtype is F64 else F32

    @property
    def options(self) -> dict[str, Any]:
        given: dict[str, Any] = {
            name: self.refs[name]
            for name in ("bias", "lengths_q", "lengths_kv", "state")
            if name in self.refs
        }
        problem = self.problem
        named = {name: getattr(problem, name) for name in ("causal", "scale", "slopes", "dropout")}
        return {**named, "window_left": problem.window[0], "window_right": problem.window[1], **given}

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
        """Compare. Of half types the weights are rounded too: errors are relative to the largest value.

        Differences of equal terms, which are of about 1, may be off by their rounding.
        """
        got, finite = self.bench.read(ref), np.isfinite(wanted)
        np.testing.assert_array_equal(got[~finite].astype(np.float64), wanted[~finite])
        got, wanted = got[finite], wanted[finite]
        if self.dtype not in HALF_TYPES:
            if wanted.any():
                assert_close(got, wanted)
            else:
                np.testing.assert_allclose(got, wanted, rtol=0.0, atol=TOLERANCES[self.dtype])
            return
        error = 2.0 ** (-8 if self.dtype is BF16 else -11)
        atol = 8 * error * float(np.abs(wanted).max(initial=0.0)) + 1e-6
        np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=4 * error, atol=atol)


@functools.cache
def seen(problem: Problem, b: int, i: int) -> list[int]:
    """The keys that a position sees."""
    if problem.lengths_q and i >= problem.lengths_q[b]:
        return []
    count = min(problem.columns, max(problem.lengths_kv[b], 0)) if problem.lengths_kv else problem.columns
    left, right = problem.window
    return [
        j
        for j in range(count)
        if not (problem.causal and j > i)
        and (left is None or j >= i - left)
        and (right is None or j <= i + right)
    ]


def weights(
    problem: Problem, values: dict[str, np.ndarray], b: int, h: int, i: int
) -> tuple[np.ndarray, float]:
    """The weights of the keys that a position sees, and the logarithm of what they were divided by."""
    keys = seen(problem, b, i)
    scale = 1 / math.sqrt(problem.features) if problem.scale is None else problem.scale
    scores = values["k"][b, h * problem.groups // problem.heads, keys] @ values["q"][b, h, i] * scale
    if problem.bias:
        places: list[Any] = [
            0 if letter == "1" else {"b": b, "h": h, "i": i}[letter] for letter in problem.bias
        ]
        scores = scores + values["bias"][(*places, keys)]
    if problem.slopes is not None:
        scores = scores - problem.slopes[h] * np.abs(i - np.array(keys, int))
    if not keys:
        return scores, -math.inf
    powers = np.exp(scores - scores.max())
    total = powers.sum()
    return powers / total, float(scores.max() + np.log(total))


@functools.cache
def factors(problem: Problem, b: int, h: int, i: int) -> np.ndarray:
    """What dropout makes of the weights that a position sees: 0, or more."""
    row = ((b * problem.heads + h) * problem.rows + i) * problem.columns
    below = round((1 - problem.dropout) * 2**32)
    kept = [word(STATE, row + j, 0) < below for j in seen(problem, b, i)]
    return np.array(kept, float) / (1 - problem.dropout)


def positions(problem: Problem) -> Any:
    return np.ndindex(problem.batch, problem.heads, problem.rows)


def attend(problem: Problem, values: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    y, statistics = np.zeros(problem.dims("y")), np.zeros(problem.dims("statistics"))
    for b, h, i in positions(problem):
        weight, statistics[b, h, i, 0] = weights(problem, values, b, h, i)
        if problem.dropout:
            weight = weight * factors(problem, b, h, i)
        y[b, h, i] = weight @ values["v"][b, h * problem.groups // problem.heads, seen(problem, b, i)]
    return y, statistics


def gradients(problem: Problem, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Position by position, through the Jacobian of softmax."""
    names = ["q", "k", "v", *(["bias"] if problem.bias else [])]
    found = {name: np.zeros(problem.dims(name)) for name in names}
    scale = 1 / math.sqrt(problem.features) if problem.scale is None else problem.scale
    for b, h, i in positions(problem):
        weight, _ = weights(problem, values, b, h, i)
        keys, g, dy = seen(problem, b, i), h * problem.groups // problem.heads, values["dy"][b, h, i]
        factor = factors(problem, b, h, i) if problem.dropout else np.ones(len(keys))
        slope = (np.diag(weight) - np.outer(weight, weight)) @ (values["v"][b, g, keys] @ dy * factor)
        found["q"][b, h, i] += slope @ values["k"][b, g, keys] * scale
        found["k"][b, g, keys] += np.outer(slope, values["q"][b, h, i]) * scale
        found["v"][b, g, keys] += np.outer(weight * factor, dy)
        if problem.bias:
            places: list[Any] = [
                0 if letter == "1" else {"b": b, "h": h, "i": i}[letter] for letter in problem.bias
            ]
            found["bias"][(*places, keys)] += slope
    return found


@functools.cache
def attended(problem: Problem, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """What `attend` gives for random operands: the same for each engine, and for both passes."""
    return read_only(attend(problem, floats(random_operands(problem, dtype))))


@functools.cache
def differentiated(problem: Problem, dtype: DType) -> dict[str, np.ndarray]:
    """What `gradients` gives for random operands."""
    return read_only(gradients(problem, floats(random_operands(problem, dtype))))


def floats(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.astype(np.float64) for name, array in arrays.items()}


@cases_in_one_test
@pytest.mark.each_value
@each_problem
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_forward_pass(bench: Workbench, problem: Problem, dtype: DType) -> None:
    case = Case(bench, problem, dtype)
    y, statistics = case.empty("y"), case.empty("statistics", case.statistics_dtype)
    bench.run(case.forward(y=y, statistics=statistics))
    wanted = attended(problem, dtype)
    case.close(y, wanted[0])
    case.close(statistics, wanted[1])
    alone = case.empty("y")
    bench.run(case.forward(y=alone))
    case.close(alone, wanted[0])


@cases_in_one_test
@pytest.mark.each_value
@each_problem
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_backward_pass(bench: Workbench, problem: Problem, dtype: DType) -> None:
    case = Case(bench, problem, dtype)
    y, statistics = attended(problem, dtype)
    given = {
        "y": case.place("y", y.astype(dtype.numpy), dtype),
        "statistics": case.place(
            "statistics", statistics.astype(case.statistics_dtype.numpy), case.statistics_dtype
        ),
    }
    wanted = differentiated(problem, dtype)
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


@pytest.mark.parametrize(
    ("causal", "window", "slopes", "dropout"),
    [(True, (None, None), None, 0.0), (False, (1, 1), (0.5, 0.25), 0.0), (False, (None, 2), None, 0.4)],
)
def test_gradients_are_those_of_finite_differences(
    bench: Workbench,
    causal: bool,
    window: tuple[int | None, int | None],
    slopes: tuple[float, ...] | None,
    dropout: float,
) -> None:
    problem = Problem(
        batch=1,
        heads=2,
        groups=1,
        rows=3,
        columns=4,
        features=2,
        values=3,
        bias="1hi",
        causal=causal,
        window=window,
        slopes=slopes,
        dropout=dropout,
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


def test_slopes_are_those_of_the_paper() -> None:
    assert alibi_slopes(8) == tuple(2.0**-n for n in range(1, 9))
    assert alibi_slopes(6) == (1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8)
    assert alibi_slopes(16)[:2] == pytest.approx((2**-0.5, 2**-1))
    assert alibi_slopes(1) == (2**-8,)


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


@cases_in_one_test
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
        ({"window_left": -1}, "window_left"),
        ({"window_right": 2**31}, "window_right"),
        ({"window_right": 1.0}, "window_right"),
        ({"slopes": (1.0,) * 3}, "slopes"),
        ({"slopes": (1.0, 1.0, 1.0, math.nan)}, "slopes"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": -0.1}, "dropout"),
        ({"dropout": 0.5}, "state"),
        ({"dropout": 0.5, "state": (2,)}, "state"),
        ({"state": (2,)}, "state"),
    ],
)
def test_a_mistake_names_its_field(bench: Workbench, changes: dict[str, Any], field_: str) -> None:
    fields: dict[str, Any] = {"q": (2, 4, 9, 8), "k": (2, 2, 13, 8), "v": (2, 2, 13, 16), "y": (2, 4, 9, 16)}
    made: dict[str, Any] = {
        name: bench.empty(TensorSpec.packed(value))
        if isinstance(value, tuple) and name != "slopes"
        else value
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


def test_a_builder_gives_attention_its_options() -> None:
    g = GraphBuilder()
    q, k = g.input("q", (2, 4, 9, 8)), g.input("k", (2, 2, 13, 8))
    state = g.input("state", (2,), "int64")
    graphs = [
        g.build(y=g.attention(q, k, k, window=(2, None), alibi=True, dropout=0.1, state=state)),
        g.build(y=g.attention(q, k, k, window=(None, 3), alibi=(1, 0.5, 0, 2))),
    ]
    (first,), (second,) = (graph.body.operations for graph in graphs)
    assert isinstance(first, Attention)
    assert isinstance(second, Attention)
    assert (first.window_left, first.window_right, first.slopes) == (2, None, alibi_slopes(4))
    assert (first.dropout, first.state in graphs[0].body.bound) == (0.1, True)
    assert (second.window_left, second.window_right, second.slopes) == (None, 3, (1, 0.5, 0, 2))
    assert (second.dropout, second.state) == (0.0, None)


@pytest.mark.parametrize("name", ["everything", "slopes", "dropout and all else", "many keys for one head"])
def test_a_graph_s_gradient_is_the_formula_s(name: str) -> None:
    problem = PROBLEMS[name]
    g: Any = GraphBuilder()
    named = ["q", "k", "v", *(["bias"] if problem.bias else [])]
    values = {n: np.asarray(normal(problem.dims(n), F64, seed)) for seed, n in enumerate([*named, "dy"])}
    tensors = {n: g.input(n, array.shape, "float64") for n, array in values.items()}
    lengths = {n: np.array(of, np.int32) for n in ("lengths_q", "lengths_kv") if (of := getattr(problem, n))}
    more = {n: g.input(n, (problem.batch,), "int32") for n in lengths}
    if problem.dropout:
        more["state"] = g.input("state", (2,), "int64")
    y = g.attention(
        **{n: tensors[n] for n in named},
        **more,
        causal=problem.causal,
        scale=problem.scale,
        window=problem.window,
        alibi=problem.slopes or False,
        dropout=problem.dropout,
    )
    found = g.grad(y, [tensors[n] for n in named], tensors["dy"])
    graph = g.build({f"d{n}": dx for n, dx in zip(named, found, strict=True)})
    got = computed(graph, values | lengths | ({"state": np.array(STATE)} if problem.dropout else {}))
    for n, wanted in gradients(problem, values).items():
        assert_close(got[f"d{n}"], wanted)
