"""`connect` for code without asyncio."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from cudnn_actor.attached.client.connecting import attached_to
from cudnn_actor.attached.paths import socket_path
from cudnn_actor.blocking.handle import BlockingRef, portal_for

__all__ = ["connect"]


def connect(path: str | os.PathLike[str] | None = None, *, name: str | None = None) -> BlockingRef:
    """Attach to a service of another process: `with connect() as gpu:`, or `gpu.close()` at the end.

    Blocks until it is attached. Closing it detaches; the service goes on. Parameters and errors are those of
    `cudnn_actor.connect`.
    """
    where = socket_path(path)
    portal = portal_for(f"the service at {where}")
    try:
        service: Any = portal.call(lambda: attached_to(where, name or Path(sys.argv[0]).name or "python"))
        return BlockingRef(service, portal=portal)._end_when_collected()
    except BaseException:
        portal.close_soon(_nothing)
        raise


async def _nothing() -> None:
    """Do nothing: the portal ends without a service, since none was reached."""
