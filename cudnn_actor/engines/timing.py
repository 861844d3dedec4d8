"""How often a plan is run to be timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

__all__ = ["medians"]

_LONGEST_S = 0.25
_LEAST_RUNS, _MOST_RUNS = 3, 50


def medians(run: Callable[[], Sequence[float]]) -> list[float]:
    """The median of each number that `run` gives, of several calls; the first call does not count.

    They take 0.25 s in all, or as long as three calls take if that is more.
    """
    run()
    began = time.monotonic()
    found: list[Sequence[float]] = []
    while len(found) < _LEAST_RUNS or (len(found) < _MOST_RUNS and time.monotonic() - began < _LONGEST_S):
        found.append(run())
    return [statistics.median(column) for column in zip(*found, strict=True)]
