"""Nodes whose inputs are all constants: computed once, by ONNX's own reference implementation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from cudnn_actor.onnx.nodes import Node
from cudnn_actor.onnx.values import Declined

__all__ = ["MOST_FOLDED", "fold"]

MOST_FOLDED = 1 << 28
"""Bytes of the largest constant that is computed when a model is imported."""


def fold(
    node: onnx.NodeProto, arrays: Sequence[np.ndarray | None], opsets: Mapping[str, int]
) -> tuple[np.ndarray | None, ...]:
    """The results of a node. Raises `Declined` if the reference implementation cannot compute them."""
    names = [f"i{number}" if array is not None else "" for number, array in enumerate(arrays)]
    outputs = [f"o{number}" if name else "" for number, name in enumerate(node.output)]
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    del bare.input[:], bare.output[:]
    bare.input.extend(names)
    bare.output.extend(outputs)
    function = onnx.helper.make_function(
        "fold",
        "fold",
        list(filter(None, names)),
        list(filter(None, outputs)),
        [bare],
        [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()],
    )
    feeds = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            results = iter(ReferenceEvaluator(function).run(None, feeds, attributes={}))
    except Exception as error:
        reason = str(error)[:200] or type(error).__name__
        raise Declined(f"its constant cannot be computed: {reason}") from error
    found = [next(results) if name else None for name in outputs]
    for each in found:
        if each is not None and not isinstance(each, np.ndarray | np.generic):
            raise Declined(f"gives a {type(each).__name__}, not a tensor")
    return tuple(None if each is None else np.asarray(each) for each in found)


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
    return _SIZES.get(node.op, _nothing)(node) > MOST_FOLDED
