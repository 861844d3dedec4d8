"""Einstein's summation."""

from __future__ import annotations

import functools

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.operators.matmul import product
from cudnn_actor.onnx.operators.reduction import reduce_in_dtype
from cudnn_actor.onnx.values import fitting
from cudnn_actor.protocol.graphs import einsum as summation
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.operations import ReductionMode

__all__: list[str] = []


@operator("Einsum", since=12)
def einsum(node: Node, g: GraphBuilder) -> Result:
    def total(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return reduce_in_dtype(g, ReductionMode.SUM, x, axes, keepdims=False)

    with fitting("equation"):
        return summation.einsum(
            g, node.attribute("equation"), node.tensors(), functools.partial(product, g), total
        )
