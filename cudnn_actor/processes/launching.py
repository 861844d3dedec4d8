"""Launches workers: processes forked from a forkserver ("the server") that has imported their modules.

Why a forkserver: a worker is there in milliseconds, and a fork of the user's process would inherit its
threads' locks and its CUDA state. Why not the standard library's: it listens on a socket in the file system,
sends pickles, and has one list of modules for the whole user's process.

What is shared: a launcher's server, and its children by number. Both are written under the launcher's lock,
which is held during a launch: some milliseconds, or as long as the imports take if the server has just been
started. There is one launch at a time. So each message from the server is either the answer to that launch or
a notice, and the thread that holds the lock handles both. A notice that comes at another time waits in the
socket.

What is not under the lock, and why this is safe:

- A child's exit is seen through its pidfd, and its signals are sent through it. Neither needs the server.
- `close` wakes a waiting launch before it waits for the lock itself. It only shuts the socket down, and
  leaves the descriptor to the thread that holds the lock. If that thread has started a server and not noted
  it yet, `close` sees none. So it also replaces `_closed`, which each launch looks at while it waits.

A fork of the user's process keeps none of this: its copies of the descriptors are closed right after the
fork, so that neither its end nor its exit handlers affect the processes of its parent. (A descriptor that
another thread is making at that moment is missed. This does no harm: the server and its workers watch the
pidfd of their parent, not only the socket and the lifeline.)

Workers outlive their server. A stopped server is not waited for, but killed. Its successor takes over: a fork
of the server, made after its first worker, that has all modules imported and waits. Only if both die at once,
another server is started by exec, and a launch waits for the imports again. If servers are killed again and
again before they have imported their modules, a worker is started by exec, too, and imports them itself.

No worker outlives this process, however that ends: `lifeline` says why.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

from cudnn_actor.actors import forks
from cudnn_actor.processes.interpreter import start_module
from cudnn_actor.processes.launched import Child
from cudnn_actor.processes.lifeline import lifeline_for_launch
from cudnn_actor.processes.process_state import is_stopped, own_pidfd, reason_of
from cudnn_actor.processes.server_link import (
    SERVER_LOOK_S,
    UNTIL_ENDED_S,
    ServerLink,
    ServerLost,
    StartLost,
    refuse_if,
)
from cudnn_actor.processes.server_process import SERVER, ExecutedServer, ForkedServer

__all__ = ["Child", "LaunchFailed", "Launcher", "close_launchers"]

_HEIR = f"{SERVER}:succeed"
_ALONE = "cudnn_actor.processes.alone"
_MOST_LOST_STARTS = 3
"""After this many servers in a row that were killed in their start, workers do not wait for one any more."""


def _never() -> bool:
    return False


class LaunchFailed(OSError):
    """Raised when a launch fails: no process, no descriptor, no server, or a failing preload.

    Nothing of the worker is left running. A later launch may succeed; it starts another server if the last
    one has gone. The text is the reason.
    """


class Launcher:
    """One forkserver process for a set of preloaded modules, started at first use. Any thread.

    The server is started by exec, with the environment and the module search path that this process has
    then. Its workers inherit both, including secrets in the environment. The server has its own session, so a
    terminal's signals do not reach it. It and its workers print to this process's standard output and error.

    If the server is killed or stopped, its workers go on. A dead server is replaced at once if a monitor
    watches it (`fileno`, `revive`), else at the next launch. A stopped server is replaced at the next launch.

    Parameters
    ----------
    preload
        Modules that the server imports, in order. They must not start threads that matter after a fork, nor
        initialise CUDA, because a process that was forked from one with a context cannot use CUDA.
    executable
        Path of the Python that runs the server; None for the one that `find_python` finds.
    """

    shared: ClassVar[dict[tuple[tuple[str, ...], str | None], Launcher]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, preload: tuple[str, ...], executable: str | None = None) -> None:
        self.preload = preload
        self._executable = executable
        self._lock = threading.Lock()
        self._server: ServerLink | None = None
        self._heir: ServerLink | None = None
        """The successor, which takes over when the server dies."""
        self._watch: select.epoll | None = None
        self._numbers = itertools.count(1)
        self._children: dict[int, Child] = {}
        """The children that have not been closed, by the number of their launch."""
        self._closed = object()
        """Another object after each call of `close`. Any thread."""
        self._lost_starts = 0
        """How many servers in a row were killed in their start, up to the last launch."""
        self.dying: deque[subprocess.Popen[bytes]] = deque()
        """Workers that this process has started itself and has yet to reap. Any thread adds one."""

    @classmethod
    def of_process(cls, preload: tuple[str, ...], executable: str | None = None) -> Launcher:
        """The process's launcher for these modules, in this order, and this Python. Never blocks."""
        with cls._shared_lock:
            return cls.shared.setdefault((preload, executable), cls(preload, executable))

    @property
    def pid(self) -> int | None:
        """The server's process id; None when none has been started."""
        server = self._server
        return None if server is None else server.pid

    def warm(self) -> None:
        """Start the server, unless there is one, without waiting for its imports. Blocks for the exec only.

        Errors are reported by the next `launch`. No effect while another thread launches or closes.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(OSError):
                if self._server is None:
                    self._server = self._start_server()
        finally:
            self._lock.release()

    def fileno(self) -> int:
        """A descriptor that is readable when the server has died: call `revive` then. -1 before the first."""
        return -1 if self._watch is None else self._watch.fileno()

    def revive(self) -> str | None:
        """Replace a server that has died, without waiting for imports. Blocks for a fork.

        Returns how it ended. None if it has not died, or if another thread is launching: that launch replaces
        it. A server that died before it was ready is not replaced, because its successor might die of the
        same cause again and again; the next launch reports it.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            server = self._server
            if server is None or not server.has_gone():
                return None
            end = server.end()  # in any case: otherwise `fileno` would stay readable
            if server.ready:
                self._server = None
                with contextlib.suppress(OSError):
                    self._server = self._next_server()
                    self._provide_heir()
            return end
        finally:
            self._lock.release()

    def launch(self, main: str, fds: Sequence[int], unwanted: Callable[[], bool] = _never) -> Child:
        """Fork a worker and run `main` in it. Blocks for the imports, if they are not done, and for the fork.

        If the imports never end, this waits until another thread calls `close`, or `unwanted` returns True. A
        server that is stopped, has died or is silent for ten seconds is killed, and another one is started,
        once. A server that is killed in its start is followed by another, too. After three such servers in a
        row, also of earlier launches, the worker is a new process, which imports its modules itself, and the
        next server is not waited for.

        Parameters
        ----------
        main
            "package.module:function". It is called with the list of the worker's descriptors for `fds`. When
            it returns, the worker exits with status 0 at once, without exit handlers or waiting for threads.
            An exception is printed to stderr, and the status is 1; so is the error of a wrong path.
        fds
            At most 62 descriptors for the worker, which gets copies. It has no others except 0, 1 and 2, and
            its end of the lifeline.
        unwanted
            Returns whether the worker is not wanted any more. Called some twenty times a second.

        Raises
        ------
        LaunchFailed
            See `LaunchFailed`.
        """
        closed = self._closed

        def is_refused() -> bool:
            return self._closed is not closed or unwanted()

        try:
            while not self._lock.acquire(timeout=SERVER_LOOK_S):
                refuse_if(is_refused)
            try:
                self._reap()
                child = self._launch_with_retries(main, fds, is_refused)
                self._provide_heir(is_refused)
            finally:
                self._lock.release()
            return child  # noqa: TRY300 - errors above become `LaunchFailed` below
        except (OSError, ValueError) as error:  # `InvalidRequest`, a ValueError: there is no Python to run it
            raise LaunchFailed(f"{main} was not launched: {reason_of(error)}") from error

    def _launch_with_retries(self, main: str, fds: Sequence[int], unwanted: Callable[[], bool]) -> Child:
        """Launch a worker, after as many servers as may be lost: see `launch`. Raises `OSError`."""
        lost_ready = False
        while True:
            try:
                return self._launch_once(main, fds, unwanted)
            except StartLost:  # after `_MOST_LOST_STARTS` of these, the worker needs no server
                self._server = None
            except ServerLost:
                self._server = None
                if lost_ready:
                    raise
                lost_ready = True

    def _launch_once(self, main: str, fds: Sequence[int], unwanted: Callable[[], bool]) -> Child:
        """Launch a worker from the server; or without it, if servers do not get through their start."""
        if self._lost_starts >= _MOST_LOST_STARTS and not self._has_ready_server():
            return self._launch_without_server(main, fds)
        try:
            child = self._launch_by_server(main, fds, unwanted)
        except StartLost:
            self._lost_starts += 1
            raise
        self._lost_starts = 0
        return child

    def _has_ready_server(self) -> bool:
        """Whether a server has finished its imports. Starts one if there is none, and never waits."""
        if self._server is not None and self._server.has_gone():
            self._server.end()
            self._server = None
        if self._server is None:
            with contextlib.suppress(OSError):
                self._server = self._next_server()
        return self._server is not None and self._server.ready

    def _launch_without_server(self, main: str, fds: Sequence[int]) -> Child:
        """A worker that this process starts itself. Blocks for the exec. Raises `OSError`."""
        with lifeline_for_launch() as lifeline:
            given = (*fds, lifeline.theirs)
            for fd in given:
                os.fstat(fd)  # raises here for an invalid descriptor
            process, pidfd = start_module(
                _ALONE, main, *map(str, given), descriptors=given, executable=self._executable
            )
        number = next(self._numbers)
        self._children[number] = child = Child(
            pid=process.pid,
            pidfd=pidfd,
            lifeline=lifeline,
            process=process,
            on_close=functools.partial(self._note_closed, number),
        )
        return child

    def _note_closed(self, number: int, process: subprocess.Popen[bytes] | None) -> None:
        """Forget a closed child. `process`: what this process has yet to reap of it. Any thread."""
        self._children.pop(number, None)
        if process is not None:
            self.dying.append(process)

    def _reap(self) -> None:
        """Reap the closed workers that this process has started itself, as far as they have ended."""
        for _ in range(len(self.dying)):
            process = self.dying.popleft()
            if process.poll() is None:
                self.dying.append(process)

    def _launch_by_server(self, main: str, fds: Sequence[int], unwanted: Callable[[], bool]) -> Child:
        """Launch a worker with its own lifeline.

        A server may die after the fork and before it reports it. So each try has its own lifeline, which is
        cut if the try fails. This ends a worker that was forked for it, so that it does not share descriptors
        with the next try's worker.
        """
        with lifeline_for_launch() as lifeline:
            number, pid, pidfd = self._order_fork(main, (*fds, lifeline.theirs), unwanted)
        assert self._server is not None
        self._children[number] = child = Child(
            pid=pid,
            pidfd=pidfd,
            lifeline=lifeline,
            report=functools.partial(self._await_report, self._server),
            on_close=functools.partial(self._note_closed, number),
        )
        return child

    def _order_fork(
        self, main: str, fds: Sequence[int], unwanted: Callable[[], bool]
    ) -> tuple[int, int, int]:
        """Let the server fork a worker. Returns the launch's number, and the worker's process id and
        pidfd."""
        number = next(self._numbers)
        try:
            server = self._living_server()
            return (number, *server.launch(number, main, fds, unwanted))
        except OSError:
            if self._server is not None and self._server.gone:
                self._server = None  # its end has been reported: the next launch starts another
            raise

    def close(self) -> None:
        """End the server and all workers. Blocks until they have ended. Launches that have begun fail.

        A later launch starts another server. Idempotent.
        """
        self._closed = object()
        if (server := self._server) is not None:
            server.unwanted = True
            server.hang_up()
        with self._lock:
            server, self._server = self._server, None
            heir, self._heir = self._heir, None
            children = tuple(self._children.values())
            for child in children:  # first: if the server is dead or stopped, it does not kill them
                child.lifeline.cut()
            for one in (server, heir):
                if one is not None:
                    one.end()
        for child in children:
            child.wait_and_reap(UNTIL_ENDED_S)
        self._reap()

    def _living_server(self) -> ServerLink:
        """The server; a new one if the last one was ready and has ended. Under the lock.

        Raises `OSError`, also with the cause if a server that `warm` has started has failed.
        """
        if self._server is not None and self._server.has_gone():
            end = self._server.end()
            if not self._server.ready:
                raise self._server.loss(end)
            self._server = None
        if self._server is None:
            self._server = self._next_server()
        return self._server

    def _next_server(self) -> ServerLink:
        """The forked successor if it lives; else a new server. Raises `OSError`."""
        heir, self._heir = self._heir, None
        if heir is not None:
            if not heir.has_gone() and not is_stopped(heir.pid):
                heir.watch_end()
                return heir
            heir.end()
        server = self._start_server()
        server.watch_end()
        return server

    def _start_server(self) -> ServerLink:
        if self._watch is None:
            self._watch = select.epoll()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = ExecutedServer(self._executable, theirs, self.preload)
        except BaseException:
            ours.close()
            raise
        return ServerLink(process, ours, self._children, self._watch)

    def _provide_heir(self, unwanted: Callable[[], bool] = _never) -> None:
        """Let the server fork its successor, if none lives. Blocks for a fork.

        No effect while the server still imports. If the fork fails, the next launch tries again.
        """
        if self._server is None or not self._server.ready:
            return
        if self._heir is not None:
            if not self._heir.has_gone():
                return
            self._heir.end()
            self._heir = None
        with contextlib.suppress(OSError):
            self._heir = self._fork_heir(unwanted)

    def _fork_heir(self, unwanted: Callable[[], bool]) -> ServerLink:
        server, watch = self._server, self._watch
        assert server is not None, "it has just launched"
        assert watch is not None, "a server is watched"
        ours, theirs = socket.socketpair()
        try:
            with theirs, lifeline_for_launch() as lifeline, own_pidfd() as itself:
                fds = (theirs.fileno(), itself, lifeline.theirs)
                pid, pidfd = server.launch(next(self._numbers), _HEIR, fds, unwanted)
        except BaseException:
            ours.close()
            raise
        return ServerLink(ForkedServer(pid, pidfd, lifeline), ours, self._children, watch, ready=True)

    def _await_report(self, server: ServerLink, child: Child, deadline: float) -> None:
        """Wait for the server's report of a child's end: until the deadline, or until no report can come."""
        if server.gone:  # do not wait for the lock: a launch may hold it during the successor's imports
            return
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return
        try:
            while child.end is None and not server.gone:
                left = deadline - time.monotonic()
                heard = server.receive(max(0.0, min(left, SERVER_LOOK_S)))
                if heard is None and (left <= 0 or is_stopped(server.pid)):
                    return
        finally:
            self._lock.release()

    def _forget(self) -> None:
        """Drop the server and the children in a fork of the process: they belong to the parent."""
        self._lock = threading.Lock()
        watch, self._watch = self._watch, None
        if watch is not None:  # only close it: unregistering would change the parent's epoll, too
            watch.close()
        server, self._server = self._server, None
        heir, self._heir = self._heir, None
        for one in (server, heir):
            if one is not None:
                one.forget()
        for child in list(self._children.values()):
            child.forget()
        self._children.clear()
        for process in self.dying:
            process.returncode = 0
        self.dying.clear()

    @classmethod
    def _forget_shared(cls) -> None:
        launchers, cls.shared, cls._shared_lock = cls.shared, {}, threading.Lock()
        for launcher in launchers.values():
            launcher._forget()


def close_launchers() -> None:
    """End all servers of this process, and their workers. Blocks until they have ended.

    For tests. The interpreter does this at its exit.
    """
    with Launcher._shared_lock:
        launchers = list(Launcher.shared.values())
    for launcher in launchers:
        launcher.close()


forks.call_in_child(Launcher._forget_shared)
atexit.register(close_launchers)
