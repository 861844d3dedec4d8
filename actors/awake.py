"""Keeps an event loop awake for a short while."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import select
from collections.abc import Callable

__all__ = ["Awake", "look_at"]

_LOOKS = 24
"""How often the loop looks for what is near before its other callbacks have their turn: some 15 us. From one
of its callbacks to the next, the loop takes some 10 us, in which nothing is seen."""


def look_at(descriptor: int) -> Callable[[], object]:
    """A function that returns something true if the descriptor can be read, without waiting."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return functools.partial(poll.poll, 0)


class Awake:
    """Keeps an event loop awake while something is near. On the loop's thread.

    A sleeping thread takes 20 to 60 us to be woken up, and its core is slower for a while. A loop that has a
    callback to run polls its descriptors and does not sleep, so a callback that does nothing else keeps it
    awake. Other callbacks have their turns in between, and other threads the lock.

    The callback looks for what is near itself, a few times in each turn, because the loop takes some
    microseconds for a turn and from the event to the callback.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._context = contextvars.copy_context()
        self._until_s = 0.0
        self._number = 0
        """The number of the callback that goes on. An earlier one, which was lost or comes late, ends."""
        self._goes_on: Callable[[], bool] = bool
        self._look_for: Callable[[], bool] = bool

    @property
    def stays(self) -> bool:
        """Whether the loop stays awake now. If its callback was lost, also until the time is over."""
        return self._loop.time() < self._until_s

    def stay(
        self, seconds: float, goes_on: Callable[[], bool], look: Callable[[], bool] | None = None
    ) -> None:
        """Stay awake as long as `goes_on` returns True, for `seconds` at most.

        `look`: looks once for what is near, handles it, and returns whether it was there; None for nothing of
        the kind. It runs in the context in which this object was made.

        This replaces what an earlier call has asked for.
        """
        now_s = self._loop.time()
        sleeps, self._until_s = now_s >= self._until_s, now_s + seconds
        self._goes_on, self._look_for = goes_on, look or bool
        if sleeps:
            self._number += 1
            self._loop.call_soon(self._turn, self._number, context=self._context)

    def _turn(self, number: int) -> None:
        if number != self._number:
            return
        look, time = self._look_for, self._loop.time
        try:
            if self._goes_on():
                for _ in range(_LOOKS):
                    # Each look may give the lock to another thread, which keeps it for 5 ms if it computes.
                    if time() >= self._until_s or look():
                        break
        finally:  # also if what was found raises
            if number == self._number:
                self._turn_again()

    def _turn_again(self) -> None:
        """Let the loop call `_turn` once more, if there is a reason left. Else what was found has the next
        turn."""
        if self._goes_on() and self._loop.time() < self._until_s:
            self._loop.call_soon(self._turn, self._number, context=self._context)
        else:
            self._until_s, self._goes_on, self._look_for = 0.0, bool, bool
