"""How long requests keep a device busy, as far as a pool can tell from outside. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

__all__ = ["Costs"]

_KEPT = 4096
_FIRST_US = 1000.0
_WEIGHT_OF_NEWEST = 0.2
"""How much the newest observation counts in the average, 0 to 1."""


class Costs:
    """An estimate of each kind of request, from when requests of that kind were given and answered.

    A member runs one request after the other. So a request has run since it was given to the member, or since
    the answer before its own, whichever was later. (Lindley's recursion, read backwards.)

    Parameters
    ----------
    members
        How many there are.
    """

    def __init__(self, members: int) -> None:
        self._us: OrderedDict[Hashable, float] = OrderedDict()
        self._last_s = [float("-inf")] * members
        """For each member: when it answered last."""

    def estimate_us(self, kind: Hashable) -> int:
        """Microseconds that a request of this kind may take; at least 1."""
        return max(1, round(self._us.get(kind, _FIRST_US)))

    def answered(self, kind: Hashable, member: int, *, given_s: float, now_s: float) -> None:
        """Note that a member answers a request at `now_s` that it got at `given_s`: seconds of one clock."""
        took_us = (now_s - max(given_s, self._last_s[member])) * 1e6
        self._last_s[member] = now_s
        known = self._us.get(kind)
        self._us[kind] = took_us if known is None else known + _WEIGHT_OF_NEWEST * (took_us - known)
        self._us.move_to_end(kind)
        if len(self._us) > _KEPT:
            self._us.popitem(last=False)
