"""Estimates of how long members take to restart, from each member's own history. Pure."""

from __future__ import annotations

__all__ = ["RestartTimes"]

_WEIGHT_OF_NEWEST = 0.5
"""The weight of the newest observation in the average, 0 to 1."""


class RestartTimes:
    """Estimates of how long each member's worker takes to be replaced.

    For a member whose worker has never been replaced, the estimate is the time that its process took to
    start. That is longer, since a process also loads models.

    Parameters
    ----------
    members
        How many members there are.
    now_s
        When the members start, in seconds of one clock.
    """

    def __init__(self, members: int, now_s: float) -> None:
        self._began_s: list[float | None] = [now_s] * members
        """For each member: when its process or its worker began to restart; None while the member is up."""
        self._of_process = [True] * members
        """For each member: whether its latest restart was one of its process, not of its worker alone."""
        self.start_s: list[float | None] = [None] * members
        self._worker_s: list[float | None] = [None] * members

    def down(self, member: int, now_s: float, *, process: bool) -> None:
        """Note that a member begins to restart: its whole process, or its worker alone."""
        if self._began_s[member] is None or process:
            self._began_s[member], self._of_process[member] = now_s, process

    def up(self, member: int, now_s: float) -> None:
        """Note that a member is up."""
        began_s, self._began_s[member] = self._began_s[member], None
        if began_s is None:
            return
        known_s = self.start_s if self._of_process[member] else self._worker_s
        took_s, before_s = now_s - began_s, known_s[member]
        known_s[member] = took_s if before_s is None else before_s + _WEIGHT_OF_NEWEST * (took_s - before_s)

    def worker_s(self, member: int) -> float:
        """Seconds that a worker of the member may take to be replaced. The member has been up once."""
        of_worker_s, of_start_s = self._worker_s[member], self.start_s[member]
        assert of_start_s is not None, "its process has started"
        return of_start_s if of_worker_s is None else of_worker_s
