"""Moves an event loop's clock on, so that a test neither waits for a timeout nor races it.

A timeout of a few milliseconds may pass before its request has started, if the machine is busy. A test of a
request that has started gives it a long timeout, and lets that pass when the request has started.
"""

from __future__ import annotations

import asyncio

__all__ = ["LONG_S", "pass_time"]

LONG_S = 600.0
"""A timeout, in seconds, that passes only by `pass_time`."""


def pass_time(seconds: float = LONG_S) -> None:
    """Set the running loop's clock so many seconds ahead, for good. Timers that are due by then run
    in its next turn."""
    loop = asyncio.get_running_loop()
    clock = loop.time
    loop.time = lambda: clock() + seconds  # type: ignore[method-assign]
