"""Operations along lines, as kernels compute them, against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cuda.kernels.expressions import Constant, Earlier, Leaf, Value
from cudnn_actor.engines.cuda.operations.in_lines import IN_LINES, compute_in_lines
from cudnn_actor.protocol import DType, TensorSpec
from cudnn_actor.protocol.operations import (
    FUNCTIONS,
    LayerNorm,
    Operation,
    PointwiseMode,
    Reduction,
    ReductionMode,
    RMSNorm,
    Softmax,
    SoftmaxBackward,
)

from ....in_one_test import cases_in_one_test

DIMS = (3, 4, 5)
REDUCED: dict[ReductionMode, Any] = {
    ReductionMode.MAX: np.max,
    ReductionMode.MEAN: np.mean,
    ReductionMode.SUM: np.sum,
}
CASES: dict[str, Any] = {
    "sum": Reduction(x=0, mode=ReductionMode.SUM, axes=(1,), keep_dims=True),
    "softmax": Softmax(x=0, axis=1),
    "logarithm of softmax": Softmax(x=0, axis=-1, log=True),
    "gradient of softmax": SoftmaxBackward(dy=0, y=1, axis=0),
    "gradient of its logarithm": SoftmaxBackward(dy=0, y=1, axis=1, log=True),
    "layer norm": LayerNorm(x=0, scale=1, bias=2, axis=1),
    "layer norm without weights": LayerNorm(x=0, axis=-1),
    "layer norm without bias": LayerNorm(x=0, scale=1, axis=1),
    "RMS norm": RMSNorm(x=0, scale=1, axis=1),
    "RMS norm without scale": RMSNorm(x=0, axis=2),
}


class Body:
    """A kernel's body that computes each node at once, on arrays."""

    def __init__(self, leaves: list[np.ndarray], axes: tuple[int, ...]) -> None:
        self._leaves = leaves
        self._axes = axes
        self.computed: list[np.ndarray] = []
        self.divided: list[int] = []
        """The elements of each quotient."""

    def array(self, value: Value) -> np.ndarray:
        match value:
            case Leaf(number=number):
                return self._leaves[number]
            case Earlier(number=number):
                return self.computed[number]
            case Constant(value=number):
                return np.asarray(number)
        raise AssertionError(value)

    def apply(self, mode: PointwiseMode, *operands: Value) -> Value:
        found = FUNCTIONS[mode](np, tuple(map(self.array, operands)), ())
        if mode is PointwiseMode.DIV:
            self.divided.append(found.size)
        return self._put(found)

    def reduce(self, mode: ReductionMode, operand: Value) -> Value:
        return self._put(REDUCED[mode](self.array(operand), axis=self._axes, keepdims=True))

    def _put(self, found: np.ndarray) -> Value:
        self.computed.append(found)
        return Earlier(len(self.computed) - 1)


def values_of(operation: Operation[Any]) -> dict[str, np.ndarray]:
    """Random values of an operation's inputs."""
    random = np.random.default_rng(7)
    weights = DIMS[operation.axis :] if isinstance(operation, LayerNorm | RMSNorm) else DIMS
    dims = {"scale": weights, "bias": weights}
    return {
        name: random.standard_normal(dims.get(name, DIMS)) for name, _ in operation.named(operation.inputs)
    }


def computed(operation: Any) -> tuple[Body, dict[str, np.ndarray]]:
    """The body that computes an operation, and its results by name."""
    values = values_of(operation)
    body = Body(list(values.values()), operation.reduced_dims(len(DIMS)))
    leaves = {name: Leaf(number, DType.FLOAT64) for number, name in enumerate(values)}
    found = compute_in_lines(operation, leaves, len(DIMS), body)
    return body, {name: body.array(value) for name, value in found.items()}


@cases_in_one_test
@pytest.mark.parametrize("name", CASES)
def test_an_operation_along_lines_is_its_definition(name: str) -> None:
    operation = CASES[name]
    values = values_of(operation)
    specs = {of: TensorSpec.packed(array.shape, DType.FLOAT64) for of, array in values.items()}
    wanted = operation.evaluate(np, values, specs | operation.infer(specs))
    _, found = computed(operation)
    assert found.keys() == wanted.keys()
    for of, array in wanted.items():
        np.testing.assert_allclose(found[of], array, rtol=1e-12)


def test_every_operation_along_lines_has_a_case() -> None:
    assert {type(operation) for operation in CASES.values()} == set(IN_LINES)


@cases_in_one_test
@pytest.mark.parametrize("name", CASES)
def test_there_is_no_division_for_each_element_of_a_line(name: str) -> None:
    body, _ = computed(CASES[name])
    lines = np.prod(DIMS) // np.prod([DIMS[axis] for axis in CASES[name].reduced_dims(3)])
    assert all(size <= lines for size in body.divided)


def test_weights_that_are_left_out_take_no_operations() -> None:
    steps = {name: len(computed(CASES[name])[0].computed) for name in CASES}
    assert steps["layer norm without weights"] == steps["layer norm"] - 2
    assert steps["RMS norm without scale"] == steps["RMS norm"] - 1
