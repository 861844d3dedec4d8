"""Keeps the server's event loop awake while an answer of the worker, or a client's next request, is near.

A request of a client needs two more wake-ups than one of the server's own process: the server's loop is woken
up for the request, and again for its answer. Each takes 20 to 60 us. So where the worker's owner may keep a
core busy, the loop behaves as the worker of a device does:

- It stays awake until the answer, if the run takes less than `_SOON_US`. Of a longer one the worker says when
  the answer is near (`OwningLoop`), and the client is told.
- Once everything is answered, it looks for the next request for `PROMPT_S`, if the last one came as soon.

So a service to which nobody sends sleeps. Everything here runs on the server's loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from cudnn_actor.actors import Mailbox
from cudnn_actor.actors.awake import Awake
from cudnn_actor.attached.wire import Near
from cudnn_actor.isolation.process.cores import ANSWER_S, PROMPT_S

if TYPE_CHECKING:
    from cudnn_actor.attached.server.session import Session

__all__ = ["Nearness"]

_SOON_US = 165.0
"""The loop awaits the answer awake if the request is expected to take less, in microseconds. The worker
speaks of runs that take more than `EARLY_S`."""
_NEAR = Near()


class Nearness:
    """Keeps a server's loop awake while an answer or a request is near, and tells clients that answers are.

    Parameters
    ----------
    loop
        The server's event loop.
    mailbox
        The service's mailbox. It says whether a loop may stay awake.
    sessions
        The sessions at the moment.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, mailbox: Mailbox, sessions: Collection[Session]
    ) -> None:
        self._loop, self._mailbox, self._sessions = loop, mailbox, sessions
        self._awake = Awake(loop)
        self._idle_since_s = -math.inf
        """Since when no request is open; infinite while one is."""
        self._prompt = False
        """Whether the latest request came within `PROMPT_S` after the answers before it."""
        mailbox.on_near.append(self._tell)

    def end(self) -> None:
        """Let the mailbox tell this object nothing more."""
        if self._tell in self._mailbox.on_near:  # not in a forked child
            self._mailbox.on_near.remove(self._tell)

    def note_came(self) -> None:
        """Note that requests have come."""
        if self._mailbox.loops_may_stay_awake and self._idle_since_s < math.inf:
            self._prompt = self._loop.time() - self._idle_since_s < PROMPT_S
            self._idle_since_s = math.inf

    def note_sent_alone(self, cost_us: float) -> None:
        """Note that the service was sent a request, and has no other one. `cost_us`: how long it will take,
        in microseconds."""
        if self._mailbox.loops_may_stay_awake and cost_us < _SOON_US:
            self._awake.stay(ANSWER_S, self._is_open, self._mailbox.look)

    def note_answered(self, look: Callable[[], bool]) -> None:
        """Note that all requests of a client are answered. `look`: looks for its next request, as `Look`
        does."""
        if self._mailbox.loops_may_stay_awake and not self._is_any_open():
            self._idle_since_s = self._loop.time()
            if self._prompt:
                self._awake.stay(PROMPT_S, self._is_idle, look)

    def _is_idle(self) -> bool:
        return self._idle_since_s < math.inf

    def _is_open(self) -> bool:
        return self._idle_since_s == math.inf

    def _is_any_open(self) -> bool:
        return any(session.asked for session in self._sessions)

    def _tell(self) -> None:
        """Tell the client whose request is the only one that its answer is near."""
        if asyncio._get_running_loop() is not self._loop:
            return
        waiting = [session for session in self._sessions if session.asked]
        if len(waiting) == 1 and len(waiting[0].asked) == 1 and not waiting[0].channel.backed_up:
            waiting[0].tell(_NEAR)
