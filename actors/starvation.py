"""When an event loop that never idles should release the GIL for a moment.

A busy loop releases the GIL at each `select(0)`, and takes it back a
microsecond later. The release wakes a thread that waits for the GIL on another
core. That thread needs some 30 µs to wake up, and finds the GIL taken. Worse,
each such wake-up restarts its switch interval (`take_gil` in CPython's
ceval_gil), so it never gets to ask the holder to drop the GIL. It waits until it
is lucky, for 0.05 to 1 s each time (docs/performance.md has the measurement).
The remedy is to release the GIL for longer than a wake-up takes.

So while replies are awaited, the loop checks now and then, and releases the GIL
when both hold:

- no reply came for most of a millisecond: while replies come in, no thread starves;
- the loop's thread was computing for over three quarters of the time since the last check: a loop that
  idles releases the GIL for long enough by itself.

An actor that needs no GIL at the moment, deep in a long convolution, looks the
same. So checks that do not help become rare, and each release is short: it costs
such a loop at most 0.1 ms in 2 ms. No check is made when no reply is awaited. If a
message is sent soon after that, the checks go on as rarely as they had become: a
caller that sends one message after the other has moments without any.
"""

from __future__ import annotations

__all__ = ["FIRST_LOOK_S", "LET_GO_S", "StarvationWatch"]

FIRST_LOOK_S = 0.001
"""Seconds between checks. uvloop's timers count whole milliseconds, so a shorter time would be zero."""
LET_GO_S = 0.00005
"""How long to release the GIL: longer than a thread on another core takes to wake. Timer slack doubles it."""
_SILENCE_S = 0.8 * FIRST_LOOK_S
_BUSY = 0.75
_RAREST_BUSY_S = 0.002
_RAREST_IDLE_S = 0.016
_FORGET_S = 0.1
"""The seconds without a check after which earlier checks say nothing about the loop any more."""


class StarvationWatch:
    """Decides, from clock readings, whether to release the GIL and when to check again.

    Parameters
    ----------
    now
        Seconds of a monotonic clock.
    computed
        CPU seconds that the loop's thread has used.
    """

    def __init__(self, now: float, computed: float) -> None:
        self._now = now
        self._computed = computed
        self._pause = FIRST_LOOK_S
        self._let_go_at = now

    @property
    def pause(self) -> float:
        """The seconds until the next check."""
        return self._pause

    def resume(self, now: float, computed: float) -> bool:
        """Go on behind a time in which no reply was awaited. Returns False if that was too long ago.

        Parameters
        ----------
        now, computed
            As in the constructor.
        """
        if now - self._now > _FORGET_S:
            return False
        self._now, self._computed = now, computed
        return True

    def look(self, now: float, computed: float, last_reply: float) -> tuple[bool, float]:
        """Whether to release the GIL, and the seconds until the next check.

        Parameters
        ----------
        now, computed
            As in the constructor.
        last_reply
            When the last reply came.
        """
        busy = computed - self._computed > _BUSY * (now - self._now)
        starving = busy and now - last_reply > _SILENCE_S
        helped = last_reply > self._let_go_at
        self._now, self._computed = now, computed
        if starving:
            self._let_go_at = now
            self._pause = FIRST_LOOK_S if helped else min(2 * self._pause, _RAREST_BUSY_S)
        elif busy:
            self._pause = FIRST_LOOK_S
        else:
            self._pause = min(2 * self._pause, _RAREST_IDLE_S)
        return starving, self._pause
