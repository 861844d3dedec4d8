"""Every elementwise function, against Python's numbers, on each engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.protocol import DType, InvalidRequest, OperationGraph, TensorSpec
from cudnn_actor.protocol.operations import FUNCTIONS, GraphTensor, Pointwise, PointwiseMode, TensorRole
from cudnn_actor.protocol.operations.functions import TRUTH

from ...in_one_test import cases_in_one_test, in_one_test
from ..pointwise_oracle import FLOATS, INTEGERS, PARAMETERS
from ..workbench import Workbench, spread

INF, NAN = math.inf, math.nan
MOST = (1 << 63) - 1
VALUES = (0.0, -0.0, 5e-324, -1e-310, 1e-20, 0.3, -0.5, 0.999, -1.0, 1.0, 1.5, 2.5, -2.5, 3.0, -3.0, 6.25)
FAR = (-7.0, 19.5, -33.3, 88.7, -104.0, 700.0, -745.0, 1e5, 2.0**53, -1e16, 1e300, -1e300, INF, -INF, NAN)
WHOLE = (
    0,
    1,
    -1,
    2,
    -2,
    3,
    -7,
    12,
    63,
    64,
    127,
    -128,
    255,
    1 << 31,
    3**20,
    1 << 53,
    MOST - 1,
    MOST,
    -MOST - 1,
)
UNSIGNED = (*(value for value in WHOLE if value >= 0), MOST + 1, MOST + 12, 2 * MOST, 2 * MOST + 1)
FLOATING = [dtype for dtype in DType if dtype.is_floating]
INTS = [dtype for dtype in DType if dtype.numpy.kind in "iu" and dtype is not DType.UINT64]
NARROW = [dtype for dtype in INTS if dtype.itemsize < 8]
OF_FLOATS = [mode for mode, function in FUNCTIONS.items() if not function.bits]
OF_INTEGERS = [mode for mode, function in FUNCTIONS.items() if function.whole]


def run(
    bench: Workbench, mode: PointwiseMode, operands: Sequence[np.ndarray], result: DType, **fields: Any
) -> np.ndarray:
    """What a function gives for operands of equal dims."""
    refs = tuple(map(bench.place, operands))
    out = bench.empty(TensorSpec.packed(operands[0].shape, result))
    return bench.run(Pointwise(mode=mode, operands=refs, result=out, **fields))


def columns(mode: PointwiseMode, values: Sequence[Any], dtype: DType) -> list[np.ndarray]:
    """Every combination of values, for each operand of a function; of three, the first is the condition."""
    arity = FUNCTIONS[mode].arity
    choices = [(0, 1, *values[-3:]), values[:8], values[-8:]] if arity == 3 else [values] * arity
    every = list(itertools.product(*choices))
    return [np.array(column, dtype.numpy) for column in zip(*every, strict=True)]


def test_the_oracle_has_every_function() -> None:
    assert set(FLOATS) == set(OF_FLOATS)
    assert set(INTEGERS) == set(OF_INTEGERS)
    assert set(FLOATS) | set(INTEGERS) == set(PointwiseMode)


@in_one_test("mode", OF_FLOATS)
def test_functions_of_floats(bench: Workbench, mode: PointwiseMode) -> None:
    operands = columns(mode, VALUES + FAR, DType.FLOAT64)
    given = PARAMETERS.get(mode, {}).values()
    wanted = [FLOATS[mode](*map(float, row), *given) for row in zip(*operands, strict=True)]
    got = run(bench, mode, operands, DType.FLOAT64)
    # Functions of large arguments magnify the rounding of what is inside, such as 0.044715 x³.
    np.testing.assert_allclose(got, np.array(wanted, np.float64), rtol=3e-13, atol=1e-307)
    if FUNCTIONS[mode].whole and mode is not PointwiseMode.POW:
        np.testing.assert_array_equal(got, np.array(wanted, np.float64))


@in_one_test("mode", OF_INTEGERS)
def test_functions_of_integers_are_exact(bench: Workbench, mode: PointwiseMode) -> None:
    operands = columns(mode, WHOLE, DType.INT64)
    given = PARAMETERS.get(mode, {}).values()
    exact = [int(INTEGERS[mode](*map(int, row), *given)) for row in zip(*operands, strict=True)]
    wanted = [(value + (1 << 63)) % (1 << 64) - (1 << 63) for value in exact]
    got = run(bench, mode, operands, DType.INT64)
    assert got.tolist() == wanted
    assert run(bench, mode, operands, DType.FLOAT32).tolist() == np.array(wanted).astype(np.float32).tolist()


@in_one_test("mode", OF_INTEGERS)
def test_functions_of_uint64_are_exact(bench: Workbench, mode: PointwiseMode) -> None:
    operands = columns(mode, UNSIGNED, DType.UINT64)
    given = PARAMETERS.get(mode, {}).values()
    exact = [int(INTEGERS[mode](*map(int, row), *given)) for row in zip(*operands, strict=True)]
    wanted = np.array([value % (1 << 64) for value in exact], np.uint64)
    assert run(bench, mode, operands, DType.UINT64).tolist() == wanted.tolist()
    if not FUNCTIONS[mode].bits:
        assert run(bench, mode, operands, DType.INT64).tolist() == np.minimum(wanted, MOST).tolist()


@in_one_test("mode, dtype", [*itertools.product(OF_INTEGERS, NARROW)], ids=str)
def test_integers_saturate_where_bits_are_cut_off(
    bench: Workbench, mode: PointwiseMode, dtype: DType
) -> None:
    limits = np.iinfo(dtype.value)
    values = [value for value in WHOLE if limits.min <= value <= limits.max]
    operands = columns(mode, [*values, limits.min, limits.max], dtype)
    given = PARAMETERS.get(mode, {}).values()
    exact = [int(INTEGERS[mode](*map(int, row), *given)) for row in zip(*operands, strict=True)]
    if FUNCTIONS[mode].bits:
        wanted = np.array([value % (1 << 64) for value in exact], np.uint64).astype(dtype.numpy)
    else:
        inside = [(value + (1 << 63)) % (1 << 64) - (1 << 63) for value in exact]
        wanted = np.clip(inside, limits.min, limits.max).astype(dtype.numpy)
    np.testing.assert_array_equal(run(bench, mode, operands, dtype), wanted)


@in_one_test("mode", [mode for mode in OF_FLOATS if mode not in OF_INTEGERS])
def test_functions_that_give_no_integers_convert_them(bench: Workbench, mode: PointwiseMode) -> None:
    operands = columns(mode, (-3, 0, 1, 2, 5), DType.INT8)
    given = PARAMETERS.get(mode, {}).values()
    wanted = [FLOATS[mode](*map(float, row), *given) for row in zip(*operands, strict=True)]
    got = run(bench, mode, operands, DType.FLOAT32)
    np.testing.assert_allclose(got, np.array(wanted, np.float32), rtol=4e-6, atol=4e-6)


def test_whole_numbers_and_floats_together_are_floats(bench: Workbench) -> None:
    a, b = np.array([7, -7, 5], np.int32), np.array([2.5, 2.5, NAN], np.float64)
    assert run(bench, PointwiseMode.MOD, (a, b), DType.FLOAT64).tolist()[:2] == [2.0, 0.5]
    half = np.array([1.5, -2.5], np.float32)
    assert run(bench, PointwiseMode.MUL, (a[:2], half), DType.FLOAT32).tolist() == [10.5, 17.5]
    assert run(bench, PointwiseMode.CLIP, (a,), DType.FLOAT32, upper=4.5).tolist() == [4.5, -7.0, 4.5]


@pytest.mark.parametrize("dtype", FLOATING)
def test_identity_rounds_once(bench: Workbench, dtype: DType) -> None:
    ties = {DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8, DType.FLOAT32: 2.0**-24, DType.FLOAT64: 0.0}
    half = ties[dtype]
    x = np.array([0.5, -2.5, 2.0**-24, -1e3, INF, -INF, NAN, 1 + half, 1 + 3 * half, 1 + half + 2.0**-52])
    wanted = [*x[:7], 1.0, 1 + 4 * half, 1 + 2 * half + (2.0**-52 if not half else 0.0)]
    got = run(bench, PointwiseMode.IDENTITY, (x,), dtype)
    np.testing.assert_array_equal(got[[0, 1, 2, 4, 5, 6, 7, 8, 9]].astype(np.float64), np.delete(wanted, 3))


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
@pytest.mark.parametrize("read", [DType.FLOAT64, DType.FLOAT32])
@pytest.mark.parametrize("dtype", [*INTS, DType.UINT64])
def test_identity_rounds_to_even_and_saturates(bench: Workbench, dtype: DType, read: DType) -> None:
    x = np.array([0.5, 1.5, 2.5, 2.51, -0.4, 1e30, INF, -INF, NAN], read.numpy)
    limits = np.iinfo(dtype.value)
    spare = {DType.INT64: 1023, DType.UINT64: 2047}  # a float64 has fewer bits
    most = limits.max - spare.get(dtype, 0)
    got = run(bench, PointwiseMode.IDENTITY, (x,), dtype)
    assert got.tolist() == [0, 2, 2, 3, 0, most, most, limits.min, 0]


def test_an_int64_is_rounded_to_float32_once(bench: Workbench) -> None:
    """By way of float64, this one is a tie, and goes to the even number, which is smaller."""
    x = np.array([(1 << 62) + (1 << 38) + 1])
    assert run(bench, PointwiseMode.IDENTITY, (x,), DType.FLOAT32).item() == 2.0**62 + 2.0**39


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, [0, 0, 0, 1, 2, 9, INF, NAN]),
        ({"parameter": 0.5}, [-INF, -2, 0, 1, 2, 9, INF, NAN]),
        ({"upper": 6}, [0, 0, 0, 1, 2, 6, 6, NAN]),
        ({"lower": 1, "upper": 6}, [1, 1, 1, 1, 2, 6, 6, NAN]),
        ({"parameter": 2, "lower": 1}, [-INF, -9, -1, 1, 2, 9, INF, NAN]),
        ({"parameter": -1, "upper": 3}, [3, 3, 0, 1, 2, 3, 3, NAN]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.BFLOAT16])
def test_relu_with_a_slope_and_bounds(
    bench: Workbench, fields: dict[str, float], wanted: list[float], dtype: DType
) -> None:
    x = np.array([-INF, -4, 0, 1, 2, 9, INF, NAN], dtype.numpy)
    got = run(bench, PointwiseMode.RELU, (x,), dtype, **fields)
    np.testing.assert_array_equal(got.astype(np.float64), wanted)


@cases_in_one_test
@pytest.mark.parametrize(
    ("mode", "fields", "wanted"),
    [
        (PointwiseMode.CLIP, {"lower": -1, "upper": 2.5}, [-1, -1, -0.5, 2, 2.5, NAN]),
        (PointwiseMode.CLIP, {"upper": 1}, [-INF, -2, -0.5, 1, 1, NAN]),
        (PointwiseMode.LEAKY_RELU, {"parameter": 0.25}, [-INF, -0.5, -0.125, 2, INF, NAN]),
        (PointwiseMode.ELU, {"parameter": 2}, [-2, 2 * math.expm1(-2), 2 * math.expm1(-0.5), 2, INF, NAN]),
        (
            PointwiseMode.CELU,
            {"parameter": 4},
            [-4, 4 * math.expm1(-0.5), 4 * math.expm1(-0.125), 2, INF, NAN],
        ),
        (PointwiseMode.HARD_SIGMOID, {"parameter": 0.2}, [0, 0.1, 0.4, 0.9, 1, NAN]),
    ],
)
def test_parameters(
    bench: Workbench, mode: PointwiseMode, fields: dict[str, float], wanted: list[float]
) -> None:
    x = np.array([-INF, -2, -0.5, 2, INF, NAN])
    np.testing.assert_allclose(run(bench, mode, (x,), DType.FLOAT64, **fields), wanted, rtol=1e-9)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT32])
def test_three_operands_are_broadcast_and_may_have_gaps(bench: Workbench, dtype: DType) -> None:
    rng = np.random.default_rng(3)
    given = [rng.integers(low, 4, dims).astype(dtype.numpy) for low, dims in CHOICES]
    specs = [spread(array.shape, dtype) for array in given]
    refs = tuple(map(bench.place, given, specs))
    out = bench.empty(spread((2, 3, 4), dtype))
    got = bench.run(Pointwise(mode=PointwiseMode.SELECT, operands=refs, result=out))
    condition, a, b = given
    np.testing.assert_array_equal(got, np.where(condition != 0, a, b))
    assert (got < 0).any()


CHOICES = ((0, (2, 1, 4)), (-4, (1, 3, 1)), (-4, (2, 3, 4)))


def test_a_chain_is_rounded_where_the_graph_says_so(bench: Workbench) -> None:
    """Of values that are computed in different types, too."""

    def tensor(uid: int, dtype: DType, role: TensorRole = TensorRole.VIRTUAL) -> GraphTensor:
        return GraphTensor(uid=uid, dims=(6,), strides=(1,), dtype=dtype, role=role)

    bound = TensorRole.BOUND
    tensors = (
        tensor(0, DType.FLOAT32, bound),
        tensor(1, DType.INT32, bound),
        tensor(2, DType.INT8),
        tensor(3, DType.INT32),
        tensor(4, DType.BFLOAT16),
        tensor(5, TRUTH),
        tensor(6, DType.FLOAT64, bound),
        tensor(7, DType.FLOAT32, bound),
    )
    modes = PointwiseMode
    operations = (
        Pointwise(mode=modes.MUL, operands=(0, 0), result=2),  # float32, rounded to int8
        Pointwise(mode=modes.ADD, operands=(2, 1), result=3),  # int64, rounded to int32
        Pointwise(mode=modes.IDENTITY, operands=(3,), result=4),  # int64, rounded to bfloat16
        Pointwise(mode=modes.GT, operands=(3, 2), result=5),
        Pointwise(mode=modes.SELECT, operands=(5, 4, 0), result=6),
        Pointwise(mode=modes.SUB, operands=(4, 0), result=7),
    )
    x = np.array([1.5, -20.0, 0.25, 3.0, NAN, -1.0], np.float32)
    n = np.array([1000, 2**31 - 1, -5, -(2**31), 70001, 0], np.int32)
    got = bench.run_graph(OperationGraph(tensors=tensors, operations=operations), {0: x, 1: n})
    squares = np.array([2, 127, 0, 9, 0, 1])
    sums = np.clip(squares + n, -(2**31), 2**31 - 1)
    rounded = sums.astype(np.float32).astype(DType.BFLOAT16.numpy).astype(np.float64)
    np.testing.assert_array_equal(got[6], np.where(sums > squares, rounded, x.astype(np.float64)))
    np.testing.assert_array_equal(got[7], (rounded - x.astype(np.float64)).astype(np.float32))


def test_a_product_is_rounded_before_something_is_subtracted(bench: Workbench) -> None:
    """Contracted to one operation, they would give 2**-60."""
    specs = TensorSpec.packed((1,), DType.FLOAT64)
    roles = (TensorRole.BOUND, TensorRole.BOUND, TensorRole.VIRTUAL, TensorRole.BOUND)
    tensors = tuple(
        GraphTensor(uid=uid, dims=specs.dims, strides=specs.strides, dtype=specs.dtype, role=role)
        for uid, role in enumerate(roles)
    )
    operations = (
        Pointwise(mode=PointwiseMode.MUL, operands=(0, 0), result=2),
        Pointwise(mode=PointwiseMode.SUB, operands=(2, 1), result=3),
    )
    given = {0: np.array([1 + 2.0**-30]), 1: np.array([1 + 2.0**-29])}
    got = bench.run_graph(OperationGraph(tensors=tensors, operations=operations), given)
    assert got[3].item() == 0.0


def test_what_a_result_is_if_nothing_is_said() -> None:
    def inferred(mode: PointwiseMode, *dtypes: DType) -> DType:
        specs = {f"operands[{n}]": TensorSpec.packed((2,), dtype) for n, dtype in enumerate(dtypes)}
        operation = Pointwise(mode=mode, operands=tuple(range(len(dtypes))), result=9)
        return operation.infer(specs)["result"].dtype

    half, double, byte, long = DType.FLOAT16, DType.FLOAT64, DType.INT8, DType.INT64
    assert inferred(PointwiseMode.ADD, half, byte) is DType.FLOAT32
    assert inferred(PointwiseMode.ADD, double, byte) is double
    assert inferred(PointwiseMode.ADD, byte, byte) is long
    assert inferred(PointwiseMode.DIV, byte, byte) is DType.FLOAT32
    assert inferred(PointwiseMode.LT, double, byte) is TRUTH
    assert inferred(PointwiseMode.SELECT, TRUTH, half, half) is DType.FLOAT32
    assert inferred(PointwiseMode.SHIFT_LEFT, byte, byte) is long


@cases_in_one_test
@pytest.mark.parametrize(
    ("mode", "dtypes", "fields", "field", "words"),
    [
        ("bitwise_and", ("int8", "float32"), {}, "operands[1]", "use int8 or"),
        ("shift_left", ("float64", "int8"), {}, "operands[0]", "use int8 or"),
        ("select", ("int8", "float32"), {}, "operands", "give it 3"),
        ("clip", ("int8",), {"lower": 2, "upper": 1}, "lower", "above the upper bound, 1.0"),
        ("clip", ("int8",), {"lower": NAN}, "lower", "must be a finite number"),
        ("clip", ("int8",), {"parameter": 1.0}, "parameter", "clip has no parameter"),
        ("exp", ("int8",), {"upper": 1.0}, "upper", "exp has no upper"),
        ("relu", ("int8",), {"upper": -1.0}, "lower", "above the upper bound, -1.0"),
        ("softplus", ("int8",), {"parameter": 0.0}, "parameter", "must be a finite number > 0"),
        ("celu", ("int8",), {"parameter": -1.0}, "parameter", "must be a finite number > 0"),
    ],
)
def test_what_a_function_does_not_take(
    mode: str, dtypes: tuple[str, ...], fields: dict[str, Any], field: str, words: str
) -> None:
    specs = {f"operands[{n}]": TensorSpec.packed((2,), DType(dtype)) for n, dtype in enumerate(dtypes)}
    operands = tuple(range(len(dtypes)))
    operation = Pointwise(mode=PointwiseMode(mode), operands=operands, result=9, **fields)
    with pytest.raises(InvalidRequest) as caught:
        operation.infer(specs)
    assert caught.value.field == field
    assert words in str(caught.value)


@cases_in_one_test
@pytest.mark.parametrize("mode", PointwiseMode)
def test_samples_tell_functions_apart(mode: PointwiseMode) -> None:
    """In a check, each operand has values of its own, and the results are many numbers, not one."""
    rng, function = np.random.default_rng(0), FUNCTIONS[mode]
    dtype = DType.INT32 if function.bits else DType.FLOAT32
    specs = {f"operands[{n}]": TensorSpec.packed((200,), dtype) for n in range(function.arity)}
    bounds: dict[str, Any] = {"lower": 50.0, "upper": 90.0} if mode is PointwiseMode.CLIP else {}
    operation = Pointwise(mode=mode, operands=tuple(specs), result="result", **bounds)

    def draw(spec: TensorSpec) -> np.ndarray:
        return rng.integers(-3, 5, spec.dims).astype(np.float64)

    values = {name: draw(spec) for name, spec in specs.items()} | operation.samples(NumPy(), specs, draw)
    given = [values[name].astype(np.int64) if function.bits else values[name] for name in specs]
    assert len({array.tobytes() for array in given}) == function.arity
    out = {"result": TensorSpec.packed((200,), dtype)}
    result = operation.evaluate(NumPy(), dict(zip(specs, given, strict=True)), out)["result"]
    assert np.isfinite(result).all()
    _, counts = np.unique(result, return_counts=True)
    assert len(counts) >= 2
    assert max(counts) <= 180


@cases_in_one_test
@pytest.mark.parametrize("mode", PointwiseMode)
def test_each_element_of_a_sample_follows_from_the_number_drawn_in_its_place(mode: PointwiseMode) -> None:
    specs = {f"operands[{n}]": TensorSpec.packed((3, 40)) for n in range(FUNCTIONS[mode].arity)}
    bounds: dict[str, Any] = {"lower": 50.0, "upper": 90.0} if mode is PointwiseMode.CLIP else {}
    operation = Pointwise(mode=mode, operands=tuple(specs), result="result", **bounds)
    assert operation.samples_of_each
    drawn, numbers = np.random.default_rng(5).integers(-3, 5, (3, 40)), np.arange(-3.0, 5.0)
    whole = operation.samples(NumPy(), specs, lambda _: drawn.astype(np.float64))
    each = operation.samples(np, specs, lambda _: numbers)
    assert whole.keys() == each.keys()
    for name, values in whole.items():
        np.testing.assert_array_equal(each[name][drawn + 3], values)


def test_uint64_is_copied_and_converted(bench: Workbench) -> None:
    x = np.array([0, 1, (1 << 64) - 1, 1 << 63], np.uint64)
    np.testing.assert_array_equal(run(bench, PointwiseMode.IDENTITY, (x,), DType.UINT64), x)
    np.testing.assert_array_equal(run(bench, PointwiseMode.IDENTITY, (x,), DType.INT8), [0, 1, 127, 127])
    np.testing.assert_array_equal(run(bench, PointwiseMode.IDENTITY, (x,), DType.FLOAT64), x.astype(float))


def test_integers_beside_uint64_are_taken_modulo_2_to_the_64th(bench: Workbench) -> None:
    """But for a condition, which decides no type."""
    x, y = np.array([0, 5, (1 << 64) - 1], np.uint64), np.array([-1, 7, 3], np.int32)
    assert run(bench, PointwiseMode.ADD, (x, y), DType.UINT64).tolist() == [(1 << 64) - 1, 12, 2]
    assert run(bench, PointwiseMode.MAX, (y, x), DType.UINT64).tolist() == [(1 << 64) - 1, 7, (1 << 64) - 1]
    assert run(bench, PointwiseMode.SELECT, (x, y, y), DType.INT64).tolist() == [-1, 7, 3]


@pytest.mark.parametrize(("lower", "upper"), [(-3, 4), (4, 2.0**70), (-4, -2)])
def test_bounds_of_uint64_saturate(bench: Workbench, lower: float, upper: float) -> None:
    x = np.array([0, 5, (1 << 64) - 1], np.uint64)
    got = run(bench, PointwiseMode.CLIP, (x,), DType.UINT64, lower=lower, upper=upper)
    most = (1 << 64) - 1
    assert got.tolist() == [min(max(min(max(n, lower), upper), 0), most) for n in x.tolist()]


def test_bits_of_bools_are_truth_values(bench: Workbench) -> None:
    x = np.array([False, True])
    assert run(bench, PointwiseMode.BITWISE_NOT, (x,), DType.BOOL).tolist() == [True, False]
    assert run(bench, PointwiseMode.BITWISE_XOR, (x, ~x), DType.BOOL).tolist() == [True, True]


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
@pytest.mark.parametrize("mode", [PointwiseMode.ELU, PointwiseMode.SELU, PointwiseMode.CELU])
@pytest.mark.parametrize("dtype", FLOATING)
def test_the_sign_of_zero_is_kept(bench: Workbench, mode: PointwiseMode, dtype: DType) -> None:
    x = np.array([0.0, -0.0] * 20, dtype.numpy)
    assert np.signbit(run(bench, mode, (x,), dtype).astype(np.float64)).tolist() == [False, True] * 20
