"""A client that sends what it likes."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from pathlib import Path

from cudnn_actor.attached.wire import VERSION, Attach

ATTACH = Attach(VERSION, "raw")


class Raw:
    """A client that sends what it likes."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(os.fspath(path))
        self.socket.setblocking(False)

    async def send(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        )
        self.socket.sendmsg([data], rights)

    async def ended(self) -> None:
        """Wait until the server has closed the connection."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while await loop.sock_recv(self.socket, 1 << 16):
                pass
