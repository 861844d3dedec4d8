"""Estimates of how long requests keep a device busy, as far as a pool can tell from outside. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

__all__ = ["Costs"]

_KEPT = 4096
_FIRST_US = 1000.0
_WEIGHT_OF_NEWEST = 0.2
"""The weight of the newest observation in the average, 0 to 1."""


class Costs:
    """An estimate for each kind of request, from the times at which such requests were given to members and
    answered.

    A member runs one request after the other. So a request has run since it was given to the member, or since
    the member's answer before its own, whichever was later. (This is Lindley's recursion, read backwards.)

    Parameters
    ----------
    members
        How many members there are.
    """

    def __init__(self, members: int) -> None:
        self._us: OrderedDict[Hashable, float] = OrderedDict()
        self._last_s = [float("-inf")] * members
        """For each member: the time of its last answer."""

    def estimate_us(self, kind: Hashable) -> int:
        """Microseconds that a request of this kind may take; at least 1."""
        return max(1, round(self._us.get(kind, _FIRST_US)))

    def answered(self, kind: Hashable, member: int, *, given_s: float, now_s: float) -> None:
        """Note that a member has answered a request at `now_s` that it got at `given_s`, in seconds of one
        clock."""
        took_us = (now_s - max(given_s, self._last_s[member])) * 1e6
        self._last_s[member] = now_s
        known = self._us.get(kind)
        self._us[kind] = took_us if known is None else known + _WEIGHT_OF_NEWEST * (took_us - known)
        self._us.move_to_end(kind)
        if len(self._us) > _KEPT:
            self._us.popitem(last=False)
