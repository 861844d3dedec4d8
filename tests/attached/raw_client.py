"""A client that sends what it likes."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import Any

from cudnn_actor.attached.wire import FROM_SERVER, VERSION, Answers, Attach, Given, Request, Requests
from cudnn_actor.messages import Allocate
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import encode
from cudnn_actor.protocol.messages.codec import decode_reply, encode_message
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec

ATTACH = Attach(VERSION, "raw")
_SPEC = TensorSpec.packed((1, 1, 256, 256), DType.FLOAT32, Layout.NCHW)


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


class Asking:
    """A client that gives no room unasked."""

    def __init__(self, raw: Raw) -> None:
        self.raw, self._channel, self.last = raw, Channel(raw.socket, FROM_SERVER), 0

    async def ask(self, message: Any) -> Any:
        """Send a message, and wait for its answer."""
        self.last += 1
        await self.raw.send(encode(Requests(self.last, [Request(encode_message(message))])))
        return await self.answer()

    async def answer(self) -> Any:
        """The next answer."""
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.raw.socket.fileno(), came.set)
        try:
            while True:
                await came.wait()
                came.clear()
                for frame in self._channel.receive():
                    if isinstance(frame, Answers):
                        (answer,) = frame.answers
                        return answer
        finally:
            loop.remove_reader(self.raw.socket.fileno())

    async def allocate(self, spec: TensorSpec = _SPEC) -> BufferRef:
        """A buffer, of 256 KiB unless told otherwise."""
        given = await self.ask(Allocate(spec=spec))
        assert isinstance(given, Given)
        ref = decode_reply(given.body)
        assert isinstance(ref, BufferRef)
        return ref
