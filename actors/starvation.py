"""When an event loop that never idles should let go of the GIL for a moment.

A busy loop lets go of the GIL at each `select(0)`, and takes it back a
microsecond later. A thread that waits for it on another core is woken by that,
needs some 30 µs to get there, and finds the GIL taken. Worse, each such wake-up
starts its switch interval anew (`take_gil` in CPython's ceval_gil), so it never
gets to asking the holder to drop it: it waits until it is lucky, for 0.05 to
1 s a time (docs/performance.md has the measurement). The remedy is to let go
for longer than a wake-up takes.

So while replies are awaited, the loop looks now and then, and lets go when both
hold:

- no reply came for most of a millisecond: with replies coming in, nobody starves;
- the loop's thread was computing for over three quarters of the time since the last look: one that
  idles gives the GIL away for long enough by itself.

What cannot be told apart is an actor that needs no GIL at the moment, deep in a
long convolution. So looks that do not help become rare, and letting go is short:
it costs such a loop 0.1 ms in 2 at most. No look is made when no reply is awaited.
"""

from __future__ import annotations

__all__ = ["FIRST_LOOK_S", "LET_GO_S", "StarvationWatch"]

FIRST_LOOK_S = 0.001
"""Between looks. uvloop's timers count whole milliseconds, so less would be none at all."""
LET_GO_S = 0.00005
"""How long to let go: longer than another core's thread takes to wake up. Timer slack doubles it."""
_SILENCE_S = 0.8 * FIRST_LOOK_S
_BUSY = 0.75
_RAREST_BUSY_S = 0.002
_RAREST_IDLE_S = 0.016


class StarvationWatch:
    """The decision: clocks go in, what to do and when to look again come out.

    Parameters
    ----------
    now
        Seconds of a monotonic clock.
    computed
        Seconds that the loop's thread has computed.
    """

    def __init__(self, now: float, computed: float) -> None:
        self._now = now
        self._computed = computed
        self._pause = FIRST_LOOK_S
        self._let_go_at = now

    def look(self, now: float, computed: float, last_reply: float) -> tuple[bool, float]:
        """Whether to let go of the GIL, and seconds until the next look.

        Parameters
        ----------
        now, computed
            As at the start.
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
