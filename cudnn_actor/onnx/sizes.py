"""How large the results of nodes are that make much of little."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from cudnn_actor.onnx.nodes import Node

__all__ = ["too_large"]

_MOST = 1 << 28
"""Bytes of the largest constant that is computed when a model is imported."""


def _product(sizes: object) -> int:
    return math.prod(int(size) for size in np.asarray(sizes).reshape(-1))


def _nothing(node: Node) -> int:
    del node
    return 0


def _of_shape(node: Node) -> int:
    return _product(node.constant(0))


def _expanded(node: Node) -> int:
    return _product(node.constant(1)) * node.value(0).dtype.itemsize


def _tiled(node: Node) -> int:
    return _product(node.constant(1)) * node.value(0).array.nbytes


def _range(node: Node) -> int:
    start, limit, delta = (node.constant(number).reshape(()) for number in range(3))
    return int(8 * abs((float(limit) - float(start)) / (float(delta) or 1.0)))


def _one_hot(node: Node) -> int:
    return 8 * _product(node.constant(1)) * node.value(0).size


def _padded(node: Node) -> int:
    if not node.has(1):
        return 0
    largest: int = int(np.abs(node.constant(1)).max(initial=0)) + max(node.dims(0), default=1)
    return int(largest ** node.rank(0))


_SIZES: dict[str, Callable[[Node], int]] = {
    "ConstantOfShape": _of_shape,
    "Expand": _expanded,
    "OneHot": _one_hot,
    "Pad": _padded,
    "Range": _range,
    "Tile": _tiled,
}
"""Operators whose results may be far larger than their inputs: about how many bytes they have."""


def too_large(node: Node) -> bool:
    """Whether the result of a node with constants is too large to be computed when a model is imported."""
    return _SIZES.get(node.op, _nothing)(node) > _MOST
