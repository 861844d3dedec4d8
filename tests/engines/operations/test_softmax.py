"""Softmax and its logarithm, forward and backward, against SciPy, formulas and finite differences."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.special

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.protocol import BufferRef, DType, InvalidRequest, Softmax, SoftmaxBackward, TensorSpec
from cudnn_actor.protocol.messages.lowering import lower

from ...in_one_test import cases_in_one_test
from ..problems import normal
from ..references import TOLERANCES
from ..workbench import Workbench, spread

FLOATS = [dtype for dtype in DType if dtype.is_floating]
SHAPES = [((6, 10), -1), ((2, 3, 4, 5), 1), ((7, 33), 0), ((3, 1, 4099), 2), ((5,), 0), ((2, 3, 4), -2)]
BOTH = (False, True)
each_case = pytest.mark.parametrize(("dtype", "log"), [*itertools.product(FLOATS, BOTH)])


def of(bench: Workbench, array: Any, *, gaps: bool = False) -> BufferRef:
    array = np.asarray(array)
    dtype = DType(array.dtype.name)
    return bench.place(array, spread(array.shape, dtype) if gaps else TensorSpec.packed(array.shape, dtype))


def forward(bench: Workbench, x: BufferRef, axis: int, *, log: bool) -> np.ndarray:
    y = bench.empty(TensorSpec.packed(x.spec.dims, x.spec.dtype))
    return bench.run(Softmax(x=x, y=y, axis=axis, log=log))


def backward(bench: Workbench, dy: BufferRef, y: BufferRef, axis: int, *, log: bool) -> np.ndarray:
    dx = bench.empty(TensorSpec.packed(dy.spec.dims, dy.spec.dtype))
    return bench.run(SoftmaxBackward(dy=dy, y=y, dx=dx, axis=axis, log=log))


def close(got: np.ndarray, wanted: np.ndarray) -> None:
    error = TOLERANCES[DType(got.dtype.name)]
    np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=error, atol=error * np.abs(wanted).max())


@cases_in_one_test
@pytest.mark.pairwise
@each_case
def test_forward(bench: Workbench, dtype: DType, log: bool) -> None:
    for (dims, axis), gaps in itertools.product(SHAPES, BOTH):
        x = (3 * normal(dims, DType.FLOAT64, 1)).astype(dtype.numpy)
        function = scipy.special.log_softmax if log else scipy.special.softmax
        close(
            forward(bench, of(bench, x, gaps=gaps), axis, log=log), function(x.astype(np.float64), axis=axis)
        )


@cases_in_one_test
@pytest.mark.pairwise
@each_case
def test_backward(bench: Workbench, dtype: DType, log: bool) -> None:
    """dx is dy times the Jacobian: diag(p) - p p', or 1 - 1 p' of the logarithm."""
    for (dims, axis), gaps in itertools.product(SHAPES, BOTH):
        p = scipy.special.softmax(normal(dims, DType.FLOAT64, 2), axis=axis)
        y = (np.log(p) if log else p).astype(dtype.numpy)
        dy = normal(dims, dtype, 3)
        rows = [np.moveaxis(a.astype(np.float64), axis, -1) for a in (dy, y)]
        wanted = np.empty_like(rows[0])
        for place in np.ndindex(wanted.shape[:-1]):
            slope, given = (a[place] for a in rows)
            share = np.exp(given) if log else given
            change = share * math.fsum(slope) if log else share * math.fsum(slope * share)
            wanted[place] = slope - change if log else share * slope - change
        got = backward(bench, of(bench, dy, gaps=gaps), of(bench, y, gaps=gaps), axis, log=log)
        close(got, np.moveaxis(wanted, -1, axis))


@pytest.mark.parametrize("log", BOTH)
def test_gradients_are_those_of_finite_differences(bench: Workbench, log: bool) -> None:
    x, dy = normal((3, 4, 2), DType.FLOAT64, 4), normal((3, 4, 2), DType.FLOAT64, 5)
    y = forward(bench, of(bench, x), 1, log=log)
    got = backward(bench, of(bench, dy), of(bench, y), 1, log=log)
    function = scipy.special.log_softmax if log else scipy.special.softmax
    for place in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[place] = 1e-6
        sides = [float((function(x + sign * step, axis=1) * dy).sum()) for sign in (1, -1)]
        assert got[place] == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("log", BOTH)
@pytest.mark.parametrize("axis", [0, 1])
def test_extremes(bench: Workbench, log: bool, axis: int) -> None:
    """Large numbers are finite; of -infinity alone, of infinity and of NaN, all of a row is NaN."""
    inf, nan = math.inf, math.nan
    x = np.array(
        [[3e38, 3e38, -3e38], [-3e38] * 3, [-inf, 0, 0], [-inf] * 3, [inf, 0, 1], [nan, 0, 1]], np.float32
    )
    wanted = np.array([[0.5, 0.5, 0], [1 / 3] * 3, [0, 0.5, 0.5], *[[nan] * 3] * 3])
    with np.errstate(divide="ignore"):
        wanted = np.log(wanted) if log else wanted
    got = forward(bench, of(bench, x if axis else x.T.copy()), axis, log=log)
    if log:
        wanted[0, 2] = -inf  # -3e38 - 3e38 is beyond float32
    np.testing.assert_allclose(got if axis else got.T, wanted, rtol=1e-6)


@pytest.mark.parametrize("dims", [(0,), (3, 0), (0, 3)])
def test_of_no_elements(bench: Workbench, dims: tuple[int, ...]) -> None:
    x = of(bench, np.empty(dims, np.float32))
    assert forward(bench, x, 0, log=False).shape == dims
    assert backward(bench, x, x, 0, log=True).shape == dims


@cases_in_one_test
@pytest.mark.parametrize(
    ("operation", "changes", "field"),
    [
        (Softmax, {"axis": 2}, "axis"),
        (Softmax, {"axis": -3}, "axis"),
        (Softmax, {"axis": True}, "axis"),
        (Softmax, {"log": 2}, "log"),
        (Softmax, {"y": ((3, 4), DType.FLOAT32)}, "y"),
        (Softmax, {"y": ((3, 5), DType.FLOAT16)}, "y"),
        (Softmax, {"x": ((3, 5), DType.INT32)}, "x"),
        (SoftmaxBackward, {"axis": 2}, "axis"),
        (SoftmaxBackward, {"y": ((5, 3), DType.FLOAT32)}, "y"),
        (SoftmaxBackward, {"dx": ((3, 5), DType.FLOAT64)}, "dx"),
    ],
)
def test_a_mistake_names_its_field(
    bench: Workbench, operation: Any, changes: dict[str, Any], field: str
) -> None:
    fields = dict.fromkeys((*operation.inputs, *operation.outputs), ((3, 5), DType.FLOAT32)) | changes
    made = {
        name: bench.empty(TensorSpec.packed(*value)) if isinstance(value, tuple) else value
        for name, value in fields.items()
    }
    with pytest.raises(InvalidRequest) as caught:
        lower(operation(**made))
    assert caught.value.field == field


@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.FLOAT32])
def test_a_check_sees_an_exponential_that_overflows(dtype: DType) -> None:
    spec = TensorSpec.packed((4, 9), dtype)
    rng = np.random.default_rng(0)
    values = Softmax(x=0, y=1).samples(NumPy(), {"x": spec, "y": spec}, lambda s: rng.normal(size=s.dims))[
        "x"
    ]
    with np.errstate(over="ignore"):
        assert np.isinf(np.exp(values.astype(dtype.numpy))).all()
