"""The plan cache: least recently used first out, refusals remembered, builds counted."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from cudnn_actor.engines.base import Plan
from cudnn_actor.protocol.errors import UnsupportedGraph
from cudnn_actor.protocol.receipts import PlanStatistics

__all__ = ["CAPACITY", "PlanCache"]

CAPACITY = 256


class PlanCache:
    """Plans by the digest of their graph. One thread's own.

    A graph that cannot be run is remembered too, in the same order, so that it is not tried again for
    every request. What is being built elsewhere is known as such, and built once, however many ask: `get`
    builds on the calling thread, `begin` and `end` frame a build on another.

    Parameters
    ----------
    capacity
        Plans and refusals held; the least recently used goes first.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._known: OrderedDict[str, Plan | UnsupportedGraph] = OrderedDict()
        self._building: dict[str, int] = {}
        """How many have asked for a plan that is being built, besides the first."""
        self._hits = self._misses = self._evictions = 0
        self._build_ns = 0
        self._last_run_ns: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, digest: str) -> bool:
        return digest in self._known

    def get(self, digest: str, build: Callable[[], Plan]) -> Plan:
        """The plan for a graph; `build` makes it when it is not known. Blocks while it does.

        Raises `UnsupportedGraph` when the graph is known, or found, to be one. Any other error of
        `build` passes through and is not remembered.
        """
        known = self.find(digest)
        if known is None:
            self._misses += 1
            known = self._build(build)
            self._remember(digest, known)
        if isinstance(known, UnsupportedGraph):
            raise known.again()
        return known

    def find(self, digest: str) -> Plan | UnsupportedGraph | None:
        """The plan for a graph, or that it has none; None where that is not known, which is no miss yet."""
        known = self._known.get(digest)
        if known is not None:
            self._hits += 1
            self._known.move_to_end(digest)
        return known

    def peek(self, digest: str) -> Plan | UnsupportedGraph | None:
        """What `find` gives, as no use of it."""
        return self._known.get(digest)

    def begin(self, digest: str) -> bool:
        """Count one who asks for a plan that is not known; whether it is the first: it has it built."""
        if digest in self._building:
            self._building[digest] += 1
            return False
        self._misses += 1
        self._building[digest] = 0
        return True

    def end(self, digest: str, known: Plan | UnsupportedGraph | None) -> None:
        """Publish what a build has come to; None for a failure that may pass, which is not remembered.

        For those who joined the first it was as good as there, or as good as missing.
        """
        joined = self._building.pop(digest)
        if known is None:
            self._misses += joined
            return
        self._hits += joined
        self._remember(digest, known)

    def replace(self, digest: str, plan: Plan) -> None:
        """Put a better plan in the place of the one that is known."""
        self._remember(digest, plan)

    def note_build(self, took_ns: int) -> None:
        """Count time that was spent on building elsewhere, in nanoseconds."""
        self._build_ns += took_ns

    def note_run(self, tag: str, ran_ns: int) -> None:
        """Remember how long a run took, in nanoseconds."""
        if len(self._last_run_ns) > 2 * self._capacity and tag not in self._last_run_ns:
            self._last_run_ns.clear()  # most are of plans that are long gone; the others are soon known again
        self._last_run_ns[tag] = ran_ns

    def last_run_ns(self, tag: str) -> int:
        """How long a plan's last run took, in nanoseconds; 0 where that is not known."""
        return self._last_run_ns.get(tag, 0)

    def statistics(self) -> PlanStatistics:
        """Counters since the cache was made."""
        return PlanStatistics(
            size=len(self._known),
            capacity=self._capacity,
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            refused=sum(isinstance(known, UnsupportedGraph) for known in self._known.values()),
            build_s=self._build_ns / 1e9,
        )

    def _build(self, build: Callable[[], Plan]) -> Plan | UnsupportedGraph:
        started = time.perf_counter_ns()
        try:
            return build()
        except UnsupportedGraph as refusal:
            return refusal.again()
        finally:
            self._build_ns += time.perf_counter_ns() - started

    def _remember(self, digest: str, known: Plan | UnsupportedGraph) -> None:
        self._known[digest] = known
        self._known.move_to_end(digest)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)
            self._evictions += 1
