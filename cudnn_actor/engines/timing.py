"""How a plan is timed: how often it is run, and what the timing itself takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

__all__ = ["medians", "without_overhead"]

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


def without_overhead(run_us: float, pieces_us: Sequence[float]) -> tuple[float, ...]:
    """The times of pieces without what timing them apart has added, which is the same for each.

    Together they took longer than a run that is timed as a whole: the difference is what was added.
    """
    added_us = max(0.0, sum(pieces_us) - run_us) / max(1, len(pieces_us))
    return tuple(max(0.0, piece_us - added_us) for piece_us in pieces_us)
