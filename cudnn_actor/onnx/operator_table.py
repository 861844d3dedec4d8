"""The table of operators: which function adds each of them to a graph, from which version on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.schemas import domain_of, of_onnx
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder

__all__ = ["HANDLERS", "NO_WAY", "RANDOM", "UNSEEDED", "Handler", "handler_of", "operator", "unknown"]

Handler = Callable[[Node, GraphBuilder], Result]
"""A function that adds a node to the graph and returns its results. It raises `Declined` for a node that it
cannot run."""

HANDLERS: dict[tuple[str, str], dict[int, Handler]] = {}
"""Domain and operator → handlers, by the version since which each of them is right."""


NO_WAY = "no operator of that name and version is known here, and ONNX defines it by no function"
"""The reason for which a node with an unknown operator cannot be run. A hint may follow."""

RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Operators of ONNX that draw random numbers, whatever their inputs are."""
UNSEEDED = (
    "draws random numbers from no seed: load the model with one, as in gpu.load(model, random=1) or "
    "`cudnn-actor run --random 1`"
)
"""The reason for which a node of such an operator cannot be run without a seed."""


def operator(*names: str, since: int = 1, domain: str = "") -> Callable[[Any], Any]:
    """Decorate the handler of these operators. It handles them from version `since` of the domain on, up to
    the version at which another handler begins."""

    def decorate(handler: Any) -> Any:
        for name in names:
            HANDLERS.setdefault((domain, name), {})[since] = handler
        return handler

    return decorate


def handler_of(domain: str, op_type: str, version: int) -> Handler | None:
    """The handler of an operator as its domain has defined it since `version`; None if there is none."""
    of = HANDLERS.get((domain, op_type), {})
    since = [each for each in of if each <= version]
    return of[max(since)] if since else None


def unknown(node: onnx.NodeProto, opsets: Mapping[str, int]) -> str:
    """The text that says why a node of an operator without a handler cannot be run, and what can be done
    about it."""
    domain = domain_of(node)
    version = opsets.get(domain, 1)
    later = [since for since in HANDLERS.get((domain, node.op_type), {}) if since > version]
    if later and of_onnx(node.op_type, version, domain) is not None:
        return (
            f"{NO_WAY}; it is known from version {min(later)} of ONNX's operators on, and the model asks for "
            f"{version}: convert it with onnx.version_converter.convert_version(model, 21)"
        )
    if domain.startswith("com.microsoft") or domain == "ai.onnxruntime":
        return (
            f"{NO_WAY}; ONNX Runtime's optimiser or quantiser wrote it: export the model without its "
            "optimisations (ORT_DISABLE_ALL or ORT_ENABLE_BASIC), or quantised with QuantFormat.QDQ"
        )
    return NO_WAY
