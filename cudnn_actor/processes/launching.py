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
  leaves the descriptor to the thread that holds the lock.

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
import itertools
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

from cudnn_actor.actors import forks
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.processes.interpreter import OTHER_VERSION, VERSION, environment, python_command
from cudnn_actor.processes.launch_messages import (
    FROM_SERVER,
    Discard,
    Exited,
    FromServer,
    Launch,
    Launched,
    PreloadFailed,
    Ready,
    Refused,
)
from cudnn_actor.processes.lifeline import Lifeline
from cudnn_actor.processes.process_state import is_stopped, own_pidfd, reason_of
from cudnn_actor.processes.waiting import wait_for

__all__ = ["Child", "LaunchFailed", "Launcher", "close_launchers"]

_UNTIL_ENDED_S = 5.0
"""How long a server may take to end its workers, and then the kernel to end the server."""
_LOOK_EVERY_S = 0.05
"""Seconds between two checks whether an awaited server is stopped."""
_LOOKS = 200
"""After this many checks without an answer, a server that has finished its imports counts as hung. Checks are
counted instead of seconds, because this process may have been stopped itself meanwhile."""
_NOWHERE = -1
_SERVER = "cudnn_actor.processes.forkserver"
_FLAGS = ("-X", "faulthandler")
_RUN = "import importlib; importlib.import_module(sys.argv.pop(1)).main()"
_HEIR = f"{_SERVER}:succeed"
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


class _ServerLost(OSError):
    """Raised when a launch has failed because of its server, so that another server may succeed."""


class _StartLost(_ServerLost):
    """Raised when that server was killed before it had finished its imports."""


class Child:
    """A worker as its parent sees it. Any thread may call its methods; `close` must be the last call.

    `Launcher.launch` makes it, and the caller must close it. Closing it kills the worker.
    """

    def __init__(
        self,
        launcher: Launcher,
        server: _Server | None,
        *,
        number: int,
        pid: int,
        pidfd: int,
        lifeline: Lifeline,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.pid = pid
        """Its process id, for people and logs. It may be reused once the worker has exited."""
        self.pidfd = pidfd
        """Readable when the worker has exited. Owned by this object; -1 once it is closed."""
        self._launcher = launcher
        self._server = server
        self._number = number
        self._lifeline = lifeline
        self._process = process
        """The process, if this one has started it itself, and must reap it."""
        self._end: str | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Child {self.pid}>"

    def signal(self, number: int) -> None:
        """Send a signal. No effect if the worker has ended or this is closed. Never raises.

        If the kernel refuses (this process has changed its user, or filters system calls), SIGKILL is sent by
        cutting the lifeline, which needs no permission, and other signals are dropped.
        """
        with self._lock:
            if self.pidfd == _NOWHERE:
                return
            try:
                signal.pidfd_send_signal(self.pidfd, number)
            except ProcessLookupError:
                pass
            except OSError:
                if number == signal.SIGKILL:
                    self._lifeline.cut()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether the worker has exited. Blocks until it has, or for `timeout_s` seconds.

        Raises `ValueError` when this is closed.
        """
        return bool(wait_for((self.pidfd,), timeout_s))

    def how_it_ended(self, timeout_s: float) -> str:
        """How the worker ended, as text: "was killed by SIGKILL", "exited with status 3".

        Blocks for up to `timeout_s` seconds: for the exit, and for the server's report. Without a report, the
        text is "has ended"; for a worker that still runs, "has not ended". Raises `ValueError` if this is
        closed.
        """
        deadline = time.monotonic() + timeout_s
        if not self.wait(timeout_s):
            return "has not ended"
        told = None if self._server is None else self._launcher._report_of(self, self._server, deadline)
        return told or self._reaped() or "has ended"

    def close(self) -> None:
        """Release the worker, which is killed if it still runs. Does not wait for its end. Idempotent."""
        self._lifeline.cut()
        self._launcher._children.pop(self._number, None)
        self._reaped()
        with self._lock:
            pidfd, self.pidfd = self.pidfd, _NOWHERE
            if pidfd != _NOWHERE:
                os.close(pidfd)
            process, self._process = self._process, None
        if process is not None and process.returncode is None:
            self._launcher._dying.append(process)

    def _reaped(self) -> str | None:
        """How the worker ended, if this process must reap it; else None. Never blocks.

        A worker that has outlived its server gets another parent: process 1, or a process that has asked to
        adopt orphans. In many containers, this process is process 1.
        """
        with self._lock, contextlib.suppress(OSError):
            if self.pidfd != _NOWHERE and (end := os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)):
                by_itself = end.si_code == os.CLD_EXITED
                self._end = _ending_of(end.si_status if by_itself else -end.si_status)
                if self._process is not None:
                    self._process.returncode = 0  # so that nobody else waits for it; the text has its status
        return self._end

    def _awaited(self, timeout_s: float) -> None:
        """Wait for its exit, for up to `timeout_s` seconds, even if another thread closes this meanwhile."""
        with self._lock:
            pidfd = _NOWHERE if self.pidfd == _NOWHERE else os.dup(self.pidfd)
        if pidfd != _NOWHERE:
            wait_for((pidfd,), timeout_s)
            os.close(pidfd)
        if self._process is not None:
            self._reaped()

    def _forget(self) -> None:
        """In a fork of the process: replace the lock, which another thread may hold, and close all."""
        self._lock = threading.Lock()
        self._lifeline.forget()
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # it is not a child of this process
        pidfd, self.pidfd = self.pidfd, _NOWHERE
        if pidfd != _NOWHERE:
            os.close(pidfd)


_Children = dict[int, Child]


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

    _shared: ClassVar[dict[tuple[tuple[str, ...], str | None], Launcher]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, preload: tuple[str, ...], executable: str | None = None) -> None:
        self.preload = preload
        self._executable = executable
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._heir: _Server | None = None
        """The successor, which takes over when the server dies."""
        self._watch: select.epoll | None = None
        self._numbers = itertools.count(1)
        self._children: _Children = {}
        """The children that have not been closed, by the number of their launch."""
        self._lost_starts = 0
        """How many servers in a row were killed in their start, up to the last launch."""
        self._dying: deque[subprocess.Popen[bytes]] = deque()
        """Workers that this process has started itself and has yet to reap. Any thread adds one."""

    @classmethod
    def shared(cls, preload: tuple[str, ...], executable: str | None = None) -> Launcher:
        """The process's launcher for these modules, in this order, and this Python. Never blocks."""
        with cls._shared_lock:
            return cls._shared.setdefault((preload, executable), cls(preload, executable))

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
                    self._server = self._new_server()
        finally:
            self._lock.release()

    def fileno(self) -> int:
        """A descriptor that is readable when the server has died: call `revive` then. -1 before the first."""
        return _NOWHERE if self._watch is None else self._watch.fileno()

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
                    self._server = self._successor()
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
        try:
            while not self._lock.acquire(timeout=_LOOK_EVERY_S):
                _refuse_if(unwanted)
            try:
                self._reap()
                child = self._launched_in_the_end(main, fds, unwanted)
                self._provide_heir(unwanted)
            finally:
                self._lock.release()
            return child  # noqa: TRY300 - errors above become `LaunchFailed` below
        except (OSError, ValueError) as error:  # `InvalidRequest`, a ValueError: there is no Python to run it
            raise LaunchFailed(f"{main} was not launched: {reason_of(error)}") from error

    def _launched_in_the_end(self, main: str, fds: Sequence[int], unwanted: Callable[[], bool]) -> Child:
        """Launch a worker, after as many servers as may be lost: see `launch`. Raises `OSError`."""
        lost_ready = False
        while True:
            try:
                return self._launched_somehow(main, fds, unwanted)
            except _StartLost:  # after `_MOST_LOST_STARTS` of these, the worker needs no server
                self._server = None
            except _ServerLost:
                self._server = None
                if lost_ready:
                    raise
                lost_ready = True

    def _launched_somehow(self, main: str, fds: Sequence[int], unwanted: Callable[[], bool]) -> Child:
        """Launch a worker from the server; or without it, if servers do not get through their start."""
        if self._lost_starts >= _MOST_LOST_STARTS and not self._has_ready_server():
            return self._started_alone(main, fds)
        try:
            child = self._launched(main, fds, unwanted)
        except _StartLost:
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
                self._server = self._successor()
        return self._server is not None and self._server.ready

    def _started_alone(self, main: str, fds: Sequence[int]) -> Child:
        """A worker that this process starts itself. Blocks for the exec. Raises `OSError`."""
        lifeline = Lifeline()
        given = (*fds, lifeline.theirs)
        arguments = (_ALONE, main, *map(str, given))
        try:
            for fd in given:
                os.fstat(fd)
            process = _started(
                python_command(_RUN, *arguments, flags=_FLAGS, executable=self._executable), given
            )
            pidfd = _pidfd_of(process)
        except BaseException:
            lifeline.cut()
            raise
        finally:
            lifeline.hand_over()
        number = next(self._numbers)
        child = Child(
            self, None, number=number, pid=process.pid, pidfd=pidfd, lifeline=lifeline, process=process
        )
        self._children[number] = child
        return child

    def _reap(self) -> None:
        """Reap the closed workers that this process has started itself, as far as they have ended."""
        for _ in range(len(self._dying)):
            process = self._dying.popleft()
            if process.poll() is None:
                self._dying.append(process)

    def _launched(self, main: str, fds: Sequence[int], unwanted: Callable[[], bool]) -> Child:
        """Launch a worker with its own lifeline.

        A server may die after the fork and before it reports it. So each try has its own lifeline, which is
        cut if the try fails. This ends a worker that was forked for it, so that it does not share descriptors
        with the next try's worker.
        """
        lifeline = Lifeline()
        try:
            number, pid, pidfd = self._ordered(main, (*fds, lifeline.theirs), unwanted)
        except BaseException:
            lifeline.cut()
            raise
        finally:
            lifeline.hand_over()
        assert self._server is not None
        child = Child(self, self._server, number=number, pid=pid, pidfd=pidfd, lifeline=lifeline)
        self._children[number] = child
        return child

    def _ordered(self, main: str, fds: Sequence[int], unwanted: Callable[[], bool]) -> tuple[int, int, int]:
        number = next(self._numbers)
        try:
            server = self._ready_for_orders()
            return (number, *server.launch(number, main, fds, unwanted))
        except OSError:
            if self._server is not None and self._server.gone:
                self._server = None  # its end has been reported: the next launch starts another
            raise

    def close(self) -> None:
        """End the server and all workers. Blocks until they have ended. A running launch fails.

        A later launch starts another server. Idempotent.
        """
        if (server := self._server) is not None:
            server.unwanted = True
            server.hang_up()
        with self._lock:
            server, self._server = self._server, None
            heir, self._heir = self._heir, None
            children = tuple(self._children.values())
            for child in children:  # first: if the server is dead or stopped, it does not kill them
                child._lifeline.cut()
            for one in (server, heir):
                if one is not None:
                    one.end()
        for child in children:
            child._awaited(_UNTIL_ENDED_S)
        self._reap()

    def _ready_for_orders(self) -> _Server:
        """The server; a new one if the last one was ready and has ended. Under the lock.

        Raises `OSError`, also with the cause if a server that `warm` has started has failed.
        """
        if self._server is not None and self._server.has_gone():
            end = self._server.end()
            if not self._server.ready:
                raise self._server.loss(end)
            self._server = None
        if self._server is None:
            self._server = self._successor()
        return self._server

    def _successor(self) -> _Server:
        """The forked successor if it lives; else a new server. Raises `OSError`."""
        heir, self._heir = self._heir, None
        if heir is not None:
            if not heir.has_gone() and not is_stopped(heir.pid):
                heir.be_watched()
                return heir
            heir.end()
        server = self._new_server()
        server.be_watched()
        return server

    def _new_server(self) -> _Server:
        if self._watch is None:
            self._watch = select.epoll()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = _Started(self._executable, theirs, self.preload)
        except BaseException:
            ours.close()
            raise
        return _Server(process, ours, self._children, self._watch)

    def _provide_heir(self, unwanted: Callable[[], bool] = _never) -> None:
        """Have the server fork its successor, if none lives. Blocks for a fork.

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
            self._heir = self._forked_heir(unwanted)

    def _forked_heir(self, unwanted: Callable[[], bool]) -> _Server:
        server, watch = self._server, self._watch
        assert server is not None, "it has just launched"
        assert watch is not None, "a server is watched"
        ours, theirs = socket.socketpair()
        try:
            lifeline = Lifeline()
        except OSError:
            ours.close()
            theirs.close()
            raise
        try:
            with theirs, own_pidfd() as itself:
                fds = (theirs.fileno(), itself, lifeline.theirs)
                pid, pidfd = server.launch(next(self._numbers), _HEIR, fds, unwanted)
        except BaseException:
            lifeline.cut()
            ours.close()
            raise
        finally:
            lifeline.hand_over()
        return _Server(_Heir(pid, pidfd, lifeline), ours, self._children, watch, ready=True)

    def _report_of(self, child: Child, server: _Server, deadline: float) -> str | None:
        """The server's report of a worker's end, awaited until `deadline`; None if there is none."""
        if server.gone:  # do not wait for the lock: a launch may hold it during the successor's imports
            return child._end
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return child._end
        try:
            while child._end is None and not server.gone:
                left = deadline - time.monotonic()
                heard = server.receive(max(0.0, min(left, _LOOK_EVERY_S)))
                if heard is None and (left <= 0 or is_stopped(server.pid)):
                    break
            return child._end
        finally:
            self._lock.release()

    def _forget(self) -> None:
        """In a fork of the process: drop the server and the children, which belong to the parent."""
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
            child._forget()
        self._children.clear()
        for process in self._dying:
            process.returncode = 0
        self._dying.clear()

    @classmethod
    def _forget_shared(cls) -> None:
        launchers, cls._shared, cls._shared_lock = cls._shared, {}, threading.Lock()
        for launcher in launchers.values():
            launcher._forget()


class _Started:
    """A server's process, started by exec. Raises `OSError`, `InvalidRequest`."""

    def __init__(self, executable: str | None, theirs: socket.socket, preload: Sequence[str]) -> None:
        arguments = (_SERVER, str(theirs.fileno()), str(os.getpid()), *preload)
        command = python_command(_RUN, *arguments, flags=_FLAGS, executable=executable)
        self._python = command[0]
        self._process = _started(command, (theirs.fileno(),))
        self.pidfd = _pidfd_of(self._process)
        self.pid = self._process.pid

    def kill(self) -> None:
        with contextlib.suppress(PermissionError):  # this process has changed its user
            self._process.kill()

    def status(self) -> int | None:
        """The exit status, as in `subprocess`; None while it runs, or if it is unknown."""
        return self._process.poll()

    def origin(self) -> str:
        """Text about what ran it, after text about how it ended."""
        wrong = (
            f", which is not Python {VERSION}, as this process is" if self.status() == OTHER_VERSION else ""
        )
        return f", run by {self._python}{wrong}"

    def forget(self) -> None:
        """In a fork of its parent: drop it, because it is not a child of this process."""
        self._process.returncode = 0
        self.close()

    def close(self) -> None:
        """Close the pidfd. Idempotent."""
        pidfd, self.pidfd = self.pidfd, _NOWHERE
        if pidfd != _NOWHERE:
            os.close(pidfd)


class _Heir:
    """A server's process that another server has forked as its successor."""

    def __init__(self, pid: int, pidfd: int, lifeline: Lifeline) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._lifeline = lifeline

    def kill(self) -> None:
        if self.pidfd != _NOWHERE:
            with contextlib.suppress(OSError):  # it has ended, or the kernel refuses: the lifeline does it
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self._lifeline.cut()

    def status(self) -> int | None:
        """The exit status if this process has had to adopt it (see `Child._reaped`); else None."""
        with contextlib.suppress(OSError):
            if end := os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG):
                return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return None

    def origin(self) -> str:
        return ""

    def forget(self) -> None:
        """In a fork of its parent."""
        self._lifeline.forget()
        self.close()

    def close(self) -> None:
        """Release it. It is killed if it still runs. Idempotent."""
        self._lifeline.cut()
        pidfd, self.pidfd = self.pidfd, _NOWHERE
        if pidfd != _NOWHERE:
            os.close(pidfd)


class _Server:
    """The server process and this side of its socket.

    Used under the launcher's lock, except `hang_up` and `pid`.

    Parameters
    ----------
    process
        The process, owned by this object from now on.
    connection
        This end of its socket, owned by this object from now on.
    children
        The children, by the number of their launch. They are told how they ended.
    watch
        The epoll that shows its end, from `be_watched` until the end has been handled.
    ready
        Whether its imports are done.
    """

    def __init__(
        self,
        process: _Started | _Heir,
        connection: socket.socket,
        children: _Children,
        watch: select.epoll,
        *,
        ready: bool = False,
    ) -> None:
        self._process = process
        self._children = children
        self._watch = watch
        self.unwanted = False
        """Whether its launcher is being closed, so that it is not replaced. Any thread."""
        self.ready = ready
        """Whether its imports are done, according to the messages read so far."""
        self.gone = False
        """Whether no more messages will come from it."""
        self._last_word = ""
        self._awaited = 0
        """Number of the running launch; 0 for none."""
        self._ended = False
        self.pid = process.pid
        self._socket = connection
        self._channel = Channel(connection, FROM_SERVER)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(process.pidfd, select.POLLIN)

    def be_watched(self) -> None:
        """Register its end in `watch`. Called when it becomes the server that launches."""
        self._watch.register(self._process.pidfd, select.EPOLLIN)

    def launch(
        self, number: int, main: str, fds: Sequence[int], unwanted: Callable[[], bool]
    ) -> tuple[int, int]:
        """Process id and pidfd of a new worker. Blocks. Raises `OSError`."""
        for fd in fds:
            os.fstat(fd)  # raises here for an invalid descriptor; sending it would look like the server's end
        self._awaited = number
        try:
            self._channel.send(Launch(number, main, len(fds)), fds)
            while not self.gone:
                match self._heard(unwanted):
                    case Launched(launched, pid), [pidfd] if launched == number:
                        return pid, pidfd
                    case Launched(launched), [] if launched == number:
                        self._channel.send(Discard(number))
                        raise OSError("there is no room for another descriptor")
                    case Refused(refused, why), _ if refused == number:
                        raise OSError(why)
        finally:
            self._awaited = 0
        raise self.loss(self.end())

    def loss(self, end: str) -> OSError:
        """The error for a launch that has failed because this server has ended, as `end` says."""
        if self.unwanted:
            return OSError(end)
        if self.ready:
            return _ServerLost(end)
        killed = (self._process.status() or 0) < 0 and not self._last_word
        return _StartLost(end) if killed else OSError(end)

    def _heard(self, unwanted: Callable[[], bool]) -> tuple[FromServer, list[int]] | None:
        """The next message; None, and `gone`, at the end. Blocks. Kills a server that is stopped or hangs."""
        in_vain = 0
        while (received := self.receive(_LOOK_EVERY_S)) is None and not self.gone:
            _refuse_if(unwanted)
            in_vain += self.ready
            if in_vain > _LOOKS or is_stopped(self.pid):
                # Not `hang_up`: a server that continues after that would end its workers, which still serve.
                self._kill()
                self.gone = True
        return received

    def has_gone(self) -> bool:
        """Whether it has ended and all of its messages have been handled. Never blocks."""
        while not self.gone and self.receive(0.0) is not None:
            pass
        return self.gone

    def receive(self, timeout_s: float | None) -> tuple[FromServer, list[int]] | None:
        """The next message; if it is a notice, it has been handled. None if none comes in time, or `gone`.

        Blocks. The end of the process counts like the end of the socket, because a process that a preloaded
        module has started may keep the socket open. Earlier messages are read first.
        """
        ended = False
        while (received := self._read()) is None and not self.gone:
            if ended:
                self.gone = True
                break
            events = self._poll.poll(None if timeout_s is None else 1000 * timeout_s)
            if not events:
                break
            ended = any(fd == self._process.pidfd for fd, _ in events)
        if received is not None:
            self._note(*received)
        return received

    def hang_up(self) -> None:
        """Shut the socket down: the server sees its end, and a thread that waits here wakes. Any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> str:
        """End it and its workers. Returns how or why it ended. Blocks. Idempotent."""
        self.hang_up()
        self.has_gone()  # handles its earlier messages
        if not self._ended:
            self._ended = True
            self._how = self._awaited_end()
            self._let_go()
        return self._last_word or self._how

    def _awaited_end(self) -> str:
        # A server that is still importing does not read its socket, and has no workers to end.
        grace_s = _UNTIL_ENDED_S if self.ready and not is_stopped(self.pid) else 0.0
        ended = wait_for((self._process.pidfd,), grace_s)
        if not ended:
            self._kill()
            ended = wait_for((self._process.pidfd,), 0.0)
        how = f"the forkserver {_ending_of(self._process.status()) if ended else 'cannot be killed'}"
        return how if self.ready else how + self._process.origin()

    def forget(self) -> None:
        """In a fork of its parent: drop it, because it is not a child of this process."""
        self._ended = self.gone = True
        self._channel.close()
        self._process.forget()

    def _let_go(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it is not watched, or `watch` is closed
            self._watch.unregister(self._process.pidfd)
        self._channel.close()
        self._process.close()

    def _kill(self) -> None:
        self._process.kill()
        wait_for((self._process.pidfd,), _UNTIL_ENDED_S)

    def _read(self) -> tuple[FromServer, list[int]] | None:
        """A message that has come already; None if there is none. Sets `gone` at the end of the socket."""
        channel = self._channel
        channel.flush()
        try:
            while not channel.frames:
                if not channel.fetch():
                    self.gone = self.gone or channel.ended
                    return None
        except BadFrame:  # not from our forkserver
            self.gone = True
            return None
        record: FromServer = channel.frames.popleft()
        descriptors: list[int] = []
        if isinstance(record, Launched):
            with contextlib.suppress(OSError, BadFrame):
                descriptors.append(channel.take_descriptor())
        return record, descriptors

    def _note(self, record: FromServer, descriptors: Sequence[int]) -> None:
        match record:
            case Launched(number) if number != self._awaited:  # that launch has failed on this side
                self._channel.send(Discard(number))
                for fd in descriptors:
                    os.close(fd)
            case Ready():
                self.ready = True
            case PreloadFailed(why):
                self._last_word = why
            case Exited(number, status, by):
                child = self._children.get(number)
                if child is not None and (status, by) != (None, None):
                    child._end = _ending_of(status if by is None else -by)


def close_launchers() -> None:
    """End all servers of this process, and their workers. Blocks until they have ended.

    For tests. The interpreter does this at its exit.
    """
    with Launcher._shared_lock:
        launchers = list(Launcher._shared.values())
    for launcher in launchers:
        launcher.close()


def _started(command: Sequence[str], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a process. Of our descriptors, it gets these, 1 and 2, and no others."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=tuple(descriptors),
        close_fds=True,
        start_new_session=True,
        env=environment(),
    )


def _pidfd_of(process: subprocess.Popen[bytes]) -> int:
    try:
        return os.pidfd_open(process.pid)
    except OSError:
        process.kill()
        process.wait()
        raise


def _refuse_if(unwanted: Callable[[], bool]) -> None:
    if unwanted():
        raise OSError("the process is not wanted any more")


def _ending_of(status: int | None) -> str:
    """An exit status, as in `subprocess`, as text."""
    if status is None:
        return "has ended"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"


forks.call_in_child(Launcher._forget_shared)
atexit.register(close_launchers)
