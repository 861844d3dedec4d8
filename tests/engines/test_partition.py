"""Where graphs are cut: the pieces, run one after the other in shared scratch memory, compute the graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_actor.engines.cpu.evaluation import EvaluatedPlan
from cudnn_actor.engines.cuda.plans.composition import _places
from cudnn_actor.engines.cuda.plans.partition import Cut, cut
from cudnn_actor.protocol import (
    Graph,
    GraphBuilder,
    LayerNorm,
    Layout,
    MaxPool,
    OperationGraph,
    Tensor,
    Window,
)
from cudnn_actor.protocol.operations import GraphTensor


def evaluated(graph: OperationGraph, buffers: list[np.ndarray]) -> None:
    EvaluatedPlan("", graph).bind(np.empty(0, np.uint8)).run(buffers, ())


def in_pieces(graph: OperationGraph, parts: Cut, memories: list[np.ndarray]) -> None:
    """Run the pieces as a composed plan does: what is between them lies in scratch memory, by its places."""
    places, nbytes = _places(parts)
    scratch = np.full(max(nbytes, 1), 0x77, np.uint8)
    roots = dict(zip(graph.bound, memories, strict=True))

    def bound(uid: int, tensor: GraphTensor) -> np.ndarray:
        root, offset = parts.stored[uid]
        memory = roots[root] if root in roots else scratch[places[root] :]
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


def filled(graph: Graph) -> list[np.ndarray]:
    """The bytes of a buffer of whole numbers for each bound tensor."""
    memories: list[np.ndarray] = []
    for number, uid in enumerate(graph.body.bound):
        tensor = graph.body.tensor(uid)
        overwritten = graph.body.tensor(uid).overwrites
        if overwritten is not None:
            memories.append(memories[graph.body.bound.index(overwritten)])
            continue
        values = np.random.default_rng(number).integers(-3, 4, tensor.spec.nbytes // tensor.dtype.itemsize)
        memories.append(values.astype(tensor.dtype.numpy).view(np.uint8))
    return memories


def check(graph: Graph) -> Cut:
    parts = cut(graph.body)
    assert parts is not None
    whole, pieces = filled(graph), filled(graph)
    tensors = map(graph.body.tensor, graph.body.bound)
    evaluated(graph.body, [array_in(memory, tensor) for memory, tensor in zip(whole, tensors, strict=True)])
    in_pieces(graph.body, parts, pieces)
    for one, other in zip(whole, pieces, strict=True):
        np.testing.assert_array_equal(one, other)
    return parts


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
    normal = g.apply(LayerNorm(x=x + moved, axis=1))
    check(g.build(updates={"m": m * 0.5 + x}, y=normal + moved, old=m))


def test_scratch_memory_is_used_again() -> None:
    g = GraphBuilder()
    x = g.input("x", (64, 64))
    for _ in range(12):
        x = g.apply(LayerNorm(x=x, axis=1))
    parts = check(g.build(y=x))
    _, nbytes = _places(parts)
    assert nbytes == 2 * 64 * 64 * 4


STEPS: dict[str, Callable[[GraphBuilder, Tensor, Tensor], Tensor]] = {
    "add": lambda _, a, b: a + b,
    "mul": lambda _, a, b: a * b,
    "number": lambda _, a, __: a * 2.0 + 1.0,
    "relu": lambda g, a, _: g.pointwise("relu", a),
    "norm": lambda g, a, _: g.apply(LayerNorm(x=a, axis=3, epsilon=0.5)),
    "pool": lambda g, a, _: g.apply(MaxPool(x=a, window=Window.symmetric(2, 3, 1, 1))),
    "conv": lambda g, a, b: g.conv(a, b[:, :, 1:4, 1:4], pad=1),
    "transpose": lambda _, a, __: a.transpose(1, 0, 3, 2),
    "slice": lambda _, a, __: a[:, ::-1, :, :],
    "reshape": lambda _, a, __: a.reshape(16, 36).reshape(4, 4, 6, 6),
    "half": lambda _, a, __: a.astype("float16").astype("float32"),
}


@given(st.data())
@settings(max_examples=150)
def test_any_graph_is_cut_into_pieces_that_compute_it(data: st.DataObject) -> None:
    g = GraphBuilder()
    dims, layout = (4, 4, 6, 6), data.draw(st.sampled_from((Layout.NCHW, Layout.NHWC)))
    known = [g.input(name, dims, layout=layout) for name in "ab"]
    for _ in range(data.draw(st.integers(2, 12))):
        step = STEPS[data.draw(st.sampled_from(sorted(STEPS)))]
        one, other = (known[data.draw(st.integers(0, len(known) - 1))] for _ in range(2))
        known.append(step(g, one, other))
    outputs = data.draw(st.lists(st.integers(0, len(known) - 1), min_size=1, max_size=4))
    updates = {"a": known[-1] + known[0]} if data.draw(st.booleans()) else None
    graph = g.build({f"y{n}": known[place] for n, place in enumerate(outputs)}, updates=updates)
    if cut(graph.body) is not None:
        check(graph)
