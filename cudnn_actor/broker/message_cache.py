"""A cache of the graphs, slots and encoded bodies that were computed for messages, for the next time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from cudnn_actor.memory import Slot
from cudnn_actor.memory.least_recent import LeastRecent
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.messages.lowering import Lowered, Signature, lower, signature
from cudnn_actor.protocol.messages.messages import Compute, GraphRun, RunGraph, RunLoop
from cudnn_actor.protocol.messages.receipts import CacheStatistics

__all__ = ["Bound", "CachedMessage", "MessageCache", "RecentPlan"]

_MOST_SIGNATURES, _MOST_MESSAGES = 4096, 1024
_MESSAGE_BYTES = 4096
"""The bytes, approximately, that an entry takes in addition to its graph: the message, its references and
slots, its encoded body."""


class Bound(msgspec.Struct, eq=False, weakref=True):
    """The slots and scalars that a message runs on. Each slot keeps or drops the engine's binding itself."""

    epoch: int
    slots: Sequence[Slot]
    scalars: Sequence[float]
    has_bindings: bool = False
    """Whether each slot has its binding, which it then keeps while the epoch lasts. Written by the runner."""


class RecentPlan(msgspec.Struct, eq=False):
    """A plan that has run lately, with which another worker is warmed.

    Parameters
    ----------
    message
        A request that runs it.
    nbytes
        The bytes, approximately, that the message keeps in memory.
    """

    message: Compute
    nbytes: int
    last: int = 0
    """The number of the last request that ran it."""
    kept: bool = True
    """Whether it is still among the recent ones."""


class CachedMessage(msgspec.Struct, eq=False, weakref=True):
    """A message that has been sent, with what was computed for it, to be reused when it is sent again.

    Messages are immutable, so only the end of a buffer can make a cached piece wrong. Each piece that depends
    on buffers carries the epoch (`MemoryTable.epoch`, which changes when a buffer ends, and which no other
    table of the process has), and is valid while the table still has that epoch. The epoch is read before the
    piece is computed. So if a buffer ends in between, the piece carries an old epoch and is computed again;
    it never carries a new epoch with old contents.
    """

    message: Compute
    lowered: Lowered
    bound: Bound | None = None
    """The message's slots. Senders and the live incarnation write it, on any thread. In the parent, all
    values ever written have the same slots, each of which is its reference's as long as the reference is
    live."""
    body: bytes | None = None
    """The message as bytes, for a worker process."""
    recent: RecentPlan | None = None
    """The message's plan, as it was last noted for the warming of another worker."""

    @property
    def nbytes(self) -> int:
        """The bytes, approximately, that the entry keeps in memory, if no other entry keeps its graph."""
        return _MESSAGE_BYTES + _graph_bytes(self.message, self.lowered)


class MessageCache:
    """Caches of pure functions, which any thread fills: a race only computes the same result twice.

    Several entries may share a graph. Each counts it, so the caches never keep more than their limits.

    Parameters
    ----------
    nbytes
        Bytes for each of the two caches: the one by message and the one by signature.
    check_graph
        This is called with a graph that is not known yet. It raises `InvalidRequest` if the graph is too
        large.
    """

    def __init__(self, nbytes: int, check_graph: Callable[[Graph], None]) -> None:
        self._check_graph = check_graph
        self._lowered: LeastRecent[Signature, Lowered] = LeastRecent(most=_MOST_SIGNATURES, nbytes=nbytes)
        self._messages: LeastRecent[int, CachedMessage] = LeastRecent(most=_MOST_MESSAGES, nbytes=nbytes)

    def of(self, message: Compute) -> CachedMessage:
        """The entry of a message. Raises `InvalidRequest`."""
        known = self._messages.get(id(message))
        if known is None or known.message is not message:
            known = self.once(message)
            # the entry keeps the message alive: no other gets its id
            self._messages.put(id(message), known, known.nbytes)
        return known

    def once(self, message: Compute) -> CachedMessage:
        """A new entry for a message, which only its caller keeps. Raises `InvalidRequest`."""
        return CachedMessage(message, self._lower(message))

    def _lower(self, message: Compute) -> Lowered:
        if (graph := _graph_of(message)) is not None:
            self._check_graph(graph)
        try:
            key = signature(message)
            known = self._lowered.get(key)
        except (AttributeError, TypeError):
            return lower(message)  # raises the error that names the wrong field
        if known is None:
            known = lower(message)
            self._lowered.put(key, known, _MESSAGE_BYTES + _graph_bytes(message, known))
        return known

    def forget(self, identities: Collection[str]) -> None:
        """Drop the entries of graphs with these identities."""
        for message in self._messages.values():
            of = message.message
            if (graph := _graph_of(of)) is not None and graph.identity in identities:
                self._messages.pop(id(of))
        for key in self._lowered:
            if key[0] in (RunGraph, RunLoop) and key[1] in identities:
                self._lowered.pop(key)

    def clear(self) -> None:
        """Drop everything: the service has ended."""
        self._messages.clear()
        self._lowered.clear()

    def statistics(self) -> CacheStatistics:
        """The counts and bytes of the entries that are kept now."""
        caches: tuple[LeastRecent[Any, Any], ...] = (self._lowered, self._messages)
        return CacheStatistics(
            size=sum(map(len, caches)),
            nbytes=sum(cache.nbytes for cache in caches),
            capacity_nbytes=sum(cache.limit for cache in caches),
            evictions=sum(cache.evictions for cache in caches),
        )


def _graph_of(message: Any) -> Graph | None:
    """The graph with names that a message runs. None if it has none, or something else in its place."""
    graph = getattr(message, "graph", None) if isinstance(message, GraphRun) else None
    return graph if isinstance(graph, Graph) else None


def _graph_bytes(message: Any, lowered: Lowered) -> int:
    return (_graph_of(message) or lowered.graph).footprint
