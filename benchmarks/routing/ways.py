"""The ways to choose a member that are compared."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from random import Random

from cudnn_actor.pool.choosing import Choose, Loads, least_time_of

__all__ = ["WAYS"]


def _by_chance(loads: Loads, random: Random) -> int:
    return loads.up[int(random.random() * len(loads.up))]


def _shortest_queue(loads: Loads, _random: Random) -> int:
    """Give the member with the fewest requests."""
    return min(loads.up, key=lambda member: len(loads.requests[member]))


def _round_robin() -> Choose:
    turn = itertools.count()
    return lambda loads, _random: loads.up[next(turn) % len(loads.up)]


WAYS: dict[str, Callable[[], Choose]] = {
    "random": lambda: _by_chance,
    "round robin": _round_robin,
    "shortest queue": lambda: _shortest_queue,
    "least time of 2": lambda: least_time_of(2),
    "least time of 4": lambda: least_time_of(4),
    "least time of 8": lambda: least_time_of(8),
    "least time of all": lambda: least_time_of(sys.maxsize),
}
"""By name: makes the function for one simulation."""
