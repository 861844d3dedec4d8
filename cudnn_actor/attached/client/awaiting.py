"""Keeps the event loop of an attached process awake while an answer is near, where it may use enough cores.

It is so near the end of a longer run on a device, of which the service's process tells, as with a service of
this process. And it is so for a short request that is the only one, if the last one was answered soon: such a
request passes through another process, so that a loop that sleeps is woken up twice as often on its way.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from cudnn_actor.actors.awake import Awake, look_at
from cudnn_actor.isolation.process.cores import ANSWER_S

__all__ = ["Awaiting"]


class Awaiting:
    """Keeps the loop that owns a connection awake. Used on that loop.

    Parameters
    ----------
    loop
        The event loop.
    descriptor
        The connection.
    read
        A function that reads the connection, and delivers the answers that have come.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int, read: Callable[[], None]) -> None:
        self._loop, self._read = loop, read
        self._looks = look_at(descriptor)
        self._awake = Awake(loop)
        self._awaits = False
        """Whether any request is in flight."""
        self._sent_alone_s = -math.inf
        """When the only request in flight was sent; minus infinity if there are several."""
        self._is_soon = False
        """Whether the last answer came within `ANSWER_S` after its request, which was the only one."""

    def note_sent(self, in_flight: int) -> None:
        """Note that requests were sent, and how many are in flight now."""
        self._awaits = in_flight > 0
        if in_flight != 1:
            self._sent_alone_s = -math.inf
            return
        self._sent_alone_s = self._loop.time()
        if self._is_soon:
            self.await_answer()

    def note_answered(self, in_flight: int) -> None:
        """Note that answers have come, and how many requests are in flight now."""
        self._awaits = in_flight > 0
        sent_s = self._sent_alone_s
        self._is_soon = sent_s > -math.inf and self._loop.time() - sent_s < ANSWER_S

    def await_answer(self) -> None:
        """Stay awake until all is answered, but for `ANSWER_S` at most."""
        self._awake.stay(ANSWER_S, self._goes_on, self._look)

    def end(self) -> None:
        """Look at the connection no more, because it has ended."""
        self._awaits, self._looks = False, bool

    def _goes_on(self) -> bool:
        return self._awaits

    def _look(self) -> bool:
        if not self._looks():
            return False
        self._read()
        return True
