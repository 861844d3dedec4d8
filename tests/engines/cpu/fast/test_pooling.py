"""Max and average pooling in blocks, beside their definition."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.engines.cpu.fast import pooling
from cudnn_actor.engines.cpu.fast.kernels import MOST_SCRATCH, Call, Kernel, in_turn
from cudnn_actor.engines.cpu.fast.pooling_element_joins import element_gradient, element_pooling
from cudnn_actor.engines.cpu.fast.pooling_gradients import avg_pool_backward
from cudnn_actor.engines.cpu.fast.pooling_joined import BlockArrays
from cudnn_actor.engines.cpu.fast.pooling_joins import ElementJoin, FirstLargest, ScaledSums
from cudnn_actor.engines.cpu.fast.pooling_tiles import TiledPooling
from cudnn_actor.engines.cpu.fast.pooling_windows import counts_of, regular_axis, window_axes
from cudnn_actor.engines.cpu.scratch import Scratch, aligned_bytes
from cudnn_actor.protocol import (
    AdaptiveWindow,
    AvgPool,
    AvgPoolBackward,
    DType,
    Layout,
    MaxPool,
    Operation,
    TensorSpec,
    Window,
)

from ....in_one_test import cases_in_one_test
from .kernel_cases import check_any
from .kernel_runs import LANES, array_of, calls_of, peak_of_second, run
from .test_allocation import MOST_BYTES

S = Window.symmetric
SHAPES = [
    ((1, 64, 30, 31), S(2, size=3, pad=1, stride=2)),
    ((2, 40, 20, 20), S(2, size=5, pad=2, stride=1)),
    ((1, 3, 300, 90), S(2, size=2)),
    ((2, 80, 7, 7), S(2, size=7)),
    ((1, 300, 14, 13), AdaptiveWindow(output=(1, 1))),
    ((1, 70, 14, 13), AdaptiveWindow(output=(4, 3))),
    ((1, 12, 40, 37), S(2, size=(1, 3), pad=(0, 1), stride=(1, 2), dilation=(1, 3))),
    ((1, 2, 40_000), S(1, size=9, pad=4, stride=1)),
    ((1, 5, 12, 14, 40), S(3, size=3, pad=1, stride=(2, 1, 2))),
    ((1, 3, 50, 61), S(2, size=(23, 16), pad=(11, 5), stride=(1, 2), dilation=(2, 1))),
    ((1, 2, 9, 100), AdaptiveWindow(output=(2, 77))),
    ((1, 2, 700), S(1, size=300, pad=150, stride=1)),
]


def made(operation: Operation[Any], specs: dict[str, TensorSpec]) -> Kernel | None:
    match operation:
        case MaxPool():
            return pooling.max_pool(operation, specs)
        case AvgPool():
            return pooling.avg_pool(operation, specs)
        case AvgPoolBackward():
            return avg_pool_backward(operation, specs)
    return None


@cases_in_one_test
@pytest.mark.parametrize("kind", [MaxPool, AvgPool])
@pytest.mark.parametrize(("dims", "window"), SHAPES, ids=[str(dims) for dims, _ in SHAPES])
def test_blocks_give_what_the_definition_gives_on_any_number_of_lanes(
    dims: tuple[int, ...], window: Any, kind: Any
) -> None:
    rng = np.random.default_rng(38)
    values = rng.normal(size=dims).astype(np.float32)
    values.reshape(-1)[rng.integers(0, values.size, 3)] = (np.nan, np.inf, 1e-40)
    operation = kind(x="x", y="y", window=window)
    results = TensorSpec.packed(window.output_dims(dims), DType.FLOAT32)
    wanted = operation.evaluate(NumPy(), {"x": values.astype(np.float64)}, {"y": results})["y"]
    for layout in (Layout.NCHW, Layout.NHWC):
        specs = {"x": TensorSpec.packed(dims, DType.FLOAT32, layout)}
        specs["y"] = TensorSpec.packed(results.dims, DType.FLOAT32, layout)
        kernel = made(operation, specs)
        assert kernel is not None
        found = []
        for lanes in LANES:
            y = array_of(specs["y"])
            run(kernel, {"x": array_of(specs["x"], values)}, {"y": y}, lanes)
            found.append(y)
        np.testing.assert_allclose(found[0], wanted, rtol=1e-6, atol=3e-6 if kind is AvgPool else 0)
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])


LARGE = ((1, 3, 190, 180), S(2, size=(3, 4), stride=(1, 2), pad=1))


@cases_in_one_test
@pytest.mark.parametrize(("dims", "window"), [*SHAPES, LARGE], ids=lambda one: str(one)[:30])
def test_gradients_of_means_are_spread_in_blocks(dims: tuple[int, ...], window: Any) -> None:
    outputs = window.output_dims(dims)
    values = np.random.default_rng(38).normal(size=outputs).astype(np.float32)
    operation = AvgPoolBackward(dy="dy", dx="dx", window=window)
    given = {"dy": values.astype(np.float64)}
    wanted = operation.evaluate(NumPy(), given, {"dx": TensorSpec.packed(dims, DType.FLOAT32)})["dx"]
    for layout in (Layout.NCHW, Layout.NHWC):
        specs = {"dy": TensorSpec.packed(outputs, DType.FLOAT32, layout)}
        specs["dx"] = TensorSpec.packed(dims, DType.FLOAT32, layout)
        kernel = made(operation, specs)
        assert kernel is not None
        for lanes in (1, 3):
            dx = array_of(specs["dx"])
            run(kernel, {"dy": array_of(specs["dy"], values)}, {"dx": dx}, lanes)
            np.testing.assert_allclose(dx, wanted, rtol=1e-6, atol=1e-6)


def test_random_problems_are_within_the_bounds_of_their_operations() -> None:
    check_any("pooling", made, 150, least=36)


KINDS = (MaxPool, AvgPool, AvgPoolBackward)
EXTREME = [
    ((1, 16, 16, 4096), S(2, size=(1, 127), pad=(0, 63), stride=1)),
    ((1, 1, 16, 4096), S(2, size=(1, 2047), pad=(0, 1023), stride=1)),
    ((1, 4, 1024, 1024), S(2, size=33, pad=16, stride=1)),
    ((1, 4, 2048, 2048), AdaptiveWindow(output=(2047, 2047))),
    ((1, 1, 100_000), S(1, size=39_999, pad=19_999, stride=1)),
    ((1, 1, 4096, 4096), AdaptiveWindow(output=(1, 1))),
    ((1_000_000, 2, 2, 2), AdaptiveWindow(output=(1, 1))),
    ((1, 16, 16, 65_536), S(2, size=3, pad=1, stride=1)),
    ((1, 1, 40, 400, 400), S(3, size=3, stride=1)),
]


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dims", "window"), EXTREME, ids=[str(dims) for dims, *_ in EXTREME])
def test_calls_and_scratch_are_bounded_whatever_the_windows(
    dims: tuple[int, ...], window: Any, kind: Any
) -> None:
    small = TensorSpec.packed(window.output_dims(dims), DType.FLOAT32)
    large = TensorSpec.packed(dims, DType.FLOAT32)
    if kind is AvgPoolBackward:
        operation, specs = AvgPoolBackward(dy="dy", dx="dx", window=window), {"dy": small, "dx": large}
    else:
        operation, specs = kind(x="x", y="y", window=window), {"x": large, "y": small}
    kernel = made(operation, specs)
    assert kernel is not None
    assert kernel.footprint(1) <= 4 << 20
    given, result = ({name: np.empty(spec.dims, np.float32)} for name, spec in specs.items())
    assert calls_of(kernel, given, result) <= 100_000


TILED = [
    ((1, 2, 30, 37), S(2, size=(21, 18), pad=(10, 7), stride=(5, 2), dilation=(1, 2)), 20_000),
    ((2, 3, 34, 31), AdaptiveWindow(output=(3, 4)), 4000),
    ((1, 17, 20, 50), S(2, size=3, pad=1, stride=2), 12_000),
    ((1, 1, 900), AdaptiveWindow(output=(7,)), 4000),
    ((1, 1, 1000), S(1, size=300, pad=150, stride=1), 8000),
    ((1, 1, 9, 10, 20), S(3, size=(7, 8, 17), pad=3, stride=(2, 1, 1)), 40_000),
    ((1, 1, 4, 90), S(2, size=(2, 3), stride=(1, 20)), 4000),
]
"""Dims of images, windows, and bytes of scratch that hold less than a row."""


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dims", "window", "most"), TILED, ids=[str(dims) for dims, *_ in TILED])
def test_windows_in_parts_give_what_the_definition_gives(
    dims: tuple[int, ...], window: Any, most: int, kind: Any
) -> None:
    rng, y = np.random.default_rng(38), window.output_dims(dims)
    given, result = ("dy", "dx") if kind is AvgPoolBackward else ("x", "y")
    operation = kind(**{given: given, result: result}, window=window)
    of_dims = {"x": dims, "y": y, "dy": y, "dx": dims}
    values = rng.normal(size=of_dims[given])
    if kind is not AvgPoolBackward:
        values.reshape(-1)[rng.integers(0, values.size, 3)] = (np.nan, np.inf, 1e-40)
    spec = TensorSpec.packed(of_dims[result], DType.FLOAT64)
    wanted = operation.evaluate(NumPy(), {given: values}, {result: spec})[result]
    for layout in (Layout.NCHW, Layout.NHWC):
        specs = {name: TensorSpec.packed(of_dims[name], DType.FLOAT64, layout) for name in (given, result)}
        kernel = tiled(operation, specs, most)
        assert kernel.footprint(1) <= most
        for lanes in (1, 3):
            found = array_of(specs[result])
            run(kernel, {given: array_of(specs[given], values)}, {result: found}, lanes)
            np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def tiled(operation: Any, specs: dict[str, TensorSpec], most: int) -> Kernel:
    """The kernel for windows of which no row fits into so many bytes of scratch."""
    dims = {name: spec.dims for name, spec in specs.items()}
    dtype = np.dtype(np.float64)
    if isinstance(operation, AvgPoolBackward):
        axes = window_axes(operation.window, dims["dx"], dims["dy"])
        counts = counts_of(operation, axes, dtype)
        kernel: Any = element_gradient(operation.window, dims["dx"], dims["dy"], dtype, counts)
    else:
        of_sums = isinstance(operation, AvgPool)
        axes = window_axes(operation.window, dims["x"], dims["y"])
        join = ElementJoin(np.add, dtype, 0.0) if of_sums else ElementJoin(np.maximum, dtype, -np.inf)
        divisors = counts_of(operation, axes, dtype) if isinstance(operation, AvgPool) else None
        kernel = element_pooling(dims["x"], dims["y"], axes, join, divisors)
    of = kernel.pooling
    found: Kernel = dataclasses.replace(kernel, pooling=TiledPooling(of.x, of.y, of.axes, of.join, most))
    return found


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
def test_rows_that_do_not_fit_into_scratch_allocate_no_arrays(kind: Any, layout: Layout) -> None:
    x, window = (1, 2, 9, 110_000), S(2, size=3, stride=(5, 1))
    specs = {"x": TensorSpec.packed(x, DType.FLOAT64, layout)}
    specs["y"] = TensorSpec.packed(window.output_dims(x), DType.FLOAT64, layout)
    specs |= {"dx": specs["x"], "dy": specs["y"]}
    given, result = ("dy", "dx") if kind is AvgPoolBackward else ("x", "y")
    operation = kind(**{given: given, result: result}, window=window)
    kernel = made(operation, {name: specs[name] for name in (given, result)})
    assert kernel is not None
    assert kernel.footprint(1) <= MOST_SCRATCH
    arrays = {name: array_of(specs[name], np.ones(specs[name].dims)) for name in (given, result)}
    (step,) = kernel.bind(arrays, arrays, [Scratch(aligned_bytes(kernel.footprint(1)))])
    assert peak_of_second(in_turn(step)) < MOST_BYTES


def bound(pooling: TiledPooling) -> list[int]:
    """How many elements each part has that is read, in a run in as much scratch as blocks ask for."""
    read: list[int] = []

    def load(block: Any, part: Any, arrays: BlockArrays) -> Iterator[Call]:
        read.append(arrays.elements[0].size)
        return iter(())

    def store(block: Any, arrays: BlockArrays) -> Iterator[Call]:
        return iter(())

    memory = Scratch(aligned_bytes(pooling.footprint()))
    (step,) = pooling.bind([memory], channels_last=False, load=load, store=store)
    with np.errstate(all="ignore"):  # nothing is loaded
        in_turn(step)()  # calls that are too many to be kept are made now
    return read


@pytest.mark.parametrize(
    ("dims", "window"),
    [
        ((1, 1, 30, 36), S(2, size=(29, 8), pad=(14, 5), stride=(2, 8))),
        ((1, 1, 35, 16), S(2, size=(23, 6), pad=(4, 3), stride=(1, 5))),
    ],
)
def test_parts_at_borders_have_room(dims: tuple[int, ...], window: Window) -> None:
    """They are shorter than others, and are doubled where others are folded."""
    y = window.output_dims(dims)
    assert bound(TiledPooling(dims, y, window_axes(window, dims, y), FirstLargest(), 3000))


def test_windows_that_share_rows_do_not_read_them_again_and_again() -> None:
    """What is left of their parts along the first dim is kept."""
    x, window = (1, 1, 400, 1200), S(2, size=(390, 390), stride=10)
    y = window.output_dims(x)
    pooling = TiledPooling(x, y, window_axes(window, x, y), ScaledSums(3.0, largest=True))
    read = bound(pooling)
    assert math.prod(x) <= sum(read) < 2 * math.prod(x)


@pytest.mark.parametrize("window", [S(1, size=3, stride=1, pad=1), S(1, size=1 << 19, stride=1 << 18)])
def test_windows_along_a_long_dim_take_memory_in_proportion_to_the_result(window: Window) -> None:
    x = TensorSpec.packed((1, 1, 1 << 20), DType.FLOAT32)
    operation = MaxPool(x="x", y="y", window=window)
    tracemalloc.start()
    try:
        specs = {"x": x, "y": operation.infer({"x": x})["y"]}
        assert made(operation, specs) is not None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * specs["y"].size + (1 << 20)  # whole numbers of Python take twice as much


def test_the_gradient_of_few_long_windows_takes_a_call_for_each() -> None:
    dx = TensorSpec.packed((1, 2, 1 << 20, 1), DType.FLOAT32)
    window = S(2, size=(1 << 20, 1))
    dy = TensorSpec.packed(AvgPool(x="x", y="y", window=window).infer({"x": dx})["y"].dims, DType.FLOAT32)
    kernel = made(AvgPoolBackward(dy="dy", dx="dx", window=window), {"dy": dy, "dx": dx})
    assert kernel is not None
    results = {"dx": array_of(dx)}
    given = {"dy": array_of(dy, np.array([3.0, 5.0]).reshape(dy.dims))}
    assert calls_of(kernel, given, results) < 20
    run(kernel, given, results)
    np.testing.assert_array_equal(
        results["dx"][0, :, :, 0] * (1 << 20), [[3.0] * (1 << 20), [5.0] * (1 << 20)]
    )


def test_a_part_of_the_windows_along_a_dim_has_their_elements() -> None:
    rng = np.random.default_rng(38)
    for _ in range(300):
        size, count, stride, dilation, longest = (int(rng.integers(1, most)) for most in (30, 9, 7, 5, 8))
        first = int(rng.integers(-20, 20))
        axis = regular_axis(range(first, first + longest * dilation, dilation), stride, size, count)
        members = [
            [place for tap in axis.taps or () if 0 <= (place := tap + number * stride) < size]
            for number in range(count)
        ]
        begin = int(rng.integers(0, count))
        end = int(rng.integers(begin, count)) + 1
        read, part = axis.part(begin, end)
        assert 0 <= read.start <= read.stop <= size
        assert part.size == read.stop - read.start
        for of, ahead, windows in ((axis, 0, members), (part, read.start, members[begin:end])):
            found = zip(of.starts, of.stops, strict=True)
            assert [[*range(start + ahead, stop + ahead, dilation)] for start, stop in found] == windows
