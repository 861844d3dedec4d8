"""What a builder process does, however it was started: it opens a builder and answers its parent.

It lives as long as its parent wants it, and never longer than the parent itself:

- between two jobs it waits at the socket, whose end ends it;
- in the middle of one it may be deep in a library that holds the interpreter's lock, where neither a thread
  nor a signal handler of Python's would be heard, and another process may hold a copy of the parent's end
  (the parent has forked). So the kernel is asked to kill it when the parent dies. To the kernel, the parent
  is the thread that started it: the builder's, which ends it before it ends itself;
- between its first instruction and that wish, the parent may have died already: then it has another parent
  by now, which is looked at after the wish.

Signals that are meant for the whole process group or service (Ctrl-C, the TERM of an init system) are the
parent's to answer: it may want to finish what it has, with plans from here.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
from typing import Any

from cudnn_actor.engines.base import Builder, EngineFailure, StickyError
from cudnn_actor.engines.remote.frames import (
    REQUESTS,
    Answer,
    Build,
    Built,
    Failed,
    Frames,
    Progress,
    Ready,
    Refused,
    Request,
    Start,
    encode,
)
from cudnn_actor.engines.remote.lines import send_lines
from cudnn_actor.protocol.errors import CudnnActorError

__all__ = ["Channel", "follow_parent", "serve"]

_PR_SET_PDEATHSIG = 1
_CHUNK = 1 << 16


class Channel:
    """The child's end of the socket pair. Where the other end is gone, so is the reason to go on.

    Parameters
    ----------
    connection
        A stream socket, blocking.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames: Frames[Any] = Frames(REQUESTS)

    def receive(self) -> Any:
        """The next frame from the parent. Blocks. Raises `SystemExit` at the socket's end."""
        while (frame := self._frames.next()) is None:
            data = self._connection.recv(_CHUNK)
            if not data:
                raise SystemExit(0)
            self._frames.feed(data)
        return frame

    def send(self, answer: Answer) -> None:
        """Tell the parent. Raises `SystemExit` when there is none."""
        try:
            self._connection.sendall(encode(answer))
        except OSError:
            raise SystemExit(0) from None


def follow_parent() -> None:
    """Leave signals for the whole service to the parent, and have the kernel kill this process behind it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def serve(channel: Channel) -> None:
    """Open the builder that is asked for, say so, and do what is asked until the socket ends.

    What goes wrong before the builder is open is for the traceback on stderr, which the parent reads.
    """
    start: Start = channel.receive()
    if os.getppid() != start.parent:
        return
    send_lines(channel)
    builder = _made(start)
    builder.open()
    try:
        channel.send(Ready(builder.fingerprint))
        while True:
            channel.send(_answer(builder, channel.receive(), channel))
    finally:
        builder.close()


def _made(start: Start) -> Builder:
    module, _, name = start.make.partition(":")
    builder: Builder = getattr(importlib.import_module(module), name)(*start.arguments)
    return builder


def _answer(builder: Builder, request: Request, channel: Channel) -> Answer:
    try:
        return Built(_exported(builder, request, channel))
    except CudnnActorError as error:
        return Refused(error.to_record())
    except EngineFailure as error:
        kind: Any = "sticky" if isinstance(error, StickyError) else "failure"
        return Failed(kind, error.status, error.detail)
    except MemoryError as error:
        return Failed("memory", "OUT_OF_MEMORY", str(error))
    except Exception as error:  # noqa: BLE001 - the parent is told, as if it had built it itself
        return Failed("failure", type(error).__name__, str(error))


def _exported(builder: Builder, request: Request, channel: Channel) -> bytes | None:
    def progress(done: int, of: int, what: str) -> None:
        channel.send(Progress(done, of, what))

    graph, limit = request.graph, request.workspace_limit
    if isinstance(request, Build):
        plan = builder.build(graph, workspace_limit=limit)
    else:
        plan = builder.tune(graph, workspace_limit=limit, progress=progress)
    try:
        return builder.export(plan)
    except StickyError:
        raise
    except EngineFailure:  # a plan that cannot leave this process: the parent makes its own
        return None
