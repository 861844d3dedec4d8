"""What a watchdog counts: the time in which it could have looked, and no other."""

from __future__ import annotations

__all__ = ["Watch", "look_every_s"]

_LOOKS_PER_LIMIT = 8
_SHORTEST_S = 0.02


def look_every_s(limit_s: float) -> float:
    """Seconds between two looks at a child that may make no progress for `limit_s`."""
    return max(limit_s / _LOOKS_PER_LIMIT, _SHORTEST_S)


class Watch:
    """Notes the time that a watchdog has slept beyond what it meant to.

    Its process was stopped then, or its machine was, and so perhaps were those that it watches. The looks
    come often, so a stop that is worth noticing is noticed whenever it comes: of one that begins and ends
    between two looks at most that pause is counted. All times are of one clock, in seconds.
    """

    def __init__(self) -> None:
        self._due: float | None = None
        self._tolerance = 0.0
        self._lapses: list[tuple[float, float]] = []

    def sleep(self, now: float, pause_s: float | None, *, every_s: float) -> None:
        """Note that it looks again in `pause_s` (None: whenever), where looks come each `every_s`."""
        self._due = None if pause_s is None else now + pause_s
        self._tolerance = every_s / 4  # any thread is late by a little: that is no stop

    def wake(self, now: float) -> None:
        """Note that it looks."""
        if self._due is not None and now - self._due > self._tolerance:
            self._lapses.append((self._due, now))
        self._due = None

    def forget_before(self, time: float) -> None:
        """Drop what has ended by then: nobody is asked about from before."""
        if self._lapses:
            self._lapses = [lapse for lapse in self._lapses if lapse[1] > time]

    def watched_s(self, since: float, now: float) -> float:
        """How long it has watched since then, without what it slept through."""
        return now - since - sum(max(0.0, end - max(start, since)) for start, end in self._lapses)
