"""Max pooling with indices, Lp pooling, and the gradients of both, by windows of any length."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.engines.cpu.fast import pooling_joined, pooling_tiles
from cudnn_actor.engines.cpu.fast.kernels import MOST_SCRATCH, in_turn
from cudnn_actor.engines.cpu.fast.pooling_index_gradients import max_pool_backward
from cudnn_actor.engines.cpu.fast.pooling_indices import max_pool
from cudnn_actor.engines.cpu.fast.pooling_joined_norms import joined_norms, joined_norms_gradient
from cudnn_actor.engines.cpu.fast.pooling_joins import FirstLargest
from cudnn_actor.engines.cpu.fast.pooling_norms import lp_pool, lp_pool_backward
from cudnn_actor.engines.cpu.fast.pooling_scaled_norms import scaled_norms, scaled_norms_gradient
from cudnn_actor.engines.cpu.fast.pooling_tiles import TiledPooling, bounded_pooling
from cudnn_actor.engines.cpu.fast.pooling_wide_indices import WideIndexedPooling, wide_max_pool
from cudnn_actor.engines.cpu.fast.pooling_windows import window_axes
from cudnn_actor.engines.cpu.scratch import Scratch, aligned_bytes
from cudnn_actor.protocol import DType, Layout, TensorSpec
from cudnn_actor.protocol.operations import (
    AdaptiveWindow,
    LpPool,
    LpPoolBackward,
    MaxPool,
    MaxPoolBackward,
    Window,
)

from ....in_one_test import cases_in_one_test
from ....whole import WHOLE
from .kernel_cases import check
from .kernel_runs import array_of, peak_of_second, run_kernel
from .test_allocation import MOST_BYTES

S = Window.symmetric
SHAPES: list[tuple[tuple[int, ...], Any]] = [
    ((2, 3, 40, 37), S(2, size=(21, 18), pad=(10, 7), stride=(1, 2), dilation=(1, 2))),
    ((1, 20, 40, 40), S(2, size=40)),
    ((2, 3, 34, 31), AdaptiveWindow(output=(2, 3))),
    ((1, 2, 6600), AdaptiveWindow(output=(59,))),
    ((1, 2, 5000), S(1, size=900, pad=450, stride=1)),
    ((1, 2, 9, 10, 20), S(3, size=(7, 8, 17), pad=3, stride=(2, 1, 1))),
]
LAYOUTS = (Layout.NCHW, Layout.NHWC)
Values = dict[str, np.ndarray]


def results_of(
    make: Any,
    operation: Any,
    given: Mapping[str, np.ndarray],
    dtypes: Mapping[str, DType],
    dims: Any,
    *,
    layouts: Sequence[Layout] = LAYOUTS,
) -> list[Values]:
    """What a kernel gives in these layouts and on 1 and 3 lanes, which are the same."""
    found = []
    for layout in layouts:
        specs = {name: TensorSpec.packed(dims[name], dtype, layout) for name, dtype in dtypes.items()}
        one, other = (run_kernel(make, operation, specs, given, lanes) for lanes in (1, 3))
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name])
        found.append(one)
    return found


def whole_numbers(rng: np.random.Generator, dims: tuple[int, ...]) -> np.ndarray:
    """Few values, so that many are equal; NaN, infinities and -0 among them."""
    values = rng.integers(-9, 9, dims).astype(np.float32)
    values.reshape(-1)[rng.integers(0, values.size, 5)] = (np.nan, np.inf, -0.0, np.nan, -np.inf)
    values.reshape(-1)[rng.integers(0, values.size)] = -np.float32(np.nan)
    return values


@pytest.mark.parametrize(("dims", "window"), SHAPES, ids=[str(dims) for dims, _ in SHAPES])
def test_the_first_of_the_largest_is_found_and_its_gradient_added(dims: tuple[int, ...], window: Any) -> None:
    rng, y = np.random.default_rng(38), window.output_dims(dims)
    x = whole_numbers(rng, dims)
    forward = MaxPool(x="x", y="y", index="index", window=window)
    every = {"x": dims, "y": y, "index": y, "dy": y, "dx": dims}
    specs = {name: TensorSpec.packed(of, DType.INT64) for name, of in every.items()}
    wanted = forward.evaluate(
        NumPy(), {"x": x.astype(np.float64)}, {"y": specs["y"], "index": specs["index"]}
    )
    for dtype in (DType.FLOAT32, DType.FLOAT64):
        dtypes = {"x": dtype, "y": dtype, "index": DType.INT64}
        for found in results_of(max_pool, forward, {"x": x}, dtypes, every):
            np.testing.assert_array_equal(found["index"], wanted["index"])
            np.testing.assert_array_equal(found["y"], wanted["y"])
    index = np.array(wanted["index"])
    foreign = rng.random(y) < 0.2
    index[foreign] = rng.integers(-5, x.size + 5, int(foreign.sum()))
    dy = rng.integers(-99, 99, y)
    backward = MaxPoolBackward(dy="dy", index="index", dx="dx", window=window)
    expected = backward.evaluate(NumPy(), {"dy": dy, "index": index}, {"dx": specs["dx"]})["dx"]
    for dtype in (DType.FLOAT32, DType.INT8):
        dtypes = {"dy": dtype, "index": DType.INT64, "dx": dtype}
        clipped = expected.clip(-128, 127) if dtype is DType.INT8 else expected
        for found in results_of(max_pool_backward, backward, {"dy": dy, "index": index}, dtypes, every):
            np.testing.assert_array_equal(found["dx"], clipped)


@cases_in_one_test
@pytest.mark.parametrize("dtype", [DType.INT64, DType.UINT64])
@pytest.mark.parametrize(("dims", "window"), SHAPES, ids=[str(dims) for dims, _ in SHAPES])
def test_whole_numbers_of_64_bits_are_compared_as_such(
    dims: tuple[int, ...], window: Any, dtype: DType
) -> None:
    """Those of neighbours differ by less than float64 can tell, and are as large as the dtype holds."""
    rng, y = np.random.default_rng(38), window.output_dims(dims)
    bounds = np.iinfo(dtype.name.lower())
    x = rng.choice(np.array([bounds.min, bounds.min + 1, 5, bounds.max - 1], dtype.numpy), dims)
    x[0, 0] = bounds.min  # as what stands for padding is
    operation = MaxPool(x="x", y="y", index="index", window=window)
    specs = {"y": TensorSpec.packed(y, dtype), "index": TensorSpec.packed(y, DType.INT64)}
    wanted = operation.evaluate(NumPy(), {"x": x}, specs)
    dtypes = {"x": dtype, "y": dtype, "index": DType.INT64}
    for found in results_of(max_pool, operation, {"x": x}, dtypes, {"x": dims, "y": y, "index": y}):
        np.testing.assert_array_equal(found["index"], wanted["index"])
        np.testing.assert_array_equal(found["y"], wanted["y"])


NORMS = [
    *((p, DType.FLOAT32) for p in (1.0, 2.0, 3.0, 5.5, 40.0)),
    *((p, DType.FLOAT64) for p in (2.0, 300.0)),
]


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize(("p", "dtype"), NORMS)
@pytest.mark.parametrize(("dims", "window"), SHAPES, ids=[str(dims) for dims, _ in SHAPES])
def test_norms_and_their_gradients_hold_large_and_small_numbers(
    dims: tuple[int, ...], window: Any, p: float, dtype: DType
) -> None:
    rng, y = np.random.default_rng(38), window.output_dims(dims)
    turn = SHAPES.index((dims, window)) + NORMS.index((p, dtype))
    layouts = LAYOUTS if WHOLE else LAYOUTS[turn % 2 :][:1]  # each with every shape and with every norm
    most = 30 if dtype is DType.FLOAT32 else 300
    scales = 10.0 ** rng.integers(-most, most, dims[:2]).reshape(*dims[:2], *[1] * (len(dims) - 2))
    x = (rng.normal(size=dims) * scales).astype(dtype.numpy)
    x[0, 0, :3] = x[0, -1] = 0
    every = {"x": dims, "y": y, "dy": y, "dx": dims}
    specs = {name: TensorSpec.packed(of, DType.FLOAT32) for name, of in every.items()}
    forward = LpPool(x="x", y="y", window=window, p=p)
    wanted = forward.evaluate(NumPy(), {"x": x.astype(np.float64)}, {"y": specs["y"]})["y"]
    floats = dict.fromkeys(every, dtype)
    exact_to = 1e-6 if dtype is DType.FLOAT32 else 1e-14
    for found in results_of(
        lp_pool, forward, {"x": x}, {n: floats[n] for n in ("x", "y")}, every, layouts=layouts
    ):
        np.testing.assert_allclose(found["y"], wanted, rtol=exact_to)
    given = {"x": x, "y": wanted.astype(dtype.numpy), "dy": np.abs(rng.normal(size=y)).astype(dtype.numpy)}
    backward = LpPoolBackward(dy="dy", x="x", y="y", dx="dx", window=window, p=p)
    exact = {name: values.astype(np.float64) for name, values in given.items()}
    expected = backward.evaluate(NumPy(), exact, {"dx": specs["dx"]})["dx"]
    for found in results_of(lp_pool_backward, backward, given, floats, every, layouts=layouts):
        np.testing.assert_allclose(found["dx"], expected, rtol=10 * exact_to * max(p, 1), atol=1e-37)


@pytest.mark.parametrize(
    "window", [S(2, size=(20, 5), pad=(10, 2), stride=1), S(2, size=(20, 5), stride=999)]
)
def test_norms_of_images_of_many_rows_are_computed_in_blocks(window: Window) -> None:
    """Blocks of one size whose windows lie differently, or that begin behind all windows."""
    dims = (1, 1, 612, 80)
    rng, y = np.random.default_rng(38), window.output_dims(dims)
    x, p = rng.normal(size=dims), 3.0
    every = {"x": dims, "y": y, "dy": y, "dx": dims}
    specs = {name: TensorSpec.packed(of, DType.FLOAT64) for name, of in every.items()}
    forward = LpPool(x="x", y="y", window=window, p=p)
    wanted = forward.evaluate(NumPy(), {"x": x}, {"y": specs["y"]})["y"]
    floats = dict.fromkeys(every, DType.FLOAT64)
    for found in results_of(lp_pool, forward, {"x": x}, {n: floats[n] for n in ("x", "y")}, every):
        np.testing.assert_allclose(found["y"], wanted, rtol=1e-13)
    given = {"x": x, "y": np.asarray(wanted), "dy": rng.random(y)}
    backward = LpPoolBackward(dy="dy", x="x", y="y", dx="dx", window=window, p=p)
    expected = backward.evaluate(NumPy(), given, {"dx": specs["dx"]})["dx"]
    for found in results_of(lp_pool_backward, backward, given, floats, every):
        np.testing.assert_allclose(found["dx"], expected, rtol=1e-12)


def tiled(make: Any, most: int) -> Any:
    """The same kernel, with so many bytes of scratch: windows are computed in parts."""

    def of_tiles(operation: Any, specs: Any) -> Any:
        kernel = make(operation, specs)
        of = kernel.pooling
        found = dataclasses.replace(kernel, pooling=TiledPooling(of.x, of.y, of.axes, of.join, most))
        assert found.footprint(1) <= most
        return found

    return of_tiles


TILED_SHAPES: list[tuple[tuple[int, ...], Any, int]] = [
    ((1, 1, 30, 37), S(2, size=(21, 18), pad=(10, 7), stride=(5, 2), dilation=(1, 2)), 60_000),
    ((1, 2, 34, 31), AdaptiveWindow(output=(2, 3)), 20_000),
    ((1, 1, 900), AdaptiveWindow(output=(7,)), 20_000),
    ((1, 1, 1000), S(1, size=300, pad=150, stride=1), 20_000),
    ((1, 1, 9, 10, 20), S(3, size=(7, 8, 17), pad=3, stride=(2, 1, 1)), 200_000),
    ((1, 1, 40, 30), S(2, size=(40, 30)), 20_000),
]


@pytest.mark.parametrize(("dims", "window", "most"), TILED_SHAPES, ids=[str(of[0]) for of in TILED_SHAPES])
def test_windows_in_parts_have_the_first_of_their_largest_and_their_norms(
    dims: tuple[int, ...], window: Any, most: int
) -> None:
    rng, y = np.random.default_rng(38), window.output_dims(dims)
    x = whole_numbers(rng, dims)
    every = {"x": dims, "y": y, "index": y, "dy": y, "dx": dims}
    specs = {name: TensorSpec.packed(of, DType.INT64) for name, of in every.items()}
    largest = MaxPool(x="x", y="y", index="index", window=window)
    wanted = largest.evaluate(NumPy(), {"x": x.astype(np.float64)}, {n: specs[n] for n in ("y", "index")})
    dtypes = {"x": DType.FLOAT32, "y": DType.FLOAT32, "index": DType.INT64}
    for found in results_of(tiled(wide_max_pool, most), largest, {"x": x}, dtypes, every):
        np.testing.assert_array_equal(found["index"], wanted["index"])
        np.testing.assert_array_equal(found["y"], wanted["y"])
    numbers, floats = rng.normal(size=dims), dict.fromkeys(every, DType.FLOAT64)
    numbers[0, 0, :3] = 0
    forward = LpPool(x="x", y="y", window=window, p=3.5)
    norms = np.asarray(forward.evaluate(NumPy(), {"x": numbers}, specs)["y"])
    of_norms = dict.fromkeys(("x", "y"), DType.FLOAT64)
    for found in results_of(tiled(scaled_norms, most), forward, {"x": numbers}, of_norms, every):
        np.testing.assert_allclose(found["y"], norms, rtol=1e-13)
    given = {"x": numbers, "y": norms, "dy": rng.random(y)}
    backward = LpPoolBackward(dy="dy", x="x", y="y", dx="dx", window=window, p=3.5)
    expected = backward.evaluate(NumPy(), given, {"dx": specs["dx"]})["dx"]
    for found in results_of(tiled(scaled_norms_gradient, most), backward, given, floats, every):
        np.testing.assert_allclose(found["dx"], expected, rtol=1e-12)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("p", [2.0, 40.0])
@pytest.mark.parametrize("size", [900, 5000])
def test_norms_of_float64_by_long_windows_allocate_no_arrays(size: int, p: float, gradient: bool) -> None:
    window = S(1, size=size, pad=size // 2, stride=1)
    x, y = (1, 2, 5000), window.output_dims((1, 2, 5000))
    if gradient:
        operation: Any = LpPoolBackward(dy="dy", x="x", y="y", dx="dx", window=window, p=p)
        result, dims = "dx", {"dy": y, "x": x, "y": y, "dx": x}
    else:
        operation = LpPool(x="x", y="y", window=window, p=p)
        result, dims = "y", {"x": x, "y": y}
    kernel = (lp_pool_backward if gradient else lp_pool)(
        operation, {name: TensorSpec.packed(of, DType.FLOAT64) for name, of in dims.items()}
    )
    assert kernel is not None
    memory = [Scratch(aligned_bytes(kernel.footprint(1)))]
    arrays = {name: np.ones(of) for name, of in dims.items()}
    (step,) = kernel.bind(arrays, {result: arrays[result]}, memory)

    def computed() -> None:
        with np.errstate(all="ignore"):
            for call in step:
                call()

    assert peak_of_second(computed) < MOST_BYTES


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64])
@pytest.mark.parametrize("window", [S(2, size=(1000, 800)), S(2, size=(390, 390), stride=200)])
def test_rows_that_do_not_fit_into_scratch_allocate_no_arrays(window: Window, dtype: DType) -> None:
    x, y = (1, 1, 1000, 800), window.output_dims((1, 1, 1000, 800))
    of_x, of_y, index = (TensorSpec.packed(*of) for of in ((x, dtype), (y, dtype), (y, DType.INT64)))
    arrays = {"x": np.ones(x, dtype.numpy), "y": np.empty(y, dtype.numpy), "index": np.empty(y, np.int64)}
    of_largest: Any = MaxPool(x="x", y="y", index="index", window=window)
    of_norms: Any = LpPool(x="x", y="y", window=window, p=3.0)
    largest = max_pool(of_largest, {"x": of_x, "y": of_y, "index": index})
    norms = lp_pool(of_norms, {"x": of_x, "y": of_y})
    for kernel in (largest, norms):
        assert kernel is not None
        memory = [Scratch(aligned_bytes(kernel.footprint(1)))]
        (step,) = kernel.bind(arrays, arrays, memory)
        run: Any = step[0]
        assert peak_of_second(run) < MOST_BYTES


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("kind", [LpPoolBackward, MaxPoolBackward])
@pytest.mark.parametrize("size", [2, 5])
def test_gradients_by_small_windows_of_long_rows_allocate_no_arrays(size: int, kind: Any) -> None:
    window = S(2, size=size, stride=1)
    x = (1, 1, size + 1, 600_000 // size)
    y = window.output_dims(x)
    dtypes = {"dy": DType.FLOAT64, "dx": DType.FLOAT64}
    if kind is LpPoolBackward:
        operation: Any = LpPoolBackward(dy="dy", x="x", y="y", dx="dx", window=window, p=9.0)
        dtypes |= {"x": DType.FLOAT64, "y": DType.FLOAT64}
    else:
        operation = MaxPoolBackward(dy="dy", index="index", dx="dx", window=window)
        dtypes |= {"index": DType.INT64}
    dims = {"x": x, "dx": x, "y": y, "dy": y, "index": y}
    specs = {name: TensorSpec.packed(dims[name], dtype) for name, dtype in dtypes.items()}
    kernel = (lp_pool_backward if kind is LpPoolBackward else max_pool_backward)(operation, specs)
    assert kernel is not None
    assert 0 < kernel.footprint(1) <= 16 << 20
    memory = [Scratch(aligned_bytes(kernel.footprint(1)))]
    arrays = {name: np.ones(spec.dims, spec.dtype.numpy) for name, spec in specs.items()}
    (step,) = kernel.bind(arrays, arrays, memory)
    with np.errstate(all="ignore"):
        assert peak_of_second(in_turn(step)) < MOST_BYTES


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("most", [200_000, MOST_SCRATCH])
@pytest.mark.parametrize("window", [S(1, size=900, stride=1), AdaptiveWindow(output=(19_000,))])
def test_calls_that_are_too_many_to_be_kept_allocate_no_arrays(
    window: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run makes them again: a window's bounds would be arrays of 100 kB."""
    for module in (pooling_joined, pooling_tiles):
        monkeypatch.setattr(module, "_CALLS", 1 << 40)
    x, y = (1, 2, 20_000), window.output_dims((1, 2, 20_000))
    specs = {"x": TensorSpec.packed(x, DType.FLOAT64), "y": TensorSpec.packed(y, DType.FLOAT64)}
    specs["index"] = TensorSpec.packed(y, DType.INT64)
    of = bounded_pooling(x, y, window_axes(window, x, y), FirstLargest())
    if most < MOST_SCRATCH:
        of = TiledPooling(x, y, of.axes, of.join, most)
    kernel = WideIndexedPooling(of)
    arrays = {name: array_of(spec, np.arange(spec.dims[-1])) for name, spec in specs.items()}
    (step,) = kernel.bind(arrays, arrays, [Scratch(aligned_bytes(kernel.footprint(1)))])
    assert peak_of_second(in_turn(step)) < 50_000  # what Python keeps of lists and tuples of the same size
    # The last element of a window is its largest.
    last = np.arange(899, 20_000) if isinstance(window, Window) else -(np.arange(1, 19_001) * -20 // 19) - 1
    np.testing.assert_array_equal(arrays["y"][0, 1], last)


def test_blocks_of_gradients_of_unequal_sizes_have_room() -> None:
    window, dims = S(2, size=4, stride=1), {"dx": (1, 1, 304, 303), "dy": (1, 1, 301, 300)}
    given = {"dy": np.ones(dims["dy"]), "index": np.zeros(dims["dy"], np.int64)}
    operation = MaxPoolBackward(dy="dy", index="index", dx="dx", window=window)
    dtypes = {"dy": DType.FLOAT64, "index": DType.INT64, "dx": DType.FLOAT64}
    dims["index"] = dims["dy"]
    for found in results_of(max_pool_backward, operation, given, dtypes, dims):
        assert found["dx"].sum() == found["dx"][0, 0, 0, 0] == 1


def narrow_norms(node: Any, specs: Any) -> Any:
    x, y = specs["x"].dims, specs["y"].dims
    return joined_norms(x, y, window_axes(node.window, x, y), node.p)


def narrow_norms_gradient(node: Any, specs: Any) -> Any:
    return joined_norms_gradient(node, specs["dx"].dims, specs["dy"].dims)


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 5.5])
@pytest.mark.parametrize(("dims", "window", "most"), TILED_SHAPES, ids=[str(of[0]) for of in TILED_SHAPES])
def test_windows_in_parts_have_the_norms_of_float32_without_scales(
    dims: tuple[int, ...], window: Any, most: int, p: float
) -> None:
    rng, y = np.random.default_rng(38), window.output_dims(dims)
    every = {"x": dims, "y": y, "dy": y, "dx": dims}
    specs = {name: TensorSpec.packed(of, DType.FLOAT32) for name, of in every.items()}
    x = rng.normal(size=dims).astype(np.float32)
    x[0, 0, :3] = 0
    forward = LpPool(x="x", y="y", window=window, p=p)
    norms = np.asarray(forward.evaluate(NumPy(), {"x": x.astype(np.float64)}, specs)["y"])
    floats = dict.fromkeys(every, DType.FLOAT32)
    of_norms = {name: floats[name] for name in ("x", "y")}
    for found in results_of(tiled(narrow_norms, most), forward, {"x": x}, of_norms, every):
        np.testing.assert_allclose(found["y"], norms, rtol=1e-6)
    given = {"x": x, "y": norms.astype(np.float32), "dy": rng.random(y).astype(np.float32)}
    backward = LpPoolBackward(dy="dy", x="x", y="y", dx="dx", window=window, p=p)
    exact = {name: values.astype(np.float64) for name, values in given.items()}
    expected = backward.evaluate(NumPy(), exact, {"dx": specs["dx"]})["dx"]
    for found in results_of(tiled(narrow_norms_gradient, most), backward, given, floats, every):
        np.testing.assert_allclose(found["dx"], expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64])
@pytest.mark.parametrize("most", [None, 10_000])
def test_infinity_between_windows_has_a_gradient_of_0(dtype: DType, most: int | None) -> None:
    dims = {"dy": (1, 1, 2), "y": (1, 1, 2), "x": (1, 1, 245), "dx": (1, 1, 245)}
    given = {name: np.ones(dims[name]) for name in ("dy", "y", "x")}
    given["x"][..., [110, 240]] = np.inf  # behind the first window, and behind the last
    given["y"][..., 1] = 0
    operation = LpPoolBackward(dy="dy", x="x", y="y", dx="dx", window=S(1, size=100, stride=120), p=3.0)
    in_parts = narrow_norms_gradient if dtype is DType.FLOAT32 else scaled_norms_gradient
    make = lp_pool_backward if most is None else tiled(in_parts, most)
    for found in results_of(make, operation, given, dict.fromkeys(dims, dtype), dims):
        np.testing.assert_array_equal(found["dx"], np.repeat([1.0, 0.0], [100, 145]).reshape(1, 1, 245))


def test_random_problems_are_within_the_bounds_of_their_operations() -> None:
    makes = {
        MaxPool: max_pool,
        MaxPoolBackward: max_pool_backward,
        LpPool: lp_pool,
        LpPoolBackward: lp_pool_backward,
    }
    check("pooling", makes, 30)


def test_images_of_many_rows_are_cut_into_blocks() -> None:
    dims = (1, 1, 700, 600)
    x = np.random.default_rng(38).permutation(math.prod(dims)).reshape(dims).astype(np.float32)
    window = S(2, size=(50, 60), stride=(40, 60))
    y = window.output_dims(dims)
    operation = MaxPool(x="x", y="y", index="index", window=window)
    specs = {"y": TensorSpec.packed(y, DType.FLOAT32), "index": TensorSpec.packed(y, DType.INT64)}
    wanted = operation.evaluate(NumPy(), {"x": x.astype(np.float64)}, specs)
    for dtype in (DType.FLOAT32, DType.FLOAT64):
        dtypes = {"x": dtype, "y": dtype, "index": DType.INT64}
        for found in results_of(max_pool, operation, {"x": x}, dtypes, {"x": dims, "y": y, "index": y}):
            np.testing.assert_array_equal(found["index"], wanted["index"])
