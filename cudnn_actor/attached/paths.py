"""The path of a service's socket, and checks of who may use it."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

from cudnn_actor.options import NAME
from cudnn_actor.protocol.errors import InvalidRequest

__all__ = ["peer_of", "require_private", "socket_path"]

_LONGEST = 107
"""The most bytes that the path of a Unix socket may have."""
_CREDENTIALS = struct.Struct("iII")


def socket_path(given: str | os.PathLike[str] | None, name: str = NAME) -> Path:
    """The socket's path. `given`: the path that the user has given, with or without "unix:" before it; None
    for the default.

    The default is `$XDG_RUNTIME_DIR/cudnn-actor/NAME.sock`, where NAME is `name`; without that variable, the
    folder is `/tmp/cudnn-actor-UID`. Raises `InvalidRequest` if the path is too long for a socket.
    """
    if given is None:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        folder = Path(runtime) / "cudnn-actor" if runtime else Path(f"/tmp/cudnn-actor-{os.geteuid()}")
        path = folder / f"{name}.sock"
    else:
        path = Path(os.fspath(given).removeprefix("unix:"))
    if len(os.fsencode(path)) > _LONGEST or not path.name:
        raise InvalidRequest(
            field="path",
            value=str(path),
            problem=f"is no path of a socket, which has 1 to {_LONGEST} bytes",
            fix="give a shorter one, such as unix:/tmp/gpu.sock",
        )
    return path


def require_private(folder: Path) -> None:
    """Make the folder of the default path if it is missing.

    Raises `InvalidRequest` unless it is a real folder of this user that no other user may write to.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    problem = ""
    if not stat.S_ISDIR(found.st_mode):
        problem = "is no folder"
    elif found.st_uid != os.geteuid():
        problem = f"belongs to user {found.st_uid}"
    elif found.st_mode & 0o022:
        problem = "may be written to by others"
    if problem:
        raise InvalidRequest(
            field="path", value=str(folder), problem=problem, fix="give a path in a folder of your own"
        )


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process id and the user id of the process that has made the other end. Raises `OSError`."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid
