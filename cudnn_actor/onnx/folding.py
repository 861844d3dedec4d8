"""Nodes whose inputs are all constants: computed once, by ONNX's own reference implementation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from cudnn_actor.onnx.values import Declined

__all__ = ["fold"]


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
