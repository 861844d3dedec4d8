"""A member's own process: a service, and the socket by which the pool uses it.

The pool's process sends one line, `Begin`, on a socket. The answer is one line: `Ready` or `Failed`. The
member's process ends when the other end of that socket is closed, and also when its service gives up.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import msgspec

from cudnn_actor.attached import serve_socket
from cudnn_actor.engines.engine_choice import CPU_PRELOAD
from cudnn_actor.protocol.errors import CudnnActorError, ErrorRecord, ServiceStopped
from cudnn_actor.service.spawning import spawn

__all__ = ["MAIN", "Begin", "Failed", "Ready", "Said", "main", "preloaded_for", "read_line"]

MAIN = f"{__name__}:main"


class Begin(msgspec.Struct, frozen=True):
    """The parameters of a member's process: the options of `spawn`, as plain data; the path of its socket;
    and the id of the pool's process, which alone may move buffers."""

    options: dict[str, Any]
    path: str
    owner: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The service has started, and its socket is served."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The service could not be started."""

    error: ErrorRecord


Said = Ready | Failed


def preloaded_for(device: str) -> tuple[str, ...]:
    """The modules that members' processes on a device need, which their forkserver imports for all of them.

    To import the modules of the CPU engine would take most of the time of a member's start. The modules of
    CUDA are left to the member: where they cannot be imported, its own error says why.
    """
    return (__name__, *(CPU_PRELOAD if device == "cpu" else ()))


def main(descriptors: list[int]) -> None:
    """Run a member's process. `descriptors`: its end of the socket."""
    (descriptor,) = descriptors
    with socket.socket(fileno=descriptor) as control:
        control.setblocking(False)
        asyncio.run(_serve(control))


async def _serve(control: socket.socket) -> None:
    begin = msgspec.json.decode(await read_line(control), type=Begin)
    try:
        with contextlib.suppress(ServiceStopped):  # it has given up: the pool sees the end of the process
            async with spawn(**begin.options) as gpu, serve_socket(gpu, begin.path) as served:
                served.mover = begin.owner
                await _say(control, Ready())
                await read_line(control)  # nothing arrives but the end
    except CudnnActorError as error:
        await _say(control, Failed(error.to_record()))


async def _say(control: socket.socket, what: Said) -> None:
    with contextlib.suppress(OSError):  # the pool has gone, and this process ends, too
        await asyncio.get_running_loop().sock_sendall(control, msgspec.json.encode(what) + b"\n")


async def read_line(control: socket.socket) -> bytes:
    """Read a line. Returns it without its end; empty if the other side closes before the line is complete."""
    loop, line = asyncio.get_running_loop(), b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n"):
            received = await loop.sock_recv(control, 1 << 16)
            if not received:
                return b""
            line += received
    return line.rstrip(b"\n")
