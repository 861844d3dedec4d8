"""The table of operators: which function adds each of them to a graph, from which version on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.protocol.graph_builder import GraphBuilder

__all__ = ["HANDLERS", "REFUSED", "Handler", "handler_of", "operator"]

Handler = Callable[[Node, GraphBuilder], Result]
"""Adds a node to the graph and gives its results; raises `Declined` for what it cannot run."""

HANDLERS: dict[tuple[str, str], dict[int, Handler]] = {}
"""Domain and operator → handlers, by the version since which each of them is right."""


REFUSED: dict[tuple[str, str], str] = {}
"""Domain and operator → why no node of it can be run, nor the function that defines it."""


def operator(*names: str, since: int = 1, domain: str = "") -> Callable[[Any], Any]:
    """Decorate the handler of these operators, from a version of the domain on until another begins."""

    def decorate(handler: Any) -> Any:
        for name in names:
            HANDLERS.setdefault((domain, name), {})[since] = handler
        return handler

    return decorate


def handler_of(domain: str, op_type: str, version: int) -> Handler | None:
    """The handler of an operator that is as it is since `version`; None if there is none."""
    of = HANDLERS.get((domain, op_type), {})
    since = [each for each in of if each <= version]
    return of[max(since)] if since else None
