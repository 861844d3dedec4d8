"""What asyncio does with futures of an event loop that has closed.

Cancelling or completing a future wakes whoever waits for it, through its loop. If the loop has closed, this
raises a `RuntimeError`, after the future has got its new state. Nobody waits there any more, so the error
means nothing. But it would hide what the caller does next: to free a buffer, for example.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

__all__ = ["tolerating_closed"]


@contextlib.contextmanager
def tolerating_closed(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Suppress the `RuntimeError` of an event loop that has closed, and no other."""
    try:
        yield
    except RuntimeError:
        if not loop.is_closed():
            raise
