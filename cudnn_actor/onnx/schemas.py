"""ONNX's schemas of its operators, and its inference of their results."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import onnx
from onnx import checker, defs, shape_inference

from cudnn_actor.onnx.runtime_schemas import SCHEMAS

__all__ = ["NOT_INFERRED", "Schema", "domain_of", "infer", "of_onnx", "schema_for", "schema_of"]

Schema = Any
"""An `onnx.defs.OpSchema`, whose declared types lack half of its attributes."""
NOT_INFERRED = (checker.ValidationError, shape_inference.InferenceError)
"""The errors that ONNX raises for a node that contradicts its operator."""
_UNSAFE = frozenset({"Einsum", "GatherND", "Split"})
"""Operators whose inference, which is native code, reads or writes beyond its memory for some nodes that
contradict themselves, or does not end. Random nodes of every operator and version were tried to find them."""
_MOST = 1024
"""The largest number of an attribute with which a node is inferred: some make lists of that length."""


def domain_of(node: onnx.NodeProto | onnx.OperatorSetIdProto) -> str:
    """The domain of a node's operator, or of an import; empty for ONNX's own domain, which has two names."""
    return "" if node.domain == "ai.onnx" else node.domain


def schema_for(node: onnx.NodeProto, opsets: Mapping[str, int]) -> Schema | None:
    """The schema of a node's operator for these versions of the domains; None if there is none."""
    domain = domain_of(node)
    return schema_of(node.op_type, opsets.get(domain, 1), domain)


@functools.lru_cache(maxsize=4096)
def schema_of(op_type: str, version: int, domain: str) -> Schema | None:
    """The schema of an operator in a version of its domain; None if there is none."""
    return of_onnx(op_type, version, domain) or SCHEMAS.get((domain, op_type))


@functools.lru_cache(maxsize=4096)
def of_onnx(op_type: str, version: int, domain: str) -> Schema | None:
    """The schema of an operator of ONNX's own in a version of its domain; None if there is none."""
    try:
        return defs.get_schema(op_type, version, domain)
    except defs.SchemaError:
        return None


_UNKNOWN = (*NOT_INFERRED, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
"""The errors that ONNX raises if it cannot infer the results of a node."""


def infer(
    node: onnx.NodeProto,
    types: Mapping[str, onnx.TypeProto],
    data: Mapping[str, onnx.TensorProto],
    opsets: Mapping[str, int],
) -> tuple[Mapping[str, onnx.TypeProto], str]:
    """The types that ONNX infers for a node's results, by name; nothing if it cannot, or is not to be asked.

    The second result is the reason for which ONNX finds that the dims of the node's inputs contradict its
    operator; empty if it finds none. ONNX checks only dims, so the inputs may contradict the operator in
    other ways.
    """
    schema = schema_for(node, opsets)
    if schema is None or node.op_type in _UNSAFE or any(abs(each.i) > _MOST for each in node.attribute):
        return {}, ""
    try:
        imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        return shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=imports), ""  # type: ignore[arg-type]
    except shape_inference.InferenceError as error:
        return {}, str(error).split("] ", 1)[-1].split("\n", 1)[0]
    except _UNKNOWN:
        return {}, ""
