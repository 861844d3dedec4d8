"""The running asyncio event loop, or a clear error where there is none; and loops that have closed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator

from cudnn_actor.protocol.errors import NoEventLoop

__all__ = ["running_loop", "tolerating_closed"]


def running_loop() -> asyncio.AbstractEventLoop:
    """The event loop that runs in this thread. Raises `NoEventLoop`."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise NoEventLoop(library=_other_library()) from None


def _other_library() -> str | None:
    """The library whose event loop runs here, where sniffio knows it; None if none does. Imports nothing."""
    sniffio = sys.modules.get("sniffio")
    return getattr(getattr(sniffio, "thread_local", None), "name", None)


@contextlib.contextmanager
def tolerating_closed(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Suppress the `RuntimeError` of an event loop that has closed, and no other.

    Cancelling or completing a future wakes whoever waits for it, through its loop. If the loop has closed,
    this raises a `RuntimeError`, after the future has got its new state. Nobody waits there any more, so the
    error means nothing. But it would hide what the caller does next: to free a buffer, for example.
    """
    try:
        yield
    except RuntimeError:
        if not loop.is_closed():
            raise
