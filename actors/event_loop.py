"""The running asyncio event loop, or a clear error where there is none."""

from __future__ import annotations

import asyncio
import sys

from cudnn_actor.protocol.types.errors import NoEventLoop

__all__ = ["running_loop"]


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
