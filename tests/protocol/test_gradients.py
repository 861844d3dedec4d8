"""The gradients of elementwise functions against finite differences, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.protocol import TensorSpec
from cudnn_actor.protocol.operations import FUNCTIONS, Pointwise, PointwiseMode
from cudnn_actor.protocol.operations.gradients import GRADIENTS, gradients, require_all

from ..in_one_test import cases_in_one_test

JUMPS = {
    *("sign", "ceil", "floor", "round", "trunc", "eq", "ne", "lt", "le", "gt", "ge"),
    *("logical_and", "logical_or", "logical_xor", "logical_not", "is_nan", "is_inf"),
}
INSIDE = {PointwiseMode.ASIN, PointwiseMode.ACOS, PointwiseMode.ATANH}
ABOVE = {
    PointwiseMode.ACOSH: 1.0,
    **dict.fromkeys((PointwiseMode.LOG, PointwiseMode.SQRT, PointwiseMode.RSQRT, PointwiseMode.POW), 0.0),
    PointwiseMode.LOG1P: -1.0,
}
PARAMETERS: list[tuple[PointwiseMode, dict[str, float]]] = [
    *((mode, {}) for mode in GRADIENTS),
    *((PointwiseMode(name), {"parameter": 0.7}) for name in ("leaky_relu", "elu", "celu", "softplus")),
    *((PointwiseMode(name), {"parameter": 0.7}) for name in ("swish", "hard_sigmoid", "relu")),
    (PointwiseMode.RELU, {"parameter": 0.3, "lower": 0.5, "upper": 2.0}),
    (PointwiseMode.RELU, {"parameter": -1.5, "upper": 2.0}),
    (PointwiseMode.CLIP, {"lower": -1.0, "upper": 2.0}),
    (PointwiseMode.CLIP, {"upper": 0.5}),
]


def apply(mode: PointwiseMode, *operands: Any, **parameters: Any) -> np.ndarray:
    """A function of arrays and numbers, in float64."""
    arrays = np.broadcast_arrays(*(np.asarray(operand, np.float64) for operand in operands))
    operation = Pointwise(mode=mode, operands=tuple(range(len(arrays))), result=9, **parameters)
    spec = TensorSpec.packed(arrays[0].shape or (1,), "float64")
    values = dict(enumerate(map(np.array, arrays)))
    with np.errstate(all="ignore"):
        found = operation.evaluate(NumPy(), values, {"result": spec})["result"]  # type: ignore[arg-type]
    return np.asarray(found, np.float64)


def found_for(
    mode: PointwiseMode, operands: list[np.ndarray], gradient: np.ndarray, **parameters: Any
) -> tuple[np.ndarray | None, ...]:
    operation = Pointwise(mode=mode, operands=tuple(range(len(operands))), result=9, **parameters)
    return gradients(operation, operands, apply(mode, *operands, **parameters), gradient, apply)


def inputs(mode: PointwiseMode) -> list[np.ndarray]:
    rng = np.random.default_rng(sum(mode.encode()))
    operands = [rng.uniform(-4, 4, 60) for _ in range(FUNCTIONS[mode].arity)]
    if mode in INSIDE:
        operands[0] /= 4.5
    if mode in ABOVE:
        operands[0] = np.abs(operands[0]) + ABOVE[mode] + 0.05
    if mode is PointwiseMode.SELECT:
        operands[0] = (operands[0] > 0).astype(np.float64)
    return operands


def test_every_function_without_a_gradient_is_constant_between_jumps_or_of_integers() -> None:
    without = {mode for mode in PointwiseMode if mode not in GRADIENTS}
    assert without == {mode for mode in PointwiseMode if mode in JUMPS or FUNCTIONS[mode].bits}
    assert found_for(PointwiseMode.LT, inputs(PointwiseMode.LT), np.ones(60)) == (None, None)


def test_a_function_that_has_neither_a_gradient_nor_jumps_is_refused() -> None:
    rows = dict(GRADIENTS)
    del rows[PointwiseMode.SOFTSIGN]
    with pytest.raises(NotImplementedError, match="no row for softsign"):
        require_all(rows)


@cases_in_one_test
@pytest.mark.parametrize(("mode", "parameters"), PARAMETERS, ids=str)
def test_gradients_are_the_limits_of_differences(mode: PointwiseMode, parameters: dict[str, float]) -> None:
    operands, step = inputs(mode), 1e-6
    gradient = np.random.default_rng(1).normal(size=60)
    for number, found in enumerate(found_for(mode, operands, gradient, **parameters)):
        if found is None:
            assert (mode, number) == (PointwiseMode.SELECT, 0)
            continue
        sides = []
        for sign in (1, -1):
            moved = list(operands)
            moved[number] = operands[number] + sign * step
            sides.append(apply(mode, *moved, **parameters))
        wanted = gradient * (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)
        assert np.abs(wanted).max() > 0.01, "these points say nothing"


@cases_in_one_test
@pytest.mark.parametrize(
    ("mode", "operands", "wanted"),
    [
        ("abs", (0.0,), (0.0,)),
        ("relu", (0.0,), (0.0,)),
        ("leaky_relu", (0.0,), (0.01,)),
        ("max", (2.0, 2.0), (0.5, 0.5)),
        ("min", (2.0, 2.0), (0.5, 0.5)),
        ("pow", (0.0, 0.0), (0.0, 0.0)),
        ("pow", (0.0, 2.0), (0.0, 0.0)),
        ("pow", (0.0, 1.0), (1.0, 0.0)),
        ("pow", (0.0, -1.0), (-math.inf, -math.inf)),
        ("pow", (-2.0, 2.0), (-4.0, math.nan)),
        ("gelu", (-40.0,), (0.0,)),
        ("sigmoid", (-800.0,), (0.0,)),
        ("softplus", (800.0,), (1.0,)),
        ("mish", (800.0,), (1.0,)),
        ("mish", (-800.0,), (0.0,)),
        ("softsign", (1e200,), (0.0,)),
        ("elu", (800.0,), (1.0,)),
        ("clip", (math.nan,), (1.0,)),
        ("relu", (math.nan,), (1.0,)),
        ("max", (math.nan, 2.0), (1.0, 1.0)),
        ("min", (2.0, math.nan), (1.0, 1.0)),
        ("pow", (math.nan, 0.0), (0.0, math.nan)),
    ],
)
def test_gradients_at_kinks_and_far_away(
    mode: str, operands: tuple[float, ...], wanted: tuple[float, ...]
) -> None:
    arrays = [np.array([value]) for value in operands]
    found = found_for(PointwiseMode(mode), arrays, np.ones(1))
    np.testing.assert_array_equal([each.item() for each in found if each is not None], wanted)


def test_a_bound_belongs_to_what_a_clip_leaves_as_it_is_and_to_what_a_bounded_relu_cuts_off() -> None:
    x, bounds = np.array([-1.0, 2.0, -1.5, 2.5, np.nan]), {"lower": -1.0, "upper": 2.0}
    (clip,) = found_for(PointwiseMode.CLIP, [x], np.ones(5), **bounds)
    (relu,) = found_for(PointwiseMode.RELU, [x], np.ones(5), **bounds)
    np.testing.assert_array_equal(np.array([clip, relu]), [[1, 1, 0, 0, 0], [0, 0, 0, 0, 1]])


def test_select_passes_the_gradient_to_what_it_chose() -> None:
    operands = [np.array([1.0, 0.0]), np.ones(2), np.ones(2)]
    none, a, b = found_for(PointwiseMode.SELECT, operands, np.array([3.0, np.nan]))
    assert none is None
    np.testing.assert_array_equal(np.array([a, b]), [[3, 0], [0, np.nan]])
