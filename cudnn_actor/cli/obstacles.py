"""Tries one by one what a service needs from the system; reports what is denied, and how to fix it."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import socket
import stat
from collections.abc import Callable

from cudnn_actor.engines.cuda.diagnosis.installation import Problem
from cudnn_actor.processes.interpreter import find_python
from cudnn_actor.protocol.errors import InvalidRequest

__all__ = ["find_obstacles"]

_DESCRIPTORS = 64
"""The descriptors that a process should be able to open. A service takes some 20, plus one for each arena and
event loop."""
_ALLOW = "let the container's seccomp profile, or the sandbox around it, allow {}"


def find_obstacles() -> tuple[Problem, ...]:
    """Find the obstacles to services or worker processes on this system. Never raises, and starts no
    process."""
    calls = itertools.starmap(_system_call, _CALLS)
    found = [_null(), _interpreter(), *calls, _proc(), _descriptors()]
    return tuple(problem for problem in found if problem is not None)


def _null() -> Problem | None:
    try:
        with open(os.devnull, "r+b") as null:
            if stat.S_ISCHR(os.fstat(null.fileno()).st_mode):
                return None
            why = "it is not a device"
    except OSError as error:
        why = _why(error)
    return Problem(
        what=f"{os.devnull} cannot be used",
        detail=f"{why}, and a worker process has it as its input",
        fix="mknod -m 666 /dev/null c 1 3, or have the container or chroot mount a /dev",
    )


def _interpreter() -> Problem | None:
    try:
        path = find_python()
    except InvalidRequest as error:
        why = error.problem
    else:
        if os.access(path, os.X_OK):
            return None
        why = f"{path!r} cannot be started"
    return Problem(
        what="there is no Python for worker processes",
        detail=why,
        fix="give `spawn` the path of one (`executable=`), or run this with a Python, not frozen",
    )


def _socket() -> int:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    return ours.detach()


_CALLS: tuple[tuple[str, str, Callable[[], int]], ...] = (
    ("memfd_create", "buffers lie in anonymous files", lambda: os.memfd_create("doctor")),
    ("pidfd_open", "worker processes are watched by it", lambda: os.pidfd_open(os.getpid())),
    ("eventfd", "threads are woken by it", lambda: os.eventfd(0)),
    ("socketpair", "worker processes are spoken to by it", _socket),
)
"""System calls that return a descriptor, and the purposes for which services need them."""


def _system_call(name: str, needed: str, call: Callable[[], int]) -> Problem | None:
    try:
        os.close(call())
    except (OSError, AttributeError) as error:
        why = _why(error) if isinstance(error, OSError) else "this Python was built without it"
        fix = "ulimit -n 1024" if why.startswith("EMFILE") else _ALLOW.format(name)
        return Problem(what=f"{name} is denied", detail=f"{why}, and {needed}", fix=fix)
    return None


def _proc() -> Problem | None:
    try:
        os.listdir("/proc/self/fd")
    except OSError as error:
        return Problem(
            what="/proc cannot be read",
            detail=f"{_why(error)}, and a worker process finds its descriptors there",
            fix="mount -t proc proc /proc",
        )
    return None


def _descriptors() -> Problem | None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _DESCRIPTORS:
        return None
    return Problem(
        what=f"this process may open only {soft} descriptors",
        detail=f"a service needs some {_DESCRIPTORS}",
        fix=f"ulimit -n {min(1024, hard) if hard != resource.RLIM_INFINITY else 1024}",
        prevents=False,
    )


def _why(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, 'OSError')}: {error.strerror or error}"
