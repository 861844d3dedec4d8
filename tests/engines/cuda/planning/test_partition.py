"""Where graphs are cut: the pieces, run one after the other in shared scratch memory, compute the graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan
from cudnn_actor.engines.cuda.cudnn.errata import erratum
from cudnn_actor.engines.cuda.planning.indexed_reads import indices_of
from cudnn_actor.engines.cuda.planning.partition import Cut, cut
from cudnn_actor.engines.cuda.planning.scratch_places import places
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.running.recipe import KernelStep
from cudnn_actor.protocol import (
    Graph,
    GraphBuilder,
    LayerNorm,
    Layout,
    MaxPool,
    OperationGraph,
    PadMode,
    Tensor,
    Window,
)
from cudnn_actor.protocol.operations import BorderPad, GraphTensor, Node, Pad, Pointwise, Resample
from cudnn_actor.protocol.operations.indexing import Gathering

from ....in_one_test import cases_in_one_test
from ....whole import some


def evaluated(graph: OperationGraph, buffers: list[np.ndarray]) -> None:
    EvaluatedPlan("", graph).bind(np.empty(0, np.uint8)).run(buffers, ())


def in_pieces(graph: OperationGraph, parts: Cut, memories: list[np.ndarray]) -> None:
    """Run the pieces as a composed plan does: what is between them lies in scratch memory, by its places."""
    offsets, nbytes = places(parts)
    scratch = np.full(max(nbytes, 1), 0x77, np.uint8)
    roots = dict(zip(graph.bound, memories, strict=True))

    def bound(uid: int, tensor: GraphTensor) -> np.ndarray:
        root, offset = parts.stored[uid]
        memory = roots[root] if root in roots else scratch[offsets[root] :]
        return array_in(memory[offset:], tensor)

    for piece in parts.pieces:
        tensors = map(piece.graph.tensor, piece.graph.bound)
        arrays = [bound(uid, tensor) for uid, tensor in zip(piece.tensors, tensors, strict=True)]
        evaluated(piece.graph, arrays)


def array_in(memory: np.ndarray, tensor: GraphTensor) -> np.ndarray:
    """A tensor at the beginning of some bytes."""
    data = memory[: tensor.spec.nbytes].view(tensor.dtype.numpy)
    steps = [stride * tensor.dtype.itemsize for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(data, tensor.dims, steps)


def filled(graph: Graph, unit: float = 1.0) -> list[np.ndarray]:
    """The bytes of a buffer for each bound tensor: of whole numbers of this unit."""
    memories: list[np.ndarray] = []
    for number, uid in enumerate(graph.body.bound):
        tensor = graph.body.tensor(uid)
        overwritten = graph.body.tensor(uid).overwrites
        if overwritten is not None:
            memories.append(memories[graph.body.bound.index(overwritten)])
            continue
        values = np.random.default_rng(number).integers(-3, 4, tensor.spec.nbytes // tensor.dtype.itemsize)
        memories.append((values * unit).astype(tensor.dtype.numpy).view(np.uint8))
    return memories


def check(graph: Graph, unit: float = 1.0) -> Cut:
    """Cut a graph, and run it and its pieces. `unit`: its inputs are multiples of that."""
    parts = cut(graph.body)
    assert parts is not None
    whole, pieces = filled(graph, unit), filled(graph, unit)
    tensors = map(graph.body.tensor, graph.body.bound)
    evaluated(graph.body, [array_in(memory, tensor) for memory, tensor in zip(whole, tensors, strict=True)])
    in_pieces(graph.body, parts, pieces)
    for one, other in zip(whole, pieces, strict=True):
        np.testing.assert_array_equal(one, other)
    for piece in parts.pieces:
        check_reads(piece.graph)
    return parts


def check_reads(piece: OperationGraph) -> None:
    """A gather or the like is with functions only; nothing that it reads is computed or overwritten there."""
    reads = [op for op in piece.operations if isinstance(op, Gathering | BorderPad | Pad | Resample)]
    if reads and len(piece.operations) > 1:
        assert {type(operation) for operation in piece.operations} <= {Pointwise, *map(type, reads)}
        written = piece.written | {tensor.overwrites for tensor in piece.tensors}
        assert written.isdisjoint(uid for operation in reads for uid in operation.reads)


def bottleneck() -> Graph:
    g = GraphBuilder()
    x = g.input("x", (2, 16, 6, 6), "float32", layout="NHWC")

    def conv(x: Tensor, name: str, filters: int, taps: int) -> Tensor:
        w = g.input(f"w{name}", (filters, x.dims[1], taps, taps), "float32", layout="NHWC")
        return g.conv(x, w, pad=taps // 2, bias=g.input(f"b{name}", (filters,)))

    y = g.pointwise("relu", conv(x, "1", 8, 1))
    y = g.pointwise("relu", conv(y, "2", 8, 3))
    return g.build(y=g.pointwise("relu", conv(y, "3", 16, 1) + x))


def test_a_convolution_takes_what_follows_it_and_equal_pieces_are_equal_graphs() -> None:
    parts = check(bottleneck())
    assert [len(piece.graph.operations) for piece in parts.pieces] == [3, 3, 4]
    assert [len(piece.graph.bound) for piece in parts.pieces] == [4, 4, 5]


def test_views_are_not_copied() -> None:
    g = GraphBuilder()
    x = g.input("x", (4, 6, 8))
    pooled = g.apply(MaxPool(x=x.transpose(0, 2, 1)[:, ::2, 4:], window=Window.symmetric(1, 2)))
    parts = check(g.build(y=pooled + 1.0))
    assert [piece.graph.operations[0].kind for piece in parts.pieces] == ["max_pool", "pointwise"]


def test_a_result_is_written_where_its_reader_wants_it() -> None:
    g = GraphBuilder()
    q = g.input("q", (2, 4, 8, 16))
    seen = g.attention(q, q, q).transpose(0, 2, 1, 3).reshape(16, 64)
    w = g.input("w", (64, 64))
    parts = check(g.build(y=(seen @ w + 1.0).reshape(2, 8, 64), z=g.relu(q).transpose(3, 0, 1, 2)))
    kinds = [[operation.kind for operation in piece.graph.operations] for piece in parts.pieces]
    assert kinds == [["attention"], ["matmul", "pointwise"], ["pointwise"]]


def test_what_is_misaligned_reversed_or_not_contiguous_is_copied() -> None:
    g = GraphBuilder()
    x = g.input("x", (4, 6, 8))
    window = Window.symmetric(1, 2)
    taken = [x[:, :, 1:], x[:, ::-1], x.transpose(2, 0, 1).reshape(8, 2, 12)]
    check(g.build({str(n): g.apply(MaxPool(x=one, window=window)) for n, one in enumerate(taken)}))


def test_an_update_is_written_after_all_reads() -> None:
    g = GraphBuilder()
    x, m = g.input("x", (2, 6)), g.input("m", (2, 6))
    moved = m * 2.0
    total = g.cumsum(x + moved, 1)
    check(g.build(updates={"m": m * 0.5 + x}, y=total + moved, old=m))


def test_functions_of_the_same_dims_are_one_piece_with_several_results() -> None:
    g = GraphBuilder()
    x, y, row = g.input("x", (4, 6)), g.input("y", (4, 6)), g.input("row", (1, 6))
    a = x * (row + 1.0)
    b = g.relu(a - y)
    assert cut(g.build(a=a, b=b, beside=y * 3.0, shared=b * b + a).body) is None


def test_a_group_ends_where_something_else_reads_it() -> None:
    g = GraphBuilder()
    x = g.input("x", (4, 6))
    a = x + 1.0
    parts = check(g.build(y=g.cumsum(a, 1) * a, z=a * 2.0))
    kinds = [[operation.kind for operation in piece.graph.operations] for piece in parts.pieces]
    assert kinds == [["pointwise"], ["cumulative"], ["pointwise", "pointwise"]]


def test_a_gather_is_one_piece_with_the_functions_behind_it() -> None:
    g = GraphBuilder()
    table, tokens = g.input("table", (9, 8)), g.input("tokens", (2, 5), "int64")
    places = g.input("places", (1, 5, 8))
    rows = g.take(table, tokens, 0)
    parts = check(g.build(y=g.relu(rows * 2.0 + places), sums=g.sum(rows + 1.0, axis=2)))
    kinds = [[operation.kind for operation in piece.graph.operations] for piece in parts.pieces]
    assert kinds == [["gather", "pointwise", "pointwise", "pointwise", "pointwise"], ["reduction"]]


def test_the_gradient_of_slices_is_one_piece() -> None:
    g = GraphBuilder()
    x, dy = g.input("x", (4, 12)), g.input("dy", (4, 6))
    parts = [x[:, :6], x[:, 6:], x[:, 3:9]]
    dx = g.grad(parts[0] * parts[1] + parts[2], x, dy)
    pieces = check(g.build(dx=dx)).pieces
    assert [operation.kind for operation in pieces[-1].graph.operations].count("pad") == 3


OF_IMAGES: dict[str, Callable[[GraphBuilder, Tensor], Tensor]] = {
    "columns": lambda g, x: g.unfold(x, 3, pad=1),
    "columns of strips": lambda g, x: g.unfold(x, 4, stride=2, pad=1),
    "columns of patches": lambda g, x: g.relu(g.unfold(x, 2, stride=2)),
    "columns and back": lambda g, x: g.fold(g.unfold(x, 3, dilation=2), x.dims[2:], 3, dilation=2),
    "flipped": lambda g, x: g.relu(g.conv(x, x[:, :, :3, :3], pad=1, flipped=True)),
    "affine": lambda g, x: g.grid_sample(x, g.affine_grid(x[:, 0, :2, :3], x.dims)),
    "divided": lambda g, x: g.divisive_norm(x, 3, beta=1.0),
    "convolved in float64": lambda g, x: g.relu(
        g.conv(x, g.reshape(x, (2, 2, 6, 6)), pad=1, bias=x[0, :, 0, 0], compute_dtype="float64") + 1.0
    ),
    "summed in float64": lambda g, x: g.sum(g.relu(x), (2, 3), compute_dtype="float64") * 2.0,
    "truth": lambda g, x: g.where(g.all(x > 0, (2, 3), keepdims=True), x, g.any(x, 0)),
    "divided by deviations": lambda g, x: g.divisive_norm(x, 3, means=x * 0.5, beta=1.0),
    "per activation": lambda g, x: g.batch_norm_training(x, x[0], x[1], per_activation=True) * 2.0,
    "pooled back": lambda g, x: g.max_pool_backward(g.max_pool(x, 2), x, 2),
}


@cases_in_one_test
@pytest.mark.parametrize("name", OF_IMAGES)
def test_compositions_of_images_are_cut_into_pieces_that_compute_them(name: str) -> None:
    g = GraphBuilder()
    check(g.build(y=OF_IMAGES[name](g, g.input("x", (2, 2, 6, 6)))))


def test_a_backward_activation_and_factors_are_in_the_plan_of_the_product_before_them() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 6, 6))
    assert cut(g.build(y=g.pointwise_backward("relu", x @ x, x)).body) is None
    assert cut(g.build(y=g.pointwise("add", x @ x, x, alphas=(0.5, 2.0))).body) is None


def test_the_sums_of_columns_are_one_piece_along_each_dim() -> None:
    g = GraphBuilder()
    pieces = check(g.build(y=g.fold(g.input("x", (2, 18, 36)), (6, 6), 3, pad=1))).pieces
    kinds = [[operation.kind for operation in piece.graph.operations] for piece in pieces]
    assert [kind for kind in kinds if "pointwise" in kind] == [["pad"] * 3 + ["pointwise"] * 2] * 2


def test_a_gather_is_no_epilogue() -> None:
    g = GraphBuilder()
    a, b, table = (g.input(name, (4, 4)) for name in "abc")
    rows = g.take(table, g.input("n", (4,), "int64"), 0) * 0.5
    parts = check(g.build(y=a @ b + rows))
    assert [len(piece.numbers) for piece in parts.pieces] == [2, 2]


@pytest.mark.parametrize(("groups", "pieces"), [(1, 2), (16, 1)])
def test_a_sigmoid_is_no_epilogue_of_a_graph_of_cudnn(groups: int, pieces: int) -> None:
    """Behind a depthwise convolution, which has a kernel of our own, it is."""
    g = GraphBuilder()
    x = g.input("x", (2, 16, 4, 4), "bfloat16", layout="NHWC")
    w = g.input("w", (16, 16 // groups, 3, 3), "bfloat16", layout="NHWC")
    parts = cut(g.build(y=g.sigmoid(g.conv(x, w, groups=groups))).body)
    assert (1 if parts is None else len(parts.pieces)) == pieces


def test_a_gather_alone_keeps_its_own_kernel() -> None:
    g = GraphBuilder()
    table, tokens = g.input("table", (9, 8)), g.input("tokens", (6,), "int64")
    parts = check(g.build(y=g.softmax(g.take(table, tokens, 0)), z=g.sum(table + 1.0, axis=0)))
    assert [len(piece.numbers) for piece in parts.pieces] == [1, 1, 2]


@pytest.mark.parametrize(
    ("operation", "size", "wanted"),
    [
        (BorderPad(x=0, y=1, before=(3,), after=(0,), mode=PadMode.WRAP), 1 << 40, (1 << 40) + 3),
        (Pad(x=0, y=1, before=(0,), after=(0,), steps=(-1,)), 1 << 40, 1 << 40),
        (Resample(x=0, y=1, sizes=(4,)), 1 << 33, 4),
    ],
)
def test_what_would_need_large_tables_is_not_fused(operation: Node, size: int, wanted: int) -> None:
    assert indices_of(operation, (size,), (wanted,)) is None


def test_lines_of_the_same_axes_are_one_piece() -> None:
    g = GraphBuilder()
    x, shift, scale = g.input("x", (4, 6)), g.input("shift", (1, 6)), g.input("scale", (6,))
    moved = x + shift
    normal = g.rms_norm(moved, scale)
    largest = g.max(normal, axis=1, keepdims=True)
    y, most = normal * largest, largest + 1.0
    graph = g.build(moved=moved, y=y, most=most, other=g.sum(normal, axis=0))
    parts = check(graph)
    kinds = [[operation.kind for operation in piece.graph.operations] for piece in parts.pieces]
    assert kinds == [["pointwise", "rms_norm", "reduction", "pointwise", "pointwise"], ["reduction"]]


def test_integers_are_reduced_apart() -> None:
    """Sums of integers are exact. Kernels over lines add up floats."""
    g = GraphBuilder()
    parts = check(g.build(y=g.sum(g.input("x", (4, 6), "int64") * 2, axis=1)))
    kinds = [[operation.kind for operation in piece.graph.operations] for piece in parts.pieces]
    assert kinds == [["pointwise"], ["reduction"]]


def test_a_norm_is_one_piece_with_what_is_before_and_behind_it() -> None:
    g = GraphBuilder()
    x, residual, dy = (g.input(name, (2, 4, 6, 6)) for name in ("x", "residual", "dy"))
    mean, variance = g.input("running_mean", (4,)), g.input("running_variance", (4,))
    moved = x + residual
    normal, *new = g.batch_norm_training(moved, running_mean=mean, running_variance=variance, epsilon=1.0)
    y = g.relu(normal + residual)
    dx = g.grad(y, x, dy)
    updates = dict(zip(("running_mean", "running_variance"), new, strict=True))
    parts = check(g.build(y=y, normal=normal, dx=dx, updates=updates))
    kinds = [[operation.kind for operation in piece.graph.operations] for piece in parts.pieces]
    forward, backward = kinds
    assert forward[:4] == ["pointwise", "batch_norm_training", "pointwise", "pointwise"]
    assert backward == ["batch_norm_bwd"]
    assert sum(tensor.overwrites is not None for tensor in parts.pieces[0].graph.tensors) == 2


def test_two_norms_are_two_pieces_and_their_sum_belongs_to_the_second() -> None:
    g = GraphBuilder()
    a, b = g.input("a", (2, 4, 6, 6)), g.input("b", (2, 4, 6, 6))
    one, other = (g.batch_norm_training(x, epsilon=1.0) for x in (a, b))
    parts = check(g.build(y=g.relu(one + other)))
    kinds = [[operation.kind for operation in piece.graph.operations] for piece in parts.pieces]
    assert kinds == [["batch_norm_training"], ["batch_norm_training", "pointwise", "pointwise"]]


def test_a_statistic_that_is_read_besides_is_updated_by_a_copy() -> None:
    g = GraphBuilder()
    x, mean, variance = g.input("x", (2, 4, 3, 3)), g.input("mean", (4,)), g.input("variance", (4,))
    y, new_mean, new_variance = g.batch_norm_training(x, None, None, mean, variance, epsilon=1.0)
    check(g.build(y=y, old=mean * 2.0, updates={"mean": new_mean, "variance": new_variance}))
    check(g.build(y=y, twice=new_variance * 2.0, updates={"mean": new_mean, "variance": new_variance}))
    check(g.build(y=y, updates={"mean": new_variance, "variance": new_mean}))


def test_groups_have_a_limit() -> None:
    g = GraphBuilder()
    x = g.input("x", (4, 6))
    for _ in range(150):
        x = -x
    parts = check(g.build(y=x))
    assert [len(piece.graph.operations) for piece in parts.pieces] == [64, 64, 22]
    g = GraphBuilder()
    total = g.input("x", (4, 6))
    for number in range(60):
        total = total + g.input(f"x{number}", (4, 6))
    parts = check(g.build(y=total))
    assert max(len(piece.graph.bound) for piece in parts.pieces) == 24
    g = GraphBuilder()
    x = g.input("x", (4, 6))
    parts = check(g.build({f"y{number}": x * float(number) for number in range(60)}))
    assert [len(piece.graph.bound) for piece in parts.pieces] == [24, 24, 15]


def test_updates_read_what_was_there_before() -> None:
    g = GraphBuilder()
    a, b = g.input("a", (2, 6)), g.input("b", (2, 6))
    both = a + b
    check(g.build(updates={"a": b * 2.0, "b": a * 3.0}, y=g.cumsum(both, 1) + both))
    g = GraphBuilder()
    a, b = g.input("a", (2, 1)), g.input("b", (2, 6))
    check(g.build(updates={"a": a + 1.0, "b": a * 3.0 + b}, y=g.cumsum(b, 1)))


UPDATES: dict[str, Callable[[GraphBuilder, Tensor, Tensor, Tensor], dict[str, Tensor]]] = {
    "moved row": lambda _, a, b, c: {"a": a * 2.0, "b": b + a[0]},
    "turned": lambda _, a, b, c: {"a": a * 2.0, "b": b + a.T},
    "sliced": lambda _, a, b, c: {"a": a * 0.5, "b": b + a[1:3].reshape(4, 2)[:, :1]},
    "itself turned": lambda _, a, b, c: {"a": a + a.T},
    "itself less a row": lambda _, a, b, c: {"a": a - a[:1]},
    "only turned": lambda _, a, b, c: {"a": a.T},
    "lines": lambda g, a, b, c: {"a": g.softmax(a, axis=1) * a[:1]},
    "shifted": lambda g, a, b, c: {"a": g.cumsum(c, 1), "b": a},
    "swapped": lambda _, a, b, c: {"a": b, "b": a},
    "turned around": lambda _, a, b, c: {"a": b, "b": c, "c": a},
    "product": lambda g, a, b, c: {"a": g.relu(a @ b)},
    "around": lambda g, a, b, c: {"a": g.pad(a[1:3], [(1, 1), (0, 0)], mode=PadMode.WRAP) + b, "b": a},
    "taken": lambda g, a, b, c: {"a": g.take(a, b[0].astype("int32"), 0) + a},
    "taken by another": lambda g, a, b, c: {"b": g.take(a, b[0].astype("int32"), 0) + a},
}


@cases_in_one_test
@pytest.mark.parametrize("name", UPDATES)
def test_updates_read_what_all_inputs_held_before(name: str) -> None:
    g = GraphBuilder()
    a, b, c = (g.input(name, (4, 4)) for name in "abc")
    updates = UPDATES[name](g, a, b, c)
    graph = g.build(updates=updates, y=g.cumsum(a, 1) + g.cumsum(b * 2.0, 1) + g.cumsum(c, 0))
    parts = check(graph)
    overwritten = {tensor.overwrites for tensor in graph.body.tensors} - {None}
    for piece in parts.pieces:  # a kernel reads what it overwrites at the same places only
        roots = [parts.stored[uid].root for uid in piece.tensors]
        written = {graph.body.tensor(uid).overwrites for uid in roots} - {None}
        views = {uid for uid in piece.tensors if parts.stored[uid].root != uid}
        assert not {parts.stored[uid].root for uid in views} & written
        assert not {parts.stored[uid].root for uid in views} & overwritten


def test_scratch_memory_is_used_again() -> None:
    g = GraphBuilder()
    x = g.input("x", (64, 64))
    for _ in range(12):
        x = g.cumsum(x, 1)
    parts = check(g.build(y=x))
    _, nbytes = places(parts)
    assert nbytes == 2 * 64 * 64 * 4


STEPS: dict[str, Callable[[GraphBuilder, Tensor, Tensor], Tensor]] = {
    "add": lambda _, a, b: a + b,
    "mul": lambda _, a, b: a * b,
    "number": lambda _, a, __: a * 2.0 + 1.0,
    "relu": lambda g, a, _: g.pointwise("relu", a),
    "norm": lambda g, a, _: g.apply(LayerNorm(x=a, axis=3, epsilon=0.5)),
    "batch": lambda g, a, _: g.batch_norm_training(a, epsilon=1.0),
    "groups": lambda g, a, b: g.group_norm(a, 2, b[0, :, 0, 0], epsilon=1.0),
    "batch gradient": lambda g, a, b: g.grad(g.relu(g.batch_norm_training(a, epsilon=1.0)), a, b),
    "pool": lambda g, a, _: g.apply(MaxPool(x=a, window=Window.symmetric(2, 3, 1, 1))),
    "conv": lambda g, a, b: g.conv(a, b[:, :, 1:4, 1:4], pad=1),
    "transpose": lambda _, a, __: a.transpose(1, 0, 3, 2),
    "slice": lambda _, a, __: a[:, ::-1, :, :],
    "reshape": lambda _, a, __: a.reshape(16, 36).reshape(4, 4, 6, 6),
    "concat": lambda g, a, b: g.concatenate((a[:, :2], b[:, 2:]), 1),
    "row": lambda _, a, b: a + b[:1, :, :1, :],
    "small": lambda g, a, b: g.relu(b[:, :1] - a[:, 1:2]) * a,
    "sum": lambda g, a, _: a + g.sum(a, axis=1, keepdims=True),
    "max": lambda g, a, b: g.max(a, axis=3, keepdims=True) - b,
    "softmax": lambda g, a, _: g.softmax(a, axis=1),
    "pad": lambda g, a, _: g.pad(a[:, 1:, 2:-1], [(0, 0), (0, 1), (1, 2), (0, 0)], value=2),
    "ones": lambda g, a, _: g.full(a.dims, 1) + a,
    "gradient": lambda g, a, _: g.grad(g.relu(a * 3.0 + 1.0).sum(axis=(0, 2)), a),
    "take": lambda g, a, b: g.take(a, b[0, 0, 0, :4].astype("int32"), 1),
    "take rows": lambda g, a, b: g.take_along_axis(a, b.astype("int64"), 3) * b,
    "mirror": lambda g, a, _: g.pad(a[:, :, 1:-1], [(0, 0), (0, 0), (2, 0), (0, 0)], mode=PadMode.REFLECT),
    "enlarge": lambda g, a, _: g.resize(a[:, :, ::2, ::2], sizes=a.dims),
    "half": lambda _, a, __: a.astype("float16").astype("float32"),
}


@given(st.data())
@settings(max_examples=some(150))
def test_any_graph_is_cut_into_pieces_that_compute_it(data: st.DataObject) -> None:
    g = GraphBuilder()
    dims, layout = (4, 4, 6, 6), data.draw(st.sampled_from((Layout.NCHW, Layout.NHWC)))
    known = [g.input(name, dims, layout=layout) for name in "ab"]
    for _ in range(data.draw(st.integers(2, 12))):
        step = STEPS[data.draw(st.sampled_from(sorted(STEPS)))]
        one, other = (known[data.draw(st.integers(0, len(known) - 1))] for _ in range(2))
        known.append(step(g, one, other))
    outputs = data.draw(st.lists(st.integers(0, len(known) - 1), min_size=1, max_size=4))
    updated = data.draw(st.permutations("ab"))[: data.draw(st.integers(0, 2))]
    updates = {name: known[-1 - n] + known[0] * known[1] for n, name in enumerate(updated)}
    graph = g.build({f"y{n}": known[place] for n, place in enumerate(outputs)}, updates=updates)
    if cut(graph.body) is not None:
        check(graph)


def test_a_long_chain_becomes_several_kernels() -> None:
    g = GraphBuilder()
    x: Tensor = g.input("x", (3,))
    for number in range(500):
        x = g.maximum(x, float(number))
    graph = g.build(y=x)
    parts = cut(graph.body)
    assert parts is not None
    lengths = [len(piece.numbers) for piece in parts.pieces]
    assert max(lengths) == 64
    assert [number for piece in parts.pieces for number in piece.numbers] == list(range(500))
    memories = filled(graph)
    in_pieces(graph.body, parts, memories)
    np.testing.assert_array_equal(memories[1][:12].view(np.float32), 499)
    for piece in parts.pieces:
        (step,) = compile_split(piece.graph, None, None).recipe.steps
        assert isinstance(step, KernelStep)
        assert all(launch.source for launch in step.kernel.launches())


def test_a_bias_of_a_graph_lies_as_that_of_a_message_does() -> None:
    """So that what keeps cuDNN's engines from strided tensors does not keep them from fusing it."""
    g = GraphBuilder()
    x, w = g.input("x", (2, 8, 9, 9), "bfloat16"), g.input("w", (16, 8, 3, 3), "bfloat16")
    graph = g.build(y=g.relu(g.conv(x, w, bias=g.input("b", (16,), "bfloat16")))).body
    parts = cut(graph)
    assert parts is not None
    (piece,) = parts.pieces
    assert all(tensor.spec.layout is not Layout.STRIDED for tensor in piece.graph.tensors)
    assert erratum(piece.graph, "eng10", 91901) is None
