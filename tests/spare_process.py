"""Forkservers without an interpreter's imports: a process stands by to be the first one of a forked program.

It is forked from the program before that runs anything, and is its child, as a started forkserver is. When
the package starts its forkserver, this process takes what an exec would have given it: arguments, search
path, environment, working directory, descriptors, and a session of its own. What differs:

- modules have been imported already: those of `program_server`, and what they do in an import was done there;
- until then, it is a child of the program that does nothing, and ends when the program has ended;
- `/proc` and `sys.orig_argv` show the command of the server of programs, and `/proc` its environment: who
  finds the processes of a program by what stands there, as `cudnn-actor chaos` does, does not find this one.

Only one is there: a second forkserver of a program is executed, and so is one whose interpreter, or a
variable that an interpreter reads at its start, is not the program's.

The forkservers of pytest's own process are forked by the server of programs, in the same way, as often as one
is started: see `forked_programs.forking_forkservers`. A member of a pool is a fork of such a forkserver, and
has a service, whose forkserver is a spare process, too.
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
from typing import Any, Final, NamedTuple, NoReturn

from cudnn_actor.processes import forkserver, interpreter, named_functions, server_process

__all__ = ["ForkserverOrder", "be_forkserver", "child_of", "fork_spare", "order_of", "starts_the_same"]

_LONGEST: Final = 200_000
_MOST_DESCRIPTORS: Final = 64
_ABOVE: Final = 100
"""The program's end of the socket has a number above this one: programs have the lowest numbers to use."""
_MEMBER: Final = "cudnn_actor.pool.member_process:main"
"""What a member of a pool runs."""


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
            _stand_by(theirs, be, starting)
    with ours:
        number = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, _ABOVE)
    spare = _Spare(pid, number, starting)
    server_process.start_module = spare.start_module  # type: ignore[attr-defined]


class ForkserverOrder(NamedTuple):
    """What a forkserver would get by an exec, but for its descriptors."""

    module: str
    arguments: list[str]
    numbers: list[int]
    """Those that its descriptors are to have, besides 0, 1 and 2."""
    path: list[str]
    environment: dict[str, str]
    folder: str


def order_of(module: str, arguments: Sequence[str], numbers: Sequence[int]) -> ForkserverOrder:
    """What `interpreter.start_module` would give a process now."""
    path, environment = [*interpreter.search_path()], interpreter.environment()
    return ForkserverOrder(module, [*arguments], [*numbers], path, environment, os.getcwd())


def starts_the_same(starting: Sequence[str]) -> object:
    """What is equal as long as an exec gives this process the same interpreter.

    `starting`: how the names of variables begin that are read when an interpreter starts.
    """
    read = {name: value for name, value in os.environ.items() if name.startswith(tuple(starting))}
    return read, os.getpid(), sys.executable, getattr(sys, "frozen", False)


class _Spare:
    def __init__(self, pid: int, orders: int, starting: Sequence[str]) -> None:
        self._pid, self._orders = pid, orders  # not a socket, of which it would be warned at the end
        self._lock = threading.Lock()
        self._starting = tuple(starting)
        self._at_first = starts_the_same(self._starting)

    def start_module(
        self, module: str, *arguments: str, descriptors: Sequence[int], executable: str | None
    ) -> tuple[subprocess.Popen[bytes], int]:
        """As `interpreter.start_module`, which this calls if the process is not there, or not to be used."""
        if not self._may_be(executable) or not self._lock.acquire(blocking=False):
            return interpreter.start_module(
                module, *arguments, descriptors=descriptors, executable=executable
            )
        order = order_of(module, arguments, descriptors)
        with socket.socket(fileno=self._orders) as orders:
            socket.send_fds(orders, [json.dumps(order).encode()], [1, 2, *descriptors])
        return child_of(self._pid), os.pidfd_open(self._pid)

    def _may_be(self, executable: str | None) -> bool:
        """Whether an exec now would give the same interpreter, whose parent is this process."""
        return executable is None and self._at_first == starts_the_same(self._starting)


def child_of(pid: int) -> subprocess.Popen[bytes]:
    """What `subprocess` has of a child that it has started."""
    process: Any = subprocess.Popen.__new__(subprocess.Popen)
    process.args, process.pid, process.returncode = [sys.executable], pid, None
    process.stdin = process.stdout = process.stderr = None
    process._child_created, process._waitpid_lock = True, threading.Lock()
    found: subprocess.Popen[bytes] = process
    return found


def _stand_by(
    orders: socket.socket, be: Callable[[dict[int, int]], None], starting: Sequence[str]
) -> NoReturn:
    """Wait for the order, and be the forkserver; or end with the program."""
    try:
        data, descriptors, _, _ = socket.recv_fds(orders, _LONGEST, _MOST_DESCRIPTORS)
        if data:
            be_forkserver(ForkserverOrder(*json.loads(data)), descriptors, be, starting)
    finally:
        os._exit(0)


def be_forkserver(
    order: ForkserverOrder,
    descriptors: Sequence[int],
    be: Callable[[dict[int, int]], None],
    starting: Sequence[str],
) -> None:
    """Become the forkserver.

    `descriptors` are those of 1, 2 and `order.numbers`; `be` and `starting` as in `fork_spare`.
    """
    gc.freeze()
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    numbers = [0, 1, 2, *order.numbers]
    be(dict(zip(numbers, [nothing, *descriptors], strict=True)))
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    rest = [place for place in sys.path if place and place not in order.path]
    sys.path[:] = [*order.path, *rest]
    sys.argv[:] = ["-c", *order.arguments]
    sys.modules["__main__"] = types.ModuleType("__main__")
    faulthandler.enable()
    random.seed()
    importlib.import_module("numpy.random").seed()
    _give_members_spares(be, starting)
    importlib.import_module(order.module).main()


def _give_members_spares(be: Callable[[dict[int, int]], None], starting: Sequence[str]) -> None:
    """Have a member of a pool that this forkserver forks begin with a spare process of its own."""
    find = named_functions.function_named

    def function_named(text: str) -> Callable[..., Any]:
        function = find(text)

        def run(descriptors: list[int]) -> object:
            fork_spare(be, starting)
            return function(descriptors)

        return run if text == _MEMBER else function

    forkserver.function_named = function_named  # type: ignore[attr-defined]
