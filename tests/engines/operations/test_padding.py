"""Padding against NumPy's, and element by element; what is refused; and the kernel that it is on CUDA."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_actor.engines.cuda.operations import padding
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.running.recipe import OperationStep
from cudnn_actor.protocol import (
    BorderPad,
    DType,
    Graph,
    GraphBuilder,
    GraphTensor,
    InvalidRequest,
    Layout,
    Pad,
    PadMode,
    TensorSpec,
)

from ...in_one_test import cases_in_one_test
from ...whole import some
from .. import host_cuda
from ..differences import check_gradients, computed
from ..workbench import Workbench, spread

VALUE = 2.0


def integers(dims: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Different numbers, as far as the dtype has them."""
    return np.arange(math.prod(dims)).reshape(dims).astype(dtype.numpy)


def padded(x: np.ndarray, before: Any, after: Any, steps: Any) -> np.ndarray:
    """Each element put where it belongs."""
    dims = [b + (n - 1) * abs(s) + 1 + a for b, n, s, a in zip(before, x.shape, steps, after, strict=True)]
    y = np.full(dims, VALUE, x.dtype)
    for place in itertools.product(*map(range, x.shape)):
        along = zip(place, before, x.shape, steps, strict=True)
        y[tuple(b + (i * s if s > 0 else (n - 1 - i) * -s) for i, b, n, s in along)] = x[place]
    return y


@st.composite
def problems(draw: st.DrawFn) -> tuple[TensorSpec, dict[str, tuple[int, ...]]]:
    rank = draw(st.integers(0, 4))
    dims = tuple(draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank)))
    layout = Layout.NHWC if rank in (3, 4) and draw(st.booleans()) else Layout.NCHW
    spec = TensorSpec.packed(dims, DType.FLOAT32, layout)
    some = st.lists(st.integers(0, 3), min_size=rank, max_size=rank).map(tuple)
    steps = st.lists(st.sampled_from([1, 1, -1, 2, -3]), min_size=rank, max_size=rank).map(tuple)
    attributes = {"before": draw(some), "after": draw(some), "steps": draw(steps)}
    return spec, attributes


def graph_of(spec: TensorSpec, attributes: dict[str, Any]) -> Graph:
    g = GraphBuilder()
    x = g.input("x", spec.dims, spec.dtype, layout=spec.layout)
    return g.build(y=g.apply(Pad(x=x, **attributes, value=VALUE)))


@given(problems())
def test_each_element_is_where_it_belongs(problem: tuple[TensorSpec, dict[str, Any]]) -> None:
    spec, attributes = problem
    x = integers(spec.dims, spec.dtype)
    np.testing.assert_array_equal(
        computed(graph_of(spec, attributes), {"x": x})["y"], padded(x, **attributes)
    )


MODES = list(PadMode)
Widths = tuple[tuple[int, int], ...]
SHAPES: dict[str, tuple[tuple[int, ...], Layout, Widths]] = {
    "rows": ((2, 3, 24), Layout.NCHW, ((0, 0), (1, 2), (8, 8))),
    "far": ((3, 2, 3), Layout.NCHW, ((7, 5), (0, 0), (9, 8))),
    "image": ((2, 8, 3, 4), Layout.NHWC, ((0, 0), (0, 0), (1, 1), (2, 1))),
    "one": ((1, 2), Layout.NCHW, ((4, 3), (1, 0))),
    "none": ((3, 4), Layout.NCHW, ((0, 0), (0, 0))),
    "gaps in memory": ((3, 4), Layout.STRIDED, ((1, 1), (3, 2))),
    "long rows": ((3, 2500), Layout.NCHW, ((1, 0), (3, 1))),
    "whole rows": ((3, 2, 96), Layout.NCHW, ((0, 1), (2, 0), (0, 0))),
}
DTYPES: dict[str, DType] = {
    **dict(zip(MODES, (DType.FLOAT32, DType.FLOAT16, DType.INT8, DType.INT64), strict=True)),
    "constant": DType.BFLOAT16,
}


def laid_out(dims: tuple[int, ...], dtype: DType, layout: Layout) -> TensorSpec:
    if layout is Layout.STRIDED:
        return spread(dims, dtype)
    return TensorSpec.packed(dims, dtype, layout)


KERNELS: dict[str, tuple[TensorSpec, str, Widths]] = {
    f"{mode}, {name}": (laid_out(dims, dtype, layout), str(mode), widths)
    for mode, dtype in DTYPES.items()
    for name, (dims, layout, widths) in SHAPES.items()
}


def operation_of(mode: str, widths: Widths) -> Any:
    before, after = zip(*widths, strict=True)
    operands: dict[str, Any] = {"x": "x", "y": "y", "before": before, "after": after}
    if mode == "constant":
        return Pad(**operands, steps=(1,) * len(widths), value=VALUE)
    return BorderPad(**operands, mode=PadMode(mode))


def numpys(x: np.ndarray, mode: str, widths: Widths) -> np.ndarray:
    given_: Any = {"constant_values": VALUE} if mode == "constant" else {}
    return np.pad(x, widths, mode, **given_)  # type: ignore[call-overload,no-any-return]


@pytest.fixture(scope="module")
def compiled() -> None:
    host_cuda.compile_together(
        source
        for spec, mode, widths in KERNELS.values()
        for source in host_cuda.sources_of(
            operation_of(mode, widths), tensors_of(spec, y_spec(spec, mode, widths))
        )
    )


def y_spec(x: TensorSpec, mode: str, widths: Widths) -> TensorSpec:
    return laid_out(operation_of(mode, widths).infer({"x": x})["y"].dims, x.dtype, x.layout)


def tensors_of(*specs: TensorSpec) -> list[GraphTensor]:
    return [GraphTensor(uid=n, dims=s.dims, strides=s.strides, dtype=s.dtype) for n, s in enumerate(specs)]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.usefixtures("compiled")
def test_the_kernel_of_cuda_is_numpys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host_cuda.use(monkeypatch)
    spec, mode, widths = KERNELS[name]
    x = integers(spec.dims, spec.dtype)
    specs = {"x": spec, "y": y_spec(spec, mode, widths)}
    found = host_cuda.launched(operation_of(mode, widths), specs, {"x": x})["y"]
    np.testing.assert_array_equal(found.view(np.uint8), numpys(x, mode, widths).view(np.uint8))


def test_an_index_that_counts_from_a_mirrored_end_fits_into_its_type() -> None:
    wide = []
    for size in ((1 << 30) - (1 << 20), 1 << 30):  # an index is subtracted from twice the size
        x, widths = TensorSpec.packed((size,), DType.INT8), ((2, 2),)
        tensors = tensors_of(x, y_spec(x, "reflect", widths))
        wide.append(padding.describe_padding(operation_of("reflect", widths), *tensors).wide)
    assert wide == [False, True]


@pytest.mark.parametrize("mode", ["constant", "reflect"])
@pytest.mark.parametrize("dims", [(100, 9), (9, 2100)], ids=["short rows", "rows in parts"])
def test_a_thread_pads_the_same_columns_of_several_rows(
    mode: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    host_cuda.use(monkeypatch)
    monkeypatch.setattr(padding, "BUSY_BLOCKS", 1)
    widths, x = ((3, 2), (2, 1)), integers(dims, DType.FLOAT32)
    specs = {"x": TensorSpec.packed(dims, "float32")}
    specs["y"] = y_spec(specs["x"], mode, widths)
    found = padding.describe_padding(operation_of(mode, widths), *tensors_of(*specs.values()))
    assert found.parts == (1 if dims[0] == 100 else 3)
    assert found.blocks // found.parts * (256 // found.beside) < found.walk.total
    y = host_cuda.launched(operation_of(mode, widths), specs, {"x": x})["y"]
    np.testing.assert_array_equal(y, numpys(x, mode, widths))


@given(problems())
@settings(max_examples=some(12), deadline=None)
def test_the_kernel_of_cuda_leaves_gaps_and_reverses(problem: tuple[TensorSpec, dict[str, Any]]) -> None:
    spec, attributes = problem
    x = integers(spec.dims, spec.dtype)
    operation = Pad(x="x", y="y", **attributes, value=VALUE)
    specs = {"x": spec, "y": operation.infer({"x": spec})["y"]}
    with pytest.MonkeyPatch.context() as patch:
        host_cuda.use(patch)
        found = host_cuda.launched(operation, specs, {"x": x})["y"]
    np.testing.assert_array_equal(found, padded(x, **attributes))


UNITS: dict[str, tuple[tuple[int, ...], Widths, DType, int]] = {
    "a row as it is": ((4, 8), ((1, 1), (0, 0)), DType.FLOAT32, 4),
    "of sixteen bits": ((4, 24), ((1, 1), (0, 0)), DType.FLOAT16, 8),
    "of six": ((4, 6), ((1, 1), (0, 0)), DType.FLOAT32, 2),
    "a padded row": ((4, 8), ((1, 1), (2, 2)), DType.FLOAT32, 1),
    "a padded row of bytes": ((4, 10), ((1, 1), (3, 3)), DType.INT8, 4),
    "an odd one": ((4, 10), ((1, 1), (3, 2)), DType.INT8, 1),
    "halves": ((4, 112), ((0, 0), (1, 1)), DType.BFLOAT16, 2),
}


@pytest.mark.parametrize("name", UNITS)
def test_elements_are_moved_together_where_rows_allow_it(name: str) -> None:
    dims, widths, dtype, together = UNITS[name]
    spec = TensorSpec.packed(dims, dtype)
    operation = operation_of("edge", widths)
    y = operation.infer({"x": spec})["y"]
    assert f"Pack<T, {together}>" in host_cuda.sources_of(operation, tensors_of(spec, y))[0]
    assert "Pack<T, 1>" in host_cuda.sources_of(operation, tensors_of(spec, spread(y.dims, dtype)))[0]


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=some(150))
@given(st.data())
def test_modes_are_numpys(mode: PadMode, data: st.DataObject) -> None:
    dims = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    widths = tuple((data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))) for _ in dims)
    g = GraphBuilder()
    x = integers(dims, DType.FLOAT32)
    graph = g.build(y=g.pad(g.input("x", dims), widths, mode=mode))
    np.testing.assert_array_equal(computed(graph, {"x": x})["y"], np.pad(x, widths, mode))  # type: ignore[call-overload]


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DType)
def test_modes_of_every_dtype(bench: Workbench, dtype: DType, mode: PadMode) -> None:
    dims, widths = (2, 3, 4), ((1, 2), (0, 0), (3, 9))
    x = integers(dims, dtype)
    wanted = np.pad(x, widths, mode)  # type: ignore[call-overload]
    y = bench.empty(TensorSpec.packed(wanted.shape, dtype))
    operation = BorderPad(
        x=bench.place(x, spread(dims, dtype)), y=y, before=(1, 0, 3), after=(2, 0, 9), mode=mode
    )
    np.testing.assert_array_equal(bench.run(operation), wanted)


@cases_in_one_test
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("widths", [((1, 2), (0, 3)), ((7, 9), (11, 4)), ((0, 5), (6, 0))])
def test_gradients_of_modes(mode: PadMode, widths: Widths) -> None:
    values = {"x": np.random.default_rng(0).uniform(-1, 1, (3, 4))}
    check_gradients(lambda g, x: g.square(g.pad(x, widths, mode=mode)), values, tolerance=1e-6)
    check_gradients(lambda g, x: g.pad(x[:1, :2], widths, mode=mode), values)


def test_without_elements_only_a_number_is_put_around() -> None:
    g = GraphBuilder()
    x = g.input("x", (0, 3))
    graph = g.build(y=g.pad(x, ((1, 2), (0, 1)), 5), z=g.pad(x, ((0, 0), (1, 2)), mode="wrap"))
    found = computed(graph, {"x": np.empty((0, 3), np.float32)})
    np.testing.assert_array_equal(found["y"], np.full((3, 4), 5))
    assert found["z"].shape == (0, 6)
    with pytest.raises(InvalidRequest, match="no elements to put around"):
        g.pad(x, 1, mode="edge")


@pytest.mark.parametrize("mode", ["constant", PadMode.REFLECT])
def test_a_result_without_elements_launches_nothing(mode: Any) -> None:
    g = GraphBuilder()
    graph = g.build(y=g.pad(g.input("x", (3, 0)), ((1, 1), (0, 0)), mode=mode)).body
    (step,) = compile_split(graph, None, None).recipe.steps
    assert isinstance(step, OperationStep)
    assert not host_cuda.sources_of(step.operation, step.tensors)


@cases_in_one_test
@pytest.mark.parametrize("dtype", DType)
def test_every_dtype_is_numpys(bench: Workbench, dtype: DType) -> None:
    dims, value = (2, 3, 4), 1.0
    x = integers(dims, dtype)
    wanted = np.pad(x.astype(np.float64), [(1, 2), (0, 0), (3, 1)], constant_values=value)
    y = bench.empty(TensorSpec.packed(wanted.shape, dtype))
    operation = Pad(
        x=bench.place(x, spread(dims, dtype)),
        y=y,
        before=(1, 0, 3),
        after=(2, 0, 1),
        steps=(1, 1, 1),
        value=value,
    )
    np.testing.assert_array_equal(bench.run(operation).astype(np.float64), wanted)


def test_the_builders_function_is_numpys() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 3))
    graph = g.build(all=g.pad(x, 1, value=5), some=g.pad(x, [(0, 2), (1, 0)]))
    given_ = integers((2, 3), DType.FLOAT32)
    found = computed(graph, {"x": given_})
    np.testing.assert_array_equal(found["all"], np.pad(given_, 1, constant_values=5))
    np.testing.assert_array_equal(found["some"], np.pad(given_, [(0, 2), (1, 0)]))
    with pytest.raises(InvalidRequest, match="widths"):
        g.pad(x, [(1,), (2, 3)])


@cases_in_one_test
@pytest.mark.parametrize(
    ("field", "value", "dtype"),
    [
        ("before", (0, -1), "float32"),
        ("after", (-1, 0), "float32"),
        ("before", (0,), "float32"),
        ("steps", (1, 0), "float32"),
        ("steps", (1, 1, 1), "float32"),
        ("value", math.inf, "float32"),
        ("value", math.nan, "float64"),
        ("value", 0.5, "int32"),
        ("value", 128.0, "int8"),
        ("value", -1.0, "uint64"),
        ("value", 2.0, "bool"),
    ],
)
def test_what_does_not_fit_is_refused(field: str, value: Any, dtype: Any) -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 3), dtype)
    given_: dict[str, Any] = {"before": (0, 0), "after": (1, 1), "steps": (1, 1), field: value}
    with pytest.raises(InvalidRequest) as caught:
        g.apply(Pad(x=x, **given_))
    assert caught.value.field == field
