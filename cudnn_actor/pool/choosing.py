"""The choice of the member that gets a request: a pure function of the members' loads.

`Dispatching.begin` makes the same choice itself where all members are compared and the kind of the request is
known, which is the usual case.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

__all__ = ["Choose", "Loads", "least_time_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loads:
    """The loads of the members. The sequences are a router's own, and change with it, so do not keep them.

    Parameters
    ----------
    up
        The members that may be chosen, at least one. The members that have been up longest come first.
    device_us
        For each member: the estimated device time of its open requests, in microseconds.
    requests
        For each member: the number of its open requests.
    """

    up: Sequence[int]
    device_us: Sequence[int]
    requests: Sequence[Collection[Any]]


Choose: TypeAlias = Callable[[Loads, Random], int]
"""A function that chooses a member of `Loads.up`."""


def least_time_of(choices: int) -> Choose:
    """The way that looks at `choices` members at random, and takes the one with the least device time to do.

    A pool's router has 8: `routing.CHOICES`.

    If no more are up, it looks at all, in the order of `Loads.up`, and takes the first of equals: so a small
    quiet pool keeps one member busy, whose caches are warm. Two choices are far better than one
    (Mitzenmacher, "The power of two choices in randomized load balancing", 2001). A few more are better
    still, since the router of a pool knows all that it has given: `python -m benchmarks.routing` compares
    them.
    """

    def choose(loads: Loads, random: Random) -> int:
        up = loads.up if len(loads.up) <= choices else random.sample(loads.up, choices)
        return min(up, key=loads.device_us.__getitem__)

    return choose
