"""A process that stands by to be the first forkserver of a forked program, without an interpreter's imports.

It is forked from the program before that runs anything, and is its child, as a started forkserver is. When
the package starts its forkserver, this process takes what an exec would have given it: arguments, search
path, environment, working directory, descriptors, and a session of its own. What differs:

- modules have been imported already: those of `program_server`, and what they do in an import was done there;
- until then, it is a child of the program that does nothing, and ends when the program has ended;
- `/proc` and `sys.orig_argv` show the command of the server of programs, and `/proc` its environment: who
  finds the processes of a program by what stands there, as `cudnn-actor chaos` does, does not find this one.

Only one is there: a second forkserver is executed, and so is one whose interpreter, or a variable that an
interpreter reads at its start, is not the program's.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import importlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from cudnn_actor.processes import interpreter, server_process

__all__ = ["fork_spare"]

_LONGEST: Final = 200_000
_MOST_DESCRIPTORS: Final = 64
_ABOVE: Final = 100
"""The program's end of the socket has a number above this one: programs have the lowest numbers to use."""


def fork_spare(be: Callable[[dict[int, int]], None], starting: Sequence[str]) -> None:
    """Fork the process; the program's next forkserver is it. On the program's only thread.

    Parameters
    ----------
    be
        Gives a process the descriptors that it is to have, by their numbers, and new standard streams.
    starting
        How the names of variables begin that are read when an interpreter starts.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of OpenBLAS' threads, which end before a fork
            pid = os.fork()
        if pid == 0:
            ours.close()
            _stand_by(theirs, be)
    with ours:
        number = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, _ABOVE)
    spare = _Spare(pid, number, starting)
    server_process.start_module = spare.start_module  # type: ignore[attr-defined]


class _Spare:
    def __init__(self, pid: int, orders: int, starting: Sequence[str]) -> None:
        self._pid, self._orders = pid, orders  # not a socket, of which it would be warned at the end
        self._lock = threading.Lock()
        self._starting = tuple(starting)
        self._at_first = self._read_at_start()
        self._of = os.getpid(), sys.executable

    def _read_at_start(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith(self._starting)}

    def start_module(
        self, module: str, *arguments: str, descriptors: Sequence[int], executable: str | None
    ) -> tuple[subprocess.Popen[bytes], int]:
        """As `interpreter.start_module`, which this calls if the process is not there, or not to be used."""
        if not self._may_be(executable) or not self._lock.acquire(blocking=False):
            return interpreter.start_module(
                module, *arguments, descriptors=descriptors, executable=executable
            )
        order = {
            "module": module,
            "arguments": arguments,
            "numbers": descriptors,
            "path": [*interpreter.search_path()],
            "environment": interpreter.environment(),
            "folder": os.getcwd(),
        }
        with socket.socket(fileno=self._orders) as orders:
            socket.send_fds(orders, [json.dumps(order).encode()], [1, 2, *descriptors])
        return _child(self._pid), os.pidfd_open(self._pid)

    def _may_be(self, executable: str | None) -> bool:
        """Whether an exec now would give the same interpreter, whose parent is this process."""
        same = self._of == (os.getpid(), sys.executable) and self._at_first == self._read_at_start()
        return same and executable is None and not getattr(sys, "frozen", False)


def _child(pid: int) -> subprocess.Popen[bytes]:
    """What `subprocess` has of a child that it has started."""
    process: Any = subprocess.Popen.__new__(subprocess.Popen)
    process.args, process.pid, process.returncode = [sys.executable], pid, None
    process.stdin = process.stdout = process.stderr = None
    process._child_created, process._waitpid_lock = True, threading.Lock()
    found: subprocess.Popen[bytes] = process
    return found


def _stand_by(orders: socket.socket, be: Callable[[dict[int, int]], None]) -> NoReturn:
    """Wait for the order, and be the forkserver; or end with the program."""
    try:
        data, descriptors, _, _ = socket.recv_fds(orders, _LONGEST, _MOST_DESCRIPTORS)
        if data:
            _run(json.loads(data), descriptors, be)
    finally:
        os._exit(0)


def _run(order: dict[str, Any], descriptors: list[int], be: Callable[[dict[int, int]], None]) -> None:
    gc.freeze()
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    numbers = [0, 1, 2, *order["numbers"]]
    be(dict(zip(numbers, [nothing, *descriptors], strict=True)))
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    rest = [place for place in sys.path if place and place not in order["path"]]
    sys.path[:] = [*order["path"], *rest]
    sys.argv[:] = ["-c", *order["arguments"]]
    sys.modules["__main__"] = types.ModuleType("__main__")
    faulthandler.enable()
    random.seed()
    importlib.import_module("numpy.random").seed()
    importlib.import_module(order["module"]).main()
