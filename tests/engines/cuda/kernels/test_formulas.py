"""The formulas of generated kernels, compiled for the host: they compute what the definitions say.

A device's mathematical functions differ in the last digits. What is compared here is everything else: special
values, domains, cancellation, overflow, integers.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import NumPy, round_into
from cudnn_actor.engines.cuda.kernels.element_types import C_TYPES, store, value_type
from cudnn_actor.engines.cuda.kernels.expressions import Expression, Leaf, Value
from cudnn_actor.engines.cuda.kernels.formulas import FORMULA_FUNCTIONS, FORMULAS, formula
from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import FUNCTIONS, PointwiseMode

from ....in_one_test import in_one_test
from ... import host_cuda
from ...operations.test_pointwise import FAR, UNSIGNED, VALUES, WHOLE, columns

COMPUTED = (DType.FLOAT64, DType.FLOAT32, DType.INT64, DType.UINT64)
CASES = [
    (mode, compute)
    for mode, compute in itertools.product(PointwiseMode, COMPUTED)
    if (not FUNCTIONS[mode].bits if compute.is_floating else FUNCTIONS[mode].whole)
]
OTHERS: list[tuple[PointwiseMode, tuple[float, ...]]] = [
    (PointwiseMode.RELU, (0.5, 0.0, np.inf)),
    (PointwiseMode.RELU, (2.0, -1.0, 6.0)),
    (PointwiseMode.CLIP, (-2.0, 3.0)),
    (PointwiseMode.CLIP, (2.0, 2.0**63)),
    (PointwiseMode.CELU, (3.0,)),
    (PointwiseMode.SOFTPLUS, (0.25,)),
]
LONG, SINGLE = DType.INT64, DType.FLOAT32
Compiled = Callable[[str, Sequence[np.ndarray], DType], np.ndarray]


def of(compute: DType) -> tuple[float, ...]:
    """Values that functions are computed of."""
    if compute.is_floating:
        return VALUES + FAR
    return UNSIGNED if compute is DType.UINT64 else WHOLE


def named(mode: PointwiseMode, compute: DType, number: int = 0) -> str:
    return f"{mode}_{compute}_{number}"


def function(name: str, value: Value, operands: Sequence[DType], out: DType, stored: str = "") -> str:
    """A C function that computes a value for many elements. `stored`: how it is stored in `out`."""
    steps: list[str] = []
    result = formula(value, steps)
    types = [value_type(dtype) for dtype in operands]
    arguments = ", ".join(f"const {kind}* in{n}" for n, kind in enumerate(types))
    loads = " ".join(f"const {kind} v{n} = in{n}[i];" for n, kind in enumerate(types))
    body = f"{loads} {' '.join(steps)} out[i] = {stored.format(result) if stored else result};"
    kind = C_TYPES[out] if stored else value_type(out)
    loop = f"for (long i = 0; i < n; ++i) {{{body}}}"
    return f'extern "C" void {name}({arguments}, {kind}* out, long n) {{{loop}}}'


def sources() -> list[str]:
    parts = []
    for mode, compute in CASES:
        every = [tuple(FUNCTIONS[mode].parameters.values()), *(other for of, other in OTHERS if of is mode)]
        leaves = [compute] * FUNCTIONS[mode].arity
        operands = tuple(Leaf(n, compute) for n in range(len(leaves)))
        for number, parameters in enumerate(every):
            value = Expression(mode, operands, parameters, compute)
            parts.append(function(named(mode, compute, number), value, leaves, compute))
    for dtype, compute in itertools.product(INTS, COMPUTED):
        name, stored = f"store_{dtype}_{compute}", store(dtype, "{}")
        parts.append(function(name, Leaf(0, compute), [compute], dtype, stored))
    ratio = Expression(PointwiseMode.DIV, (Leaf(0, LONG), Leaf(1, LONG)), (), SINGLE)
    parts.append(function("ratio", ratio, [LONG, LONG], SINGLE))
    for dtype in INTS:
        shifted = Expression(PointwiseMode.SHIFT_LEFT, (Leaf(0, LONG), Leaf(1, LONG)), (), LONG, dtype)
        parts.append(function(f"shift_{dtype}", shifted, [LONG, LONG], LONG))
        product = Expression(PointwiseMode.MUL, (Leaf(0, SINGLE), Leaf(0, SINGLE)), (), SINGLE, dtype)
        sums = Expression(PointwiseMode.ADD, (product, Leaf(1, LONG)), (), LONG)
        parts.append(function(f"chain_{dtype}", sums, [SINGLE, LONG], LONG))
    return parts


INTS = [d for d in DType if d.numpy.kind == "i" or d in (DType.UINT8, DType.UINT64)]


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    """Runs one of the functions, from its name, its operands, and what it gives."""
    loaded = host_cuda.library("\n".join([host_cuda.PREAMBLE, FORMULA_FUNCTIONS, *sources()]))

    def run(name: str, operands: Sequence[np.ndarray], out: DType) -> np.ndarray:
        result = np.empty(operands[0].shape, out.numpy)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*operands, result)]
        getattr(loaded, name)(*pointers, ctypes.c_long(result.size))
        return result

    return run


def defined(mode: PointwiseMode, operands: Sequence[np.ndarray], parameters: Sequence[float]) -> np.ndarray:
    exact = [array.astype(np.float64) if array.dtype.kind == "f" else array for array in operands]
    with np.errstate(all="ignore"):
        return np.asarray(FUNCTIONS[mode](NumPy(), exact, parameters))


@in_one_test("mode, compute", CASES, ids=str)
def test_a_formula_computes_what_the_definition_says(
    compiled: Compiled, mode: PointwiseMode, compute: DType
) -> None:
    every = [tuple(FUNCTIONS[mode].parameters.values()), *(other for of, other in OTHERS if of is mode)]
    with np.errstate(over="ignore"):
        operands = columns(mode, of(compute), compute)
    for number, parameters in enumerate(every):
        if not compute.is_floating and not FUNCTIONS[mode].exact(parameters, integers=True):
            continue
        got = compiled(named(mode, compute, number), operands, compute)
        wanted = defined(mode, operands, parameters)
        if not compute.is_floating:
            assert got.tolist() == wanted.tolist()
            continue
        with np.errstate(over="ignore"):
            wanted = wanted.astype(compute.numpy)
        # What is inside an exponential is rounded, which its size magnifies.
        tolerance, least = (2e-5, 1e-38) if compute is DType.FLOAT32 else (3e-13, 1e-307)
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=least)


@pytest.mark.parametrize(("dtype", "compute"), [*itertools.product(INTS, COMPUTED)])
def test_values_are_stored_as_integers_as_the_cpu_engine_does(
    compiled: Compiled, dtype: DType, compute: DType
) -> None:
    values = of(compute)
    if compute.is_floating:
        values = (*values, 127.5, 128.5, 255.5, -0.51, 2.0**31, -(2.0**63))
    with np.errstate(over="ignore"):
        given = np.array(values, compute.numpy)
    wanted = np.empty(given.shape, dtype.numpy)
    round_into(given.astype(np.float64) if compute.is_floating else given, dtype, wanted)
    got = compiled(f"store_{dtype}_{compute}", [given], dtype)
    assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", INTS)
def test_bits_that_a_type_has_no_room_for_are_cut_off(compiled: Compiled, dtype: DType) -> None:
    a, b = columns(PointwiseMode.SHIFT_LEFT, WHOLE, LONG)
    exact = [n << by if 0 <= by < 64 else 0 for n, by in zip(a.tolist(), b.tolist(), strict=True)]
    wanted = np.array([value % (1 << 64) for value in exact], np.uint64).astype(dtype.numpy).astype(np.int64)
    assert compiled(f"shift_{dtype}", [a, b], LONG).tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", INTS)
def test_each_value_of_a_chain_has_its_own_type(compiled: Compiled, dtype: DType) -> None:
    """A product of floats is rounded to an integer, saturates, and is added to others exactly."""
    x = np.array([0.5, 1.5, 20.0, 2e5, np.nan], np.float32)
    n = np.array([1, (1 << 53) + 1, -7, 5, 3])
    products = np.empty(x.shape, dtype.numpy)
    round_into(x.astype(np.float64) ** 2, dtype, products)
    assert compiled(f"chain_{dtype}", [x, n], LONG).tolist() == (products.astype(np.int64) + n).tolist()


def test_integers_are_converted_before_they_are_divided(compiled: Compiled) -> None:
    got = compiled("ratio", [np.array([7, 1]), np.array([2, -4])], SINGLE)
    assert got.tolist() == [3.5, -0.25]


def test_every_function_has_a_formula_for_what_it_is_computed_in() -> None:
    assert set(FORMULAS) == set(PointwiseMode)
    assert all(bool(FORMULAS[mode].floating) is not FUNCTIONS[mode].bits for mode in PointwiseMode)
    assert not [mode for mode in PointwiseMode if FORMULAS[mode].whole and not FUNCTIONS[mode].whole]
