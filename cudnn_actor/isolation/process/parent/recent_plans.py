"""The plans that have run lately, with which a standby is warmed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cudnn_actor.broker.message_cache import CachedMessage, RecentPlan
from cudnn_actor.isolation.process.parent.in_flight import WINDOW, WorkerRequest

__all__ = ["MOST_RECENT", "RecentPlans"]

MOST_RECENT = WINDOW


class RecentPlans:
    """The recent plans of a service. Used with the host held.

    Parameters
    ----------
    kept
        Whether plans are noted at all: only if there is a standby.
    nbytes
        The most bytes, approximately, that the requests which run these plans may keep in memory.
    """

    def __init__(self, *, kept: bool, nbytes: int) -> None:
        self.kept = kept
        self.plans: dict[str, RecentPlan] = {}
        """The plans, by the digests of their graphs."""
        self.on_new: Callable[[], None] = lambda: None
        """Called when a plan is about to be added, before the host is freed."""
        self._nbytes = nbytes

    def note(self, request: WorkerRequest, cached: CachedMessage) -> None:
        """Note that a request has run a plan.

        The fast path calls this before its step, so it may be interrupted anywhere, and is then repeated.
        """
        plan = cached.recent
        if plan is not None and plan.kept:
            plan.last = request.number
            return
        if request.forgotten:
            return
        digest = cached.lowered.graph.digest()
        plan = self.plans.get(digest)
        if plan is None:
            plan = RecentPlan(cached.message, cached.nbytes)
            self._make_room(plan.nbytes)
            self.on_new()
        plan.last = request.number
        plan.kept = True
        self.plans[digest] = plan
        cached.recent = plan  # last: until then, the next call does all this again

    def forget(self, digests: Iterable[str]) -> None:
        """Drop the plans of these graphs, if they are there."""
        for digest in digests:
            plan = self.plans.get(digest)
            if plan is not None:
                plan.kept = False  # first: `note` must not take one that has gone for one that is there
                del self.plans[digest]

    def clear(self) -> None:
        """Drop all plans, because the service has ended."""
        self.plans.clear()

    def _make_room(self, nbytes: int) -> None:
        """Drop the plans that were used the longest ago, until one more of `nbytes` is within the bounds."""
        left = nbytes + sum(plan.nbytes for plan in self.plans.values())
        for digest in sorted(self.plans, key=lambda digest: self.plans[digest].last):
            if len(self.plans) < MOST_RECENT and left <= self._nbytes:
                return
            left -= self.plans[digest].nbytes
            self.forget((digest,))
