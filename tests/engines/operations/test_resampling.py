"""Resampling against ONNX's reference implementation, on every engine; and its kernel on the host."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cuda.operations import resampling
from cudnn_actor.protocol import (
    Coordinates,
    DType,
    GraphBuilder,
    GraphTensor,
    InvalidRequest,
    Layout,
    NearestRounding,
    Resample,
    ResampleBackward,
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

NEAREST, LINEAR, CUBIC = ResampleMode
CROP = Coordinates.TF_CROP_AND_RESIZE
ROI = (0.125, -0.25, 0.875, 1.5)
COORDINATES = [one for one in Coordinates if one is not Coordinates.TF_HALF_PIXEL_FOR_NN]
"""Those that the reference has."""
SIZES = [((5, 4), (8, 9)), ((5, 7), (3, 2)), ((4, 6), (1, 12)), ((3, 1), (7, 3))]


def onnx(x: np.ndarray, operation: Resample[Any]) -> np.ndarray:
    """What ONNX's reference gives. The last of the coordinates is the one that it no longer has."""
    roi = None if operation.roi is None else np.array(operation.roi, np.float64)
    scales = None if operation.scales is None else np.array(operation.scales, np.float32)
    sizes = np.array(operation.sizes) if scales is None else None
    found: np.ndarray = reference(
        "Resize",
        [x, roi, scales, sizes],
        mode=operation.mode.value,
        coordinate_transformation_mode=operation.coordinates.value,
        nearest_mode=operation.rounding.value,
        cubic_coeff_a=operation.cubic_coefficient,
        exclude_outside=int(operation.exclude_outside),
        antialias=int(operation.antialias),
        extrapolation_value=operation.extrapolation,
    )
    return found


def asked(sizes: tuple[int, ...], mode: ResampleMode = NEAREST, **of: Any) -> Resample[Any]:
    if of.get("coordinates") is CROP:
        of = {"roi": ROI, "extrapolation": 7.5, **of}
    return Resample(x="x", y="y", sizes=sizes, mode=mode, **of)


def backward_of(forward: Resample[Any]) -> ResampleBackward[Any]:
    """The gradient of a resampling, with its parameters."""
    shared = {*Resample.__struct_fields__} & {*ResampleBackward.__struct_fields__} - {"numerics"}
    return ResampleBackward(dy="dy", dx="dx", **{name: getattr(forward, name) for name in shared})


def resampled(bench: Workbench, operation: Resample[Any], x: np.ndarray, *, gaps: bool = False) -> np.ndarray:
    made = spread if gaps else TensorSpec.packed
    dtype = TensorSpec.like(x).dtype
    refs = {"x": bench.place(x, made(x.shape, dtype)), "y": bench.empty(made(operation.sizes, dtype))}
    return bench.run(operation.with_operands(refs.__getitem__))


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize(("x", "sizes"), SIZES)
def test_the_nearest_element_is_onnxs(
    bench: Workbench, x: tuple[int, ...], sizes: tuple[int, ...], coordinates: Coordinates
) -> None:
    array = np.arange(1, 1 + np.prod(x), dtype=np.float32).reshape(x)
    for rounding in NearestRounding:
        operation = asked(sizes, coordinates=coordinates, rounding=rounding)
        got = resampled(bench, operation, array, gaps=rounding is NearestRounding.CEIL)
        np.testing.assert_array_equal(got, onnx(array, operation))


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("mode", [LINEAR, CUBIC])
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize(("x", "sizes"), SIZES)
def test_interpolation_is_onnxs(
    bench: Workbench, x: tuple[int, ...], sizes: tuple[int, ...], coordinates: Coordinates, mode: Any
) -> None:
    """With neighbours outside counted and not, with antialiasing and without."""
    array = normal(x, DType.FLOAT64, 4)
    for exclude, antialias in itertools.product((False, True), (False, True)):
        operation = asked(
            sizes,
            mode,
            coordinates=coordinates,
            exclude_outside=exclude,
            antialias=antialias,
            cubic_coefficient=-0.5 if exclude else -0.75,
        )
        got = resampled(bench, operation, array, gaps=antialias)
        np.testing.assert_allclose(
            got, onnx(array, operation), rtol=1e-5, atol=1e-5
        )  # it has cubic weights in float32


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("mode", ResampleMode)
@pytest.mark.parametrize("coordinates", COORDINATES)
def test_scales_decide_the_places_though_sizes_are_rounded(
    bench: Workbench, coordinates: Coordinates, mode: ResampleMode
) -> None:
    array = normal((5, 7), DType.FLOAT64, 5)
    for scales in ((1.5, 0.6), (0.2, 2.3), (1.0, 1.0)):
        given = tuple(float(np.float32(scale)) for scale in scales)
        sizes = tuple(int(scale * size) for scale, size in zip(given, (5, 7), strict=True))
        operation = asked(sizes, mode, scales=given, coordinates=coordinates)
        np.testing.assert_allclose(resampled(bench, operation, array), onnx(array, operation), atol=1e-5)


@cases_in_one_test
@pytest.mark.parametrize("dtype", DType)
def test_the_nearest_element_is_moved_as_it_is(bench: Workbench, dtype: DType) -> None:
    x = np.random.default_rng(1).integers(0, 2, (2, 3, 4)).astype(dtype.numpy)
    got = resampled(bench, asked((2, 6, 8)), x)
    assert got.tobytes() == x.repeat(2, 1).repeat(2, 2).tobytes()


@pytest.mark.parametrize("mode", ResampleMode)
def test_without_dims_nothing_is_resized(bench: Workbench, mode: ResampleMode) -> None:
    x = bench.place(np.array(2.5, np.float32))
    y = bench.empty(TensorSpec.packed((), "float32"))
    assert bench.run(Resample(x=x, y=y, sizes=(), mode=mode)) == 2.5


def test_the_older_coordinates_of_the_nearest(bench: Workbench) -> None:
    """(i + 1/2) / scale, rounded down: the reference does not have them any more."""
    x = np.arange(7.0)
    operation = asked((5,), coordinates=Coordinates.TF_HALF_PIXEL_FOR_NN, rounding=NearestRounding.FLOOR)
    wanted = x[np.floor((np.arange(5) + 0.5) * 7 / 5).astype(int)]
    np.testing.assert_array_equal(resampled(bench, operation, x), wanted)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_more_dims_at_once_are_rounded_once(bench: Workbench, dtype: DType) -> None:
    x = normal((2, 3, 4, 5), dtype, 6)
    operation = asked((2, 5, 7, 3), LINEAR)
    wanted = onnx(x.astype(np.float64), operation).astype(dtype.numpy)
    got = resampled(bench, operation, x)
    tolerance = {DType.FLOAT32: 1e-6}.get(dtype, 2**-8)
    np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), atol=tolerance)


def test_what_has_no_weight_is_not_read(bench: Workbench) -> None:
    x = np.array([1.0, np.inf, 2.0, np.nan])
    operation = asked((2,), LINEAR, coordinates=Coordinates.ASYMMETRIC)
    np.testing.assert_array_equal(resampled(bench, operation, x), [1, 2])


@cases_in_one_test
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sizes": (3,)}, "sizes"),
        ({"sizes": (3, -1)}, "sizes"),
        ({"scales": (1.0, -2.0)}, "scales"),
        ({"scales": (1.0,)}, "scales"),
        ({"roi": (0.0, 1.0)}, "roi"),
        ({"antialias": True}, "antialias"),
        ({"mode": "bilinear"}, "mode"),
        ({"cubic_coefficient": float("nan")}, "cubic_coefficient"),
        ({"dtype": DType.INT32, "mode": LINEAR}, "x"),
        ({"mode": LINEAR, "antialias": True, "scales": (1e-9, 1.0)}, "scales"),
        ({"mode": LINEAR, "antialias": True, "scales": (1e-4, 1.0), "sizes": (1 << 20, 3)}, "scales"),
    ],
)
def test_a_mistake_names_its_field(bench: Workbench, changes: dict[str, Any], field: str) -> None:
    given: dict[str, Any] = {"sizes": (3, 3), **changes}
    dtype = given.pop("dtype", DType.FLOAT32)
    x, y = (bench.empty(TensorSpec.packed(dims, dtype)) for dims in ((5, 4), (3, 3)))
    with pytest.raises(InvalidRequest) as caught:
        lower(Resample(x=x, y=y, **given))
    assert caught.value.field == field


def test_an_element_is_not_made_of_very_many_others() -> None:
    for dims, sizes in (((1 << 20, 4), (1, 3)), ((1 << 25, 1), (1 << 20, 1))):
        with pytest.raises(InvalidRequest) as caught:
            asked(sizes, LINEAR, antialias=True).infer({"x": TensorSpec.packed(dims, DType.FLOAT32)})
        assert caught.value.field == "sizes"
    for dims, sizes in (((1 << 14, 4), (1, 3)), ((1 << 25, 1), (1 << 25, 2)), ((0, 4), (0, 3))):
        asked(sizes, LINEAR, antialias=True).infer({"x": TensorSpec.packed(dims, DType.FLOAT32)})


# Graphs and gradients.


def test_a_builder_takes_sizes_or_scales_of_some_dims() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 3, 5, 4), "float64")
    graph = g.build(
        sizes=g.resize(x, sizes=(10, 6), axes=(2, -1), mode=LINEAR),
        scales=g.resize(x, scales=(1.0, 1.0, 1.7, 0.5), mode=CUBIC, coordinates=Coordinates.ALIGN_CORNERS),
        part=g.resize(x, sizes=(3,), axes=(3,), coordinates=CROP, roi=(0.5, 1.5), extrapolation=9.0),
    )
    given = {"x": normal((2, 3, 5, 4), DType.FLOAT64, 3)}
    found = computed(graph, given)
    np.testing.assert_allclose(found["sizes"], onnx(given["x"], asked((2, 3, 10, 6), LINEAR)), atol=1e-6)
    scaled = asked((2, 3, 8, 2), CUBIC, scales=(1.0, 1.0, 1.7, 0.5), coordinates=Coordinates.ALIGN_CORNERS)
    np.testing.assert_allclose(found["scales"], onnx(given["x"], scaled), atol=1e-5)
    assert found["part"].shape == (2, 3, 5, 3)
    np.testing.assert_array_equal(found["part"][..., 2], 9.0)
    wrong: Any
    for wrong in ({}, {"sizes": (3,), "scales": (2.0,)}, {"sizes": (3, 3)}):
        with pytest.raises(InvalidRequest):
            g.resize(x, axes=(2,), **wrong)


@pytest.mark.parametrize("mode", ResampleMode)
@pytest.mark.parametrize("coordinates", [Coordinates.HALF_PIXEL, Coordinates.ALIGN_CORNERS, CROP])
def test_gradients(mode: ResampleMode, coordinates: Coordinates) -> None:
    roi = {"roi": (0.2, 0.1, 1.4, 0.8), "extrapolation": 3.0} if coordinates is CROP else {}

    def function(g: GraphBuilder, x: Tensor) -> list[Tensor]:
        of: Any = {"mode": mode, "coordinates": coordinates, "antialias": mode is not NEAREST, **roi}
        return [g.resize(x, sizes=sizes, **of) for sizes in ((3, 9), (7, 2))]

    def twice(g: GraphBuilder, x: Tensor) -> Tensor:
        y, *_ = function(g, x)
        return g.grad(g.square(y), x)

    given = {"x": normal((5, 4), DType.FLOAT64, 1)}
    check_gradients(function, given)
    check_gradients(twice, given, tolerance=1e-6)


def test_lists_of_a_gradient_are_as_long_as_all_that_is_summed() -> None:
    """Where one element of x has become all of y, too."""
    operation = asked((3000,), LINEAR, coordinates=CROP, roi=(0.5, 0.5))
    (taps,) = operation.taps((2001,)).values()
    lists = taps.transpose(2001)
    assert len(lists.places) == 3000
    assert lists.starts[1000:1002].tolist() == [0, 3000]


# The kernel, on the host.


def problems() -> list[tuple[Any, dict[str, TensorSpec]]]:
    dtypes = itertools.cycle((DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16))
    found: list[tuple[Any, dict[str, TensorSpec]]] = []
    dims = (((5, 4), (8, 9)), ((2, 6, 3, 7), (2, 4, 3, 12)), ((3, 4), (3, 4)))
    for (x, sizes), mode in itertools.product(dims, ResampleMode):
        dtype = next(dtypes)
        made = spread if mode is CUBIC else TensorSpec.packed
        of: dict[str, Any] = {"antialias": mode is CUBIC}
        if len(x) == 2 and mode is not CUBIC:
            of["coordinates"] = CROP
        forward = asked(sizes, mode, **of)
        found.append((forward, {"x": made(x, dtype), "y": made(sizes, dtype)}))
        back = backward_of(forward)
        found.append((back, {"dy": made(sizes, dtype), "dx": made(x, dtype)}))
    found.append((asked((8, 9)), {"x": spread((5, 4), DType.INT8), "y": spread((8, 9), DType.INT8)}))
    for mode, (sizes, of) in itertools.product(ResampleMode, TOGETHER.items()):
        dtype = next(dtypes)
        for layout in (Layout.NCHW, Layout.NHWC):
            specs = [TensorSpec.packed(dims, dtype, layout) for dims in ((2, 8, 3, 16), sizes)]
            found.append((asked(sizes, mode, **of), dict(zip("xy", specs, strict=True))))
    number = TensorSpec.packed((), DType.FLOAT32)
    found += [(asked((), mode), {"x": number, "y": number}) for mode in ResampleMode]
    specs = [TensorSpec.packed(dims, DType.UINT8) for dims in ((3, 32), (6, 64))]
    found.append((asked((6, 64)), dict(zip("xy", specs, strict=True))))
    return found + [(operation, dict(zip("xy", specs, strict=True))) for operation, *specs in in_rows()]


def in_rows() -> list[tuple[Any, TensorSpec, TensorSpec]]:
    """Those whose threads have neighbours in rows, or nearly: what is in the way at borders."""
    found = []
    for (dims, sizes, of), mode in itertools.product(ROWS, ResampleMode):
        for dtype in (DType.BFLOAT16, DType.FLOAT32)[: 1 if mode is CUBIC else 2]:
            specs = (TensorSpec.packed(dims, dtype), TensorSpec.packed(sizes, dtype))
            found.append((asked(sizes, mode, **of), *specs))
    for dtype, mode in itertools.product((DType.BFLOAT16, DType.FLOAT32), (NEAREST, LINEAR)):
        y = TensorSpec.packed((2, 8, 32), dtype)
        of = {"mode": mode}
        for steps in ((80, 18, 1), (85, 17, 1), (160, 40, 2)):  # fewer elements of x are read at once
            x = TensorSpec(dims=(2, 4, 16), strides=steps, dtype=dtype)
            found.append((asked(y.dims, **of), x, y))
        apart = TensorSpec(dims=y.dims, strides=(300, 36, 1), dtype=dtype)
        found.append((asked(y.dims, **of), TensorSpec.packed((2, 4, 16), dtype), apart))
        last = TensorSpec.packed((2, 3, 4, 16), dtype, Layout.NHWC)
        found.append((asked((2, 3, 8, 32), **of), last, TensorSpec.packed((2, 3, 8, 32), dtype)))
    return found


ROWS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 6, 16), (2, 12, 32), {}),
    ((3, 4, 16), (3, 16, 64), {}),
    ((4, 14), (8, 32), {"scales": (2.0, 2.0)}),
    ((3, 15), (6, 30), {}),
    ((4, 2), (8, 4), {}),
    ((16, 64), (8, 32), {}),
    ((3, 4, 16), (5, 8, 32), {}),
    ((4, 9, 33), (3, 8, 16), {"coordinates": CROP, "roi": (-0.25, 0.0, 0.0, 1.25, 7 / 16, 15 / 64)}),
]
"""Dims of x and of results: twice as large, four times, beyond x's end, odd, few, half, and three dims."""


TOGETHER: dict[tuple[int, ...], dict[str, Any]] = {
    (2, 8, 6, 32): {},
    (2, 8, 5, 48): {"coordinates": Coordinates.ASYMMETRIC},
    (2, 8, 3, 8): {"coordinates": Coordinates.ALIGN_CORNERS},
    (2, 8, 2, 24): {"coordinates": CROP, "roi": (0.0, 0.0, 0.125, -0.25, 1.0, 1.0, 0.875, 1.5)},
}
"""Dims of results whose neighbours a thread has."""


def made(operation: Any, *specs: TensorSpec) -> resampling.ResamplingKernel:
    tensors = [GraphTensor(uid=n, dims=s.dims, strides=s.strides, dtype=s.dtype) for n, s in enumerate(specs)]
    return resampling.describe_resampling(operation.with_operands(["x", "y"].index), tensors)


PROBLEMS = problems()
KNOWN = [
    (operation, specs)
    for operation, specs in PROBLEMS
    if isinstance(operation, Resample) and made(operation, *specs.values()).columns is not None
]
"""Those whose source says what neighbours are made of."""


@pytest.mark.parametrize("mode", ResampleMode)
@pytest.mark.parametrize("times", [2, 4])
def test_images_that_become_larger_need_no_tables(mode: ResampleMode, times: int) -> None:
    for dtype, together in ((DType.BFLOAT16, 8), (DType.FLOAT32, 4), (DType.FLOAT64, times)):
        sizes = (2, 3, 6 * times, 24 * times)
        x, y = (TensorSpec.packed(dims, dtype) for dims in ((2, 3, 6, 24), sizes))
        kernel = made(asked(sizes, mode), x, y)
        assert kernel.columns is not None
        assert (kernel.together, kernel.columns.step) == (together, together // times)
        assert len(kernel.rows.places) == 4
        assert kernel.piece == kernel.columns.step
        assert kernel.tables() == []
        x, y = (TensorSpec.packed(dims, dtype, Layout.NHWC) for dims in ((2, 8, 6, 24), (2, 8, *sizes[2:])))
        kernel = made(asked((2, 8, *sizes[2:]), mode), x, y)
        assert kernel.together == {DType.FLOAT64: 4}.get(dtype, 8), "channels lie side by side"
        assert (kernel.columns, kernel.neighbours) == (None, kernel.together)


def test_threads_have_neighbours_in_fewer_rows_where_they_are_made_of_much() -> None:
    x, y = (TensorSpec.packed(dims, DType.BFLOAT16) for dims in ((32, 128), (16, 64)))
    for mode, rows in ((NEAREST, 2), (LINEAR, 1), (CUBIC, 1)):
        assert len(made(asked(y.dims, mode), x, y).rows.places) == rows


def test_there_is_no_pattern_where_what_neighbours_are_made_of_differs() -> None:
    for sizes, of in (
        ((6, 37), {}),
        ((6, 40), {"mode": LINEAR}),
        ((6, 64), {"mode": LINEAR, "coordinates": Coordinates.ALIGN_CORNERS}),
        ((6, 64), {"coordinates": CROP}),
        ((6, 64), {"mode": LINEAR, "exclude_outside": True}),
    ):
        specs = (TensorSpec.packed(dims, DType.FLOAT32) for dims in ((3, 32), sizes))
        assert made(asked(sizes, **of), *specs).columns is None


def compile_all(problems: list[tuple[Any, dict[str, TensorSpec]]]) -> None:
    sources: list[str] = []
    for operation, specs in problems:
        tensors = [
            GraphTensor(uid=uid, dims=spec.dims, strides=spec.strides, dtype=spec.dtype)
            for uid, spec in enumerate(specs.values())
        ]
        sources += host_cuda.sources_of(operation, tensors)
    host_cuda.compile_together(sources)


def test_the_kernel_computes_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    host_cuda.use(monkeypatch)
    compile_all(PROBLEMS)
    for operation, specs in PROBLEMS:
        (name, given), *_ = specs.items()
        values = {name: (normal(given.dims, DType.FLOAT64, 2) * 9).astype(given.dtype.numpy)}
        got, wanted = (
            {n: array.astype(np.float64) for n, array in of(operation, specs, values).items()}
            for of in (host_cuda.launched, host_cuda.defined)
        )
        for result, array in wanted.items():
            exact = getattr(operation, "mode", None) is NEAREST and result == "y"
            tolerance = {DType.FLOAT64: 1e-12, DType.FLOAT32: 1e-5}.get(given.dtype, 2**-7)
            np.testing.assert_allclose(
                got[result], array, rtol=0 if exact else tolerance, atol=0 if exact else 10 * tolerance
            )


def test_what_the_source_knows_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside tables: the same products in the same order, of the same elements, infinite ones or not."""
    host_cuda.use(monkeypatch)
    compile_all(PROBLEMS)
    found = []
    for tables in (False, True):
        if tables:
            monkeypatch.setattr(resampling, "repeating_pattern", lambda *_: None)
            compile_all(KNOWN)
        found.append([host_cuda.launched(operation, specs, odd(specs)) for operation, specs in KNOWN])
    for problem, known, tabled in zip(KNOWN, *found, strict=True):
        assert {n: array.tobytes() for n, array in known.items()} == {
            n: array.tobytes() for n, array in tabled.items()
        }, problem


def odd(specs: dict[str, TensorSpec]) -> dict[str, np.ndarray]:
    """Values for the input, some of which are no numbers, infinite, zeros of both signs, or very small."""
    (name, spec), *_ = specs.items()
    values = (normal(spec.dims, DType.FLOAT64, 2) * 9).ravel()
    if spec.dtype.is_floating:
        places = np.random.default_rng(3).permutation(values.size)
        for n, value in enumerate((np.nan, np.inf, -np.inf, 1e-39)):
            values[places[n :: 16 * (n + 1)]] = value
        values[: values.size // 3] = -0.0
    return {name: values.reshape(spec.dims).astype(spec.dtype.numpy)}
