"""Decides since when a worker has made no progress with the work that its parent waits for. Pure.

The frames that the parent has sent without an answer decide whether there is work, because a worker that has
lost a frame, or has received half of one, believes that it is idle. So the time is counted from when the
oldest unanswered frame was sent or, if later, from when the frame before it was answered. Two claims of the
worker make the time later:

- The progress of a build or of tuning, always: a request may wait for a plan while later ones overtake it.
- The progress of its other work, unless the oldest unanswered frame is **lost**. It is lost if the worker has
  finished a request that was sent later than that frame, and later than the last progress of a build. The
  reason: a worker reads frames, and begins requests, in the order in which they were sent. Only requests that
  wait for a plan begin later, but before the worker reads on. And requests finish in the order in which they
  began. So the work that the worker claims is not what the parent waits for.

All times are `time.monotonic()` seconds, which all processes of the machine share. 0 stands for never.
"""

from __future__ import annotations

from typing import NamedTuple

from cudnn_actor.isolation.process.parent.in_flight import Claims, Oldest

__all__ = ["Claimed", "FirstSeen", "Wait", "stalled_since", "unless_unread"]


class Wait(NamedTuple):
    """The frame that the parent waits for.

    Parameters
    ----------
    since_s
        When the frame became the oldest unanswered one.
    before_s
        The worker handles the frame before all frames that are sent after this time: when the frame was sent
        or, if its request has begun, when the parent first noticed that.
    """

    since_s: float
    before_s: float


class Claimed(NamedTuple):
    """The progress that a worker claims.

    Parameters
    ----------
    since_s
        Since when its work has made no progress; without work, since when it has been idle.
    built_s
        When a build or tuning last made progress, or ended.
    """

    since_s: float
    built_s: float


def stalled_since(wait: Wait, answered_s: float, claimed: Claimed) -> float:
    """Since when the worker has made no progress with the work that the parent waits for.

    `answered_s`: when the parent sent the latest of the requests that the worker has finished.
    """
    is_lost = answered_s > max(wait.before_s, claimed.built_s)
    return max(wait.since_s, claimed.built_s, 0.0 if is_lost else claimed.since_s)


def unless_unread(since_s: float, read_s: float, now: float, *, limit_s: float, every_s: float) -> float:
    """`since_s` or, if an answer may have come that the parent has not read, a time too recent for a hang.

    Not `now` in that case: the watchdog would drop its record of the times at which it was stopped itself,
    and would count them as time without progress after the answers have been read.

    Parameters
    ----------
    since_s
        Since when the worker has made no progress.
    read_s
        When the parent had last read all that the worker had sent.
    limit_s, every_s
        How long it may go without progress, and how often the watchdog looks and has the parent read.
    """
    is_proven = read_s >= since_s + limit_s and read_s >= now - 2 * every_s
    return since_s if is_proven else max(since_s, now - limit_s + every_s / 4)


class FirstSeen:
    """Remembers when the oldest request in flight was first seen to have begun."""

    def __init__(self) -> None:
        self._request: Oldest | None = None
        self._at_s = 0.0

    def wait_for(self, oldest: Oldest, claims: Claims, now: float) -> Wait:
        """The wait for this request at the time `now`."""
        if oldest != self._request and claims.has_begun(oldest.place, oldest.number):
            self._request, self._at_s = oldest, now
        return Wait(oldest.since_s, self._at_s if oldest == self._request else oldest.sent_s)
