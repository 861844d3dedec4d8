"""Checks which operators of a model can be run at all, whatever the dims of its inputs."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import defs

from cudnn_actor.actors.long_work import check_wanted
from cudnn_actor.onnx import operators
from cudnn_actor.onnx.control import is_control
from cudnn_actor.onnx.expanding import has_body
from cudnn_actor.onnx.reading import ModelFile, Opsets, label_of, versions
from cudnn_actor.onnx.schemas import domain_of, schema_for

__all__ = ["problem_of", "problems_of", "unknown_versions"]

_NEWEST: Mapping[str, int] = {"": defs.onnx_opset_version(), "ai.onnx.ml": defs.onnx_ml_opset_version()}
"""The versions of ONNX's domains that the installed package onnx knows."""


def unknown_versions(file: ModelFile) -> list[str]:
    """Texts about versions of ONNX's operators that a model asks for and the installed onnx does not have."""
    imports = [("opset_import", file.opsets)]
    imports += [(f"function {each.name!r}", versions(each.opset_import)) for each in file.functions.values()]
    return [
        f"{where}: asks for version {opsets[domain]} of ONNX's operators{f' of {domain}' if domain else ''}, "
        + _known_versions(opsets[domain], newest)
        for where, opsets in imports
        for domain, newest in _NEWEST.items()
        if domain in opsets and not 1 <= opsets[domain] <= newest
    ]


def _known_versions(version: int, newest: int) -> str:
    if version < 1:
        return "which there is not: the first one is 1"
    return f"and the installed package onnx {onnx.__version__} knows up to {newest}; upgrade it"


def problems_of(file: ModelFile) -> list[str]:
    """The nodes that cannot be run with any dims, each once, and why.

    A node in a function of the model is named with the first call by which it is reached: each function is
    checked once, since there may be exponentially many ways to reach it.
    """
    found: list[str] = []
    reached: set[tuple[str, str, str]] = set()
    waiting = [("", node, file.opsets) for node in reversed(file.nodes)]
    while waiting:
        check_wanted()
        outer, node, opsets = waiting.pop()
        name = node.domain, node.op_type, node.overload
        if (own := file.functions.get(name)) is not None:
            if name not in reached:
                reached.add(name)
                label, inner = outer or f"{label_of(node)}, in ", versions(own.opset_import)
                waiting += [(label, each, inner) for each in reversed(own.node)]
        elif problem := problem_of(node, opsets, file):
            found.append(f"{outer}{label_of(node)}: {problem}")
    return found


def problem_of(node: onnx.NodeProto, opsets: Opsets, file: ModelFile) -> str:
    """Why a node cannot be run, whatever its inputs are; empty if it may be."""
    domain = domain_of(node)
    if (node.domain, node.op_type, node.overload) in file.functions or is_control(node):
        return ""
    seeded = file.random is not None or any(each.name == "seed" for each in node.attribute)
    if not domain and node.op_type in operators.RANDOM and not seeded:
        return operators.UNSEEDED
    schema, no_way = schema_for(node, opsets), operators.unknown(node, opsets)
    if schema is None:
        return no_way
    handler = operators.handler_of(domain, node.op_type, schema.since_version)
    known = handler is not None or has_body(schema) or (domain, node.op_type) == ("", "Constant")
    return "" if known else no_way
