"""Gathers and resampling, block by block, beside their definitions."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.engines.cpu.fast import resampling
from cudnn_actor.engines.cpu.fast.indexing import gather, gather_elements, gather_nd
from cudnn_actor.engines.cpu.fast.kernels import MOST_SCRATCH, Kernel, in_turn
from cudnn_actor.engines.cpu.fast.resampling import resample, resample_backward
from cudnn_actor.engines.cpu.scratch import Scratch, aligned_bytes
from cudnn_actor.protocol import DType, Layout, TensorSpec
from cudnn_actor.protocol.operations import Gather, GatherElements, GatherND, Resample, ResampleBackward
from cudnn_actor.protocol.operations.resampling import Coordinates, ResampleMode

from ....in_one_test import cases_in_one_test
from .kernel_cases import check_any
from .kernel_runs import LANES, array_of, peak_of_second, run
from .test_allocation import MOST_BYTES

RNG = np.random.default_rng(38)


def made(operation: Any, specs: dict[str, TensorSpec]) -> Kernel | None:
    match operation:
        case Gather():
            return gather(operation, specs)
        case GatherElements():
            return gather_elements(operation, specs)
        case GatherND():
            return gather_nd(operation, specs)
        case Resample():
            return resample(operation, specs)
    return None


@pytest.mark.parametrize(("family", "count", "least"), [("indexing", 250, 71), ("resampling", 150, 41)])
def test_random_problems_are_within_the_bounds_of_their_operations(
    family: str, count: int, least: int
) -> None:
    check_any(family, made, count, least=least)


@cases_in_one_test
@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize(
    ("dims", "indices", "axis"),
    [((500, 96), (4, 300), 0), ((40, 30, 500), (70,), 2), ((3, 700, 8, 5), (2, 3), 1), ((70_000,), (3,), 0)],
)
def test_many_slices_are_gathered_on_any_number_of_lanes(
    dims: tuple[int, ...], indices: tuple[int, ...], axis: int, lanes: int
) -> None:
    x = RNG.normal(size=dims).astype(np.float32)
    places = RNG.integers(-2 * dims[axis], 2 * dims[axis], indices).astype(np.int32)
    operation = Gather(x="x", indices="indices", y="y", axis=axis)
    specs = {"x": TensorSpec.like(x), "indices": TensorSpec.like(places)}
    specs |= operation.infer(specs)
    kernel = made(operation, specs)
    assert kernel is not None
    y = array_of(specs["y"])
    run(kernel, {"x": x, "indices": places}, {"y": y}, lanes)
    within = np.clip(np.where(places < 0, places + dims[axis], places), 0, dims[axis] - 1)
    np.testing.assert_array_equal(y, np.take(x, within, axis))


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_many_elements_are_gathered_on_any_number_of_lanes(lanes: int) -> None:
    x = RNG.normal(size=(5, 300, 200)).astype(np.float32)
    places = RNG.integers(-300, 300, (5, 350, 190))
    lists = RNG.integers(0, 200, (5, 40_000, 2))
    taken = np.take_along_axis(x[:, :, :190], places % 300, 1)
    listed = np.stack([of[at[:, 0], at[:, 1]] for of, at in zip(x, lists, strict=True)])
    for operation, indices, wanted in (
        (GatherElements(x="x", indices="indices", y="y", axis=1), places, taken),
        (GatherND(x="x", indices="indices", y="y", batch_dims=1), lists, listed),
    ):
        specs = {"x": TensorSpec.like(x), "indices": TensorSpec.like(indices)}
        specs["y"] = TensorSpec.like(wanted)
        kernel = made(operation, specs)
        assert kernel is not None
        y = np.empty_like(wanted)
        run(kernel, {"x": x, "indices": indices}, {"y": y}, lanes)
        np.testing.assert_array_equal(y, wanted)


MANY_SAMPLES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "slices": (Gather(x="x", indices="indices", y="y", axis=1, batch_dims=1), (5000, 7, 60), (5000, 4)),
    "lists": (GatherND(x="x", indices="indices", y="y", batch_dims=1), (5000, 7, 60), (5000, 4, 1)),
}


@pytest.mark.each_value
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(("operation", "dims", "indices"), MANY_SAMPLES.values(), ids=MANY_SAMPLES.keys())
def test_samples_with_indices_of_their_own_are_gathered_in_memory_of_bounded_size(
    operation: Any, dims: tuple[int, ...], indices: tuple[int, ...], lanes: int
) -> None:
    x = RNG.normal(size=dims).astype(np.float32)
    places = RNG.integers(-9, 9, indices)  # also out of range
    specs = {"x": TensorSpec.like(x), "indices": TensorSpec.like(places)}
    specs |= operation.infer(specs)
    within = np.clip(np.where(places < 0, places + 7, places), 0, 6).reshape(5000, 4)
    wanted = np.take_along_axis(x, within[:, :, None], 1)
    for given in (x, np.asfortranarray(x)):
        y = array_of(specs["y"])
        tracemalloc.start()
        try:
            kernel = made(operation, specs)
            assert kernel is not None
            memory = [Scratch(aligned_bytes(kernel.footprint(lanes))) for _ in range(lanes)]
            steps = kernel.bind({"x": given, "indices": places}, {"y": y}, memory)
            for step in steps:
                for call in step:
                    call()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        np.testing.assert_array_equal(y, wanted)
        assert peak < y.nbytes // 2


@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
def test_pictures_are_made_larger_on_any_number_of_lanes(layout: Layout) -> None:
    dims, sizes = (2, 40, 23, 20), (2, 40, 46, 40)
    x = RNG.normal(size=dims).astype(np.float32)
    x[0, 0, 0, 0] = np.inf
    specs = {"x": TensorSpec.packed(dims, DType.FLOAT32, layout)}
    specs["y"] = TensorSpec.packed(sizes, DType.FLOAT32, layout)
    for mode in (ResampleMode.NEAREST, ResampleMode.LINEAR, ResampleMode.CUBIC):
        operation = Resample(x="x", y="y", sizes=sizes, mode=mode)
        with np.errstate(invalid="ignore"):  # infinity less infinity
            wanted = operation.evaluate(NumPy(), {"x": x.astype(np.float64)}, specs)["y"]
        kernel = made(operation, specs)
        assert kernel is not None
        found = []
        for lanes in LANES:
            y = array_of(specs["y"])
            run(kernel, {"x": array_of(specs["x"], x)}, {"y": y}, lanes)
            found.append(y)
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])
        np.testing.assert_allclose(found[0], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.each_value
@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
@pytest.mark.parametrize(
    ("dims", "sizes"), [((1, 16, 250, 400), (1, 16, 30, 700)), ((1, 1, 40, 900), (1, 1, 1300, 890))]
)
def test_large_pictures_are_resampled_in_parts_of_bounded_size(
    dims: tuple[int, ...], sizes: tuple[int, ...], layout: Layout
) -> None:
    x = RNG.normal(size=dims).astype(np.float32)
    specs = {"x": TensorSpec.packed(dims, DType.FLOAT32, layout)}
    specs["y"] = TensorSpec.packed(sizes, DType.FLOAT32, layout)
    for mode in (ResampleMode.NEAREST, ResampleMode.CUBIC):
        operation = Resample(x="x", y="y", sizes=sizes, mode=mode)
        kernel = made(operation, specs)
        assert kernel is not None
        assert kernel.footprint(1) <= MOST_SCRATCH
        y = array_of(specs["y"])
        run(kernel, {"x": array_of(specs["x"], x)}, {"y": y}, 2)
        wanted = operation.evaluate(NumPy(), {"x": x.astype(np.float64)}, specs)["y"]
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)


def test_the_places_of_a_very_long_dim_are_not_kept() -> None:
    x = RNG.normal(size=(1, 1 << 20)).astype(np.float32)
    operation = Resample(x="x", y="y", sizes=(1, (1 << 20) + 7), mode=ResampleMode.LINEAR)
    specs = {"x": TensorSpec.like(x), "y": TensorSpec.packed(operation.sizes, DType.FLOAT32)}
    tracemalloc.start()
    try:
        kernel = made(operation, specs)
        assert kernel is not None
        y = np.empty(operation.sizes, np.float32)
        memory = [Scratch(aligned_bytes(kernel.footprint(1)))]
        (step,) = kernel.bind({"x": x}, {"y": y}, memory)
        for call in step:
            call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * y.nbytes  # of 12 bytes for each of two neighbours
    wanted = operation.evaluate(NumPy(), {"x": x.astype(np.float64)}, specs)["y"]
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)


FOUND: dict[str, dict[str, Any]] = {
    "nearest": {},
    "linear": {"mode": ResampleMode.LINEAR, "coordinates": Coordinates.ALIGN_CORNERS},
    "cubic": {"mode": ResampleMode.CUBIC, "exclude_outside": True},
    "antialias": {"mode": ResampleMode.LINEAR, "antialias": True},
    "cropped": {
        "mode": ResampleMode.CUBIC,
        "coordinates": Coordinates.TF_CROP_AND_RESIZE,
        "roi": (0.0, 0.0, 0.2, -0.1, 1.0, 1.0, 0.1, 1.1),
        "extrapolation": 7.0,
    },
}


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.each_value
@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
@pytest.mark.parametrize("parameters", FOUND.values(), ids=FOUND.keys())
def test_taps_that_each_run_finds_are_those_that_a_program_keeps(
    parameters: dict[str, Any], layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in blocks of which each has some images, and parts of a dim that is found in several pieces."""
    dims, sizes = (1, 3, 4, 20_000), (1, 3, 7, 19_500)
    forward = Resample(x="x", y="y", sizes=sizes, **parameters)
    check_found_taps(resample, forward, dims, sizes, layout=layout, monkeypatch=monkeypatch)


@pytest.mark.parametrize("size", [19_500, 40_000])
@pytest.mark.usefixtures("small_buffers")
def test_taps_of_gradients_are_found_in_those_that_the_plan_holds(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = (1, 3, 4, 20_000)
    backward = ResampleBackward(dy="x", dx="y", sizes=dims)
    sizes = (1, 3, 4, size)
    check_found_taps(resample_backward, backward, dims, sizes, layout=Layout.NCHW, monkeypatch=monkeypatch)


def check_found_taps(
    make: Any, operation: Any, dims: Any, sizes: Any, *, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a run gives the same, and allocates nothing, where taps are not kept."""
    x = RNG.normal(size=dims).astype(np.float32)
    x[0, 0, 0, 7] = np.inf
    specs = {"x": TensorSpec.packed(dims, DType.FLOAT32, layout)}
    specs["y"] = TensorSpec.packed(sizes, DType.FLOAT32, layout)
    specs |= {"dy": specs["x"], "dx": specs["y"]}
    kernel, given = make(operation, specs), {"x": array_of(specs["x"], x)}
    wanted, found = array_of(specs["y"]), array_of(specs["y"])
    run(kernel, given, {"y": wanted})
    monkeypatch.setattr(resampling, "_TAPS_SCRATCH", 1 << 16)
    monkeypatch.setattr(resampling, "_GROUP", 2)
    monkeypatch.setattr(resampling, "_MOST_KEPT", 0)
    run(kernel, given, {"y": found}, 2)
    np.testing.assert_array_equal(found, wanted)
    memory = Scratch(aligned_bytes(kernel.footprint(1)))
    call: Any = in_turn(*kernel.bind(given, {"y": found}, [memory]))
    assert memory.kept_bytes == 0
    with np.errstate(all="ignore"):
        assert peak_of_second(call) < MOST_BYTES


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 1, 0, 2)])
@pytest.mark.parametrize("axis", range(4))
def test_what_is_in_one_other_order_is_gathered_in_that_order(axis: int, order: tuple[int, ...]) -> None:
    """Slices are copied as they lie, and not element by element."""
    dims, taken = (3, 40, 7, 9), [3, 40, 7, 9]
    taken[axis] = 6
    operation: Any = Gather(x="x", indices="indices", y="y", axis=axis)

    def in_order(dims: tuple[int, ...]) -> TensorSpec:
        turned = TensorSpec.packed(tuple(dims[axis] for axis in order), "float32").strides
        return TensorSpec.strided(dims, [turned[order.index(axis)] for axis in range(4)], "float32")

    specs = {"x": in_order(dims), "indices": TensorSpec.packed((6,), "int64"), "y": in_order(tuple(taken))}
    x, indices = RNG.standard_normal(dims).astype(np.float32), np.array([0, 2, -1, 1, 0, 2])
    y = array_of(specs["y"])
    kernel = gather(operation, specs)
    operands = {"x": array_of(specs["x"], x), "indices": array_of(specs["indices"], indices)}
    run(kernel, operands, {"y": y}, 2)
    np.testing.assert_array_equal(y, x.take(indices, axis))
    turned = kernel.in_c_order(operands["x"], y)
    assert turned is not None
    assert turned[1].flags.c_contiguous
