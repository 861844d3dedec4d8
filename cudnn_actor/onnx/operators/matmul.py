"""Products of matrices."""

from __future__ import annotations

from typing import Any

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operators.casts import wrapped
from cudnn_actor.onnx.table import operator
from cudnn_actor.onnx.values import Declined
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.graph_builder import GraphBuilder, Tensor

__all__ = ["product", "turned"]

_MOST = 1 << 24
"""The most products of integers that are formed one by one."""


def turned(g: GraphBuilder, x: Tensor) -> Tensor:
    """Matrices with rows for columns."""
    *batch, row, column = range(x.rank)
    return g.transpose(x, (*batch, column, row))


def product(g: GraphBuilder, a: Tensor, b: Tensor) -> Tensor:
    """a @ b, of their dtype."""
    if a.dtype.is_floating:
        return g.matmul(a, b)
    row, column = a.rank == 1, b.rank == 1
    a, b = a[None] if row else a, b[:, None] if column else b
    left, right = a[..., :, :, None], b[..., None, :, :]
    if a.dims[-2] * a.dims[-1] * b.dims[-1] > _MOST:
        raise Declined(f"a product of large matrices of {a.dtype}")
    wide = (g.astype(each, DType.INT64) for each in (left, right))
    y = wrapped(g, g.sum(g.multiply(*wide), -2), a.dtype)
    y = y[..., 0] if column else y
    return (y[..., 0] if column else y[..., 0, :]) if row else y


@operator("MatMul", since=1)
def mat_mul(node: Node, g: GraphBuilder) -> Result:
    return product(g, node.tensor(0), node.tensor(1))


@operator("Gemm", since=7)
def gemm(node: Node, g: GraphBuilder) -> Result:
    a, b = node.tensor(0), node.tensor(1)
    y: Any = product(
        g,
        turned(g, a) if node.attribute("transA") else a,
        turned(g, b) if node.attribute("transB") else b,
    )
    alpha, beta = node.attribute("alpha"), node.attribute("beta")
    whole = not y.dtype.is_floating
    y = y if alpha == 1 else y * (int(alpha) if whole else alpha)
    if node.has(2) and beta:
        c: Any = node.operand(2)
        y = y + (c if beta == 1 else c * (int(beta) if whole else beta))
    return y
