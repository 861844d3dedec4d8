"""How long requests keep a device busy, as far as a pool can tell from outside. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

__all__ = ["Costs"]

_KEPT = 4096
_FIRST_US = 1000.0
_WEIGHT = 0.2
"""Of the newest observation."""


class Costs:
    """An estimate of each kind of request, corrected by how long its requests took.

    A member runs one request after the other. So a request should take as long as what the member had to do
    when the request was given to it, its own time included. By what factor it took longer or shorter, its
    estimate was too small or too large, and that of each other kind likewise when one of its requests is
    answered. Where the estimates of all kinds are right, none changes.
    """

    def __init__(self) -> None:
        self._us: OrderedDict[Hashable, float] = OrderedDict()

    def estimate_us(self, kind: Hashable) -> int:
        """Microseconds that a request of this kind may take; at least 1."""
        return max(1, round(self._us.get(kind, _FIRST_US)))

    def learn(self, kind: Hashable, cost_us: int, ahead_us: int, took_us: float) -> None:
        """Note that a request took so many microseconds.

        `cost_us` is what was estimated of it, and `ahead_us` what its member had to do besides.
        """
        observed = cost_us * max(took_us, 1.0) / (cost_us + ahead_us)
        known = self._us.get(kind)
        self._us[kind] = observed if known is None else known + _WEIGHT * (observed - known)
        self._us.move_to_end(kind)
        if len(self._us) > _KEPT:
            self._us.popitem(last=False)
