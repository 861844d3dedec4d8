"""The plan cache: evicts the least recently used, remembers refusals, counts builds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from cudnn_actor.engines.base import Plan
from cudnn_actor.memory.least_recent import LeastRecent
from cudnn_actor.protocol.errors import UnsupportedGraph
from cudnn_actor.protocol.messages.receipts import PlanCounts, PlanStatistics

__all__ = ["PLAN_CAPACITY", "PlanCache"]

PLAN_CAPACITY = 256
"""How many plans and refusals of graphs a service keeps by default: its option `plan_capacity`."""


class PlanCache:
    """Plans by the digest of their graph. Used by one thread only.

    The refusal of an unsupported graph is cached like a plan, so that the graph is not tried again for every
    request. A plan is built once, however many requests need it: `get` builds on the calling thread; `begin`
    and `end` mark the start and the end of a build on another thread.

    Parameters
    ----------
    capacity
        The most plans and refusals held; the least recently used is evicted first.
    nbytes
        The most bytes of host memory that these may take. The latest is kept, however large it is.
    """

    def __init__(self, capacity: int = PLAN_CAPACITY, nbytes: int = sys.maxsize) -> None:
        self._known: LeastRecent[str, Plan | UnsupportedGraph] = LeastRecent(most=capacity, nbytes=nbytes)
        self._building: dict[str, int] = {}
        """For each plan that is being built: how many requests wait for it, not counting the first."""
        self._hits = self._misses = 0
        self._build_ns = 0

    @property
    def capacity(self) -> int:
        """The most plans and refusals that are held."""
        return self._known.most

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, digest: str) -> bool:
        return digest in self._known

    def get(self, digest: str, build: Callable[[], Plan], nbytes: int = 0) -> Plan:
        """The plan for a graph; `build` makes it when it is not cached. Blocks while it builds.

        `nbytes`, here and below: the bytes of host memory, approximately, that a plan of the graph takes.

        Raises `UnsupportedGraph` if the graph is known or found to be unsupported. Any other error of
        `build` is passed on and not remembered.
        """
        known = self.find(digest)
        if known is None:
            self._misses += 1
            known = self._build(build)
            self._known.put(digest, known, nbytes)
        if isinstance(known, UnsupportedGraph):
            raise known.again()
        return known

    def find(self, digest: str) -> Plan | UnsupportedGraph | None:
        """The plan for a graph, or its refusal; None, not counted as a miss, if neither is cached."""
        known = self._known.get(digest)
        if known is not None:
            self._hits += 1
        return known

    def peek(self, digest: str) -> Plan | UnsupportedGraph | None:
        """The entry, as `find` returns it, but without counting this as a hit or a use."""
        return self._known.peek(digest)

    def begin(self, digest: str) -> bool:
        """Count a request for a plan that is not cached. True for the first, which must start the build."""
        if digest in self._building:
            self._building[digest] += 1
            return False
        self._misses += 1
        self._building[digest] = 0
        return True

    def end(self, digest: str, known: Plan | UnsupportedGraph | None, nbytes: int = 0) -> None:
        """Store the result of a build; None for a failure that may be temporary, which is not remembered.

        The waiting requests, except the first, count as hits if there is a result, else as misses.
        """
        joined = self._building.pop(digest)
        if known is None:
            self._misses += joined
            return
        self._hits += joined
        self._known.put(digest, known, nbytes)

    def replace(self, digest: str, plan: Plan, nbytes: int = 0) -> None:
        """Replace the cached plan with a better one."""
        self._known.put(digest, plan, nbytes)

    def drop(self, digest: str) -> None:
        """Drop a plan or a refusal, if it is there: its graph is not expected to come again."""
        self._known.pop(digest)

    def note_build(self, took_ns: int) -> None:
        """Add time that was spent on a build elsewhere, in nanoseconds."""
        self._build_ns += took_ns

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of the graphs whose plans or refusals are cached."""
        return tuple(self._known)

    @property
    def counts(self) -> PlanCounts:
        """The counts of the cache. Any thread may read them: each is a number that the cache's thread
        replaces."""
        return PlanCounts(
            size=len(self._known), hits=self._hits, misses=self._misses, evictions=self._known.evictions
        )

    def statistics(self) -> PlanStatistics:
        """Counters since the cache was made."""
        return PlanStatistics(
            size=len(self._known),
            capacity=self.capacity,
            hits=self._hits,
            misses=self._misses,
            evictions=self._known.evictions,
            refused=sum(isinstance(known, UnsupportedGraph) for known in self._known.values()),
            build_s=self._build_ns / 1e9,
            nbytes=self._known.nbytes,
            capacity_nbytes=self._known.limit,
        )

    def _build(self, build: Callable[[], Plan]) -> Plan | UnsupportedGraph:
        started = time.perf_counter_ns()
        try:
            return build()
        except UnsupportedGraph as refusal:
            return refusal.again()
        finally:
            self._build_ns += time.perf_counter_ns() - started
