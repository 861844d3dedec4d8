"""The forkserver, which forks workers. Its arguments are FD, PARENT and the PRELOAD modules.

FD is its end of a socket pair, on which it gets launch messages and answers them (`launch_messages`). PARENT
is the process id of the other end's owner. PRELOAD are the modules that it imports for every worker. It runs
no other code than these imports, so a launch waits only for a fork.

Which process outlives which, and how processes are identified:

- The forkserver never outlives its parent. The end of the socket shows that the parent has gone. If another
  process holds a copy of the parent's end (the parent has forked), the parent's pidfd shows it. Only the
  imports are not interrupted; the forkserver checks again after them. It opens the pidfd by the process id,
  and then checks that this process is still its parent. So the pidfd is the parent's, and not that of a later
  process with the same id.
- Workers outlive a killed forkserver, and their service goes on. They never outlive the parent: the kernel
  kills them when it ends (`lifeline`), and so does the forkserver, if it still runs. An error in the
  forkserver ends only the forkserver.
- No worker is mistaken for another process. Only the forkserver reaps its workers. Before it reaps one, the
  worker's process id cannot be reused, so the forkserver can open the pidfd, which it sends to the parent.
  When the forkserver has died, the kernel gives the workers another parent, which reaps them, and their exit
  status is lost.

Workers inherit the environment that the forkserver was started with, including secrets.

The forkserver ignores Ctrl-C and TERM, which the parent handles. It also blocks TERM, so that a TERM that is
sent to a new worker stays pending until the worker handles such signals, and is not lost.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.processes.launch_messages import (
    TO_SERVER,
    Discard,
    Exited,
    FromServer,
    Launch,
    Launched,
    PreloadFailed,
    Ready,
    Refused,
    ToServer,
)
from cudnn_actor.processes.lifeline import bind, tie
from cudnn_actor.processes.named_functions import function_named
from cudnn_actor.processes.process_state import call_this_process, reason_of

__all__ = ["NAME", "main", "set_signals", "succeed", "work"]

NAME = "cudnn-launcher"
"""The process's name, as `ps -o comm` shows it."""

_LONGEST_TEXT = 8 << 10
_STANDARD = frozenset((0, 1, 2))


class _ParentGone(Exception):
    """Raised when the parent has gone."""


class _Server:
    """Forks workers, reaps them, and reports both, until its parent has gone. Single-threaded.

    Parameters
    ----------
    connection
        Its end of the socket pair.
    parent
        The parent's pidfd.
    """

    def __init__(self, connection: socket.socket, parent: int) -> None:
        self._socket = connection
        self._channel = Channel(connection, TO_SERVER)
        self._parent = parent
        self._workers: dict[int, int] = {}
        """The workers that have not been reaped: number of the launch by pidfd."""
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(parent, select.POLLIN)

    def serve(self) -> None:
        """Do what the parent asks until it has gone, then kill all workers. Blocks."""
        try:
            self._tell(Ready())
            while True:
                for fd, _ in self._poll.poll():
                    self._attend(fd)
        except _ParentGone:
            self._end_workers()

    def fail(self, why: str) -> None:
        """Tell the parent why there will be no workers."""
        with contextlib.suppress(_ParentGone):
            self._tell(PreloadFailed(why[-_LONGEST_TEXT:]))

    def _attend(self, fd: int) -> None:
        if fd == self._parent:
            raise _ParentGone
        if fd == self._socket.fileno():
            self._obey()
        else:
            self._tell(self._reap(fd))

    def _obey(self) -> None:
        try:
            orders: list[ToServer] = self._channel.receive()
        except BadFrame:
            raise _ParentGone from None
        for order in orders:
            match order:
                case Launch():
                    self._launch(order, self._take_descriptors(order.descriptors))
                case Discard(number):
                    for pidfd in [fd for fd, launched in self._workers.items() if launched == number]:
                        _kill(pidfd)
        if self._channel.ended:
            raise _ParentGone

    def _take_descriptors(self, count: int) -> list[int]:
        """The descriptors that came with a launch; fewer if this process had no room for all."""
        taken: list[int] = []
        with contextlib.suppress(OSError):  # `LOST`: this and all later ones did not arrive
            while len(taken) < count:
                taken.append(self._channel.take_descriptor())
        return taken

    def _tell(self, record: FromServer, descriptors: Sequence[int] = ()) -> None:
        """Send a message. If the socket is full, wait until the parent reads, or ends."""
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        room.register(self._parent, select.POLLIN)
        self._channel.send(record, descriptors)
        while not self._channel.flush():
            if any(fd == self._parent for fd, _ in room.poll()):
                raise _ParentGone

    def _launch(self, launch: Launch, descriptors: list[int]) -> None:
        try:
            pid, pidfd = self._fork(launch, descriptors)
        except OSError as error:
            self._tell(Refused(launch.number, reason_of(error)))
            return
        finally:
            for fd in descriptors:
                os.close(fd)
        self._workers[pidfd] = launch.number
        self._poll.register(pidfd, select.POLLIN)
        self._tell(Launched(launch.number, pid), [pidfd])

    def _fork(self, launch: Launch, descriptors: list[int]) -> tuple[int, int]:
        """Process id and pidfd of a new worker. Returns in this process only. Raises `OSError`."""
        if (lost := launch.descriptors - len(descriptors)) != 0:
            raise OSError(f"the forkserver had no room for {lost} of its descriptors")
        _flush()
        if (pid := _fork()) == 0:
            self._socket.detach()  # or its finalizer would close this number, soon another file's
            work(launch.main, descriptors)
        with contextlib.suppress(OSError):  # the worker has ended. A running worker also does this itself
            bind(descriptors[-1], pid)
        try:
            return pid, os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)  # the id is still the worker's: it has not been reaped
            os.waitpid(pid, 0)
            raise

    def _reap(self, pidfd: int) -> Exited:
        """Reap a worker that has exited."""
        number = self._workers.pop(pidfd)
        self._poll.unregister(pidfd)
        try:
            end = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        except ChildProcessError:  # a preloaded module has reaped it
            end = None
        os.close(pidfd)
        if end is None:
            return Exited(number)
        if end.si_code == os.CLD_EXITED:
            return Exited(number, status=end.si_status)
        return Exited(number, signal=end.si_status)

    def _end_workers(self) -> None:
        """Kill all workers, then wait for each. Blocks for as long as the kernel takes to end a process."""
        for pidfd in self._workers:
            _kill(pidfd)
        for pidfd in list(self._workers):
            self._reap(pidfd)


def main() -> None:
    """Serve one parent until it has gone."""
    call_this_process(NAME)
    fd, parent, preload = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    set_signals()
    os.set_inheritable(fd, False)
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(parent)
        if os.getppid() == parent:
            with socket.socket(fileno=fd) as connection:
                _serve(_Server(connection, pidfd), preload)
    _flush()
    os._exit(0)  # without the modules' exit handlers: this process has not used them


def succeed(descriptors: Sequence[int]) -> None:
    """Serve the same parent, as the successor of the server that has forked this process (see `launching`).

    The descriptors are its end of a socket pair, and the parent's pidfd. It may wait for ever, because a
    lifeline ends it with the parent, like every fork of the server.
    """
    connection, parent = descriptors
    set_signals()
    call_this_process(NAME)
    with socket.socket(fileno=connection) as ours:
        _Server(ours, parent).serve()


def _serve(server: _Server, preload: Sequence[str]) -> None:
    for name in preload:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - also SystemExit; the launching process is told
            server.fail(f"{name} cannot be preloaded: {type(error).__name__}: {error}")
            traceback.print_exc()
            return
    set_signals()  # an import may have changed them
    gc.collect()
    gc.freeze()  # so that a worker's garbage collector does not touch the pages that it shares with others
    server.serve()


def set_signals() -> None:
    """Ignore SIGINT and SIGTERM, and reset inherited settings: blocked signals, and children that are reaped
    automatically."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM})


def _fork() -> int:
    """`os.fork`, without its warning about native threads of a module.

    Both processes leave the `with` block. So a worker has the warning filters that the imports left, and
    shows again what was shown in the forkserver.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def work(main: str, descriptors: list[int]) -> NoReturn:
    """Run `main` as a worker, and exit without Python's usual cleanup."""
    status = 1
    try:
        call_this_process("cudnn-starting")
        lifeline = descriptors[-1]
        tie(lifeline)
        _keep_only({*_STANDARD, *descriptors})
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        random.seed()
        status = _ran(main, descriptors[:-1])
    except BaseException:  # noqa: BLE001 - a worker must not continue in the server's stack frames
        traceback.print_exc()
    finally:
        _flush()
        os._exit(status)


def _ran(main: str, descriptors: list[int]) -> int:
    """Run `main` in a worker. Returns the exit status: 0, or the number of a `SystemExit`."""
    try:
        function_named(main)(descriptors)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        return (end.code or 0) & 0xFF
    return 0


def _keep_only(kept: set[int]) -> None:
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            os.close(fd)


def _kill(pidfd: int) -> None:
    with contextlib.suppress(OSError):  # it has ended; or the kernel refuses, and the lifeline kills it
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there was none
            stream.flush()
