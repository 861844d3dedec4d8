"""Measures the time that a watchdog was able to watch, without the time in which it did not run."""

from __future__ import annotations

__all__ = ["Watch", "look_every_s"]

_LOOKS_PER_LIMIT = 8
_SHORTEST_S = 0.02


def look_every_s(limit_s: float) -> float:
    """Seconds between two checks of a child that may go without progress for `limit_s`."""
    return max(limit_s / _LOOKS_PER_LIMIT, _SHORTEST_S)


class Watch:
    """Records the time that a watchdog slept beyond its planned pause.

    In that time its process or its machine was stopped, and so perhaps was everything that it watches. Checks
    are frequent, so every stop that matters is noticed: of a stop that begins and ends between two checks, at
    most that pause is counted. All times are of one clock, in seconds.
    """

    def __init__(self) -> None:
        self._due: float | None = None
        self._tolerance = 0.0
        self._lapses: list[tuple[float, float]] = []

    def sleep(self, now: float, pause_s: float | None, *, every_s: float) -> None:
        """Record that the next check is planned in `pause_s` (None: unplanned); checks come every
        `every_s`."""
        self._due = None if pause_s is None else now + pause_s
        self._tolerance = every_s / 4  # every thread wakes a little late: that is not a stop

    def wake(self, now: float) -> None:
        """Record that a check begins."""
        if self._due is not None and now - self._due > self._tolerance:
            self._lapses.append((self._due, now))
        self._due = None

    def forget_before(self, time: float) -> None:
        """Drop recorded lapses that ended before `time`: they are no longer needed."""
        if self._lapses:
            self._lapses = [lapse for lapse in self._lapses if lapse[1] > time]

    def watched_s(self, since: float, now: float) -> float:
        """Seconds watched from `since` to `now`, without the recorded lapses."""
        return now - since - sum(max(0.0, end - max(start, since)) for start, end in self._lapses)
