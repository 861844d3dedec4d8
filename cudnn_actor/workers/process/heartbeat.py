"""Signs of life from a worker, since when its work has not got on, and its end with its parent's."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from cudnn_actor.workers.status import StatusPage

__all__ = ["Heartbeat", "end_with"]


class Heartbeat:
    """A thread that beats. A worker that is stopped, or holds the interpreter's lock for long, beats no more.

    Parameters
    ----------
    page
        Where it is noted, for the parent.
    every_s
        Seconds between two beats.
    since
        Since when the work in hand has not got on, in `time.monotonic()` seconds; None for none.
    """

    def __init__(self, page: StatusPage, every_s: float, since: Callable[[], float | None]) -> None:
        self._page = page
        self._every_s = every_s
        self._since = since
        self._ended = threading.Event()

    def start(self) -> None:
        """Beat once, and from then on."""
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
        """Beat no more."""
        self._ended.set()


def end_with(parent: int) -> None:
    """Have this process end when its parent does, by the parent's pidfd.

    The second line: the kernel kills a worker whose lifeline is cut. But a process that was forked from the
    parent behind Python's back may hold a copy of the other end, and then nobody cuts it. This one needs the
    interpreter to run.
    """
    threading.Thread(target=_outlive, args=(parent,), name="parent", daemon=True).start()


def _outlive(parent: int) -> None:
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.poll()
    os._exit(0)
