"""The graphs that the models of a service keep."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from cudnn_actor.protocol.graphs.named_graph import Graph

__all__ = ["KeptGraphs"]


_NEVER = object()


class _Keeping(Protocol):
    """The part of `Keeping` that is used here."""

    def idle(self) -> list[tuple[int, Any]]:
        """The graphs that have places and no runs. The number with each is `Kept.used`."""

    def give_back_places(self, kept: Any) -> int:
        """Give the places of a graph back, unless it has runs. Returns the places' bytes."""


class KeptGraphs:
    """Knows which graphs the models of a service keep.

    So a graph that one model drops is dropped from the service's caches only if no other model needs it. And
    the places of idle graphs, which are their buffers for inputs and outputs, stay within one limit.

    Several models often have the same graphs with different weights. Any thread may call the methods, also
    within a finalizer: each change of a dict is one step.

    Parameters
    ----------
    forget
        A function that drops graphs by their identities, and plans by the digests of their graphs, from the
        service's caches.
    limit
        The bytes of host memory, approximately, that a model's graphs may take.
    deployed_limit
        A function that says how many bytes the places of idle graphs may take now; None for no limit.
    """

    def __init__(
        self,
        forget: Callable[[frozenset[str], frozenset[str]], None],
        limit: int,
        deployed_limit: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._forget = forget
        self.limit = limit
        self._deployed_limit = deployed_limit
        self._of_models: dict[int, Mapping[Any, Any]] = {}
        self._keepings: dict[int, weakref.ref[_Keeping]] = {}
        self._placed = 0
        """The bytes of the places of all models, without the changes in `_changes`."""
        self._changes: deque[int] = deque()
        self._noted: object = None
        """Replaced behind each change of `_placed`."""
        self._within: object = _NEVER
        """The `_noted` of the moment when the places were found to be within the limit. The limit does not
        change while there are places."""
        self._counting = threading.Lock()
        self._clock = itertools.count(1)

    def add(self, kept: Mapping[Any, Any]) -> None:
        """Add a model's dict of kept graphs, which has the model's own keys. Each value has `graphs`."""
        self._of_models[id(kept)] = kept

    def watch(self, keeping: _Keeping) -> None:
        """Let `trim` take places of the model's idle graphs, as long as `keeping` lives."""
        key = id(keeping)
        self._keepings[key] = weakref.ref(keeping, lambda _: self._keepings.pop(key, None))

    def remove(self, kept: Mapping[Any, Any]) -> None:
        """Remove a model that keeps nothing any more. Idempotent."""
        self._of_models.pop(id(kept), None)

    def tick(self) -> int:
        """A number above all earlier ones. Such numbers order graphs by when they were used."""
        return next(self._clock)

    def note_places(self, nbytes: int) -> None:
        """Note that a graph has got places of `nbytes` bytes, or, if that is negative, has given them
        back."""
        self._changes.append(nbytes)
        self._noted = object()

    def trim(self, *, at_least: int = 0) -> bool:
        """Give back places of idle graphs, the least recently used first, until the rest is within the limit.

        At least `at_least` bytes are given back, if idle graphs have them. Returns whether any were. The
        caller must hold no lock.

        A graph with runs in flight keeps its places, and they count towards the limit.
        """
        if (noted := self._noted) is self._within and at_least <= 0:  # behind nearly every run
            return False
        limit, dropped = self._deployed_limit(), False
        if limit is None or self._total() <= limit:
            # `noted` was read before the total: after a later change, `_noted` is another object.
            self._within = noted
        while at_least > 0 or (limit is not None and self._total() > limit):
            freed = self._drop_oldest()
            if not freed:
                break
            dropped, at_least = True, at_least - freed
        return dropped

    def _total(self) -> int:
        """Bytes of the places of all models. While another thread counts them, they may be a little old."""
        # A signal handler may interrupt this, and ask too.
        if self._changes and self._counting.acquire(blocking=False):
            try:
                while self._changes:
                    self._placed += self._changes.popleft()
            finally:
                self._counting.release()
        return self._placed

    def _drop_oldest(self) -> int:
        """Give back the places of the least recently used idle graph. Returns their bytes; 0 if no graph is
        idle."""
        alive = [keeping for ref in tuple(self._keepings.values()) if (keeping := ref()) is not None]
        idle = [(used, keeping, kept) for keeping in alive for used, kept in keeping.idle()]
        for _, keeping, kept in sorted(idle, key=lambda each: each[0]):
            if freed := keeping.give_back_places(kept):
                return freed
        return 0

    def release(self, graphs: Collection[Graph], plans: Collection[str]) -> None:
        """Drop graphs that a model no longer keeps, and plans (by the digests of their graphs), from the
        service's caches. Graphs and plans that another model keeps stay.
        """
        if not graphs and not plans:  # after almost every run
            return
        still_kept = [
            graph
            for kept in tuple(self._of_models.values())
            for each in tuple(kept.values())
            for graph in each.graphs
        ]
        identities = {graph.identity for graph in graphs} - {graph.identity for graph in still_kept}
        digests = set(plans) - {graph.body.digest() for graph in still_kept} if plans else set()
        if identities or digests:
            self._forget(frozenset(identities), frozenset(digests))
