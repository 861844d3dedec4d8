"""Operations that are evaluated part by part, sorted or scattered: right, in little memory, with progress."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.fast import by_definition, scattering, sorting
from cudnn_actor.engines.cpu.fast.compiler import compile_fast
from cudnn_actor.engines.cpu.fast.lanes import Lanes
from cudnn_actor.engines.cpu.fast.recording import Recording
from cudnn_actor.engines.cpu.fast.resampling import resample, resample_backward
from cudnn_actor.engines.cpu.fast.scattering import scatter
from cudnn_actor.engines.cpu.fast.sorting import top_k
from cudnn_actor.engines.cpu.scratch import Scratch, aligned_bytes
from cudnn_actor.protocol import DType, GraphBuilder, Layout, TensorSpec
from cudnn_actor.protocol.operations import (
    AdaptiveWindow,
    AvgPool,
    AvgPoolBackward,
    Cumulative,
    GridSample,
    LocalResponseNorm,
    LocalResponseNormBackward,
    LpPool,
    LpPoolBackward,
    MaxPool,
    MaxPoolBackward,
    RandomBernoulli,
    RandomIntegers,
    RandomNormal,
    RandomUniform,
    Resample,
    ResampleBackward,
    ResampleMode,
    Scatter,
    ScatterElements,
    ScatterND,
    ScatterReduction,
    TopK,
    Window,
)

from .kernel_cases import check
from .kernel_runs import array_of, run

PARTS = by_definition.by_definition
S = Window.symmetric
FAMILIES: Mapping[str, Mapping[Any, Any]] = {
    "pooling": dict.fromkeys((LpPool, LpPoolBackward, MaxPool, MaxPoolBackward), PARTS),
    "response_norm": dict.fromkeys((LocalResponseNorm, LocalResponseNormBackward), PARTS),
    "grid_sampling": {GridSample: PARTS},
    "random": dict.fromkeys((RandomUniform, RandomNormal, RandomBernoulli, RandomIntegers), PARTS),
    "reduction": {Cumulative: PARTS},
    "sorting": {TopK: top_k},
    "indexing": dict.fromkeys((Scatter, ScatterElements, ScatterND), scatter),
    "resampling": {Resample: resample, ResampleBackward: resample_backward},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_random_problems_are_within_the_bounds_of_their_operations(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (by_definition, "_PART_ELEMENTS"),
        (sorting, "_BLOCK_ELEMENTS"),
        (scattering, "_BLOCK"),
    ):
        monkeypatch.setattr(module, name, 400)
    check(family, FAMILIES[family], 36 if family == "reduction" else 12)


def test_long_rows_are_sorted_in_memory_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "_MOST_SCRATCH", 0)
    check("sorting", {TopK: top_k}, 12)
    operation: Any = TopK(x="x", values="values", indices="indices", k=3000)
    spec = TensorSpec.packed((2, 3000))
    specs = {"x": spec, **operation.infer({"x": spec})}
    kernel = top_k(operation, specs)
    assert kernel is not None
    assert kernel.footprint(1) == 0
    scratch = Scratch(aligned_bytes(0))
    kernel.bind(
        {"x": array_of(spec)}, {name: array_of(specs[name]) for name in ("values", "indices")}, [scratch]
    )
    assert scratch.kept_bytes >= kernel.place_bytes + 8 * 3000  # numbers of places are kept, too


@pytest.mark.usefixtures("small_buffers")
def test_a_few_of_a_long_row_with_gaps_are_taken_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "_BLOCK_ELEMENTS", 1 << 12)
    x = np.random.default_rng(38).permutation(3 * 40_000).reshape(40_000, 3).astype(np.float32)
    operation: Any = TopK(x="x", values="values", indices="indices", k=2000, axis=0)
    specs = {"x": TensorSpec.packed(x.shape), **operation.infer({"x": TensorSpec.packed(x.shape)})}
    kernel: Any = top_k(operation, specs)
    results = {name: array_of(specs[name]) for name in ("values", "indices")}
    run(kernel, {"x": x}, results, 2)
    best = np.argsort(-x, axis=0)[:2000]
    np.testing.assert_array_equal(results["indices"], best)
    np.testing.assert_array_equal(results["values"], np.take_along_axis(x, best, 0))
    steps = kernel.bind({"x": x}, results, [Scratch(aligned_bytes(kernel.footprint(1)))])
    tracemalloc.start()
    try:
        for call in itertools.chain.from_iterable(steps):
            call()
        assert tracemalloc.get_traced_memory()[1] < 8000
    finally:
        tracemalloc.stop()


def test_scatters_are_the_same_in_parts_along_dims_that_no_index_selects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As sums of small integers are computed that take too much scratch memory."""
    monkeypatch.setattr(by_definition, "_PART_ELEMENTS", 50)
    check("indexing", dict.fromkeys((Scatter, ScatterElements, ScatterND), PARTS), 12)


def test_sums_of_small_integers_take_scratch_memory_or_are_cut_into_parts() -> None:
    operation: Any = Scatter(x="x", indices="i", updates="u", y="y", reduction=ScatterReduction.ADD)
    for rows, found in ((1000, True), (10_000, False)):
        specs = {name: TensorSpec.packed((rows, 100), "int32") for name in ("x", "u", "y")}
        specs["i"] = TensorSpec.packed((rows,), "int64")
        assert (
            scatter(operation, {**specs, "indices": specs["i"], "updates": specs["u"]}) is not None
        ) is found


def lp_pool_gradient(g: GraphBuilder) -> Any:
    x = g.relu(g.input("x", (1, 8, 64, 64)))
    return g.grad(g.apply(LpPool(x=x, window=S(2, size=3, pad=1, stride=2))), x)


def max_pool_gradient(g: GraphBuilder) -> Any:
    x = g.relu(g.input("x", (1, 12, 64, 64)))
    return g.grad(g.max_pool(x, 3, stride=2, pad=1), x)


def response_norm_gradient(g: GraphBuilder) -> Any:
    x = g.relu(g.input("x", (2, 8, 64, 64)))
    return g.grad(g.apply(LocalResponseNorm(x=x, size=5)), x)


def grid_sample(g: GraphBuilder) -> Any:
    x, grid = g.relu(g.input("x", (1, 8, 100, 100))), g.input("grid", (1, 100, 100, 2))
    return g.apply(GridSample(x=x, grid=grid))


def best(g: GraphBuilder) -> Any:
    return g.apply(TopK(x=g.relu(g.input("x", (3, 200_000))), k=10))


def sorted_rows(g: GraphBuilder) -> Any:
    return g.apply(TopK(x=g.relu(g.input("x", (1000, 400))), k=400))


def random_numbers(g: GraphBuilder) -> Any:
    return g.relu(g.apply(RandomNormal(state=g.input("state", (2,), "int64"), dims=(1 << 16,))))


def added_rows(g: GraphBuilder) -> Any:
    x, updates = g.relu(g.input("x", (4000, 64))), g.input("updates", (9000, 64))
    where: Any = {"indices": g.input("indices", (9000,), "int64"), "reduction": ScatterReduction.ADD}
    return g.apply(Scatter(x=x, updates=updates, **where))


def written_elements(g: GraphBuilder) -> Any:
    x, updates = g.relu(g.input("x", (500, 800))), g.input("updates", (500, 800))
    return g.apply(ScatterElements(x=x, indices=g.input("indices", (500, 800), "int64"), updates=updates))


def resampling_gradient(g: GraphBuilder) -> Any:
    x = g.relu(g.input("x", (2, 8, 64, 64)))
    return g.grad(g.apply(Resample(x=x, sizes=(2, 8, 150, 130), mode=ResampleMode.CUBIC)), x)


def without_aliasing(g: GraphBuilder) -> Any:
    x = g.relu(g.input("x", (2, 8, 200, 200)))
    return g.apply(Resample(x=x, sizes=(2, 8, 60, 31), mode=ResampleMode.LINEAR, antialias=True))


def far_fewer(g: GraphBuilder) -> Any:
    x = g.relu(g.input("x", (1, 8, 256, 256)))
    return g.apply(Resample(x=x, sizes=(1, 8, 8, 5), mode=ResampleMode.LINEAR, antialias=True))


def gradient_of_copies(g: GraphBuilder) -> Any:
    x = g.relu(g.input("x", (2, 64, 1, 1)))
    y = g.apply(Resample(x=x, sizes=(2, 64, 48, 48)))
    return g.grad(y, x, g.input("dy", y.dims))


GRAPHS: tuple[Callable[[GraphBuilder], Any], ...] = (
    lp_pool_gradient,
    max_pool_gradient,
    response_norm_gradient,
    grid_sample,
    best,
    sorted_rows,
    random_numbers,
    added_rows,
    written_elements,
    resampling_gradient,
    without_aliasing,
    far_fewer,
    gradient_of_copies,
)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("make", GRAPHS, ids=[make.__name__ for make in GRAPHS])
def test_a_run_allocates_for_parts_alone_and_notes_progress_between_them(
    make: Callable[[GraphBuilder], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_definition, "_PART_ELEMENTS", 1 << 9)
    monkeypatch.setattr(scattering, "_BLOCK", 1 << 13)
    g = GraphBuilder()
    graph = g.build(y=make(g))
    plan = compile_fast(graph.body, 1)
    assert plan is not None
    tensors = [graph.body.tensor(uid) for uid in graph.body.bound]
    buffers = [np.zeros(tensor.dims, tensor.dtype.numpy) for tensor in tensors]
    program, lanes = plan.bind(buffers, aligned_bytes(plan.workspace)), Lanes(1)
    pieces: list[int] = []
    steps = 0

    def note() -> None:
        nonlocal steps
        steps += 1

    program.run([], lanes, note, lambda: pieces.append(steps))
    assert max(b - a for a, b in zip([0, *pieces], pieces, strict=False)) >= 10
    tracemalloc.start()
    try:
        program.run([], lanes)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < max(buffer.nbytes for buffer in buffers) / 3


@pytest.mark.parametrize("block", [30, 1000])
def test_the_last_of_several_updates_wins_whatever_their_layout(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scattering, "_BLOCK", block)
    rng = np.random.default_rng(38)
    specs = {
        "x": TensorSpec.packed((3, 5, 4), "int32"),
        "indices": TensorSpec(dims=(6, 7), strides=(1, 6), dtype=DType.INT32),
        "updates": TensorSpec(dims=(3, 6, 7, 4), strides=(168, 1, 6, 42), dtype=DType.INT32),
    }
    x, places = rng.integers(0, 9, (3, 5, 4)), rng.integers(0, 5, (6, 7))
    updates = np.arange(3 * 6 * 7 * 4).reshape(3, 6, 7, 4)
    operation: Any = Scatter(x="x", indices="indices", updates="updates", y="y", axis=1)
    given = {"x": x, "indices": places, "updates": updates}
    y, operands = (
        array_of(specs["x"]),
        {name: array_of(specs[name], values) for name, values in given.items()},
    )
    kernel: Any = scatter(operation, specs)
    run(kernel, operands, {"y": y}, 2)
    wanted = x.copy()
    for i, j in np.ndindex(*places.shape):
        wanted[:, places[i, j]] = updates[:, i, j]
    np.testing.assert_array_equal(y, wanted)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "dtype",
    ["float32", "float16", "int8", "uint8", "uint32", "bool", "float64", "int64", "uint64"],
)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [3, 2000])
def test_long_rows_of_equal_and_special_elements_are_in_order(
    dtype: Any, largest: bool, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorting, "_BLOCK_ELEMENTS", 64)
    rng = np.random.default_rng(39)
    spec = TensorSpec.packed((2, 2000, 3), dtype)
    floats = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1.5, -1.5, 3e-40])
    whole: list[int] = [0, 1, 5, 127]
    if dtype not in ("int8", "uint8", "bool"):
        limits = np.iinfo(dtype) if not spec.dtype.is_floating else np.iinfo(np.int8)
        whole += [
            (limits.max >> 1) + 1,
            (limits.max >> 1) + 9,
            limits.max,
            int(limits.min),
            int(limits.min) + 3,
        ]
    few = floats if spec.dtype.is_floating else np.array(whole, spec.dtype.numpy)
    x = few[rng.integers(0, len(few), spec.dims)]
    operation: Any = TopK(x="x", values="values", indices="indices", k=k, axis=1, largest=largest)
    specs = {"x": spec, **operation.infer({"x": spec})}
    operands = {"x": array_of(spec, x.astype(spec.dtype.numpy))}
    results = {name: array_of(specs[name]) for name in ("values", "indices")}
    kernel: Any = top_k(operation, specs)
    run(kernel, operands, results, 2)
    exact = operands["x"].astype(
        np.float64 if spec.dtype.is_floating else np.uint64 if dtype == "uint64" else np.int64
    )
    wanted = operation.evaluate(np, {"x": exact}, specs)
    np.testing.assert_array_equal(results["indices"], wanted["indices"])
    np.testing.assert_array_equal(np.signbit(results["values"]), np.signbit(wanted["values"]))
    np.testing.assert_array_equal(results["values"], wanted["values"].astype(results["values"].dtype))


WINDOWS = (
    S(2, size=3, pad=1, stride=2),
    S(2, size=(2, 1), stride=(5, 3)),
    S(2, size=2, pad=1, stride=1, dilation=3),
    Window(size=(4, 2), pre_padding=(3, 0), post_padding=(0, 1), stride=(1, 2), dilation=(1, 1)),
    AdaptiveWindow(output=(5, 7)),
)


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_pools_and_their_gradients_are_the_same_in_parts(
    window: Any, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole numbers, so that sums are exact; of Lp pooling, powers are rounded."""
    monkeypatch.setattr(by_definition, "_PART_ELEMENTS", 100)
    rng = np.random.default_rng(40)
    x = TensorSpec.packed((2, 2, 15, 10), "float32", layout)
    y = TensorSpec.packed(window.output_dims(x.dims), "float32", layout)
    values = {name: rng.integers(-9, 9, spec.dims).astype(np.float64) for name, spec in (("x", x), ("dy", y))}
    specs = {"x": x, "dx": x, "y": y, "dy": y, "index": TensorSpec.packed(y.dims, "int64", layout)}
    fields: Any = {"window": window}
    operations: tuple[Any, ...] = (
        MaxPool(x="x", y="y", index="index", **fields),
        MaxPoolBackward(dy="dy", index="index", dx="dx", **fields),
        LpPool(x="x", y="y", **fields),
        LpPoolBackward(dy="dy", x="x", y="y", dx="dx", **fields),
        AvgPool(x="x", y="y", **fields),
        AvgPoolBackward(dy="dy", dx="dx", **fields),
    )
    for operation in operations:
        own = {name: specs[name] for name, _ in operation.named()}
        results = {name: array_of(own[name]) for name in operation.outputs}
        operands = {name: array_of(own[name], values[name]) for name in operation.inputs}
        kernel: Any = PARTS(operation, own)
        run(kernel, operands, results, 2)
        outputs = {name: own[name] for name in operation.outputs}
        wanted = operation.evaluate(np, {name: values[name] for name in operation.inputs}, outputs)
        for name, result in results.items():
            np.testing.assert_allclose(result, wanted[name], rtol=1e-5, atol=1e-5, err_msg=operation.kind)
        values |= {name: np.asarray(array) for name, array in wanted.items()}


def test_parts_that_large_windows_share_are_larger() -> None:
    """Parts of single rows would each need 201 rows of windows."""
    dims = (1, 1, 400, 400)
    specs = {name: TensorSpec.packed(dims, "float32") for name in ("dy", "dx")}
    specs["index"] = TensorSpec.packed(dims, "int64")
    window = S(2, size=(201, 1), pad=(100, 0), stride=1)
    operation: Any = MaxPoolBackward
    kernel: Any = PARTS(operation(dy="dy", index="index", dx="dx", window=window), specs)
    assert math.prod(dims) / math.prod(kernel.block_extents(range(4))) <= 4


def test_what_windows_of_all_sizes_give_is_cut_by_images_and_channels() -> None:
    specs = {"x": TensorSpec.packed((2, 3, 7, 5), "float32"), "y": TensorSpec.packed((2, 3, 3, 4), "float32")}
    operation: Any = LpPool(x="x", y="y", window=AdaptiveWindow(output=(3, 4)))
    whole, rows = (slice(0, 1), slice(1, 3)), (slice(0, 3), slice(0, 4))
    part = operation.part(specs, {"y": (*whole, *rows)})
    assert part.inputs["x"] == (*whole, slice(0, 7), slice(0, 5))
    assert operation.part(specs, {"y": (*whole, slice(0, 2), slice(0, 4))}) is None


def convolved(b: GraphBuilder) -> Any:
    """A graph in which arrays of NCHW tensors lie channels-last, since convolutions are faster so."""
    x = b.conv(b.input("x", (1, 3, 9, 7)), b.input("w", (4, 3, 3, 3)))
    return b.build(y=b.conv(b.local_response_norm(x, size=3), b.input("v", (2, 4, 3, 3)))).body


def written_ahead(b: GraphBuilder) -> Any:
    """A graph whose first piece writes to the buffer of the second one's result, which is channels-last."""
    y = b.local_response_norm(b.input("x", (1, 4, 9, 7)), size=3)
    return b.build(y=b.to_layout(b.relu(y), Layout.NHWC)).body


def in_order(b: GraphBuilder) -> Any:
    """A graph of which nothing lies channels-last."""
    return b.build(y=b.relu(b.local_response_norm(b.input("x", (1, 4, 9, 7)), size=3))).body


@pytest.mark.parametrize(("graph_of", "recorded"), [(convolved, 2), (written_ahead, 2), (in_order, 1)])
def test_what_a_run_needs_is_recorded_when_its_plan_is_built(
    graph_of: Callable[[GraphBuilder], Any], recorded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the arrays have another layout than their tensors: a recording takes longer than a run."""
    made = list[Recording]()

    def noted() -> Recording:
        made.append(Recording())
        return made[-1]

    monkeypatch.setattr(by_definition, "Recording", noted)
    graph = graph_of(GraphBuilder())
    plan = compile_fast(graph, 1)
    assert plan is not None
    assert len(made) == recorded
    tensors = [graph.tensor(uid).spec for uid in graph.bound]
    plan.bind([array_of(spec) for spec in tensors], aligned_bytes(plan.workspace))
    assert len(made) == recorded


def test_what_is_recorded_serves_every_program_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_definition, "_PART_ELEMENTS", 100)
    x = TensorSpec.packed((1, 4, 9, 7), "float32")
    operation: Any = LocalResponseNorm(x="x", y="y", size=3)
    kernel: Any = PARTS(operation, {"x": x, "y": x})
    assert len(kernel.recordings) == 0
    values = np.random.default_rng(41).standard_normal(x.dims)
    found = []
    for _ in range(2):
        y = array_of(x)
        run(kernel, {"x": array_of(x, values)}, {"y": y}, 2)
        found.append((y, [*kernel.recordings.values()]))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize(
    ("x", "y", "recorded"), [("NCHW", "NCHW", 1), ("NHWC", "NHWC", 2), ("NHWC", "NCHW", 1)]
)
def test_what_a_run_needs_is_recorded_before_it_and_no_layout_that_it_cannot_have(
    x: str, y: str, recorded: int
) -> None:
    """A recording takes longer than a run of a small operation."""
    dims = (1, 4, 9, 7)
    specs = {
        "x": TensorSpec.packed(dims, "float32", Layout(x)),
        "y": TensorSpec.packed(dims, "float32", Layout(y)),
    }
    operation: Any = LocalResponseNorm(x="x", y="y", size=3)
    kernel: Any = PARTS(operation, specs)
    kernel.footprint(1)
    assert len(kernel.recordings) == recorded
    run(kernel, {"x": array_of(specs["x"], np.ones(dims))}, {"y": array_of(specs["y"])})
    assert len(kernel.recordings) == recorded


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_images_of_either_layout_are_recorded_before_a_run(layout: str) -> None:
    """Whatever the layout of the results is."""
    dims, grid = (1, 4, 9, 7), TensorSpec.packed((1, 9, 7, 2), "float32")
    y = TensorSpec.packed(dims, "float32")
    specs = {"x": TensorSpec.packed(dims, "float32", Layout(layout)), "grid": grid, "y": y}
    operation: Any = GridSample(x="x", grid="grid", y="y")
    kernel: Any = PARTS(operation, specs)
    kernel.footprint(1)
    recorded = len(kernel.recordings)
    given = {"x": array_of(specs["x"], np.ones(dims)), "grid": array_of(grid, np.zeros(grid.dims))}
    run(kernel, given, {"y": array_of(y)})
    assert len(kernel.recordings) == recorded
