"""Operators whose dims follow from values: computed when a model is imported, from the values that decide."""

from __future__ import annotations

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.table import operator
from cudnn_actor.protocol.graph_builder import GraphBuilder

__all__: list[str] = []


@operator("NonZero", since=9)
@operator("NonMaxSuppression", since=10)
@operator("Unique", since=11)
def decided(node: Node, g: GraphBuilder) -> Result:
    """By ONNX's reference implementation."""
    del g
    return node.folded()
