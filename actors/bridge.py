"""Replies for an event loop: posted by any thread, delivered by the loop, one wake-up for many.

Waking a loop writes to its self-pipe, a system call that lets go of the GIL; at
a hundred thousand replies a second that call, once per reply, is the whole
cost. So replies are posted to a deque, and a wake-up is asked for only when
none is pending.

Why no reply waits for a wake-up that never comes: a poster appends first and
reads `_waking` second; the loop clears `_waking` first and empties the deque
second. If the poster read True, the loop had not cleared it yet, so it empties
the deque after the append. If it read False, the poster asks for a wake-up
itself. Two posters that both read False ask twice, which is harmless.

What is posted is taken out when it has been delivered, so that a signal's
handler that raises in the midst of it (`interrupts`) costs nobody his reply.
asyncio itself may lose a callback to such an exception, and so a wake-up with
it: one that is not seen to for `LOST_S` is asked for again by the next poster.

A loop may close with a wake-up pending, which then never runs. `_pending` knows
such bridges, and whoever makes the next bridge drops what they hold.

While replies are awaited the bridge also sees to it that a loop that never
idles does not starve the threads that work on them: `starvation` says how.
"""

from __future__ import annotations

import asyncio
import select
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from cudnn_actor.actors import forks
from cudnn_actor.actors.starvation import FIRST_LOOK_S, LET_GO_S, StarvationWatch

if TYPE_CHECKING:
    from cudnn_actor.actors.envelope import Envelope

__all__ = ["LoopBridge"]

_MOST_AT_ONCE = 256
"""Replies delivered before the loop gets to run its other callbacks, to keep it responsive."""

LOST_S = 0.1
"""Seconds after which a wake-up that has not come counts as lost. Asking a busy loop twice is harmless."""
_NEVER = float("inf")

_current = threading.local()
_bridges: weakref.WeakValueDictionary[int, LoopBridge] = weakref.WeakValueDictionary()
"""Of each loop that somebody still sends from, by the loop's id: a bridge keeps its loop, so the id stays the
loop's for as long as the entry is here."""
_pending: set[LoopBridge] = set()
"""Bridges whose wake-up is on its way. Each operation on it is one step under the GIL."""


class LoopBridge:
    """The way back into one event loop. Get it with `LoopBridge.of_running_loop()`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.posted: deque[tuple[Envelope, Any, BaseException | None]] = deque()
        """Replies on their way: the left one is next."""
        self.awaited = 0
        """Messages sent from this loop that have not come back, answered or not. Written on the loop."""
        self._waking = False
        self._asked_at = _NEVER
        """When the pending wake-up was asked for, in `time.monotonic()` seconds."""
        self._last_reply = 0.0
        self.watch: StarvationWatch | None = None
        """What looks now and then whether the loop starves others; None while no message is awaited."""
        self.lets_go = True
        """Whether the loop lets go of the GIL where it seems to starve others; off only to measure that."""
        self.let_go = 0
        """How often the loop let go of the GIL for a moment, because it seemed to starve the others."""

    @classmethod
    def of_running_loop(cls) -> LoopBridge:
        """The running loop's bridge. Raises RuntimeError when no loop is running in this thread.

        The last one is at hand for each thread, since a thread runs one loop at a time. A loop that takes
        turns with others on its thread keeps its bridge, and what a service has opened for it.
        """
        loop = asyncio.get_running_loop()
        bridge: LoopBridge | None = getattr(_current, "bridge", None)
        if bridge is None or bridge.loop is not loop:
            bridge = _current.bridge = cls._find(loop)
        return bridge

    @classmethod
    def _find(cls, loop: asyncio.AbstractEventLoop) -> LoopBridge:
        bridge = _bridges.get(id(loop))
        if bridge is None:
            bridge = _bridges[id(loop)] = cls(loop)
            cls._drop_closed()
        return bridge

    def sent(self, *, needs_thread: bool = True) -> None:
        """See to it that replies come, while one is awaited. Only on the loop, after an admission.

        `needs_thread`: as of the mailbox.
        """
        if not needs_thread and self.posted:
            self.wake()
        if self.watch is None and needs_thread:
            self.watch = StarvationWatch(time.monotonic(), time.thread_time())
            self.loop.call_later(FIRST_LOOK_S, self._look)

    def post(self, envelope: Envelope, value: Any, error: BaseException | None) -> None:
        """Leave a reply for the loop. Any thread; never blocks. Needs a `wake` after it."""
        self.posted.append((envelope, value, error))

    def wake(self) -> None:
        """See to it that the loop delivers what was posted. Any thread; never raises for a closed loop."""
        if self.loop.is_closed():
            self._drop()
        elif not self._waking or time.monotonic() - self._asked_at > LOST_S:
            try:
                self._waking = True
                self._asked_at = time.monotonic()
                _pending.add(self)
                self.loop.call_soon_threadsafe(self._deliver)
            except BaseException as error:
                self._waking = False  # an interrupted call may have been in time, or not: the next one asks
                if not isinstance(error, RuntimeError) or not self.loop.is_closed():
                    raise
                self._drop()  # closed between the question and the call

    def _deliver(self) -> None:
        self._waking = False
        self._asked_at = _NEVER
        _pending.discard(self)
        posted = self.posted
        self._last_reply = time.monotonic()
        try:
            for _ in range(min(len(posted), _MOST_AT_ONCE)):
                envelope, value, error = posted[0]
                future = envelope.future
                if error is None and future is not None and not future.done():
                    future.set_result(value)
                    # One step: `_take_out`, without the call.
                    self.awaited -= 1
                    del posted[0]
                elif envelope.withdrawn:  # to be discarded: at most once, whatever that raises
                    self._take_out()
                    envelope.deliver(value, error)
                else:
                    envelope.deliver(value, error)
                    self._take_out()
        finally:  # also when somebody's `discard` raised
            if posted:
                self.wake()

    def _take_out(self) -> None:
        """Take the next reply out: one step."""
        self.awaited -= 1
        del self.posted[0]

    def _look(self) -> None:
        assert self.watch is not None
        if self.awaited <= 0:
            self.watch = None
            return
        if self.posted:
            self.wake()
        starving, pause = self.watch.look(time.monotonic(), time.thread_time(), self._last_reply)
        if starving and self.lets_go:
            self.let_go += 1
            select.select((), (), (), LET_GO_S)
        self.loop.call_later(pause, self._look)

    @staticmethod
    def _drop_closed() -> None:
        for bridge in tuple(_pending):
            if bridge.loop.is_closed():
                bridge._drop()

    def _drop(self) -> None:
        self._waking = False
        _pending.discard(self)
        while True:
            try:
                envelope, value, error = self.posted.popleft()
            except IndexError:
                return
            envelope.undeliverable()
            if error is None and envelope.discard is not None:
                envelope.discard(value)


def _forget_parent() -> None:
    """In a forked child: the loops are the parent's. To wake one would write to a socket of the parent's."""
    _pending.clear()
    _bridges.clear()
    _current.bridge = None


forks.call_in_child(_forget_parent)
