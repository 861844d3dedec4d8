"""Layer norm and RMS norm, forward and backward, against their formulas and finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import (
    DType,
    InvalidRequest,
    LayerNorm,
    LayerNormBackward,
    Layout,
    RMSNorm,
    RMSNormBackward,
    TensorSpec,
)
from cudnn_actor.protocol.messages.lowering import lower

from ...in_one_test import cases_in_one_test
from ..problems import normal
from ..references import assert_close
from ..workbench import Workbench, spread

F64, F32 = DType.FLOAT64, DType.FLOAT32
FLOATS = [dtype for dtype in DType if dtype.is_floating]
SHAPES = [
    ((6, 10), -1),
    ((2, 3, 97), -1),
    ((2, 3, 4, 5), -2),
    ((2, 3, 4, 5), 1),
    ((770,), 0),
    ((3, 1, 2049), 2),
]
each_shape = pytest.mark.parametrize(("dims", "axis"), SHAPES, ids=str)
EPSILON = 1e-3


def statistics_dtype(dtype: DType) -> DType:
    return F64 if dtype is F64 else F32


class Case:
    """Random operands, as float64 after rounding to their dtype, and the buffers that hold them."""

    def __init__(
        self, bench: Workbench, dims: tuple[int, ...], axis: int, dtype: DType, layout: Layout
    ) -> None:
        self.bench, self.dims, self.axis, self.dtype = bench, dims, axis, dtype
        first = axis % len(dims)
        self.row = dims[first:]
        self.axes = tuple(range(first, len(dims)))
        self.rows = tuple(range(first))
        self.statistics = (*dims[:first], *[1] * len(self.row))
        arrays = {name: normal(dims, dtype, seed) for seed, name in enumerate(("x", "dy"))}
        arrays |= {name: normal(self.row, dtype, 2 + seed) for seed, name in enumerate(("scale", "bias"))}
        self.refs: dict[str, Any] = {
            name: bench.place(array, self.lying(array.shape, layout)) for name, array in arrays.items()
        }
        self.values = {name: array.astype(np.float64) for name, array in arrays.items()}
        self.layout = layout

    def lying(self, dims: tuple[int, ...], layout: Layout) -> TensorSpec:
        return spread(dims, self.dtype) if layout is Layout.STRIDED else TensorSpec.packed(dims, self.dtype)

    def empty(self, dims: tuple[int, ...], dtype: DType | None = None) -> Any:
        return self.bench.empty(TensorSpec.packed(dims, dtype) if dtype else self.lying(dims, self.layout))

    def statistic(self) -> Any:
        return self.empty(self.statistics, statistics_dtype(self.dtype))

    def read(self, ref: Any) -> np.ndarray:
        return self.bench.read(ref).astype(np.float64)

    def close(self, got: Any, wanted: np.ndarray) -> None:
        assert_close(self.bench.read(got), wanted)


def layer_norm(x: np.ndarray, scale: Any, bias: Any, axes: tuple[int, ...]) -> list[np.ndarray]:
    mean = np.add.reduce(x, axis=axes, keepdims=True) / np.prod([x.shape[axis] for axis in axes])
    inverse = 1 / np.sqrt(np.var(x, axis=axes, keepdims=True) + EPSILON)
    return [(x - mean) * inverse * scale + bias, mean, inverse]


def rms_norm(x: np.ndarray, scale: Any, axes: tuple[int, ...]) -> list[np.ndarray]:
    inverse = np.reciprocal(np.sqrt(np.average(np.square(x), axis=axes, keepdims=True) + EPSILON))
    return [x * inverse * scale, inverse]


@cases_in_one_test
@pytest.mark.pairwise
@each_shape
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.STRIDED])
def test_the_forward_passes(
    bench: Workbench, dims: tuple[int, ...], axis: int, dtype: DType, layout: Layout
) -> None:
    case = Case(bench, dims, axis, dtype, layout)
    x, scale, bias = (case.refs[name] for name in ("x", "scale", "bias"))
    values = case.values
    y, mean, inverse, rms = case.empty(dims), case.statistic(), case.statistic(), case.statistic()
    common: Any = {"axis": axis, "epsilon": EPSILON}
    bench.run(LayerNorm(x=x, scale=scale, bias=bias, y=y, mean=mean, inverse_deviation=inverse, **common))
    for got, wanted in zip(
        (y, mean, inverse), layer_norm(values["x"], values["scale"], values["bias"], case.axes), strict=True
    ):
        case.close(got, wanted)
    alone = case.empty(dims)
    bench.run(LayerNorm(x=x, y=alone, **common))
    case.close(alone, layer_norm(values["x"], 1, 0, case.axes)[0])
    bench.run(RMSNorm(x=x, scale=scale, y=y, inverse_rms=rms, **common))
    for got, wanted in zip((y, rms), rms_norm(values["x"], values["scale"], case.axes), strict=True):
        case.close(got, wanted)


@cases_in_one_test
@pytest.mark.pairwise
@each_shape
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.STRIDED])
def test_the_backward_passes(
    bench: Workbench, dims: tuple[int, ...], axis: int, dtype: DType, layout: Layout
) -> None:
    case = Case(bench, dims, axis, dtype, layout)
    x, dy, scale = (case.refs[name] for name in ("x", "dy", "scale"))
    values = case.values
    _, mean, inverse = layer_norm(values["x"], 1, 0, case.axes)
    _, rms = rms_norm(values["x"], 1, case.axes)
    kept = [case.statistic() for _ in range(3)]
    for ref, array in zip(kept, (mean, inverse, rms), strict=True):
        bench.engine.write(bench.binding(ref), array.astype(ref.spec.dtype.numpy))
    dx, dscale, dbias = case.empty(dims), case.empty(case.row), case.empty(case.row)
    bench.run(
        LayerNormBackward(
            dy=dy,
            x=x,
            mean=kept[0],
            inverse_deviation=kept[1],
            scale=scale,
            dx=dx,
            dscale=dscale,
            dbias=dbias,
            axis=axis,
        )
    )
    normal_x = (values["x"] - mean) * inverse
    slope = values["dy"] * values["scale"]
    centred = slope - slope.mean(axis=case.axes, keepdims=True)
    case.close(dx, (centred - normal_x * (slope * normal_x).mean(axis=case.axes, keepdims=True)) * inverse)
    case.close(dscale, (values["dy"] * normal_x).sum(axis=case.rows))
    case.close(dbias, values["dy"].sum(axis=case.rows))
    bench.run(RMSNormBackward(dy=dy, x=x, inverse_rms=kept[2], scale=scale, dx=dx, dscale=dscale, axis=axis))
    normal_x = values["x"] * rms
    case.close(dx, (slope - normal_x * (slope * normal_x).mean(axis=case.axes, keepdims=True)) * rms)
    case.close(dscale, (values["dy"] * normal_x).sum(axis=case.rows))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_gradients_are_those_of_finite_differences(bench: Workbench, kind: str) -> None:
    case = Case(bench, (3, 2, 4), -2, F64, Layout.NCHW)
    dy, v = case.values["dy"], case.values
    step = 1e-6

    def loss(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> float:
        y = layer_norm(x, scale, bias, case.axes) if kind == "layer" else rms_norm(x, scale, case.axes)
        return float((y[0] * dy).sum())

    outputs = {"x": case.empty(case.dims), "scale": case.empty(case.row), "bias": case.empty(case.row)}
    refs, kept = case.refs, [case.statistic(), case.statistic()]
    common: Any = {"axis": -2, "epsilon": EPSILON}
    y = case.empty(case.dims)
    if kind == "layer":
        bench.run(LayerNorm(x=refs["x"], y=y, mean=kept[0], inverse_deviation=kept[1], **common))
        bench.run(
            LayerNormBackward(
                dy=refs["dy"],
                x=refs["x"],
                mean=kept[0],
                inverse_deviation=kept[1],
                scale=refs["scale"],
                dx=outputs["x"],
                dscale=outputs["scale"],
                dbias=outputs["bias"],
                axis=-2,
            )
        )
    else:
        bench.run(RMSNorm(x=refs["x"], y=y, inverse_rms=kept[0], **common))
        bench.run(
            RMSNormBackward(
                dy=refs["dy"],
                x=refs["x"],
                inverse_rms=kept[0],
                scale=refs["scale"],
                dx=outputs["x"],
                dscale=outputs["scale"],
                axis=-2,
            )
        )
    for name in ("x", "scale", "bias") if kind == "layer" else ("x", "scale"):
        got = bench.read(outputs[name])
        for place in np.ndindex(got.shape):
            sides = []
            for sign in (1, -1):
                moved = {key: v[key].copy() for key in ("x", "scale", "bias")}
                moved[name][place] += sign * step
                sides.append(loss(**moved))
            assert got[place] == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-5, abs=1e-6)


def test_a_large_mean_cancels_no_digits(bench: Workbench) -> None:
    x = (1e4 + normal((4, 4096), F32, 0)).astype(np.float32)
    y = bench.empty(TensorSpec.packed(x.shape))
    bench.run(LayerNorm(x=bench.place(x, TensorSpec.packed(x.shape)), y=y, epsilon=0.0))
    wanted = (x - x.astype(np.float64).mean(-1, keepdims=True)) / x.astype(np.float64).std(-1, keepdims=True)
    np.testing.assert_allclose(bench.read(y), wanted, atol=2e-3)


@cases_in_one_test
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"axis": 2}, "axis"),
        ({"axis": -3}, "axis"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"scale": (4,)}, "scale"),
        ({"bias": (3, 5)}, "bias"),
        ({"mean": (3, 5)}, "mean"),
        ({"y": (3, 4)}, "y"),
    ],
)
def test_a_mistake_names_its_field(bench: Workbench, changes: dict[str, Any], field: str) -> None:
    fields: dict[str, Any] = {"x": (3, 5), "y": (3, 5)} | changes
    made: dict[str, Any] = {
        name: bench.empty(TensorSpec.packed(value)) if isinstance(value, tuple) else value
        for name, value in fields.items()
    }
    with pytest.raises(InvalidRequest) as caught:
        lower(LayerNorm(**made))
    assert caught.value.field == field


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_what_a_plan_is_checked_on_has_a_result_without_an_epsilon(kind: Any) -> None:
    """Whole numbers from -3 to 4 have none: in short rows all of them are equal now and then, or 0."""
    rng = np.random.default_rng(1)
    specs = {"x": TensorSpec.packed((64, 3, 2)), "y": TensorSpec.packed((64, 3, 2))}
    operation = kind(x=0, y=1, epsilon=0.0, axis=-1)
    values = operation.samples(np, specs, lambda spec: rng.integers(-3, 5, spec.dims).astype(np.float64))
    assert np.isfinite(operation.evaluate(np, values, specs)["y"]).all()
