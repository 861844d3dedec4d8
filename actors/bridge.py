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
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cudnn_actor.actors.envelope import Envelope

__all__ = ["LoopBridge"]

_MOST_AT_ONCE = 256
"""Replies delivered before the loop gets to run its other callbacks, to keep it responsive."""

_current = threading.local()


class LoopBridge:
    """The way back into one event loop. Get it with `LoopBridge.of_running_loop()`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._posted: deque[tuple[Envelope, Any, BaseException | None]] = deque()
        self._waking = False

    @classmethod
    def of_running_loop(cls) -> LoopBridge:
        """The running loop's bridge. Raises RuntimeError when no loop is running in this thread.

        Kept per thread, since a thread runs one loop at a time; a new loop replaces the last one's.
        """
        loop = asyncio.get_running_loop()
        bridge: LoopBridge | None = getattr(_current, "bridge", None)
        if bridge is None or bridge.loop is not loop:
            bridge = _current.bridge = cls(loop)
        return bridge

    def post(self, envelope: Envelope, value: Any, error: BaseException | None) -> None:
        """Leave a reply for the loop. Any thread; never blocks. Needs a `wake` after it."""
        self._posted.append((envelope, value, error))

    def wake(self) -> None:
        """See to it that the loop delivers what was posted. Any thread; never raises for a closed loop."""
        if self.loop.is_closed():
            self._drop()
        elif not self._waking:
            self._waking = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # closed between the question and the call
                self._drop()

    def _deliver(self) -> None:
        self._waking = False
        posted = self._posted
        for _ in range(min(len(posted), _MOST_AT_ONCE)):
            envelope, value, error = posted.popleft()
            envelope.deliver(value, error)
        if posted:
            self.wake()

    def _drop(self) -> None:
        self._waking = False
        while True:
            try:
                envelope, value, error = self._posted.popleft()
            except IndexError:
                return
            envelope.undeliverable()
            if error is None and envelope.discard is not None:
                envelope.discard(value)
