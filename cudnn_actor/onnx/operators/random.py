"""Random numbers, from a seed of the node or of the call that loads the model.

ONNX defines their distributions, but no generator: it is the one of `protocol.operations.random`. Each run
draws different numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.operators.casts import convert, wanted_dtype
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.types.dtypes import DType

__all__: list[str] = []


@operator("RandomNormal", "RandomUniform")
def random(node: Node, g: GraphBuilder) -> Result:
    return _draw(node, g, node.attribute("shape"), wanted_dtype(node, DType.FLOAT32))


@operator("RandomNormalLike", "RandomUniformLike")
def random_like(node: Node, g: GraphBuilder) -> Result:
    return _draw(node, g, node.dims(0), wanted_dtype(node, node.dtype(0)))


def _draw(node: Node, g: GraphBuilder, dims: Sequence[int], dtype: DType) -> Result:
    if 0 in dims:
        return np.empty(dims, dtype.numpy)
    state = node.random_state(dims)
    if node.op.startswith("RandomNormal"):
        return g.normal(dims, state, node.attribute("mean"), node.attribute("scale"), dtype=dtype)
    return g.uniform(dims, state, node.attribute("low"), node.attribute("high"), dtype=dtype)


@operator("Bernoulli", since=15)
def bernoulli(node: Node, g: GraphBuilder) -> Result:
    x = node.tensor(0)
    of = DType.FLOAT64 if x.dtype is DType.FLOAT64 else DType.FLOAT32
    below = g.less(g.uniform(x.dims, node.random_state(x.dims), dtype=of), g.astype(x, of))
    return convert(g, below, wanted_dtype(node, x.dtype))


@operator("Multinomial", since=7)
def multinomial(node: Node, g: GraphBuilder) -> Result:
    """Draw from each row: the result is how many running sums of its probabilities lie below a random
    number."""
    logits = g.astype(node.tensor(0), DType.FLOAT32)
    rows, classes = logits.dims
    dims = (rows, node.attribute("sample_size"))
    dtype = wanted_dtype(node, DType.INT32)
    if 0 in dims:
        return np.empty(dims, dtype.numpy)
    sums = g.cumsum(g.softmax(logits, 1), 1)
    numbers = g.uniform((*dims, 1), node.random_state(dims))
    passed = g.greater_equal(numbers, g.reshape(sums, (rows, 1, classes)))
    return convert(g, g.minimum(g.sum(passed, 2), classes - 1), dtype)


@operator("Dropout", since=7)
def dropout(node: Node, g: GraphBuilder) -> Result:
    dtype = DType.BOOL if node.version >= 10 else node.dtype(0)
    ratio = _ratio(node)
    if not ratio:
        return node.value(0), g.full(node.dims(0), 1, dtype) if node.wants(1) else None
    x = node.tensor(0)
    kept: Tensor = g.bernoulli(x.dims, node.random_state(x.dims), 1 - ratio)
    return g.where(kept, x * (1 / (1 - ratio)), 0.0), kept if node.wants(1) else None


def _ratio(node: Node) -> float:
    """The share of elements that a dropout drops; 0 outside of training."""
    if not node.has(2) or not bool(node.constant(2)):
        return 0.0
    ratio = float(node.constant(1).reshape(())) if node.has(1) else 0.5
    if not 0 <= ratio < 1:
        raise node.wrong(f"has the ratio {ratio}, where it takes one from 0 to below 1", 1)
    return ratio
