"""Results of functions of graphs are remembered."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["remember"]

R = TypeVar("R")


def remember(most: int) -> Callable[[Callable[[OperationGraph], R]], Callable[[OperationGraph], R]]:
    """Decorate a function of a graph: its last `most` results are remembered. Any thread may call it.

    Graphs count as one that are equal and have one digest: only the digest tells 0.0 from -0.0.
    """

    def decorate(function: Callable[[OperationGraph], R]) -> Callable[[OperationGraph], R]:
        @functools.lru_cache(most)
        def look_up(graph: OperationGraph, _: str) -> R:
            return function(graph)

        @functools.wraps(function)
        def of_graph(graph: OperationGraph) -> R:
            return look_up(graph, graph.digest())

        return of_graph

    return decorate
