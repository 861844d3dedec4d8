"""The graphs that the models of a service keep."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from cudnn_actor.protocol.graphs.named_graph import Graph

__all__ = ["KeptGraphs"]


class KeptGraphs:
    """Knows which graphs models keep, so that a model takes from the service's caches what no other needs.

    Several models with the same graphs are usual: they have other weights. Any thread, also within a
    finalizer: each change of the dict is one step.

    Parameters
    ----------
    forget
        Drops graphs, by their identities, and plans, by the digests of theirs, from the service's caches.
    limit
        About the bytes of host memory that a model's graphs may take.
    """

    def __init__(self, forget: Callable[[frozenset[str], frozenset[str]], None], limit: int) -> None:
        self._forget = forget
        self.limit = limit
        self._of_models: dict[int, Mapping[Any, Any]] = {}

    def add(self, kept: Mapping[Any, Any]) -> None:
        """Take up a model: what it keeps, by its own keys; each value has a `graph`, which may be None."""
        self._of_models[id(kept)] = kept

    def remove(self, kept: Mapping[Any, Any]) -> None:
        """Take out a model that keeps nothing any more. Idempotent."""
        self._of_models.pop(id(kept), None)

    def release(self, graphs: Collection[Graph], plans: Collection[str]) -> None:
        """Have graphs dropped that a model no longer keeps, and plans, by the digests of their graphs.

        What another model keeps stays.
        """
        if not graphs and not plans:  # after almost every run
            return
        others = [
            each.graph
            for kept in tuple(self._of_models.values())
            for each in tuple(kept.values())
            if each.graph is not None
        ]
        identities = {graph.identity for graph in graphs} - {graph.identity for graph in others}
        digests = set(plans) - {graph.body.digest() for graph in others} if plans else set()
        if identities or digests:
            self._forget(frozenset(identities), frozenset(digests))
