"""A service's lifecycle events: stored, and passed to every iterator.

Threads share an append-only list and the set of listeners, both under a lock that is held briefly. The
supervisor's thread appends events. Each event loop reads from its own position at its own pace, so none can
lose or delay another loop's events.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator

from cudnn_actor.actors import forks
from cudnn_actor.actors.event_loop import running_loop, tolerating_closed
from cudnn_actor.supervision import LifecycleEvent, Stopped

__all__ = ["EventLog"]


class EventLog:
    """Every lifecycle event of a service, from its start to its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[LifecycleEvent] = []
        self._listeners: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        forks.watch(self)

    def forget_parent(self) -> None:
        """Prepare the log in a forked child: past events stay readable, and no listener is woken."""
        self._lock = threading.Lock()
        self._listeners = set()

    def append(self, event: LifecycleEvent) -> None:
        """Add an event and wake the waiting iterators. Any thread; never blocks for long."""
        with self._lock:
            self._events.append(event)
            listeners = tuple(self._listeners)
        for loop, wake in listeners:
            with tolerating_closed(loop):
                loop.call_soon_threadsafe(wake.set)

    @property
    def all(self) -> tuple[LifecycleEvent, ...]:
        """The events so far."""
        with self._lock:
            return tuple(self._events)

    async def follow(self) -> AsyncGenerator[LifecycleEvent, None]:
        """All past events, then each new one as it happens, up to the service's own `Stopped`."""
        listener = (running_loop(), asyncio.Event())
        with self._lock:
            self._listeners.add(listener)
        seen = 0
        try:
            while True:
                listener[1].clear()
                for event in self.all[seen:]:
                    seen += 1
                    yield event
                    if isinstance(event, Stopped) and event.child is None:
                        return
                await listener[1].wait()
        finally:
            with self._lock:
                self._listeners.discard(listener)
