"""Plans of the fast engine: what runs together, where tensors lie, and what a run takes."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cudnn_actor import spawn
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cpu.blas import threads_of_blas
from cudnn_actor.engines.cpu.fast.compiler import compile_fast
from cudnn_actor.engines.cpu.fast.lanes import Lanes
from cudnn_actor.engines.cpu.fast.plan import FastPlan
from cudnn_actor.engines.cpu.scratch import aligned_bytes
from cudnn_actor.protocol import DType, Graph, GraphBuilder, Tensor, TensorRole, TensorSpec
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Softmax, Transpose
from cudnn_actor.protocol.operations.base import tensor_of
from cudnn_actor.protocol.types.dtypes import DTypeName

from ....in_one_test import cases_in_one_test

MIB = 1 << 20


def plan_of(graph: Graph, lanes: int = 1) -> FastPlan:
    plan = compile_fast(graph.body, lanes)
    assert plan is not None
    return plan


def layers(depth: int, side: int = 32, channels: int = 16) -> Graph:
    """Convolutions, each with a bias and relu."""
    g = GraphBuilder()
    x = g.input("x", (1, channels, side, side))
    for number in range(depth):
        w = g.input(f"w{number}", (channels, channels, 3, 3))
        b = g.input(f"b{number}", (1, channels, 1, 1))
        x = g.relu(g.conv(x, w, pad=1) + b)
    return g.build({"y": x})


class Bench:
    """An open engine with one arena."""

    def __init__(self, *, exact: bool = False, threads: int = 1, arena_bytes: int = 64 * MIB) -> None:
        self.engine = CpuEngine(exact=exact, threads=threads)
        self.engine.open()
        os.close(self.engine.create_arena(0, arena_bytes))
        self._next = 0

    def bound(self, graph: Graph, seed: int = 0) -> list[np.ndarray]:
        """Buffers for a graph, those that it reads full of normal numbers."""
        rng = np.random.default_rng(seed)
        found = []
        for uid in graph.body.bound:
            spec = graph.body.tensor(uid).spec
            buffer = self.engine.bind(0, self._next, spec)
            self._next += -(-spec.nbytes // 256) * 256
            if uid not in graph.body.written:
                self.engine.write(buffer, rng.standard_normal(spec.dims).astype(spec.dtype.numpy))
            found.append(buffer)
        return found

    def results(self, graph: Graph, seed: int = 0, workspace_limit: int | None = None) -> list[np.ndarray]:
        buffers = self.bound(graph, seed)
        plan = self.engine.build(graph.body, workspace_limit=workspace_limit)
        self.engine.execute(plan, buffers, [])
        results = set(graph.body.results)
        return [
            self.engine.read(b) for uid, b in zip(graph.body.bound, buffers, strict=True) if uid in results
        ]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.engine.close()


def test_functions_of_each_element_run_together_and_views_cost_nothing() -> None:
    g = GraphBuilder()
    x, b = g.input("x", (4, 6)), g.input("b", (6,))
    y = g.sigmoid(g.relu(x + g.reshape(b, (1, 6))) * 0.5)
    z = g.matmul(g.transpose(y, (1, 0)), x)
    plan = plan_of(g.build({"z": g.exp(z)}))
    assert [len(piece.operations) for piece in plan.pieces] == [4, 1, 1]
    assert len(plan.views) == 2


def swap(g: GraphBuilder, a: Tensor, b: Tensor) -> Graph:
    return g.build(updates={"a": b, "b": a})


def rotation(g: GraphBuilder, a: Tensor, b: Tensor) -> Graph:
    return g.build(updates={"a": b * 2, "b": a})


def bounds_of_what_is_negated(g: GraphBuilder, a: Tensor, b: Tensor) -> Graph:
    above = g.maximum(a, 0.0)
    return g.build(updates={"a": -a, "b": b + g.minimum(above, 1.0)})


@pytest.mark.parametrize("make", [swap, rotation, bounds_of_what_is_negated])
async def test_what_reads_an_input_that_is_overwritten_reads_its_old_values(make: Any) -> None:
    found = []
    for exact in (False, True):
        g = GraphBuilder()
        graph = make(g, g.input("a", (5,)), g.input("b", (5,)))
        async with spawn(device="cpu", exact=exact) as gpu:
            a = await gpu.upload(np.linspace(-2, 2, 5, dtype=np.float32))
            b = await gpu.upload(np.linspace(5, 9, 5, dtype=np.float32))
            await gpu.apply(graph, a=a, b=b)
            found.append([await gpu.download(a), await gpu.download(b)])
    np.testing.assert_array_equal(found[0], found[1])


def test_a_result_that_another_operation_reads_in_another_shape_is_complete_before_it_does(
    bench: Bench,
) -> None:
    g = GraphBuilder()
    x = g.input("x", (4, 4))
    y = g.relu(x)
    graph = g.build({"y": y + g.transpose(y, (1, 0))})
    values = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    positive = np.maximum(values, 0)
    np.testing.assert_array_equal(bench.results(graph)[0], positive + positive.T)


def test_a_result_lies_where_the_chain_behind_it_overwrites_it() -> None:
    assert plan_of(layers(1)).held_bytes == 0
    assert plan_of(layers(2)).held_bytes == 16 * 32 * 32 * 4


def read_by_several(g: GraphBuilder, c: Tensor, x: Tensor) -> Graph:
    first = c + 1.0
    return g.build({"first": first, "last": g.maximum(c * first, x)})


def bounded_late(g: GraphBuilder, c: Tensor, x: Tensor) -> Graph:
    above = g.maximum(c, -1.0)
    doubled = c * 2.0
    return g.build({"doubled": doubled, "bounded": x + g.minimum(above, 1.0)})


def read_by_another(g: GraphBuilder, c: Tensor, x: Tensor) -> Graph:
    return g.build({"y": g.relu(c) - x, "largest": g.max_pool(c, 2)})


def in_another_dtype(g: GraphBuilder, c: Tensor, x: Tensor) -> Graph:
    return g.build({"halves": g.astype(g.sigmoid(c) - 0.5, "float16"), "above": c > x})


def rounded_before(g: GraphBuilder, c: Tensor, x: Tensor) -> Graph:
    half = g.conv(g.astype(x, "float16"), g.astype(g.input("v", (16, 16, 3, 3)), "float16"), pad=1)
    return g.build({"y": (g.astype(half, "float32") - c) * 8.0})


def repeated(g: GraphBuilder, c: Tensor, x: Tensor) -> Graph:
    return g.build({"y": x * g.mean(c, axis=(2, 3), keepdims=True)})


@pytest.mark.parametrize(
    "make", [read_by_several, bounded_late, read_by_another, in_another_dtype, rounded_before, repeated]
)
def test_what_lies_in_the_memory_of_a_later_result_is_read_before_it_is_overwritten(make: Any) -> None:
    found = []
    for exact in (False, True):
        g = GraphBuilder()
        x = g.input("x", (1, 16, 64, 64))
        graph = make(g, g.conv(x, g.input("w", (16, 16, 3, 3)), pad=1), x)
        bench = Bench(exact=exact)
        found.append(bench.results(graph))
        bench.engine.close()
    for fast, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(fast.astype(np.float64), wanted.astype(np.float64), rtol=2e-3, atol=2e-3)


async def test_a_convolution_is_complete_before_what_it_reads_is_overwritten() -> None:
    rng = np.random.default_rng(0)
    values, filters = (
        rng.standard_normal(dims).astype(np.float32) for dims in ((1, 16, 64, 64), (16, 16, 3, 3))
    )
    found = []
    for exact in (False, True):
        g = GraphBuilder()
        x, w = g.input("x", values.shape), g.input("w", filters.shape)
        graph = g.build(updates={"x": g.relu(g.conv(x, w, pad=1))})
        async with spawn(device="cpu", exact=exact, onnx_runtime=False) as gpu:
            image = await gpu.upload(values)
            await gpu.apply(graph, x=image, w=await gpu.upload(filters))
            found.append(await gpu.download(image))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_a_view_that_nothing_reads_is_left_out(bench: Bench) -> None:
    x = tensor_of(0, TensorSpec.packed((2, 3), DType.FLOAT16))
    seen = tensor_of(1, TensorSpec.packed((3, 2), DType.FLOAT16), role=TensorRole.VIRTUAL)
    y = tensor_of(2, TensorSpec.packed((2, 3), DType.FLOAT32))
    z = tensor_of(3, TensorSpec.packed((2, 3), DType.FLOAT32))
    softmax: Any = Softmax(x=2, y=3, axis=1)
    unread: Any = Transpose(x=0, y=1, axes=(1, 0))
    plan = compile_fast(OperationGraph(tensors=(x, seen, y, z), operations=(softmax, unread)), 1)
    assert plan is not None
    buffers = [np.full((2, 3), -1.0, dtype) for dtype in ("float32", "float32", "float16")]
    plan.bind(buffers, aligned_bytes(plan.workspace)).run([], Lanes(1))
    np.testing.assert_allclose(buffers[1], 1 / 3, rtol=1e-6)


def test_tensors_that_are_not_needed_at_the_same_time_share_memory() -> None:
    shallow, deep = (plan_of(layers(depth)) for depth in (3, 30))
    assert deep.workspace == shallow.workspace


def test_a_large_image_is_not_spread_out_into_columns() -> None:
    g = GraphBuilder()
    x, w = g.input("x", (1, 64, 512, 512)), g.input("w", (64, 64, 3, 3))
    plan = plan_of(g.build({"y": g.conv(x, w, pad=1)}))
    assert plan.workspace < 4 * MIB  # of 590 MiB that all columns would take


def u_net(side: int, channels: int = 32, depth: int = 4) -> Graph:
    """Two convolutions on each level, pooled going down, and joined with what came down going up."""
    g = GraphBuilder()

    def convolved(x: Tensor, filters: int, taps: int) -> Tensor:
        w = g.input(f"w{next(numbers)}", (filters, x.dims[1], taps, taps))
        return g.relu(g.conv(x, w, pad=taps // 2))

    numbers = itertools.count()
    x, kept = g.input("x", (1, 3, side, side)), list[Tensor]()
    for level in range(depth + 1):
        x = convolved(convolved(x, channels << level, 3), channels << level, 3)
        kept.append(x)
        x = g.max_pool(x, 2)
    x = kept.pop()
    for level in reversed(range(depth)):
        x = convolved(g.resize(x, scales=(2, 2), axes=(2, 3)), channels << level, 1)
        x = g.concatenate([kept[level], x], axis=1)
        x = convolved(convolved(x, channels << level, 3), channels << level, 3)
    return g.build(y=convolved(x, 2, 1))


def test_a_u_net_of_large_images_takes_its_activations_and_a_few_blocks() -> None:
    """All columns of its largest convolution would take 576 MiB."""
    plan = plan_of(u_net(512), 2)
    largest = 64 * 512 * 512 * 4  # what is joined on the highest level
    assert plan.lanes * plan.lane_bytes < 16 * MIB
    assert plan.held_bytes < 3 * largest


def test_a_window_as_large_as_the_image_takes_little_workspace() -> None:
    g = GraphBuilder()
    x, w = g.input("x", (1, 16, 256, 256)), g.input("w", (16, 16, 256, 256))
    graph = g.build({"dx": g.grad(g.conv(x, w, pad=128), x)})
    assert plan_of(graph, 2).workspace < 16 * MIB


def test_a_long_chain_on_a_large_tensor_makes_a_bounded_number_of_calls() -> None:
    g = GraphBuilder()
    y = g.input("x", (1 << 24,))
    for _ in range(60):
        y = g.gelu(y)
    graph = g.build({"y": y})
    plan = plan_of(graph)
    buffers = [np.empty(1 << 24, np.float32) for _ in graph.body.bound]
    assert (
        plan.bind(buffers, aligned_bytes(plan.workspace)).calls < 300_000
    )  # of 800,000 blocks of usual size


def test_a_chain_of_more_operations_than_one_piece_may_have_is_several() -> None:
    g = GraphBuilder()
    x = g.input("x", (4, 4))
    for _ in range(65):
        x = g.tanh(x)
    assert [len(piece.operations) for piece in plan_of(g.build(y=x)).pieces] == [64, 1]


def test_a_very_long_chain_behind_a_convolution_is_right(bench: Bench) -> None:
    g = GraphBuilder()
    x, w = g.input("x", (2, 3, 9, 8)), g.input("w", (3, 3, 3, 3))
    y = g.conv(x, w, pad=1)
    for number in range(300):  # several chains, each of which overwrites the result of the one before
        y = g.tanh(y * 1.5) if number % 2 else y + x
    exact, graph = Bench(exact=True), g.build({"y": y})
    np.testing.assert_allclose(bench.results(graph)[0], exact.results(graph)[0], rtol=1e-4, atol=1e-4)
    exact.engine.close()


def test_a_run_allocates_no_arrays() -> None:
    g = GraphBuilder()
    x, w = g.input("x", (8, 16, 64, 64)), g.input("w", (16, 16, 3, 3))
    y = g.relu(g.conv(x, w, pad=1) + 1.0)
    rows = g.softmax(g.reshape(y, (8 * 16, 64 * 64)), axis=1)
    graph = g.build({"y": g.matmul(rows, g.transpose(rows, (1, 0)))})
    plan = plan_of(graph)
    buffers = [np.ones(graph.body.tensor(uid).dims, np.float32) for uid in graph.body.bound]
    program, lanes = plan.bind(buffers, aligned_bytes(plan.workspace)), Lanes(1)
    program.run([], lanes)
    tracemalloc.start()
    try:
        program.run([], lanes)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 10  # a tensor here has 2 MiB


@pytest.mark.parametrize("threads", [2, 3])
def test_results_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    graph = layers(3)
    one, several = Bench(), Bench(threads=threads)
    np.testing.assert_array_equal(one.results(graph), several.results(graph))
    for each in (one, several):
        each.engine.close()


def test_half_types_are_rounded_where_the_graph_has_them() -> None:
    g = GraphBuilder()
    x = g.input("x", (64, 64), "bfloat16")
    y = g.exp(g.matmul(x, x) * 0.1)
    graph = g.build({"y": y, "z": g.astype(g.astype(y, "float32") - 1.0, "float32")})
    fast, exact = Bench(), Bench(exact=True)
    for got, wanted in zip(fast.results(graph), exact.results(graph), strict=True):
        np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), rtol=2e-2, atol=2e-2)
    for each in (fast, exact):
        each.engine.close()


def test_converted_operands_decide_what_is_computed_in(bench: Bench) -> None:
    """Of float32, 1e8 + 1e-4 is 1e8; of float64 it is not."""
    g = GraphBuilder()
    x = (
        g.concatenate([g.full((1,), 1e8), g.full((4094,), 1e-4), g.full((1,), -1e8)])
        + g.input("x", (1,)) * 0.0
    )
    narrow, wide = bench.results(g.build(narrow=g.sum(x), wide=g.sum(x.astype("float64")).astype("float32")))
    assert narrow != pytest.approx(0.4094)
    assert wide == pytest.approx(0.4094, rel=1e-6)


OUT_OF_RANGE: dict[str, Callable[[GraphBuilder, Tensor], Tensor]] = {
    "sum": lambda g, x: x + 300,
    "product": lambda g, x: x * -1 + 2,
    "largest": lambda g, x: g.maximum(x, -5),
    "bits": lambda g, x: (x & -2) ^ 300,
    "shift of the number": lambda g, x: g.pointwise("shift_right", -2, x),
    "shift by the number": lambda g, x: x << -1,
    "choice": lambda g, x: g.where(x > 1, x, 300),
    "comparison": lambda g, x: g.pointwise("lt", x, -3),
    "itself": lambda g, x: g.pointwise("max", x, x, alphas=(1, 300)),
}


@cases_in_one_test
@pytest.mark.parametrize("name", OUT_OF_RANGE)
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16"])
def test_integers_meet_numbers_that_their_dtype_does_not_hold(name: str, dtype: DTypeName) -> None:
    """They are computed with as they are: x + 300 of uint8 is 255."""
    g = GraphBuilder()
    x = g.input("x", (5, 3), dtype)
    graph = g.build(y=OUT_OF_RANGE[name](g, x))
    fast, exact = Bench(), Bench(exact=True)
    (got,), (wanted,) = fast.results(graph), exact.results(graph)
    np.testing.assert_array_equal(got, wanted)
    for each in (fast, exact):
        each.engine.close()


def test_statistics_of_a_norm_may_be_overwritten() -> None:
    fast, exact = Bench(), Bench(exact=True)
    found = []
    for bench in (fast, exact):
        g = GraphBuilder()
        x = g.input("x", (4, 8, 5, 5))
        one, mean, variance = (g.input(name, (8,)) for name in ("scale", "mean", "variance"))
        made = g.batch_norm_training(
            x, scale=one, bias=one, running_mean=mean, running_variance=variance, momentum=0.3
        )
        graph = g.build(
            {"y": made.y}, updates={"mean": made.new_running_mean, "variance": made.new_running_variance}
        )
        found.append(bench.results(graph))
        bench.engine.close()
    for got, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_where_the_workspace_has_no_room_it_is_computed_in_smaller_parts(bench: Bench) -> None:
    graph = layers(1, side=64)
    needed = plan_of(graph).workspace
    exact = bench.engine.build(graph.body, workspace_limit=needed - 1)
    assert not isinstance(exact, FastPlan)
    assert isinstance(bench.engine.build(graph.body, workspace_limit=needed), FastPlan)


def test_a_run_that_was_prepared_is_right_when_the_workspace_has_grown(bench: Bench) -> None:
    small, large = layers(2, side=8), layers(2, side=48)
    buffers = bench.bound(small)
    launch = bench.engine.expect(bench.engine.build(small.body, workspace_limit=None), buffers, [])
    launch()
    wanted = bench.engine.read(buffers[-1])
    bench.results(large)
    bench.engine.fill(buffers[-1], 0.0)
    launch()
    np.testing.assert_array_equal(bench.engine.read(buffers[-1]), wanted)


def test_a_plan_takes_other_buffers_in_each_run(bench: Bench) -> None:
    graph = layers(1, side=8)
    plan = bench.engine.build(graph.body, workspace_limit=None)
    all_buffers = [bench.bound(graph, seed) for seed in range(7)]
    for _ in range(2):
        for buffers in all_buffers:
            bench.engine.execute(plan, buffers, [])
    found = [bench.engine.read(buffers[-1]) for buffers in all_buffers]
    assert len({result.tobytes() for result in found}) == 7
    for seed, result in enumerate(found):
        np.testing.assert_array_equal(bench.results(graph, seed)[0], result)


def test_blas_has_as_many_threads_behind_a_run_as_before() -> None:
    from cudnn_actor.engines.cpu import blas

    libraries: Any = blas.loaded_libraries()
    before = [library.num_threads for library in libraries]
    with threads_of_blas(2), threads_of_blas(1):
        assert {library.num_threads for library in libraries} <= {1}
    assert [library.num_threads for library in libraries] == before


def test_sums_on_the_way_may_exceed_float32_in_float64_alone() -> None:
    large = np.array([[3e38, 3e38, -3e38, 1e38]], np.float32)
    g = GraphBuilder()
    x = g.input("x", large.shape)
    graph = g.build({"mean": g.mean(x, axis=1), "norm": g.rms_norm(x, axis=1)})
    mean = large.astype(np.float64).mean(1)
    norm = large / np.sqrt((large.astype(np.float64) ** 2).mean(1, keepdims=True))
    found = []
    for bench in (Bench(), Bench(exact=True)):
        buffers = bench.bound(graph)
        bench.engine.write(buffers[0], large)
        bench.engine.execute(bench.engine.build(graph.body, workspace_limit=None), buffers, [])
        found.append([bench.engine.read(buffer) for buffer in buffers[1:]])
        bench.engine.close()
    np.testing.assert_allclose(found[1][0].ravel(), mean, rtol=1e-6)
    np.testing.assert_allclose(found[1][1], norm, rtol=1e-6)
    for fast, right in zip(*found, strict=True):
        assert np.all(np.isclose(fast, right) | ~np.isfinite(fast) | (fast == 0))


def test_a_buffer_of_another_dtype_is_refused(bench: Bench) -> None:
    graph = layers(1, side=8)
    plan = plan_of(graph)
    buffers = [np.ones(graph.body.tensor(uid).dims, np.float64) for uid in graph.body.bound]
    with pytest.raises(ValueError, match="float64 for a tensor of float32"):
        plan.bind(buffers, aligned_bytes(plan.workspace))


def test_tensors_lie_channels_last_where_the_graph_has_convolutions_of_their_rank() -> None:
    plan = plan_of(layers(2))
    assert {place.strides[1] for place in plan.places} == {np.dtype(np.float32).itemsize}
    spec = TensorSpec.packed((2, 3, 4, 4), DType.FLOAT32)
    g = GraphBuilder()
    x = g.input("x", spec.dims)
    (place,) = plan_of(g.build({"y": g.softmax(g.relu(x), axis=3)})).places
    assert place.strides == tuple(4 * stride for stride in spec.strides)
