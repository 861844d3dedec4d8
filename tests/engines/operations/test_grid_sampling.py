"""Grid samples against ONNX's reference implementation, on every engine; and the kernel on the host."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import (
    DType,
    GraphBuilder,
    GraphTensor,
    GridPadding,
    GridSample,
    InvalidRequest,
    ResampleMode,
    Tensor,
    TensorSpec,
)
from cudnn_actor.protocol.messages.lowering import lower

from ...in_one_test import cases_in_one_test
from .. import host_cuda
from ..differences import check_gradients, computed
from ..onnx_reference import reference
from ..problems import normal
from ..workbench import Workbench, spread

DIMS = [((1, 2, 5, 4), (3, 2)), ((2, 1, 6), (7,)), ((1, 1, 3, 4, 2), (2, 2, 3))]
"""Of x, and the spatial ones of y."""
EVERY = list(itertools.product(ResampleMode, GridPadding, (False, True)))


def asked(mode: ResampleMode, padding: GridPadding, corners: bool) -> GridSample[Any]:
    return GridSample(x="x", grid="grid", y="y", mode=mode, padding=padding, align_corners=corners)


def drawn(
    x: tuple[int, ...], spatial: tuple[int, ...], dtype: DType = DType.FLOAT32
) -> dict[str, np.ndarray]:
    """An image, and places in it, on its borders and around it."""
    rng = np.random.default_rng(8)
    grid = rng.uniform(-1.7, 1.7, (x[0], *spatial, len(spatial)))
    edge = rng.random(grid.shape) < 0.3
    grid[edge] = rng.choice([-1.0, 1.0, 0.0, -1.5, 3.0], int(edge.sum()))
    return {"x": normal(x, dtype, 3), "grid": grid.astype(np.float32)}


def wanted_of(x: np.ndarray, grid: np.ndarray, options: tuple[ResampleMode, GridPadding, bool]) -> np.ndarray:
    """What ONNX's reference implementation gives; for cubic borders, of an image with borders around it."""
    mode, padding, corners = options
    if mode is ResampleMode.CUBIC and padding is GridPadding.BORDER:
        around = 16
        sizes = np.array(x.shape[:1:-1]) - int(corners)
        grid = ((grid + 1) * sizes + 2 * around) / (sizes + 2 * around) - 1
        x = np.pad(x, ((0, 0), (0, 0), *[(around, around)] * (x.ndim - 2)), "edge")
    made = reference(
        "GridSample",
        [x, grid.astype(np.float32)],
        mode=mode.value,
        padding_mode=padding.value,
        align_corners=int(corners),
    )
    return np.asarray(made)


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize(("mode", "padding", "corners"), EVERY)
def test_grid_samples_are_onnxs(
    bench: Workbench, mode: ResampleMode, padding: GridPadding, corners: bool
) -> None:
    for number, (x, spatial) in enumerate(DIMS):
        given = drawn(x, spatial)
        made = spread if number else TensorSpec.packed
        specs = {name: TensorSpec.like(array) for name, array in given.items()}
        operation = asked(mode, padding, corners)
        specs |= operation.infer(specs)
        specs = {name: made(spec.dims, spec.dtype) for name, spec in specs.items()}
        refs = {name: bench.place(array, specs[name]) for name, array in given.items()}
        refs["y"] = bench.empty(specs["y"])
        wanted = wanted_of(given["x"], given["grid"], (mode, padding, corners))
        got = bench.run(operation.with_operands(refs.__getitem__))
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_places_that_are_no_numbers_or_far_away_are_outside(bench: Workbench) -> None:
    grid = np.array([np.nan, np.inf, -np.inf, 3e38, 0.0], np.float32).reshape(1, 5, 1)
    for padding, wanted in ((GridPadding.ZEROS, [0, 0, 0, 0, 2]), (GridPadding.BORDER, [1, 3, 1, 3, 2])):
        refs = {"x": bench.place(np.array([[[1, 2, 3]]], np.float32)), "grid": bench.place(grid)}
        refs["y"] = bench.empty(TensorSpec.packed((1, 1, 5)))
        operation = asked(ResampleMode.NEAREST, padding, False)
        np.testing.assert_array_equal(bench.run(operation.with_operands(refs.__getitem__))[0, 0], wanted)


@pytest.mark.parametrize(
    ("x", "grid", "field"),
    [
        ((2, 3), (2, 1), "x"),
        ((2, 3, 4, 4), (2, 5, 5, 3), "grid"),
        ((2, 3, 4, 4), (1, 5, 5, 2), "grid"),
        ((2, 3, 4, 4), (2, 5, 2), "grid"),
    ],
)
def test_a_mistake_names_its_field(
    bench: Workbench, x: tuple[int, ...], grid: tuple[int, ...], field: str
) -> None:
    refs = {name: bench.empty(TensorSpec.packed(dims)) for name, dims in (("x", x), ("grid", grid))}
    with pytest.raises(InvalidRequest) as caught:
        lower(GridSample(x=refs["x"], grid=refs["grid"], y=refs["x"]))
    assert caught.value.field == field


def test_a_builder_samples() -> None:
    g = GraphBuilder()
    x, grid = g.input("x", (1, 2, 5, 4)), g.input("grid", (1, 3, 2, 2))
    graph = g.build(y=g.grid_sample(x, grid, padding=GridPadding.BORDER, align_corners=True))
    given = drawn(*DIMS[0])
    wanted = reference("GridSample", [given["x"], given["grid"]], padding_mode="border", align_corners=1)
    np.testing.assert_allclose(computed(graph, given)["y"], wanted, atol=1e-5)


@cases_in_one_test
@pytest.mark.parametrize(
    ("number", "options"), [*enumerate(EVERY)], ids=[" ".join(map(str, of)) for of in EVERY]
)
def test_gradients_are_differences(number: int, options: tuple[ResampleMode, GridPadding, bool]) -> None:
    """Of an image, and of the places in it, which for the nearest element have a gradient of 0."""
    (mode, padding, corners), (x, spatial), rng = options, DIMS[number % len(DIMS)], np.random.default_rng(4)
    values = {"x": rng.normal(size=x), "grid": rng.uniform(-1.3, 1.3, (x[0], *spatial, len(spatial)))}

    def function(g: GraphBuilder, x: Tensor, grid: Tensor) -> Tensor:
        return g.grid_sample(x, grid, mode=mode, padding=padding, align_corners=corners)

    found = check_gradients(function, values, tolerance=1e-6)
    assert bool(found["grid"].any()) is (mode is not ResampleMode.NEAREST)


def test_a_grid_may_follow_from_the_image() -> None:
    """Whose gradient is then the sum of both, and is not counted twice."""
    values = {"x": np.random.default_rng(5).uniform(-0.9, 0.9, (1, 2, 3, 3))}

    def function(g: GraphBuilder, x: Tensor) -> Tensor:
        return g.grid_sample(x, g.moveaxis(x, 1, -1))

    check_gradients(function, values, tolerance=1e-6)


def test_all_of_a_gradient_is_known_as_that() -> None:
    g = GraphBuilder()
    x, grid = g.input("x", (1, 2, 5, 4)), g.input("grid", (1, 3, 2, 2))
    graph = g.build(dgrid=g.grad(g.grid_sample(x, grid), grid)).body
    labels = [graph.label(number) for number in range(len(graph.operations))]
    assert len(labels) > 20
    assert all(label.count("gradient of") == 1 for label in labels), labels


def test_gradients_of_halves_are_of_their_dtypes() -> None:
    halves = {"x": DType.BFLOAT16, "grid": DType.FLOAT16}
    given = {name: array.astype(halves[name].numpy) for name, array in drawn(*DIMS[0]).items()}
    found = []
    for dtypes in (halves, dict.fromkeys(halves, DType.FLOAT64)):
        g = GraphBuilder()
        x, grid = (g.input(name, given[name].shape, dtype) for name, dtype in dtypes.items())
        dx, dgrid = g.grad(g.grid_sample(x, grid), [x, grid])
        assert (dx.dtype, dgrid.dtype) == (dtypes["x"], dtypes["grid"])
        values = {name: array.astype(dtypes[name].numpy) for name, array in given.items()}
        found.append(computed(g.build(dx=dx, dgrid=dgrid), values))
    for name, wanted in found[1].items():
        np.testing.assert_allclose(found[0][name].astype(np.float64), wanted, rtol=2**-7, atol=2**-7)


def test_the_kernel_computes_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    host_cuda.use(monkeypatch)
    dtypes = itertools.cycle((DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.FLOAT16))
    problems: list[tuple[Any, dict[str, TensorSpec], dict[str, np.ndarray]]] = []
    for number, (one, (x, spatial)) in enumerate(zip(EVERY, itertools.cycle(DIMS), strict=False)):
        operation, dtype = asked(*one), next(dtypes)
        given = drawn(x, spatial, dtype)
        specs = {name: TensorSpec.like(array) for name, array in given.items()}
        specs |= operation.infer(specs)
        if number % 2:
            specs = {name: spread(spec.dims, spec.dtype) for name, spec in specs.items()}
        problems.append((operation, specs, given))
    host_cuda.compile_together(
        source
        for operation, specs, _ in problems
        for source in host_cuda.sources_of(
            operation,
            [GraphTensor(uid=0, dims=s.dims, strides=s.strides, dtype=s.dtype) for s in specs.values()],
        )
    )
    for operation, specs, given in problems:
        got, wanted = (
            of(operation, specs, given)["y"].astype(np.float64)
            for of in (host_cuda.launched, host_cuda.defined)
        )
        exact = operation.mode is ResampleMode.NEAREST
        tolerance = {DType.FLOAT64: 1e-12, DType.FLOAT32: 1e-5}.get(specs["x"].dtype, 2**-7)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=0 if exact else tolerance)
