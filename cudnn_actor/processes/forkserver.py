"""What forks workers for another process: `python -m cudnn_actor.processes.forkserver FD PARENT PRELOAD...`.

FD is its end of a socket pair, on which it is told what to launch and answers (`launch_messages`); PARENT is
the process id of the other end's owner; PRELOAD are the modules that every worker is to find imported. It
runs nobody's code but those imports, so that no launch waits for anything but a fork.

Who outlives whom, and who sees to it:

- this process never outlives its parent. The socket's end says that the parent has gone, unless another
  process holds a copy of it (the parent has forked), and then the parent's pidfd does. Only the imports are
  not interrupted: it looks again after them. That the pidfd is the parent's, and not that of a later process
  of the same number, follows from having the parent still as its parent after it was opened;
- workers outlive this process, where it is killed: their service goes on. They never outlive the parent: the
  kernel kills them when it ends (`lifeline`), and this process does so too, if it is there. It gives them no
  cause to end of its own: an error in here ends this process alone;
- nobody mistakes a worker for another. This process alone reaps its workers, so the number of one that it
  has forked stays that one's until then: it opens the pidfd, and hands that out. When it has died, they are
  reaped by the kernel's choice of another parent, and nobody tells how they ended.

Workers inherit the environment that this process was started with, secrets in it included.

Ctrl-C and TERM are for the parent to answer. TERM is also blocked in here, so that one which is sent to a
worker before it takes such signals waits until then, and is not lost.
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
from cudnn_actor.processes.process_state import call_this_process

__all__ = ["NAME", "main", "succeed"]

NAME = "cudnn-launcher"
"""The process's name, as `ps -o comm` shows it."""

_LONGEST_TEXT = 8 << 10
_STANDARD = frozenset((0, 1, 2))


class _ParentGone(Exception):
    """Raised when there is nobody left to serve."""


class _Server:
    """Forks, reaps and tells, until its parent has gone. One thread.

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
        """Those that have not been reaped: number of the launch by pidfd."""
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(parent, select.POLLIN)

    def serve(self) -> None:
        """Do what the parent asks until it has gone, and leave no worker behind then. Blocks."""
        try:
            self._tell(Ready())
            while True:
                for fd, _ in self._poll.poll():
                    self._attend(fd)
        except _ParentGone:
            self._end_workers()

    def fail(self, why: str) -> None:
        """Say why there will be no worker."""
        with contextlib.suppress(_ParentGone):
            self._tell(PreloadFailed(why[-_LONGEST_TEXT:]))

    def _attend(self, fd: int) -> None:
        if fd == self._parent:
            raise _ParentGone
        if fd == self._socket.fileno():
            self._obey()
        else:
            self._tell(self._reaped(fd))

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
        """Those that came with an order; fewer, where this process has no room for all."""
        taken: list[int] = []
        with contextlib.suppress(OSError):  # one that was lost stands for itself and those behind it
            while len(taken) < count:
                taken.append(self._channel.take_descriptor())
        return taken

    def _tell(self, record: FromServer, descriptors: Sequence[int] = ()) -> None:
        """Send; while a parent that is busy leaves no room, wait for that, or for its end."""
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        room.register(self._parent, select.POLLIN)
        self._channel.send(record, descriptors)
        while not self._channel.flush():
            if any(fd == self._parent for fd, _ in room.poll()):
                raise _ParentGone

    def _launch(self, launch: Launch, descriptors: list[int]) -> None:
        try:
            pid, pidfd = self._forked(launch, descriptors)
        except OSError as error:
            self._tell(Refused(launch.number, str(error)))
            return
        finally:
            for fd in descriptors:
                os.close(fd)
        self._workers[pidfd] = launch.number
        self._poll.register(pidfd, select.POLLIN)
        self._tell(Launched(launch.number, pid), [pidfd])

    def _forked(self, launch: Launch, descriptors: list[int]) -> tuple[int, int]:
        """Id and pidfd of a new worker. Returns in this process only. Raises `OSError`."""
        if (lost := launch.descriptors - len(descriptors)) != 0:
            raise OSError(f"{lost} of its descriptors found no room in the forkserver")
        _flush()
        if (pid := _fork()) == 0:
            self._socket.detach()  # the number is about to be free for others, whom no finalizer may close
            _work(launch.main, descriptors)
        with contextlib.suppress(OSError):  # it has ended; else it does this itself as well
            bind(descriptors[-1], pid)
        try:
            return pid, os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)  # still its own number: it has not been reaped
            os.waitpid(pid, 0)
            raise

    def _reaped(self, pidfd: int) -> Exited:
        """Take leave of a worker that has exited."""
        number = self._workers.pop(pidfd)
        self._poll.unregister(pidfd)
        try:
            end = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        except ChildProcessError:  # a preloaded module reaps what it has not forked
            end = None
        os.close(pidfd)
        if end is None:
            return Exited(number)
        if end.si_code == os.CLD_EXITED:
            return Exited(number, status=end.si_status)
        return Exited(number, signal=end.si_status)

    def _end_workers(self) -> None:
        """Kill all, then wait for each. Blocks for as long as the kernel takes to end a process."""
        for pidfd in self._workers:
            _kill(pidfd)
        for pidfd in list(self._workers):
            self._reaped(pidfd)


def main() -> None:
    """Serve one parent until it has gone."""
    call_this_process(NAME)
    fd, parent, preload = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    _set_signals()
    os.set_inheritable(fd, False)
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(parent)
        if os.getppid() == parent:
            _serve(_Server(socket.socket(fileno=fd), pidfd), preload)
    _flush()
    os._exit(0)  # what the modules do at exit is for processes that have used them


def succeed(descriptors: Sequence[int]) -> None:
    """Serve the same parent, behind the server that has forked this process (see `launching`).

    The descriptors are its end of a socket pair, and the parent's pidfd. It may wait for ever: it is tied to
    the parent's life as any fork of the server is.
    """
    connection, parent = descriptors
    _set_signals()
    call_this_process(NAME)
    _Server(socket.socket(fileno=connection), parent).serve()


def _serve(server: _Server, preload: Sequence[str]) -> None:
    for name in preload:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - also SystemExit; whoever launches is told
            server.fail(f"{name} cannot be preloaded: {type(error).__name__}: {error}")
            traceback.print_exc()
            return
    _set_signals()  # an import may have had its own ideas
    gc.collect()
    gc.freeze()  # no collection of a worker touches what it shares with the others
    server.serve()


def _set_signals() -> None:
    """Also undo what may have been handed down: signals that are blocked, children that reap themselves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM})


def _fork() -> int:
    """`os.fork`, without the warning that native threads of a module draw from it.

    Both sides leave the block: a worker has the filters that the imports left, and shows anew what has been
    shown in here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _work(main: str, descriptors: list[int]) -> NoReturn:
    """Be a worker: run `main`, and end without anything that a Python process does at its end."""
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
    except BaseException:  # noqa: BLE001 - nothing may run on in the server's frames
        traceback.print_exc()
    finally:
        _flush()
        os._exit(status)


def _ran(main: str, descriptors: list[int]) -> int:
    """The exit status of a worker that has run `main`: 0, or the number of a `SystemExit`."""
    module, _, name = main.partition(":")
    try:
        getattr(importlib.import_module(module), name)(descriptors)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        return (end.code or 0) & 0xFF
    return 0


def _keep_only(kept: set[int]) -> None:
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        with contextlib.suppress(OSError):  # the one that listed them
            os.close(fd)


def _kill(pidfd: int) -> None:
    with contextlib.suppress(OSError):  # it has gone; or the kernel refuses, and the lifeline does it
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there was none
            stream.flush()


if __name__ == "__main__":
    main()
