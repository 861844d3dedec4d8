"""A worker's heartbeat, and its end when its parent ends."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from cudnn_actor.workers.status import StatusPage

__all__ = ["Heartbeat", "end_with"]


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
    """

    def __init__(self, page: StatusPage, every_s: float, since: Callable[[], float | None]) -> None:
        self._page = page
        self._every_s = every_s
        self._since = since
        self._ended = threading.Event()

    def start(self) -> None:
        """Write a first heartbeat, and start the thread."""
        self._beat()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self._beat()

    def _beat(self) -> None:
        since = self._since()
        self._page.since_ns = 0 if since is None else int(since * 1e9)
        self._page.beat_ns = time.monotonic_ns()

    def stop(self) -> None:
        """Stop the heartbeats."""
        self._ended.set()


def end_with(parent: int) -> None:
    """Have this process end when its parent does, by watching the parent's pidfd.

    This is the second safeguard. The first is the lifeline: the kernel kills a worker whose lifeline is cut.
    But a process that was forked from the parent without Python's knowledge may hold a copy of the lifeline's
    other end. Then the parent's end does not cut the lifeline, and this thread ends the worker. Unlike the
    lifeline, it needs the interpreter to run.
    """
    threading.Thread(target=_outlive, args=(parent,), name="parent", daemon=True).start()


def _outlive(parent: int) -> None:
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.poll()
    os._exit(0)
