"""How constants follow from initialisers: by which nodes. So they can be computed again, or be recognised
without that.

Constants that follow from initialisers which may be overwritten are computed again with the new values. Other
constants are recognised by their keys in the next import of the file, for other dims, without reading their
elements.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from cudnn_actor.models.source import Origin
from cudnn_actor.onnx.budget import Budget
from cudnn_actor.onnx.folding import fold
from cudnn_actor.onnx.schemas import domain_of
from cudnn_actor.onnx.values import Value

__all__ = ["keys_of", "origins_of"]

_OF_DIMS = frozenset({"Shape", "Size"})
"""Operators whose results do not depend on the elements of their input."""
_UNBOUNDED = 1 << 62


def origins_of(
    node: onnx.NodeProto, inputs: Sequence[Value | None], opsets: Mapping[str, int]
) -> list[Origin | None]:
    """The origin of each result of a node whose inputs are all constants; None if it follows from no
    initialiser that may be overwritten."""
    names = frozenset[str]().union(
        *(each.origin.names for each in inputs if each is not None and each.origin is not None)
    )
    count = len(node.output)
    if not names or node.op_type in _OF_DIMS:
        return [None] * count
    parts = [None if each is None else each.origin or each.elements for each in inputs]
    compute = functools.partial(_compute, node, parts, opsets)
    known = [each for each in parts if isinstance(each, Origin)]
    whole = Origin(key=_key(node, inputs, opsets), names=names, compute=compute, parts=known)

    def result(number: int, *given: Any) -> np.ndarray:
        array: np.ndarray = whole.derive(*given)[number]
        return array

    return [
        Origin(
            key=f"{whole.key} {number}",
            names=names,
            compute=functools.partial(result, number),
            parts=(whole,),
        )
        for number in range(count)
    ]


def keys_of(node: onnx.NodeProto, inputs: Sequence[Value | None], opsets: Mapping[str, int]) -> list[str]:
    """A key for each result of a node whose inputs are all constants; empty if only its elements can identify
    it.

    A result has a key if an input has one, since large constants are initialisers or follow from them.
    """
    if not any(each is not None and each.key for each in inputs):
        return [""] * len(node.output)
    key = _key(node, inputs, opsets)
    return [f"{key} {number}" for number in range(len(node.output))]


def _compute(
    node: onnx.NodeProto,
    parts: Sequence[Origin | np.ndarray | None],
    opsets: Mapping[str, int],
    tensors: Mapping[str, np.ndarray],
    known: dict[str, np.ndarray],
) -> Any:
    given = [each.derive(tensors, known) if isinstance(each, Origin) else each for each in parts]
    return fold(node, given, opsets, Budget(_UNBOUNDED, _UNBOUNDED))


def _key(node: onnx.NodeProto, inputs: Sequence[Value | None], opsets: Mapping[str, int]) -> str:
    """A key that is equal for equal nodes with the same inputs, whatever their names are."""
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    bare.name = bare.doc_string = ""
    del bare.input[:], bare.output[:]
    found = hashlib.blake2b(bare.SerializeToString(deterministic=True), digest_size=16)
    found.update(repr((opsets.get(domain_of(node)), [bool(name) for name in node.output])).encode())
    for each in inputs:
        found.update(b"|" if each is None else f"|{_key_of(each)}".encode())
    return f"derived {found.hexdigest()}"


def _key_of(value: Value) -> str:
    if value.origin is not None:
        return value.origin.key
    if value.key:
        return value.key
    if not value.digest:  # once: many nodes may read it
        value.digest = _digest(value.elements)
    return value.digest


def _digest(array: np.ndarray) -> str:
    data = repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes()
    return f"{array.dtype} {array.shape} {hashlib.blake2b(data, digest_size=16).hexdigest()}"
