"""Random numbers against Philox in plain integers, SciPy's quantiles, and the statistics of distributions.

Seeds are fixed, so that nothing here is left to chance.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.special

from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan, NumPy
from cudnn_actor.protocol import (
    DType,
    GraphBuilder,
    InvalidRequest,
    Operation,
    RandomBernoulli,
    RandomIntegers,
    RandomNormal,
    RandomUniform,
    TensorSpec,
)
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.operations.random import Randomness, philox, quantile

from ...in_one_test import cases_in_one_test
from ..workbench import Workbench, spread

FLOATS = [dtype for dtype in DType if dtype.is_floating]
INTEGERS = [dtype for dtype in DType if dtype.numpy.kind in "iu"]
STATES = [(0, 0), (7, 1), (0x0123456789ABCDEF, (1 << 34) - 5), (-1, -3), (-(1 << 63), (1 << 63) - 1)]
"""Seeds and offsets: numbers inside a block, blocks of more than 32 bits, and the end of all numbers."""
DIMS = (5, 7)


# Published vectors of philox4x32-10: https://github.com/DEShawResearch/random123, tests/kat_vectors.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], wanted: tuple[int, ...]
) -> None:
    assert philox(counter, key) == wanted
    assert oracle(counter, key) == list(wanted)
    arrays = [np.full(3, word, np.uint64) for word in counter]
    for found, word in zip(philox(arrays, key), wanted, strict=True):
        assert found.dtype == np.uint64
        assert (found == word).all()


def oracle(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """The paper's definition, round by round."""
    left0, right0, left1, right1 = counter
    first, second = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * left0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * left1, 1 << 32)
        left0, right0, left1, right1 = high1 ^ right0 ^ first, low1, high0 ^ right1 ^ second, low0
        first, second = (first + 0x9E3779B9) % (1 << 32), (second + 0xBB67AE85) % (1 << 32)
    return [left0, right0, left1, right1]


@functools.cache
def word(state: tuple[int, int], number: int, draw: int) -> int:
    """The word of an element: the docstring of the module, one element at a time."""
    seed, offset = (part % (1 << 64) for part in state)
    number = (offset + number) % (1 << 64)
    counter = number // 4 % (1 << 32), number // 4 >> 32, draw, 0
    return oracle(counter, (seed % (1 << 32), seed >> 32))[number % 4]


@functools.cache
def words(state: tuple[int, int], count: int) -> list[tuple[int, int]]:
    """Both words of each element."""
    return [(word(state, number, 0), word(state, number, 1)) for number in range(count)]


def drawn(
    bench: Workbench, operation: Randomness[Any], state: tuple[int, int], *, gaps: bool = False
) -> np.ndarray:
    """What an engine draws. Cases differ in the state alone, which the plan reads."""
    dims, dtype = operation.dims, operation.dtype
    spec = spread(dims, dtype) if gaps else TensorSpec.packed(dims, dtype)
    given = bench.place(np.array(state, np.int64), TensorSpec.packed((2,), DType.INT64))
    message = operation.with_operands({"state": given, "y": bench.empty(spec)}.__getitem__)
    return bench.run(message, keep_plan=True)


def ask(kind: type[Randomness[Any]], dims: tuple[int, ...] = DIMS, **of: Any) -> Randomness[Any]:
    return kind(state="state", y="y", dims=dims, **of)


def each(state: tuple[int, int], dims: tuple[int, ...], formula: Any) -> np.ndarray:
    """A formula of each element's two words."""
    values = [formula(first, second) for first, second in words(state, math.prod(dims))]
    return np.array(values, object).reshape(dims)


def rounded(value: float, dtype: DType) -> Any:
    """To nearest, by way of exact fractions of two: NumPy rounds twice on the way to bfloat16."""
    if dtype is not DType.BFLOAT16:
        return np.float64(value).astype(dtype.numpy)
    nearest = np.float32(value).astype(ml_dtypes.bfloat16)
    around = (nearest, *(np.nextafter(nearest, ml_dtypes.bfloat16(sign * math.inf)) for sign in (-1, 1)))
    return min(around, key=lambda near: (abs(float(near) - value), near.view(np.uint16) % 2))


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("ends", [(0.0, 1.0), (-0.3, 7.7)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_numbers_are_those_of_the_definition(
    bench: Workbench, state: tuple[int, int], dtype: DType, ends: tuple[float, float], gaps: bool
) -> None:
    low, high = ends
    operation = ask(RandomUniform, dtype=dtype, low=low, high=high)
    wanted = uniform_numbers(state, dtype, low, high)
    assert drawn(bench, operation, state, gaps=gaps).tobytes() == wanted.tobytes()


@functools.cache
def uniform_numbers(state: tuple[int, int], dtype: DType, low: float, high: float) -> np.ndarray:
    """What is drawn, by the definition."""

    def formula(first: int, second: int) -> Any:
        unit = ((first << 32 | second) >> 11) / 2**53 if dtype is DType.FLOAT64 else first / 2**32
        found = rounded(low + (high - low) * unit, dtype)
        if found >= high:
            found = np.nextafter(found, dtype.numpy.type(-math.inf))
        return np.nextafter(found, dtype.numpy.type(math.inf)) if found < low else found

    return each(state, DIMS, formula).astype(dtype.numpy)


def limits_of(dtype: DType) -> tuple[int, int]:
    """The least number of a dtype, and the one past the largest, which is an int64 or uint64 itself."""
    limits = np.iinfo(dtype.value)
    return int(limits.min), min(int(limits.max) + 1, (1 << 64) - 1)


RANGES: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "one number": lambda least, beyond: (0, 1),
    "few numbers": lambda least, beyond: (3, 100),
    "all numbers": lambda least, beyond: (least, beyond),
    "the least numbers": lambda least, beyond: (least, least + 7),
    "the largest numbers": lambda least, beyond: (beyond - 6, beyond),
}


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_whole_numbers_are_those_of_the_definition(
    bench: Workbench, state: tuple[int, int], dtype: DType, name: str
) -> None:
    low, high = RANGES[name](*limits_of(dtype))
    operation = ask(RandomIntegers, dtype=dtype, low=low, high=high)
    wanted = whole_numbers(state, low, high).astype(dtype.numpy)
    np.testing.assert_array_equal(drawn(bench, operation, state), wanted)


@functools.cache
def whole_numbers(state: tuple[int, int], low: int, high: int) -> np.ndarray:
    """What is drawn, by the definition."""
    return each(state, DIMS, lambda first, second: low + ((high - low) * (first << 32 | second) >> 64))


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("probability", [0.0, 0.3, 1 - 1e-11, 1.0])
@pytest.mark.parametrize("dtype", DType)
def test_coins_are_those_of_the_definition(
    bench: Workbench, state: tuple[int, int], dtype: DType, probability: float
) -> None:
    operation = ask(RandomBernoulli, dtype=dtype, probability=probability)
    wanted = each(state, DIMS, lambda first, _: first < round(probability * 2**32))
    np.testing.assert_array_equal(drawn(bench, operation, state).astype(np.int64), wanted.astype(np.int64))


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (100.0, 0.5)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_numbers_are_scipys_quantiles(
    bench: Workbench, state: tuple[int, int], dtype: DType, mean: float, deviation: float
) -> None:
    def formula(first: int, second: int) -> float:
        if dtype is DType.FLOAT64:
            return (((first << 32 | second) >> 12) + 0.5) / 2**52
        return (first + 0.5) / 2**32

    z = scipy.special.ndtri(each(state, DIMS, formula).astype(np.float64))
    got = drawn(bench, ask(RandomNormal, dtype=dtype, mean=mean, deviation=deviation), state)
    wanted = mean + deviation * z
    ulps = np.abs(got.astype(np.float64) - wanted) / spacing(wanted, dtype)
    assert ulps.max() <= (8 if dtype is DType.FLOAT64 else 0.51)


def spacing(values: np.ndarray, dtype: DType) -> np.ndarray:
    """A unit in the last place."""
    bits = {DType.FLOAT64: 52, DType.FLOAT32: 23, DType.FLOAT16: 10, DType.BFLOAT16: 7}[dtype]
    return np.asarray(np.ldexp(1.0, np.frexp(values)[1] - 1 - bits))


def test_quantiles_are_scipys_to_the_ends() -> None:
    near = 2.0 ** -np.arange(1.5, 53.0, 0.25)
    unit = np.concatenate([near, 1 - near, np.linspace(0.001, 0.999, 5001), [2.0**-53, 1 - 2.0**-53]])
    np.testing.assert_allclose(quantile(np, unit), scipy.special.ndtri(unit), rtol=4e-15)
    assert quantile(np, np.array([0.5])) == 0
    np.testing.assert_array_equal(quantile(np, 1 - near), -quantile(np, 1 - (1 - near)))


MANY, SEED = (400, 500), (20, 3)


def test_uniform_numbers_fill_their_range_evenly(bench: Workbench) -> None:
    from scipy import stats  # here: each process that collects tests would take two seconds for it

    for dtype in FLOATS:
        got = drawn(bench, ask(RandomUniform, MANY, dtype=dtype, low=-2.0, high=3.0), SEED).astype(np.float64)
        assert got.min() >= -2
        assert got.max() < 3
        assert stats.kstest(got.ravel(), "uniform", (-2, 5)).pvalue > 1e-3 or dtype.itemsize == 2
        assert got.mean() == pytest.approx(0.5, abs=0.02)
        assert got.var() == pytest.approx(25 / 12, rel=0.02)
        # Neighbours, and neighbours of blocks, have nothing to do with each other.
        for lag in (1, 2, 4, 500):
            assert abs(np.corrcoef(got.ravel()[lag:], got.ravel()[:-lag])[0, 1]) < 0.01


def test_normal_numbers_are_normally_distributed(bench: Workbench) -> None:
    from scipy import stats

    for dtype in FLOATS:
        got = drawn(bench, ask(RandomNormal, MANY, dtype=dtype, mean=1.0, deviation=2.0), SEED)
        z = (got.astype(np.float64).ravel() - 1) / 2
        if dtype.itemsize > 2:
            assert stats.kstest(z, "norm").pvalue > 1e-3
        assert z.mean() == pytest.approx(0, abs=0.01)
        assert z.std() == pytest.approx(1, rel=0.01)
        assert stats.skew(z) == pytest.approx(0, abs=0.03)
        assert stats.kurtosis(z) == pytest.approx(0, abs=0.06)
        assert 4 < np.abs(z).max() < 6.4


def test_whole_numbers_are_equally_likely(bench: Workbench) -> None:
    from scipy import stats

    got = drawn(bench, ask(RandomIntegers, MANY, dtype=DType.INT16, low=-5, high=8), SEED)
    values, counts = np.unique(got, return_counts=True)
    assert values.tolist() == [*range(-5, 8)]
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("probability", [0.0, 0.01, 0.5, 0.9, 1.0])
def test_coins_fall_as_often_as_they_should(bench: Workbench, probability: float) -> None:
    got = drawn(bench, ask(RandomBernoulli, MANY, dtype=DType.BOOL, probability=probability), SEED)
    count, total = int(got.sum()), got.size
    assert abs(count - total * probability) <= 4 * math.sqrt(total * probability * (1 - probability))


@pytest.mark.parametrize("kind", [RandomUniform, RandomNormal, RandomBernoulli])
def test_what_is_drawn_in_two_parts_is_what_is_drawn_at_once(bench: Workbench, kind: Any) -> None:
    """Element n depends on offset + n alone, so ranges that do not overlap share nothing."""
    for dtype in (DType.FLOAT64, DType.FLOAT16):
        whole = drawn(bench, ask(kind, (40,), dtype=dtype), (9, 6))
        parts = [
            drawn(bench, ask(kind, (count,), dtype=dtype), (9, 6 + start))
            for start, count in ((0, 11), (11, 29))
        ]
        np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_another_seed_gives_other_numbers(bench: Workbench) -> None:
    operation = ask(RandomUniform, (1000,))
    found = [drawn(bench, operation, (seed, 0)) for seed in (0, 1, 1 << 32, -1)]
    for first, second in itertools.combinations(found, 2):
        assert (first == second).sum() <= 1


@cases_in_one_test
@pytest.mark.parametrize("dims", [(), (0,), (3, 0), (1,), (2,), (3,)])
def test_any_number_of_elements(bench: Workbench, dims: tuple[int, ...]) -> None:
    for kind in (RandomUniform, RandomNormal, RandomBernoulli):
        assert drawn(bench, ask(kind, dims), (3, 2)).shape == dims
    assert drawn(bench, ask(RandomIntegers, dims, high=5), (3, 2)).shape == dims


@cases_in_one_test
@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        (RandomUniform, {"dtype": DType.INT32}, "dtype"),
        (RandomUniform, {"dtype": "float"}, "dtype"),
        (RandomUniform, {"low": 1.0}, "high"),
        (RandomUniform, {"low": 2.0}, "high"),
        (RandomUniform, {"low": math.inf}, "low"),
        (RandomUniform, {"high": math.nan}, "high"),
        (RandomUniform, {"low": -1.7e308, "high": 1.7e308, "dtype": DType.FLOAT64}, "high"),
        (RandomUniform, {"high": 1e6, "dtype": DType.FLOAT16}, "high"),
        (RandomUniform, {"dims": (3,)}, "y"),
        (RandomUniform, {"low": 1.0001, "high": 1.0002, "dtype": DType.BFLOAT16}, "high"),
        (RandomUniform, {"state": ((3,), DType.INT64)}, "state"),
        (RandomUniform, {"state": ((2,), DType.INT32)}, "state"),
        (RandomUniform, {"y": ((5, 6), DType.FLOAT32)}, "y"),
        (RandomUniform, {"y": ((5, 7), DType.FLOAT64)}, "y"),
        (RandomNormal, {"deviation": -1.0}, "deviation"),
        (RandomNormal, {"mean": math.inf}, "mean"),
        (RandomBernoulli, {"probability": 1.5}, "probability"),
        (RandomIntegers, {"high": 0}, "high"),
        (RandomIntegers, {"high": 2.0}, "high"),
        (RandomIntegers, {"high": 257, "dtype": DType.UINT8}, "high"),
        (RandomIntegers, {"low": -1, "high": 5, "dtype": DType.UINT8}, "low"),
        (RandomIntegers, {"high": 1 << 64, "dtype": DType.UINT64}, "high"),
        (RandomIntegers, {"high": 5, "dtype": DType.FLOAT32}, "dtype"),
        (RandomIntegers, {"high": 2, "dtype": DType.BOOL}, "dtype"),
    ],
)
def test_a_mistake_names_its_field(bench: Workbench, kind: Any, changes: dict[str, Any], field: str) -> None:
    dtype = DType.of(changes.get("dtype", "int64" if kind is RandomIntegers else "float32")) or DType.FLOAT32
    fields = {"state": ((2,), DType.INT64), "y": (DIMS, dtype), "dims": DIMS} | changes
    made = {
        name: bench.empty(TensorSpec.packed(*value)) if name in kind.inputs + kind.outputs else value
        for name, value in fields.items()
    }
    with pytest.raises(InvalidRequest) as caught:
        lower(kind(**made))
    assert caught.value.field == field


def test_a_range_keeps_its_ends_when_it_is_rounded() -> None:
    """Of [1, 2) no float16 is 2, though half of the numbers near it would be rounded to that."""
    operation = ask(RandomUniform, dtype=DType.FLOAT16, low=1.0, high=2.0)
    assert isinstance(operation, RandomUniform)
    assert operation.limits() == (1.0, 2 - 2**-10)
    ends = operation._numbers_of(np, lambda draw=0: np.array([0, (1 << 32) - 1], np.uint64))
    assert ends.tolist() == [1.0, 2 - 2**-10]


# In graphs.


def computed(graph: Any, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a graph writes, on the CPU."""
    buffers = {
        uid: given.get(
            graph.names_of[uid], np.empty(graph.body.tensor(uid).dims, graph.body.tensor(uid).dtype.numpy)
        )
        for uid in graph.body.bound
    }
    EvaluatedPlan("", graph.body).bind(np.empty(0, np.uint8)).run([*buffers.values()], ())
    return {graph.names_of[uid]: array for uid, array in buffers.items()}


def evaluated(
    operation: Operation[Any], state: np.ndarray, dims: tuple[int, ...], dtype: DType
) -> np.ndarray:
    found = operation.evaluate(NumPy(), {"state": state}, {"y": TensorSpec.packed(dims, dtype)})["y"]
    return np.asarray(found).astype(dtype.numpy)


def test_a_builder_draws_what_the_operations_draw() -> None:
    g = GraphBuilder()
    state = g.input("state", (2,), "int64")
    graph = g.build(
        uniform=g.uniform((2, 3), state, -1, 4, dtype="float16"),
        normal=g.normal((4,), state, 2.0, 3.0),
        coins=g.bernoulli((9,), state, 0.25),
        whole=g.randint((5,), state, -3, 9, dtype="int8"),
    )
    given = np.array([5, 11])
    found = computed(graph, {"state": given})
    for name, operation in {
        "uniform": ask(RandomUniform, (2, 3), low=-1.0, high=4.0, dtype=DType.FLOAT16),
        "normal": ask(RandomNormal, (4,), mean=2.0, deviation=3.0),
        "coins": ask(RandomBernoulli, (9,), probability=0.25, dtype=DType.BOOL),
        "whole": ask(RandomIntegers, (5,), low=-3, high=9, dtype=DType.INT8),
    }.items():
        wanted = evaluated(operation, given, operation.dims, operation.dtype)
        assert found[name].tobytes() == wanted.tobytes()


def test_dropout_drops_and_scales() -> None:
    g = GraphBuilder()
    state, x = g.input("state", (2,), "int64"), g.input("x", (40, 50))
    graph = g.build(y=g.dropout(x, 0.2, state))
    values, given = np.arange(1.0, 2001, dtype=np.float32).reshape(40, 50), np.array([1, 2])
    y = computed(graph, {"state": given, "x": values})["y"]
    kept = evaluated(ask(RandomBernoulli, (40, 50), probability=0.8), given, (40, 50), DType.FLOAT32) == 1
    np.testing.assert_allclose(y, np.where(kept, values / 0.8, 0), rtol=1e-6)
    assert kept.mean() == pytest.approx(0.8, abs=0.03)
    with pytest.raises(InvalidRequest) as caught:
        g.dropout(x, 1.0, state)
    assert caught.value.field == "probability"


def test_a_graph_advances_its_own_state() -> None:
    """The second run goes on where the first one stopped, as one run of twice as many would."""
    g = GraphBuilder()
    state = g.input("state", (2,), "int64")
    graph = g.build(y=g.uniform((6,), state), updates={"state": g.advance(state, 6)})
    assert not graph.body.pure
    given = np.array([3, 7])
    found = [computed(graph, {"state": given})["y"] for _ in range(2)]
    assert given.tolist() == [3, 19]
    whole = evaluated(ask(RandomUniform, (12,)), np.array([3, 7]), (12,), DType.FLOAT32)
    np.testing.assert_array_equal(np.concatenate(found), whole)


def test_gradients_pass_random_numbers_by() -> None:
    """They depend on no tensor of floats; what they are multiplied with has a gradient."""
    g: Any = GraphBuilder()
    state, x = g.input("state", (2,), "int64"), g.input("x", (40,), "float64")
    noise = g.normal((40,), state, dtype="float64")
    graph = g.build(dropped=g.grad(g.dropout(x, 0.25, state), x), scaled=g.grad(x * noise, x), noise=noise)
    found = computed(graph, {"state": np.array([4, 5]), "x": np.ones(40)})
    kept = evaluated(ask(RandomBernoulli, (40,), probability=0.75), np.array([4, 5]), (40,), DType.BOOL)
    np.testing.assert_allclose(found["dropped"], kept / 0.75)
    np.testing.assert_array_equal(found["scaled"], found["noise"])
