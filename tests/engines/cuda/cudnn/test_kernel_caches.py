"""Which graphs may share a kernel that cuDNN compiled. What cuDNN makes of it: tests/support."""

from __future__ import annotations

import pytest

from cudnn_actor.engines.cuda.cudnn.kernel_caches import class_of, compiles
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.protocol import DType, Graph, GraphBuilder, OperationGraph
from cudnn_actor.protocol.operations import Convolution


def piece_of(graph: Graph) -> OperationGraph:
    """The only piece of a graph: what is built as one plan."""
    parts = cut(graph.body)
    if parts is None:
        return graph.body
    (piece,) = parts.pieces
    return piece.graph


def convolution(
    batch: int = 8, channels: int = 64, size: int = 14, dtype: DType = DType.BFLOAT16
) -> OperationGraph:
    """A convolution with a scale, a bias and an activation."""
    g = GraphBuilder()
    x = g.input("x", (batch, channels, size, size), dtype, layout="NHWC")
    w = g.input("w", (32, channels, 3, 3), dtype, layout="NHWC")
    scale, bias = (g.input(name, (32,), dtype)[:, None, None] for name in ("scale", "bias"))
    return piece_of(g.build(y=g.relu(g.conv(x, w, pad=1) * scale + bias)))


def biased(batch: int) -> OperationGraph:
    """A convolution with a bias and an activation, for which cuDNN has engines that compile nothing."""
    g = GraphBuilder()
    x = g.input("x", (batch, 64, 14, 14), "bfloat16", layout="NHWC")
    w = g.input("w", (32, 64, 3, 3), "bfloat16", layout="NHWC")
    return piece_of(g.build(y=g.relu(g.conv(x, w, pad=1, bias=g.input("b", (32,), "bfloat16")))))


def product(
    rows: int = 128, inner: int = 64, columns: int = 96, *, transposed: bool = False
) -> OperationGraph:
    """A product of matrices with a bias and an activation that cuBLASLt does not have."""
    g = GraphBuilder()
    x = g.input("x", (rows, inner), "bfloat16")
    w = g.input("w", (columns, inner) if transposed else (inner, columns), "bfloat16")
    y = x @ (w.transpose(1, 0) if transposed else w)
    return piece_of(g.build(y=g.gelu(y + g.input("bias", (columns,), "bfloat16"))))


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([convolution(batch) for batch in (2, 5, 8, 32)], id="batches"),
        pytest.param([convolution(size=size) for size in (14, 56)], id="sizes of images"),
        pytest.param([convolution(channels=channels) for channels in (64, 256)], id="channels"),
        pytest.param([product(rows) for rows in (65, 127, 4096)], id="rows"),
        pytest.param([product(rows) for rows in (2, 17, 64)], id="few rows"),
        pytest.param([product(inner=inner) for inner in (64, 768)], id="lengths of sums"),
    ],
)
def test_sizes_alone_are_no_difference(others: list[OperationGraph]) -> None:
    assert len({class_of(graph) for graph in others}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(convolution(), convolution(dtype=DType.FLOAT16), id="dtypes"),
        pytest.param(convolution(), convolution(channels=60), id="alignment of channels"),
        pytest.param(product(), product(transposed=True), id="a transposed operand"),
        pytest.param(
            product(inner=96, columns=96), product(inner=96, columns=96, transposed=True), id="square"
        ),
        pytest.param(product(), product(rows=1), id="a single row"),
        pytest.param(product(), product(rows=64), id="few rows"),
        pytest.param(product(), product(columns=64), id="few columns"),
        pytest.param(product(), product(inner=13), id="odd rows"),
        pytest.param(product(1 << 20, 64), product(1 << 26, 64), id="offsets beyond 32 bits"),
    ],
)
def test_what_a_kernel_depends_on_is_one(one: OperationGraph, other: OperationGraph) -> None:
    assert class_of(one) != class_of(other)


def of_convolution(kind: str) -> OperationGraph:
    """A convolution with something behind it, or its gradient."""
    g = GraphBuilder()
    x = g.input("x", (8, 64, 14, 14), "bfloat16", layout="NHWC")
    w = g.input("w", (64, 64, 3, 3), "bfloat16", layout="NHWC")
    y = g.conv(x, w, pad=1, bias=g.input("b", (64,), "bfloat16"))
    made = {
        "bias": lambda: y,
        "bias and relu": lambda: g.relu(y),
        "nothing": lambda: g.conv(x, w, pad=1),
        "relu": lambda: g.relu(g.conv(x, w, pad=1)),
        "residual": lambda: g.relu(y + x),
        "bounded relu": lambda: g.relu(y, upper=6.0),
        "gelu": lambda: g.gelu(y),
        "gradient": lambda: g.grad(g.conv(x, w, pad=1), x),
        "gradient and relu": lambda: g.relu(g.grad(g.conv(x, w, pad=1), x)),
    }
    graph = g.build(y=made[kind]()).body
    parts = cut(graph)
    pieces = [graph] if parts is None else [piece.graph for piece in parts.pieces]
    return next(one for one in pieces if any(isinstance(each, Convolution) for each in one.operations))


@pytest.mark.parametrize("kind", ["nothing", "relu", "bias and relu", "gradient"])
def test_some_kernels_are_compiled_already(kind: str) -> None:
    assert not compiles(of_convolution(kind))


@pytest.mark.parametrize("kind", ["bias", "residual", "bounded relu", "gelu", "gradient and relu"])
def test_other_kernels_are_compiled_for_a_plan(kind: str) -> None:
    assert compiles(of_convolution(kind))


def test_attention_and_functions_alone_share_nothing() -> None:
    g = GraphBuilder()
    q, k, v = (g.input(name, (2, 4, 64, 64), "bfloat16") for name in "qkv")
    assert not compiles(g.build(y=g.attention(q, k, v)).body)
    assert not compiles(g.build(y=g.exp(q)).body)
