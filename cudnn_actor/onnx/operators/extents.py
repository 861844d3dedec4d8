"""Operators whose results are computed when a model is imported, from the values that decide over them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder

__all__: list[str] = []


@operator("MelWeightMatrix", since=17)
@operator("NonZero", since=9)
@operator("NonMaxSuppression", since=10)
def compute_results(node: Node, _: GraphBuilder) -> Result:
    """Compute the results now, by ONNX's reference implementation."""
    return node.fold()


@operator("Unique", since=11)
def unique(node: Node, _: GraphBuilder) -> Result:
    """Different elements, or slices along an axis: sorted, or in the order in which they come first."""
    node.dtype(0)
    x, axis = node.constant(0), 0
    if node.attribute("axis") is None:
        x = x.reshape(-1)
    else:
        axis = node.axis()
    node.reserve(4, x.size, passing=4)
    wide = x.astype(np.float32) if node.value(0).is_half else x  # NumPy sorts no bfloat16
    if not x.shape[axis]:
        none = np.empty(0, np.int64)
        return x, none, none, none
    found: tuple[Any, ...] = np.unique(
        wide, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    _, first, inverse, counts = found
    order = np.arange(len(first)) if node.attribute("sorted") else np.argsort(first)
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return x.take(first[order], axis), first[order], places[inverse.reshape(-1)], counts[order]


@operator("OptionalHasElement", since=15)
def has_element(node: Node, _: GraphBuilder) -> Result:
    """A tensor is one, and no other optional value can be an input here."""
    return np.array(node.has(0))
