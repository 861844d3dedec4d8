"""Estimates of how long requests keep a device busy, as far as a pool can tell from outside. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

__all__ = ["Cost", "Costs"]

_KEPT = 4096
_FIRST_US = 1000
_WEIGHT_OF_NEWEST = 0.2
"""The weight of the newest observation in the average, 0 to 1."""


class Cost:
    """The estimate for one kind of request."""

    __slots__ = ("average_us", "is_used", "us")

    def __init__(self) -> None:
        self.us = _FIRST_US
        """Microseconds that a request of this kind may take; at least 1."""
        self.is_used = False
        """Whether it was used again since it was made, or since it was last spared."""
        self.average_us: float | None = None
        """The average of which `us` is the rounded value; None before the first answer."""

    def observe(self, took_us: float) -> None:
        """Note how long a request of this kind has taken."""
        if (average_us := self.average_us) is not None:
            took_us = average_us + _WEIGHT_OF_NEWEST * (took_us - average_us)
            self.is_used = True
        self.average_us = took_us
        self.us = round(took_us) or 1


class Costs:
    """An estimate for each kind of request, from the times at which such requests were given to members and
    answered.

    A member runs one request after the other. So a request has run since it was given to the member, or since
    the member's answer before its own, whichever was later.

    Parameters
    ----------
    members
        How many members there are.
    """

    def __init__(self, members: int) -> None:
        self.known: OrderedDict[Hashable, Cost] = OrderedDict()
        """The estimates of known kinds."""
        self.last_s = [float("-inf")] * members
        """For each member: the time of its last answer."""

    def of(self, kind: Hashable) -> Cost:
        """The estimate for requests of this kind, which later answers change."""
        cost = self.known.get(kind)
        if cost is None:
            return self._add(kind)
        cost.is_used = True
        return cost

    def _add(self, kind: Hashable) -> Cost:
        """Begin with a kind. If there are too many, one that has not been used for long is forgotten."""
        while len(self.known) >= _KEPT:
            oldest, cost = self.known.popitem(last=False)
            if cost.is_used:
                cost.is_used = False
                self.known[oldest] = cost  # spared: it is now the newest, and is looked at again last
        cost = self.known[kind] = Cost()
        return cost

    def note_answer(self, cost: Cost, member: int, given_s: float, now_s: float) -> None:
        """Note that a member has answered a request at `now_s` that it got at `given_s`, in seconds of one
        clock."""
        last_s = self.last_s[member]
        self.last_s[member] = now_s
        cost.observe((now_s - (given_s if given_s > last_s else last_s)) * 1e6)
