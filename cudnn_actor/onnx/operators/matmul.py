"""Products of matrices."""

from __future__ import annotations

from typing import Any

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.operators.casts import convert, wrap
from cudnn_actor.onnx.operators.spelled_attention import spelled_out_attention
from cudnn_actor.onnx.values import Declined, Value
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.operations.matmul import transpose_last
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["product"]

_MOST = 1 << 24
"""The most products of integers that are formed one by one."""


def product(g: GraphBuilder, a: Tensor, b: Tensor) -> Tensor:
    """a @ b, of their dtype."""
    if a.dtype.is_floating:
        return g.matmul(a, b)
    row, column = a.rank == 1, b.rank == 1
    a, b = a[None] if row else a, b[:, None] if column else b
    left, right = a[..., :, :, None], b[..., None, :, :]
    if a.dims[-2] * a.dims[-1] * b.dims[-1] > _MOST:
        raise Declined(f"a product of large matrices of {a.dtype}")
    wide = (convert(g, each, _wide(a.dtype)) for each in (left, right))
    y = wrap(g, g.sum(g.multiply(*wide), -2), a.dtype)
    y = y[..., 0] if column else y
    return (y[..., 0] if column else y[..., 0, :]) if row else y


def _wide(dtype: DType) -> DType:
    """The type that sums and products of integers wrap around in."""
    return DType.UINT64 if dtype is DType.UINT64 else DType.INT64


@operator("MatMul", since=1)
def mat_mul(node: Node, g: GraphBuilder) -> Result:
    fused = spelled_out_attention(node, g)
    if fused is not None:
        return fused
    return product(g, node.tensor(0), _factor(node.value(1), g))


def _factor(value: Value, g: GraphBuilder) -> Tensor:
    """A factor of a product. A transpose of a tensor that is in the graph, too, such as an embedding, is a
    view of it."""
    of = value.turned_from
    return transpose_last(g, of.tensor) if of is not None and of.is_in_graph else value.tensor


@operator("Gemm", since=7)
def gemm(node: Node, g: GraphBuilder) -> Result:
    a, b = node.tensor(0), node.tensor(1)
    y: Any = product(
        g,
        transpose_last(g, a) if node.attribute("transA") else a,
        transpose_last(g, b) if node.attribute("transB") else b,
    )
    alpha, beta = node.attribute("alpha"), node.attribute("beta")
    dtype, bias = y.dtype, node.has(2) and beta
    whole = not dtype.is_floating and alpha % 1 == beta % 1 == 0
    wide = dtype if dtype.is_floating else _wide(dtype) if whole else DType.FLOAT64  # it holds fractions
    turns = 1 << 64 if wide is DType.UINT64 else 0  # -1 times an uint64 is modulo 2**64
    if whole:
        alpha, beta = (int(factor) % turns if turns else int(factor) for factor in (alpha, beta))
    y = y if alpha == 1 else g.astype(y, wide) * alpha
    if bias:
        c: Any = node.operand(2)
        c = g.astype(c, wide) if wide is not dtype and isinstance(c, Tensor) else c
        c = c if beta == 1 else c * beta
        c = c if isinstance(c, Tensor) or not turns else c % turns
        y = (g.astype(y, wide) if wide is not dtype else y) + c
    return convert(g, y, dtype)
