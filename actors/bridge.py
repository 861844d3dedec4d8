"""Replies for an event loop: any thread posts them, the loop delivers them, one wake-up serves many.

Waking a loop writes to its self-pipe: a system call that releases the GIL. At a
hundred thousand replies a second, one such call per reply is the whole cost. So
replies are posted to a deque, and a poster asks for a wake-up only when none is
pending.

Why no reply waits for a wake-up that never comes: a poster appends first and
reads `_waking` second; the loop clears `_waking` first and empties the deque
second. If the poster read True, the loop had not cleared it yet, so it empties
the deque after the append. If it read False, the poster asks for a wake-up
itself. Two posters that both read False ask twice, which is harmless.

A reply leaves the deque only after it has been delivered. So no reply is lost
if a signal handler raises during delivery (see `interrupts`). asyncio itself may
lose a callback to such an exception, and with it a wake-up. The next poster
therefore asks again for a wake-up that has been pending for over `LOST_S`.

A loop may close while a wake-up is pending, which then never runs. `_pending`
holds the bridges with a pending wake-up. The replies held by bridges of closed
loops are dropped when the next bridge is made, before the next loop is woken, and
before the next pykka caller is answered.

While replies are awaited, the bridge also keeps a loop that never idles from
starving the threads that compute the replies; see `starvation`.
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
from cudnn_actor.actors.event_loop import running_loop
from cudnn_actor.actors.starvation import LET_GO_S, StarvationWatch

if TYPE_CHECKING:
    from cudnn_actor.actors.envelope import Envelope

__all__ = ["LoopBridge"]

_MOST_AT_ONCE = 256
"""The most replies delivered before the loop runs its other callbacks, to keep it responsive."""

LOST_S = 0.1
"""Seconds after which a wake-up that has not run counts as lost. Asking a busy loop twice is harmless."""
_NEVER = float("inf")

_current = threading.local()
_bridges: weakref.WeakValueDictionary[int, LoopBridge] = weakref.WeakValueDictionary()
"""The bridge of each loop that is still in use, by the loop's id. A bridge keeps its loop alive, so no other
loop can get the same id while the entry exists."""
_pending: set[LoopBridge] = set()
"""Bridges with a pending wake-up. Each of its methods is atomic under the GIL, `copy` too.

`tuple(_pending)` is not: Python 3.11 may collect garbage, and so run other threads, once it has begun."""


class LoopBridge:
    """Delivers replies into one event loop. Get it with `LoopBridge.of_running_loop()`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.posted: deque[tuple[Envelope, Any, BaseException | None]] = deque()
        """Replies not yet delivered. The leftmost is delivered next. Any thread appends one, and calls `wake`
        after it."""
        self.awaited = 0
        """Messages sent from this loop whose reply has not been delivered. Written on the loop's thread."""
        self._waking = False
        self._asked_at = _NEVER
        """When the pending wake-up was asked for, in `time.monotonic()` seconds."""
        self._last_reply = 0.0
        self.watch: StarvationWatch | None = None
        """Checks now and then whether the loop starves other threads; None while no reply is awaited."""
        self._last_watch: StarvationWatch | None = None
        """The one that has found no reply awaited. It may be resumed."""
        self.lets_go = True
        """Whether the loop releases the GIL when it seems to starve others. Off only to measure the
        effect."""
        self.let_go = 0
        """How often the loop released the GIL for a moment because it seemed to starve other threads."""

    @classmethod
    def of_running_loop(cls) -> LoopBridge:
        """The running loop's bridge. Raises `NoEventLoop` when no loop is running in this thread.

        Each thread caches its last bridge, since a thread runs one loop at a time. If several loops run in
        turn on one thread, each keeps its own bridge, and the resources that a service has opened for it.
        """
        loop = running_loop()
        bridge: LoopBridge | None = getattr(_current, "bridge", None)
        if bridge is None or bridge.loop is not loop:
            bridge = _current.bridge = cls._find(loop)
        return bridge

    @classmethod
    def _find(cls, loop: asyncio.AbstractEventLoop) -> LoopBridge:
        bridge = _bridges.get(id(loop))
        if bridge is None:
            bridge = _bridges[id(loop)] = cls(loop)
            cls.drop_closed()
        return bridge

    def note_sent(self, *, needs_thread: bool = True) -> None:
        """Keep replies coming while one is awaited. Only on the loop, after a message was admitted.

        `needs_thread`: as in the mailbox.
        """
        if not needs_thread and self.posted:
            self.wake()
        if self.watch is None and needs_thread:
            now, computed = time.monotonic(), time.thread_time()
            watch = self._last_watch
            if watch is None or not watch.resume(now, computed):
                watch = StarvationWatch(now, computed)
            self.watch = watch
            self.loop.call_later(watch.pause, self._look)

    def wake(self) -> None:
        """Make the loop deliver the posted replies. Any thread; does not raise if the loop is closed.

        The replies of closed loops are dropped first. So what they discard is in the mailbox before a caller
        that sees its reply can send the next message. The loop is woken even if that raises.
        """
        try:
            if _pending:
                self.drop_closed()
        finally:
            self._wake()

    def _wake(self) -> None:
        if self.loop.is_closed():
            self._drop()
        elif not self._waking or time.monotonic() - self._asked_at > LOST_S:
            try:
                self._waking = True
                self._asked_at = time.monotonic()
                _pending.add(self)
                self.loop.call_soon_threadsafe(self._deliver)
            except BaseException as error:
                # the interrupted call may or may not have taken effect: the next one asks again
                self._waking = False
                if not isinstance(error, RuntimeError) or not self.loop.is_closed():
                    raise
                self._drop()  # the loop closed between the check and the call

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
                    # Atomic: `_take_out`, inlined.
                    self.awaited -= 1
                    del posted[0]
                # take it out first: it is discarded at most once, whatever `discard` raises
                elif envelope.is_unawaited:
                    self._take_out()
                    envelope.deliver(value, error)
                else:
                    envelope.deliver(value, error)
                    self._take_out()
        finally:  # also when a `discard` callback raised
            if posted:
                self.wake()

    def _take_out(self) -> None:
        """Remove the next reply from the deque: atomic."""
        self.awaited -= 1
        del self.posted[0]

    def _look(self) -> None:
        assert self.watch is not None
        if self.awaited <= 0:
            self._last_watch, self.watch = self.watch, None
            return
        if self.posted:
            self.wake()
        starving, pause = self.watch.look(time.monotonic(), time.thread_time(), self._last_reply)
        if starving and self.lets_go:
            self.let_go += 1
            select.select((), (), (), LET_GO_S)
        self.loop.call_later(pause, self._look)

    @staticmethod
    def drop_closed() -> None:
        """Drop the replies of loops that have closed with a wake-up pending. Any thread; never blocks."""
        for bridge in _pending.copy():
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
    """Forget the loops in a forked child: they belong to the parent. Waking one would write to the parent's
    socket."""
    _pending.clear()
    _bridges.clear()
    _current.bridge = None


forks.call_in_child(_forget_parent)
