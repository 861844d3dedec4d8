"""A worker's heartbeat, and its end when its parent ends."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cudnn_actor.actors.threads import start_thread
from cudnn_actor.isolation.process.status import StatusPage
from cudnn_actor.processes.process_state import resident_bytes
from cudnn_actor.protocol.messages.receipts import PlanCounts

__all__ = ["Heartbeat", "end_with"]


@dataclass(eq=False, repr=False)
class Heartbeat:
    """A thread that writes heartbeats to the status page.

    It writes none while the worker is stopped or a library holds the interpreter's lock.

    Parameters
    ----------
    page
        The status page, which the parent reads.
    every_s
        Seconds between two heartbeats.
    since
        Returns since when the work has made no progress, in `time.monotonic()` seconds; None without work.
    builds_since
        The same for builds and tuning only, which are part of the work.
    clock
        Returns nanoseconds of `time.monotonic_ns()`'s clock.
    plans
        Returns counts of the plan cache. On the heartbeat's thread.
    """

    page: StatusPage
    every_s: float
    since: Callable[[], float | None]
    builds_since: Callable[[], float | None]
    clock: Callable[[], int] = time.monotonic_ns
    plans: Callable[[], PlanCounts] = PlanCounts
    _idle_s: float | None = field(default=None, init=False)
    """Since when there is no work, as far as the heartbeats have seen; None while there is."""
    _built_s: float = field(default=0.0, init=False)
    _builds: bool = field(default=False, init=False)
    _ended: threading.Event = field(default_factory=threading.Event, init=False)

    def start(self) -> None:
        """Write a first heartbeat, and start the thread. Raises `ThreadRefused`."""
        self.beat()
        start_thread(threading.Thread(target=self._run, name="heartbeat", daemon=True))

    def _run(self) -> None:
        while not self._ended.wait(self.every_s):
            self.beat()

    def beat(self) -> None:
        """Write a heartbeat."""
        now_ns = self.clock()
        now = now_ns / 1e9
        self.page.built_ns = int(self._last_built(now) * 1e9)
        self.page.since_ns = int(self._last_progress(now) * 1e9)
        self.page.plan_counts = self.plans()
        self.page.resident_bytes = resident_bytes()
        self.page.beat_ns = now_ns

    def _last_progress(self, now: float) -> float:
        """Since when the work has made no progress; without work, when a heartbeat first found none."""
        since = self.since()
        if since is not None:
            self._idle_s = None
            return since
        if self._idle_s is None:
            self._idle_s = now
        return self._idle_s

    def _last_built(self, now: float) -> float:
        """When a build last made progress; after it, when a heartbeat first found none; 0 before any."""
        since = self.builds_since()
        if since is not None:
            self._built_s = since
        elif self._builds:
            self._built_s = now
        self._builds = since is not None
        return self._built_s

    def stop(self) -> None:
        """Stop the heartbeats."""
        self._ended.set()


def end_with(parent: int) -> None:
    """Let this process end when its parent does, by watching the parent's pidfd.

    This is the second safeguard. The first is the lifeline: the kernel kills a worker whose lifeline is cut.
    But a process that was forked from the parent without Python's knowledge may hold a copy of the parent's
    side of the lifeline. Then the lifeline is not cut when the parent ends, and this thread ends the worker.
    Unlike the lifeline, the thread needs the interpreter to run.

    Raises `ThreadRefused`.
    """
    start_thread(threading.Thread(target=_outlive, args=(parent,), name="parent", daemon=True))


def _outlive(parent: int) -> None:
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.poll()
    os._exit(0)
