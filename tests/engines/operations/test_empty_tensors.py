"""Operands without elements: empty batches and sums of nothing are what NumPy and PyTorch give."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from cudnn_actor.engines.cuda.planning.compiler import in_pieces
from cudnn_actor.engines.cuda.planning.empty_tensors import fill_empty
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.protocol import (
    AdaptiveWindow,
    Attention,
    AvgPool,
    BatchNormTraining,
    BufferRef,
    ConvSpec,
    DType,
    GenStats,
    Graph,
    GraphBuilder,
    GridSample,
    InstanceNorm,
    InvalidRequest,
    LayerNorm,
    MatMul,
    MaxPool,
    Pointwise,
    Resample,
    RMSNorm,
    Tensor,
    TensorSpec,
    Window,
)
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.messages.messages import ConvBwdFilter, ConvFwd
from cudnn_actor.protocol.types.dtypes import DTypeLike

from ...in_one_test import in_one_test
from ..workbench import Workbench

Dims = tuple[int, ...]


class Case(NamedTuple):
    """A function of tensors of these dims, and the dims and the value of each of its results."""

    function: Callable[..., Any]
    inputs: Sequence[Dims]
    results: Sequence[tuple[Dims, float]]


def applied(operation: Any, *names: str, also: Sequence[str] = (), **fixed: Any) -> Callable[..., Any]:
    """An operation as a function of its inputs of these names."""
    return lambda g, *operands: g.apply(
        operation(**dict(zip(names, operands, strict=True)), **fixed), also=also
    )


def attention(g: GraphBuilder, *operands: Tensor) -> Any:
    q, k, v = operands
    return g.apply(Attention(q=q, k=k, v=v), also=("statistics",))


def convolution(g: GraphBuilder, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return g.conv(x, w, pad=1, bias=bias)


def experts(g: GraphBuilder, tokens: Tensor, weights: Tensor) -> Tensor:
    return g.grouped_matmul(tokens, weights, g.full((weights.dims[0],), 1, "int32"))


NAN, NONE = math.nan, 0.0
CASES: dict[str, Case] = {
    "product over none": Case(lambda g, a, b: a @ b, [(2, 0), (0, 3)], [((2, 3), 0)]),
    "products over none": Case(lambda g, a, b: a @ b, [(4, 2, 0), (0, 3)], [((4, 2, 3), 0)]),
    "product without rows": Case(lambda g, a, b: a @ b, [(0, 4), (4, 3)], [((0, 3), NONE)]),
    "no products": Case(lambda g, a, b: a @ b, [(1, 2, 3), (0, 3, 4)], [((0, 2, 4), NONE)]),
    "a product behind which is more": Case(
        lambda g, a, b, c: g.relu(a @ b + 1.0) * c, [(2, 0), (0, 3), (3,)], [((2, 3), 1)]
    ),
    "no tokens": Case(experts, [(0, 3), (2, 3, 4)], [((0, 4), NONE)]),
    "no experts": Case(experts, [(5, 3), (0, 3, 4)], [((5, 4), 0)]),
    "tokens without features": Case(experts, [(5, 0), (2, 0, 4)], [((5, 4), 0)]),
    "no images": Case(convolution, [(0, 3, 5, 5), (4, 3, 3, 3)], [((0, 4, 5, 5), NONE)]),
    "no channels": Case(convolution, [(2, 0, 5, 5), (4, 0, 3, 3)], [((2, 4, 5, 5), 0)]),
    "no channels, and a bias": Case(convolution, [(2, 0, 5, 5), (4, 0, 3, 3), (4,)], [((2, 4, 5, 5), 1)]),
    "no filters": Case(convolution, [(2, 3, 5, 5), (0, 3, 3, 3)], [((2, 0, 5, 5), NONE)]),
    "an image of nothing but padding": Case(convolution, [(2, 3, 0), (4, 3, 2)], [((2, 4, 1), 0)]),
    "max pooling": Case(lambda g, x: g.max_pool(x, 2), [(0, 3, 4, 4)], [((0, 3, 2, 2), NONE)]),
    "pooling of no channels": Case(lambda g, x: g.avg_pool(x, 2), [(2, 0, 4, 4)], [((2, 0, 2, 2), NONE)]),
    "lp pooling": Case(lambda g, x: g.lp_pool(x, 2), [(0, 3, 4, 4)], [((0, 3, 2, 2), NONE)]),
    "adaptive pooling": Case(lambda g, x: g.adaptive_avg_pool(x, 3), [(0, 3, 4, 4)], [((0, 3, 3, 3), NONE)]),
    "layer norm of no rows": Case(
        lambda g, x, scale, bias: g.layer_norm(x, scale, bias), [(0, 4), (4,), (4,)], [((0, 4), NONE)]
    ),
    "layer norm of empty rows": Case(
        applied(LayerNorm, "x", also=("mean", "inverse_deviation")),
        [(3, 0)],
        [((3, 0), NONE), ((3, 1), NAN), ((3, 1), NAN)],
    ),
    "rms norm of no rows": Case(lambda g, x, scale: g.rms_norm(x, scale), [(0, 4), (4,)], [((0, 4), NONE)]),
    "rms norm of empty rows": Case(
        applied(RMSNorm, "x", also=("inverse_rms",)), [(3, 0)], [((3, 0), NONE), ((3, 1), NAN)]
    ),
    "batch norm": Case(
        lambda g, x, m, v, s, b: g.batch_norm(x, m, v, s, b),
        [(0, 3, 2), (3,), (3,), (3,), (3,)],
        [((0, 3, 2), NONE)],
    ),
    "batch norm in training": Case(
        applied(
            BatchNormTraining,
            "x",
            "running_mean",
            "running_variance",
            also=("mean", "new_running_mean", "new_running_variance"),
        ),
        [(0, 3, 2), (3,), (3,)],
        [((0, 3, 2), NONE), ((3,), NAN), ((3,), 1), ((3,), 1)],
    ),
    "batch norm of no channels": Case(
        lambda g, x: g.apply(BatchNormTraining(x=x)), [(2, 0, 3)], [((2, 0, 3), NONE)]
    ),
    "instance norm": Case(
        applied(InstanceNorm, "x", also=("mean",)), [(2, 3, 0)], [((2, 3, 0), NONE), ((2, 3), NAN)]
    ),
    "instance norm of no samples": Case(lambda g, x: g.instance_norm(x), [(0, 3, 4)], [((0, 3, 4), NONE)]),
    "group norm": Case(
        lambda g, x, s, b: g.group_norm(x, 2, s, b), [(0, 4, 3), (4,), (4,)], [((0, 4, 3), NONE)]
    ),
    "local response norm": Case(lambda g, x: g.local_response_norm(x, 3), [(0, 4, 3)], [((0, 4, 3), NONE)]),
    "sums of channels": Case(applied(GenStats, "x"), [(0, 3, 4)], [((3,), 0), ((3,), 0)]),
    "attention to nothing": Case(
        attention, [(2, 2, 3, 4), (2, 2, 0, 4), (2, 2, 0, 5)], [((2, 2, 3, 5), 0), ((2, 2, 3, 1), -math.inf)]
    ),
    "attention of no queries": Case(
        attention, [(2, 2, 0, 4), (2, 2, 3, 4), (2, 2, 3, 5)], [((2, 2, 0, 5), NONE), ((2, 2, 0, 1), NONE)]
    ),
    "no attention": Case(
        attention, [(0, 2, 3, 4), (0, 2, 3, 4), (0, 2, 3, 5)], [((0, 2, 3, 5), NONE), ((0, 2, 3, 1), NONE)]
    ),
    "no heads": Case(
        attention, [(1, 0, 3, 4), (1, 0, 3, 4), (1, 0, 3, 5)], [((1, 0, 3, 5), NONE), ((1, 0, 3, 1), NONE)]
    ),
    "resizing": Case(lambda g, x: g.resize(x, sizes=(5,), axes=(2,)), [(0, 3, 2)], [((0, 3, 5), NONE)]),
    "resizing to nothing": Case(
        lambda g, x: g.resize(x, scales=(0.2,), axes=(2,), mode="linear"), [(2, 3, 4)], [((2, 3, 0), NONE)]
    ),
    "places in no images": Case(
        lambda g, x, grid: g.grid_sample(x, grid), [(0, 3, 4, 4), (0, 2, 2, 2)], [((0, 3, 2, 2), NONE)]
    ),
    "no places": Case(
        lambda g, x, grid: g.grid_sample(x, grid), [(1, 3, 4, 4), (1, 0, 2, 2)], [((1, 3, 0, 2), NONE)]
    ),
    "what nothing is joined with": Case(
        lambda g, a, b, c: g.concatenate([a @ b, c]), [(0, 4), (4, 3), (2, 3)], [((2, 3), 1)]
    ),
    "the sum of nothing": Case(lambda g, a, b: (a @ b).sum(axis=0), [(0, 4), (4, 3)], [((3,), 0)]),
}
each_case = in_one_test("name", CASES)


def several(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def built(case: Case, dtype: DTypeLike) -> tuple[GraphBuilder, list[Tensor], list[Tensor]]:
    """A builder, a case's inputs and its results."""
    g = GraphBuilder()
    inputs = [g.input(f"x{number}", dims, dtype) for number, dims in enumerate(case.inputs)]
    return g, inputs, several(case.function(g, *inputs))


def run(bench: Workbench, graph: Graph) -> dict[str, np.ndarray]:
    """What a graph gives of ones."""
    body = graph.body
    given = {
        uid: np.ones(body.tensor(uid).dims, body.tensor(uid).dtype.numpy)
        for uid in body.bound
        if uid not in body.written
    }
    found = bench.run_graph(body, given)
    return {port.name: found[port.uid] for port in graph.outputs if port.uid is not None}


@in_one_test("name, dtype", [*itertools.product(CASES, ("float32", "bfloat16"))])
def test_results_of_nothing(bench: Workbench, name: str, dtype: str) -> None:
    case = CASES[name]
    g, _, results = built(case, dtype)  # type: ignore[arg-type]
    found = run(bench, g.build({f"y{number}": y for number, y in enumerate(results)}))
    for result, (dims, value) in zip(found.values(), case.results, strict=True):
        np.testing.assert_array_equal(result.astype(np.float32), np.full(dims, value, np.float32))


@each_case
def test_gradients_of_nothing_are_0(bench: Workbench, name: str) -> None:
    case = CASES[name]
    g, inputs, results = built(case, "float32")
    dxs = g.grad(results[0], inputs)
    found = run(bench, g.build({f"dx{number}": dx for number, dx in enumerate(dxs)}))
    for dx, dims in zip(found.values(), case.inputs, strict=True):
        assert dx.shape == dims
        if "more" not in name and "bias" not in name and "joined" not in name:
            np.testing.assert_array_equal(dx, np.zeros(dims))


def test_what_is_added_behind_a_sum_of_nothing_has_its_own_gradient(bench: Workbench) -> None:
    g, inputs, (y,) = built(CASES["no channels, and a bias"], "float32")
    found = run(bench, g.build(db=g.grad(y, inputs[2])))
    np.testing.assert_array_equal(found["db"], np.full(4, 2 * 5 * 5))


def test_products_of_bytes_over_none_are_0(bench: Workbench) -> None:
    a, b = (bench.empty(TensorSpec.packed(dims, "int8")) for dims in ((2, 0), (0, 3)))
    y = bench.empty(TensorSpec.packed((2, 3), "int32"))
    np.testing.assert_array_equal(bench.run(MatMul(a=a, b=b, y=y)), np.zeros((2, 3)))


def test_running_statistics_stay_as_they_are_where_they_are_updated(bench: Workbench) -> None:
    g = GraphBuilder()
    x, mean = g.input("x", (0, 3, 2)), g.input("mean", (3,))
    made = g.apply(BatchNormTraining(x=x, running_mean=mean), also=("new_running_mean",))
    body = g.build(y=made.y, updates={"mean": made.new_running_mean}).body
    before = next(tensor.overwrites for tensor in body.tensors if tensor.overwrites is not None)
    given = {uid: np.full(body.tensor(uid).dims, 7, np.float32) for uid in body.bound}
    given = {uid: array for uid, array in given.items() if uid not in body.written}
    found = bench.run_graph(body, given)
    (updated,) = (found[t.uid] for t in body.tensors if t.overwrites == before)
    np.testing.assert_array_equal(updated, [7, 7, 7])


# Messages.


def test_messages_of_convolutions(bench: Workbench) -> None:
    conv = ConvSpec.symmetric(2, pad=1)
    x, w, y = (bench.empty(TensorSpec.packed(dims)) for dims in ((2, 0, 4, 4), (5, 0, 3, 3), (2, 5, 4, 4)))
    bias = bench.place(np.arange(5, dtype=np.float32))
    wanted = np.broadcast_to(np.arange(5).reshape(5, 1, 1), (2, 5, 4, 4))
    np.testing.assert_array_equal(bench.run(ConvFwd(x=x, w=w, y=y, conv=conv, bias=bias)), wanted)
    x, dy, dw = (bench.empty(TensorSpec.packed(dims)) for dims in ((0, 3, 4, 4), (0, 5, 4, 4), (5, 3, 3, 3)))
    np.testing.assert_array_equal(
        bench.run(ConvBwdFilter(x=x, dy=dy, dw=dw, conv=conv)), np.zeros((5, 3, 3, 3))
    )


def reference(*dims: int) -> BufferRef:
    return BufferRef(slot=sum(dims), generation=1, spec=TensorSpec.packed(dims), device="cpu")


def sampled(x: BufferRef) -> GridSample[BufferRef]:
    return GridSample(x=x, grid=reference(1, 2, 2), y=reference(1, 3, 2))


REFUSED: dict[str, tuple[Any, str]] = {
    "a filter without taps": (
        ConvFwd(x=reference(1, 3, 8), w=reference(4, 3, 0), y=reference(1, 4, 9), conv=ConvSpec.symmetric(1)),
        r"w=\(4, 3, 0\): has no taps",
    ),
    "a filter larger than the padded image": (
        ConvFwd(
            x=reference(1, 3, 0), w=reference(4, 3, 3), y=reference(1, 4, 1), conv=ConvSpec.symmetric(1, 1)
        ),
        "padded input has 2",
    ),
    "windows on padding alone": (
        MaxPool(x=reference(1, 3, 0), y=reference(1, 3, 1), window=Window.symmetric(1, 2, pad=1)),
        "covers only padding",
    ),
    "windows on nothing": (
        AvgPool(x=reference(1, 3, 0), y=reference(1, 3, 2), window=AdaptiveWindow(output=(2,))),
        "has no elements that windows could cover",
    ),
    "more elements of none": (
        Resample(x=reference(1, 0), y=reference(1, 3), sizes=(1, 3)),
        "has elements along a dim of x",
    ),
    "places in an image of nothing": (
        GridSample(x=reference(1, 3, 0, 2), grid=reference(1, 2, 2, 2), y=reference(1, 3, 2, 2)),
        "has no elements to read",
    ),
    "attention without features": (
        Attention(
            q=reference(1, 1, 2, 0),
            k=reference(1, 1, 2, 0),
            v=reference(1, 1, 2, 3),
            y=reference(1, 1, 2, 3),
        ),
        r"q=.*has no features",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_without_elements_is_refused(name: str) -> None:
    message, text = REFUSED[name]
    with pytest.raises(InvalidRequest, match=text):
        lower(message)


# Pieces of the CUDA engine.


@each_case
def test_no_kernel_is_planned_for_results_without_elements(name: str) -> None:
    g, inputs, results = built(CASES[name], "float32")
    outputs = {f"y{number}": y for number, y in enumerate([*results, *g.grad(results[0], inputs)])}
    graph = g.build(outputs).body
    pieces = cut(graph)
    assert pieces is not None
    for piece in pieces.pieces:
        left = fill_empty(piece.graph)
        operations = (
            piece.graph.operations if left is None else () if left.graph is None else left.graph.operations
        )
        for operation in operations:
            assert operation.takes_empty or all(0 not in piece.graph.tensor(u).dims for u in operation.reads)
            assert any(0 not in piece.graph.tensor(uid).dims for uid in operation.writes)
        assert [graph.label(n) for n in piece.numbers], "each piece knows its operations in the whole graph"


def test_a_graph_of_nothing_has_no_pieces_and_a_sum_of_nothing_is_a_fill() -> None:
    g, _, (y,) = built(CASES["no images"], "float32")
    nothing = cut(g.build(y=y).body)
    assert nothing is not None
    assert not nothing.pieces
    g, _, (y,) = built(CASES["product over none"], "float32")
    fill = cut(g.build(y=y).body)
    assert fill is not None
    ((operation,),) = (piece.graph.operations for piece in fill.pieces)
    assert isinstance(operation, Pointwise)
    assert cut(fill.pieces[0].graph) is None


def test_the_plan_of_a_graph_of_nothing_has_no_steps_and_explains_itself() -> None:
    g, _, (y,) = built(CASES["no images"], "float32")
    graph = g.build(y=y).body
    pieces = cut(graph)
    assert pieces is not None
    plan = in_pieces(graph, pieces, 0, lambda piece: pytest.fail(f"{piece} was planned"))
    assert (plan.recipe.steps, plan.workspace) == ((), 0)
    assert plan.tag.endswith("/nothing")
    explained = plan.explain(graph)
    assert (explained.pieces, len(explained.views)) == ((), 1)


def test_only_dtypes_that_an_operation_takes_are_filled() -> None:
    a, b = reference(2, 0), reference(0, 3)
    with pytest.raises(InvalidRequest, match="dtype"):
        lower(
            MatMul(
                a=a,
                b=b,
                y=BufferRef(slot=9, generation=1, spec=TensorSpec.packed((2, 3), DType.INT8), device="cpu"),
            )
        )
