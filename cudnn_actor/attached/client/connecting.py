"""`connect`: attaches this process to a service of another one."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from cudnn_actor.actors.event_loop import running_loop
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.attached.client.attached_service import AttachedService
from cudnn_actor.attached.paths import peer_of, socket_path
from cudnn_actor.attached.wire import FROM_SERVER, VERSION, Attach, Attached, Refusal
from cudnn_actor.isolation.process.cores import may_keep_one_busy
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.protocol.errors import StartFailed
from cudnn_actor.service.client import CudnnRef

__all__ = ["Connecting", "attached_to", "connect"]

_WITHIN_S = 10.0
"""Seconds that the server may take to answer."""


def connect(path: str | os.PathLike[str] | None = None, *, name: str | None = None) -> Connecting:
    """Attach to a service of another process: `async with connect() as gpu`, or `gpu = await connect()`.

    The handle is a `CudnnRef`, as from `spawn`. Closing it detaches this process: the service goes on, and
    frees the buffers and models of this process. The same happens when this process ends, however it ends. If
    the service's process ends, every request raises `ServiceStopped`, also later: connect again for a new
    handle.

    Parameters
    ----------
    path
        The path that the service's process has given to `serve_socket`, with or without "unix:" before it.
        None for the default path of a service without a name of its own,
        `$XDG_RUNTIME_DIR/cudnn-actor/cudnn.sock`.
    name
        This process's name in the server's log lines; None for the name of its program.

    Raises
    ------
    InvalidRequest
        The path is too long: raised at once. The server takes no more clients: raised when awaited or
        entered.
    StartFailed
        No process serves there, or it is no service of this version or of this user. Raised when awaited or
        entered.
    NoEventLoop
        It is awaited or entered where no asyncio event loop runs.
    """
    return Connecting(socket_path(path), name or Path(sys.argv[0]).name or "python")


class Connecting:
    """An attachment that is about to be made: the result of `connect`.

    Parameters
    ----------
    path
        The socket's path.
    name
        This process's name, for the server's log lines.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name

    def __repr__(self) -> str:
        return f"<the result of connect({str(self._path)!r}), which attaches when it is awaited or entered>"

    def __await__(self) -> Generator[Any, None, CudnnRef]:
        return self._attach().__await__()

    async def _attach(self) -> CudnnRef:
        service: Any = await attached_to(self._path, self._name)  # as handles use a service
        return CudnnRef(service)

    async def __aenter__(self) -> CudnnRef:
        self._gpu = await self._attach()
        return self._gpu

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._gpu.aclose()


async def attached_to(path: Path, name: str) -> AttachedService:
    """The service at a socket, for handles of this process. Raises as `connect`."""
    loop = running_loop()
    may_stay_awake = await in_own_thread(may_keep_one_busy)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    channel = Channel(connection, FROM_SERVER)
    try:
        async with asyncio.timeout(_WITHIN_S):
            await loop.sock_connect(connection, os.fspath(path))
            _check_server(connection)
            channel.send(Attach(VERSION, name))
            first = await _first_frame(loop, channel)
    except TimeoutError:
        channel.close()
        detail = f"{path} has not answered within {_WITHIN_S:.0f} s"
        raise StartFailed(detail=detail, fix="connect again") from None
    except (OSError, BadFrame) as error:
        channel.close()
        fix = "call serve_socket(gpu) in the process that has the service, with the path that you connect to"
        raise StartFailed(detail=f"nobody serves at {path}: {error}", fix=fix) from error
    except BaseException:
        channel.close()
        raise
    if isinstance(first, Refusal):
        channel.close()
        raise first.error.to_error()
    service = AttachedService(channel, first)
    service.link.loops_may_stay_awake = may_stay_awake
    for frame in tuple(channel.frames):  # frames that have arrived with the first one
        service._take(frame)
    channel.frames.clear()
    return service


def _check_server(connection: socket.socket) -> None:
    """Raise `StartFailed` if another user's process serves: that process could read everything that is
    sent."""
    _, uid = peer_of(connection)
    if uid not in (os.geteuid(), 0):
        raise StartFailed(detail=f"the socket is served by user {uid}", fix="serve and connect as one user")


def _lacks_status(frames: Sequence[Any]) -> bool:
    return isinstance(frames[0], Attached) and len(frames) < 2


async def _first_frame(loop: asyncio.AbstractEventLoop, channel: Channel) -> Attached | Refusal:
    """The server's first frame. Frames that arrive with it stay in the channel. `Attached` comes at least
    with the first `Status`, so that a handle knows its service's health and metrics at once."""
    came = asyncio.Event()
    loop.add_reader(channel.fileno(), came.set)
    try:
        while not channel.frames or _lacks_status(channel.frames):
            if channel.ended:
                raise StartFailed(detail="the server has refused the connection")
            await came.wait()
            came.clear()
            channel.fetch()
    finally:
        loop.remove_reader(channel.fileno())
    first = channel.frames.popleft()
    if not isinstance(first, Attached | Refusal):
        raise BadFrame(f"{type(first).__name__} came first")
    return first
