"""Bytes kept for as long as the plan that they were restored to."""

from __future__ import annotations

import weakref

from cudnn_actor.engines.base import Plan

__all__ = ["KeptBytes"]


class KeptBytes:
    """Plans to bytes, by identity: plans need not be hashable, and equal ones are still two.

    The last reference to a plan may go on any thread, and its entry goes there and then: one `pop` of a dict,
    which the interpreter does not interrupt, before the plan's memory, and with it its id, can be another's.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Plan], bytes]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, plan: Plan, data: bytes) -> None:
        """Keep the bytes of a plan. A plan that cannot be referred to weakly keeps none."""
        number, kept = id(plan), self._kept
        try:
            reference = weakref.ref(plan, lambda _: kept.pop(number, None))
        except TypeError:
            return
        kept[number] = (reference, data)

    def of(self, plan: Plan) -> bytes | None:
        """What was kept for a plan."""
        kept = self._kept.get(id(plan))
        return None if kept is None else kept[1]
