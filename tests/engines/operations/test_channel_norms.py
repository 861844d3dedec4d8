"""Batch, instance and group norm, sums over channels and LRN, against formulas and finite differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan, NumPy
from cudnn_actor.protocol import (
    BatchNorm,
    BatchNormBackward,
    BatchNormTraining,
    DType,
    GenStats,
    GraphBuilder,
    GroupNorm,
    GroupNormBackward,
    InstanceNorm,
    InstanceNormBackward,
    InvalidRequest,
    Layout,
    LocalResponseNorm,
    LocalResponseNormBackward,
    TensorSpec,
)
from cudnn_actor.protocol.messages.lowering import lower

from ...in_one_test import cases_in_one_test
from ..problems import normal
from ..references import TOLERANCES
from ..workbench import Workbench, spread

F64, F32 = DType.FLOAT64, DType.FLOAT32
FLOATS = [dtype for dtype in DType if dtype.is_floating]
EPSILON, MOMENTUM = 1e-3, 0.3
SHAPES = [((4, 6), 2), ((3, 6, 5), 3), ((2, 4, 3, 5), 1), ((2, 6, 1, 3, 2), 6), ((1, 2, 1, 4, 1, 3), 2)]
LAYOUTS = [Layout.NCHW, Layout.NHWC, Layout.STRIDED]
each_case = pytest.mark.parametrize(("dtype", "layout"), [*itertools.product(FLOATS, LAYOUTS)])
KINDS = ("batch", "instance", "group")
Arrays = dict[str, np.ndarray]


def wide(dtype: DType) -> DType:
    return F64 if dtype is F64 else F32


def lying(dims: tuple[int, ...], dtype: DType, layout: Layout) -> TensorSpec:
    if layout is Layout.STRIDED:
        return spread(dims, dtype)
    return TensorSpec.packed(dims, dtype, layout if 3 <= len(dims) <= 5 else Layout.NCHW)


def sets(kind: str, x: np.ndarray, groups: int) -> list[tuple[tuple[int, ...], Any]]:
    """The parts of x that have one mean, each with its place among the means."""
    samples, channels = x.shape[:2]
    if kind == "batch":
        return [((c,), (slice(None), slice(c, c + 1))) for c in range(channels)]
    own = 1 if kind == "instance" else channels // groups
    return [
        ((n, g), (slice(n, n + 1), slice(g * own, (g + 1) * own)))
        for n, g in itertools.product(range(samples), range(channels // own))
    ]


def weights(array: np.ndarray, x: np.ndarray) -> np.ndarray:
    return array.reshape(-1, *[1] * (x.ndim - 2))


def normalized(kind: str, given: Mapping[str, np.ndarray], groups: int = 1) -> Arrays:
    """The definition, set by set, with exact sums."""
    x = given["x"]
    normal_x, statistics = np.empty_like(x), {}
    for place, part in sets(kind, x, groups):
        values = x[part]
        mean = math.fsum(values.ravel()) / values.size
        variance = math.fsum((values - mean).ravel() ** 2) / values.size
        statistics[place] = mean, 1 / math.sqrt(variance + EPSILON), variance
        normal_x[part] = (values - mean) * statistics[place][1]
    dims = tuple(1 + top for top in max(statistics))
    mean, inverse, variance = (
        np.array([statistics[place][number] for place in np.ndindex(dims)]).reshape(dims)
        for number in range(3)
    )
    y = normal_x * weights(given["scale"], x) + weights(given["bias"], x)
    found = {"y": y, "mean": mean, "inverse_deviation": inverse, "normal": normal_x}
    if kind == "batch":
        count = x.size // x.shape[1]
        new = {"mean": mean, "variance": variance * count / max(1, count - 1)}
        for name, value in new.items():
            old = given[f"running_{name}"]
            found[f"new_running_{name}"] = (1 - MOMENTUM) * old + MOMENTUM * value
    return found


def operation(kind: str, groups: int, **operands: Any) -> Any:
    match kind:
        case "batch":
            return BatchNormTraining(**operands, epsilon=EPSILON, momentum=MOMENTUM)
        case "instance":
            return InstanceNorm(**operands, epsilon=EPSILON)
    return GroupNorm(**operands, epsilon=EPSILON, groups=groups)


def backward(kind: str, groups: int, **operands: Any) -> Any:
    match kind:
        case "batch":
            return BatchNormBackward(**operands)
        case "instance":
            return InstanceNormBackward(**operands)
    return GroupNormBackward(**operands, groups=groups)


class Bench:
    """Places arrays, and compares results."""

    def __init__(self, bench: Workbench, dtype: DType, layout: Layout) -> None:
        self.bench, self.dtype, self.layout = bench, dtype, layout

    def inputs(self, dims: tuple[int, ...], kind: str) -> tuple[Arrays, dict[str, Any]]:
        x = normal(dims, F64, 0) + 2
        vectors = ["scale", "bias", *(["running_mean", "running_variance"] if kind == "batch" else [])]
        arrays = {"x": x.astype(self.dtype.numpy)}
        arrays |= {name: normal(dims[1:2], self.dtype, n + 1) for n, name in enumerate(vectors)}
        return {n: a.astype(np.float64) for n, a in arrays.items()}, {
            n: self.at(a) for n, a in arrays.items()
        }

    def at(self, array: np.ndarray, dtype: DType | None = None) -> Any:
        array = array.astype((dtype or self.dtype).numpy)
        return self.bench.place(array, lying(array.shape, dtype or self.dtype, self.layout))

    def empty(self, dims: tuple[int, ...], dtype: DType | None = None) -> Any:
        return self.bench.empty(lying(dims, dtype or self.dtype, self.layout))

    def close(
        self,
        refs: Mapping[str, Any],
        wanted: Mapping[str, np.ndarray],
        terms: Mapping[str, float] | None = None,
    ) -> None:
        """`terms`: the largest of what results are sums of, by name, where the sums may be much smaller."""
        for name, ref in refs.items():
            error = 4 * TOLERANCES[ref.spec.dtype]
            got = self.bench.read(ref).astype(np.float64)
            largest = max(float(np.abs(wanted[name]).max()), (terms or {}).get(name, 0.0))
            np.testing.assert_allclose(got, wanted[name], rtol=error, atol=error * largest, err_msg=name)


@cases_in_one_test
@pytest.mark.each_value
@each_case
@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_passes(bench: Workbench, dtype: DType, layout: Layout, kind: str) -> None:
    on = Bench(bench, dtype, layout)
    for dims, groups in SHAPES:
        given, refs = on.inputs(dims, kind)
        wanted = normalized(kind, given, groups)
        outputs = {"y": on.empty(dims)}
        outputs |= {n: on.empty(wanted[n].shape, wide(dtype)) for n in ("mean", "inverse_deviation")}
        new = {n: on.empty(dims[1:2]) for n in wanted if n.startswith("new")}
        bench.run(operation(kind, groups, **refs, **outputs, **new))
        on.close(outputs | new, wanted)
        alone = on.empty(dims)
        bench.run(operation(kind, groups, x=refs["x"], y=alone))
        on.close({"normal": alone}, wanted)


@cases_in_one_test
@pytest.mark.each_value
@each_case
@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_passes(bench: Workbench, dtype: DType, layout: Layout, kind: str) -> None:
    on = Bench(bench, dtype, layout)
    for dims, groups in SHAPES:
        given, refs = on.inputs(dims, kind)
        forward = normalized(kind, given, groups)
        dy = normal(dims, dtype, 7)
        kept = {n: on.at(forward[n], wide(dtype)) for n in ("mean", "inverse_deviation")}
        outputs = {
            "dx": on.empty(dims),
            "dscale": on.empty(dims[1:2]),
            "dbias": on.empty(dims[1:2], wide(dtype)),
        }
        bench.run(backward(kind, groups, dy=on.at(dy), x=refs["x"], scale=refs["scale"], **kept, **outputs))
        slope, n = dy.astype(np.float64) * weights(given["scale"], given["x"]), forward["normal"]
        dx, largest = np.empty_like(slope), 0.0
        for place, part in sets(kind, slope, groups):
            inverse, count = forward["inverse_deviation"][place], slope[part].size
            mean, along = math.fsum(slope[part].ravel()) / count, math.fsum((slope * n)[part].ravel()) / count
            dx[part] = (slope[part] - mean - n[part] * along) * inverse
            largest = max(largest, float(np.abs(slope[part]).max() * inverse))
        others = tuple(axis for axis in range(len(dims)) if axis != 1)
        dy64 = dy.astype(np.float64)
        wanted = {"dx": dx, "dscale": (dy64 * n).sum(axis=others), "dbias": dy64.sum(axis=others)}
        on.close(outputs, wanted, {"dx": largest})


@cases_in_one_test
@pytest.mark.pairwise
@each_case
def test_inference_sums_and_responses(bench: Workbench, dtype: DType, layout: Layout) -> None:
    on = Bench(bench, dtype, layout)
    for dims, _ in SHAPES:
        x = normal(dims, dtype, 0)
        mean, variance, scale, bias = (normal(dims[1:2], dtype, 1 + n) for n in range(4))
        variance = np.abs(variance)
        vectors = {"mean": mean, "variance": variance, "scale": scale, "bias": bias}
        y, sums = on.empty(dims), [on.empty(dims[1:2], wide(dtype)) for _ in range(2)]
        ref = on.at(x)
        bench.run(BatchNorm(x=ref, y=y, epsilon=EPSILON, **{n: on.at(a) for n, a in vectors.items()}))
        x64 = x.astype(np.float64)
        m, v, s, b = (weights(a.astype(np.float64), x) for a in vectors.values())
        on.close({"y": y}, {"y": (x64 - m) * (v + EPSILON) ** -0.5 * s + b})
        bench.run(GenStats(x=ref, sum=sums[0], sum_of_squares=sums[1]))
        others = tuple(axis for axis in range(len(dims)) if axis != 1)
        on.close(dict(enumerate(sums)), {0: x64.sum(axis=others), 1: (x64**2).sum(axis=others)})  # type: ignore[arg-type, dict-item]
        bench.run(LocalResponseNorm(x=ref, y=y, size=4, alpha=0.3, beta=0.6, bias=1.5))
        on.close({"y": y}, {"y": response(x64, 4, 0.3, 0.6, 1.5)})


def response(x: np.ndarray, size: int, alpha: float, beta: float, bias: float) -> np.ndarray:
    """ONNX's definition, channel by channel."""
    y = np.empty_like(x)
    for c in range(x.shape[1]):
        first, last = max(0, c - math.floor((size - 1) / 2)), c + math.ceil((size - 1) / 2)
        total = np.square(x[:, first : last + 1]).sum(axis=1)
        y[:, c] = x[:, c] / (bias + alpha / size * total) ** beta
    return y


@pytest.mark.parametrize("size", [1, 2, 3, 5, 20])
def test_the_gradient_of_a_response_is_that_of_finite_differences(bench: Workbench, size: int) -> None:
    on, dims = Bench(bench, F64, Layout.NHWC), (2, 6, 2, 2)
    x, dy = normal(dims, F64, 1), normal(dims, F64, 2)
    parameters: Any = {"size": size, "alpha": 0.7, "beta": 0.6, "bias": 1.3}
    dx = on.empty(dims)
    bench.run(LocalResponseNormBackward(dy=on.at(dy), x=on.at(x), dx=dx, **parameters))
    wanted = differences({"x": x}, "x", lambda given: (response(given["x"], **parameters) * dy).sum())
    np.testing.assert_allclose(bench.read(dx), wanted, rtol=1e-5, atol=1e-7)


def differences(given: Arrays, name: str, loss: Any) -> np.ndarray:
    """The gradient of one of the inputs, from both sides."""
    found, step = np.empty_like(given[name]), 1e-6
    for place in np.ndindex(found.shape):
        sides = []
        for sign in (1, -1):
            moved = {key: array.copy() for key, array in given.items()}
            moved[name][place] += sign * step
            sides.append(float(loss(moved)))
        found[place] = (sides[0] - sides[1]) / (2 * step)
    return found


def test_running_statistics_may_be_those_of_onnx(bench: Workbench) -> None:
    x = normal((3, 2, 4), F64, 0)
    new = bench.empty(TensorSpec.packed((2,), F64))
    old, y = bench.place(np.array([1.0, 2.0])), bench.empty(TensorSpec.packed(x.shape, F64))
    asked: Any = BatchNormTraining(
        x=bench.place(x), y=y, running_variance=old, new_running_variance=new, unbiased=False, momentum=0.25
    )
    bench.run(asked)
    np.testing.assert_allclose(bench.read(new), 0.75 * np.array([1, 2]) + 0.25 * x.var(axis=(0, 2)))


@cases_in_one_test
@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        (BatchNorm, {"mean": (3,)}, "mean"),
        (BatchNorm, {"epsilon": -1.0}, "epsilon"),
        (BatchNormTraining, {"x": (5,), "y": (5,)}, "x"),
        (BatchNormTraining, {"momentum": 1.5}, "momentum"),
        (BatchNormTraining, {"new_running_mean": (4,)}, "new_running_mean"),
        (BatchNormTraining, {"scale": (1, 4, 1)}, "scale"),
        (BatchNormTraining, {"mean": (1, 4)}, "mean"),
        (InstanceNorm, {"mean": (4,)}, "mean"),
        (InstanceNorm, {"epsilon": math.nan}, "epsilon"),
        (GroupNorm, {"groups": 3}, "groups"),
        (GroupNorm, {"groups": 0}, "groups"),
        (GroupNorm, {"groups": 2, "y": (2, 4, 4)}, "y"),
        (LocalResponseNorm, {"size": 0}, "size"),
        (LocalResponseNorm, {"size": 3, "beta": math.inf}, "beta"),
    ],
)
def test_a_mistake_names_its_field(bench: Workbench, kind: Any, changes: dict[str, Any], field: str) -> None:
    fields: dict[str, Any] = {"x": (2, 4, 3), "y": (2, 4, 3)}
    if kind is BatchNorm:
        fields |= {"mean": (4,), "variance": (4,)}
    made = {
        name: bench.empty(TensorSpec.packed(value)) if isinstance(value, tuple) else value
        for name, value in (fields | changes).items()
    }
    with pytest.raises(InvalidRequest) as caught:
        lower(kind(**made))
    assert caught.value.field == field


@pytest.mark.parametrize("kind", [BatchNormTraining, InstanceNorm])
def test_what_a_plan_is_checked_on_has_a_result_without_an_epsilon(kind: Any) -> None:
    rng = np.random.default_rng(1)
    specs = {"x": TensorSpec.packed((2, 64, 3)), "y": TensorSpec.packed((2, 64, 3))}
    asked = kind(x=0, y=1, epsilon=0.0)
    values = asked.samples(np, specs, lambda spec: rng.integers(-3, 5, spec.dims).astype(np.float64))
    found = asked.evaluate(NumPy(), values, specs)["y"]
    assert np.isfinite(found).all()


def test_a_large_mean_cancels_no_digits(bench: Workbench) -> None:
    x = (1e4 + normal((4, 3, 4096), F32, 0)).astype(np.float32)
    y = bench.empty(TensorSpec.packed(x.shape))
    bench.run(InstanceNorm(x=bench.place(x), y=y, epsilon=0.0))
    exact = x.astype(np.float64)
    wanted = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
    np.testing.assert_allclose(bench.read(y), wanted, atol=2e-3)


# As functions of a graph.


def test_updates_write_the_running_statistics_back() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 3, 4), F64)
    old = {name: g.input(name, (3,), F64) for name in ("mean", "variance")}
    found = g.batch_norm_training(x, None, None, *old.values(), momentum=0.5)
    updates = {"mean": found.new_running_mean, "variance": found.new_running_variance}
    graph = g.build(y=found.y, updates=updates)
    assert not graph.body.pure
    data = {"x": normal((2, 3, 4), F64, 0), "mean": np.zeros(3), "variance": np.ones(3)}
    wanted = data["x"].mean(axis=(0, 2)) / 2
    buffers = []
    for uid in graph.body.bound:
        tensor = graph.body.tensor(uid)
        name = graph.names_of.get(uid if tensor.overwrites is None else tensor.overwrites, "y")
        buffers.append(data.setdefault(name, np.empty(tensor.dims)))
    EvaluatedPlan("", graph.body).bind(np.empty(0, np.uint8)).run(buffers, ())
    np.testing.assert_allclose(data["mean"], wanted)
