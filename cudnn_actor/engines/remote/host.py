"""A service's builder process as the service sees it: started when it is wanted, and replaced when it dies.

It belongs to the service, not to an incarnation of its actor: a build that is in work when a worker dies goes
on, and the next worker finds its plan. What it builds and for whom it does not learn here: connections go
past (`queue`).

What is shared: the queue's two ends, and `_closing`, which is set once, by `close` or by a thread that ends
of an error. The process is the thread's own. The lock guards the thread's start against `close`. Whether
somebody waits is seen at the receiving end, which a process that works empties at once; the thread looks at
the process while it does not:

==============================================  =====================================================
a process is stopped while somebody waits       it is killed
a connection is not taken for a minute          the process is killed: it hangs in a build that nobody
                                                waits for any more, or in its start
four processes in a row have taken none, or     those that wait are refused: they build without it
no process can be had
==============================================  =====================================================
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Self

from cudnn_actor.actors import forks
from cudnn_actor.actors.logs import Log, carrying
from cudnn_actor.engines.remote.killing import mark_killed
from cudnn_actor.engines.remote.queue import BuilderQueue, take_connection
from cudnn_actor.processes.launching import Child, Launcher
from cudnn_actor.processes.process_state import is_stopped, own_pidfd
from cudnn_actor.processes.waiting import wait_for

__all__ = ["SERVING", "BuilderHost"]

SERVING = "cudnn_actor.engines.remote.serving"
"""The module that a builder process runs; whoever says what a forkserver imports says this too."""
_LOOK_EVERY_S = 0.05
_LONGEST_S = 60.0
_MOST_IN_VAIN = 4
_UNTIL_ENDED_S = 5.0

log = Log("cudnn_actor")


class BuilderHost:
    """Keeps one builder process for as long as somebody wants one. `engines.base.BuilderAccess`. Any thread.

    Nothing is started before `connect` or `start`. Its maker must call `close`.

    Parameters
    ----------
    preload
        Modules that the forkserver has imported: the process is forked from it. See `Launcher`.
    executable
        Path of the Python that the forkserver is run by; None for what `find_python` finds.
    """

    def __init__(
        self, preload: tuple[str, ...] = (SERVING,), executable: str | os.PathLike[str] | None = None
    ) -> None:
        self._preload = preload
        self._executable = None if executable is None else os.fspath(executable)
        self.journal = str(Path(tempfile.gettempdir()) / f"cudnn-actor-{uuid.uuid4().hex}.journal")
        """Path of the file in which builder processes note what they try."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._queue: BuilderQueue | None = None
        self._waiting: socket.socket | None = None
        """The receiving end."""
        self._wake_event = -1
        self._thread: threading.Thread | None = None
        self._child: Child | None = None
        self._killed: Child | None = None
        """The one that has been killed, until it has ended."""
        self._output: int | None = None
        """The file that the process prints to."""
        self._in_vain = 0
        """Processes in a row that ended before they had taken a connection."""
        self._untaken_since: float | None = None
        forks.watch(self)

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        child = self._child
        return None if child is None else child.pid

    def start(self) -> BuilderQueue:
        """Have connections answered from here on; where to send them. Never blocks. Idempotent.

        Raises `OSError`: this is closed, or there is no descriptor or thread to be had.
        """
        with self._lock:
            if self._closing.is_set():
                raise OSError("the builder process of a service that has ended")
            if self._queue is None:
                self._queue = self._started()
            return self._queue

    def _started(self) -> BuilderQueue:
        ours, waiting = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        waiting.setblocking(False)
        try:
            wake_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            ours.close()
            waiting.close()
            raise
        run = carrying(functools.partial(self._run, waiting, wake_event))
        thread = threading.Thread(target=run, name="builder", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            ours.close()
            waiting.close()
            os.close(wake_event)
            raise OSError(str(error)) from error
        self._thread, self._waiting, self._wake_event = thread, waiting, wake_event
        return BuilderQueue(ours, self.journal)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> socket.socket:
        """A connection, as `BuilderQueue.connect`."""
        return self.start().connect()

    def close(self) -> None:
        """Kill the process, and refuse everybody from here on. Blocks until it has ended. Idempotent."""
        with self._lock:
            self._closing.set()
            thread, self._thread = self._thread, None
            queue, waiting, wake_event = self._queue, self._waiting, self._wake_event
            self._queue, self._waiting, self._wake_event = None, None, -1
        if thread is None or queue is None or waiting is None:
            return
        os.eventfd_write(wake_event, 1)
        thread.join()
        queue.close()
        waiting.close()
        os.close(wake_event)
        Path(self.journal).unlink(missing_ok=True)

    def forget_parent(self) -> None:
        """In a forked child: the process is the parent's, and so is the thread."""
        self._lock = threading.Lock()
        self._closing = threading.Event()  # the other's lock may have been held
        self._closing.set()
        self._thread, self._queue, self._child = None, None, None
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.close()
        wake_event, self._wake_event = self._wake_event, -1
        if wake_event >= 0:
            os.close(wake_event)

    # The thread.

    def _run(self, waiting: socket.socket, wake_event: int) -> None:
        try:
            while not self._closing.is_set():
                child = self._child
                if child is not None and child.wait(0.0):
                    self._note_death(child, waiting)
                elif not _is_readable(waiting):
                    self._untaken_since = None
                    self._in_vain = 0 if child is not None else self._in_vain
                    wait_for((wake_event, waiting.fileno(), *_pidfd_of(child)), None)
                elif child is None:
                    self._launch(waiting)
                else:
                    self._look_at(child)
                    wait_for((wake_event, *_pidfd_of(child)), _LOOK_EVERY_S)
        except Exception:
            log.exception("builder.host_failed")
            self._closing.set()  # nobody connects any more, and nobody waits for ever
            self._refuse(waiting)
        finally:
            self._end()

    def _look_at(self, child: Child) -> None:
        """Kill a process, once, that does not take the connection which waits, where it is to blame."""
        now = time.monotonic()
        self._untaken_since = since = self._untaken_since or now
        if child is not self._killed and (is_stopped(child.pid) or now - since > _LONGEST_S):
            self._killed = child
            log.warning("builder.killed", pid=child.pid, why="it is stopped or hangs, and a build waits")
            assert self._output is not None, "a process has one"
            mark_killed(self._output)
            child.signal(signal.SIGKILL)

    def _launch(self, waiting: socket.socket) -> None:
        self._untaken_since = None
        if self._in_vain >= _MOST_IN_VAIN:
            self._refuse(waiting)
            return
        try:
            self._child = self._launched(waiting)
        except OSError as error:  # also `LaunchFailed`
            if not self._closing.is_set():
                log.warning("builder.not_started", error=str(error))
                self._refuse(waiting)

    def _launched(self, waiting: socket.socket) -> Child:
        output = os.memfd_create("builder-output", os.MFD_CLOEXEC)
        try:
            with own_pidfd() as parent:
                launcher = Launcher.shared(self._preload, self._executable)
                descriptors = (waiting.fileno(), output, parent)
                child = launcher.launch(f"{SERVING}:main", descriptors, self._closing.is_set)
        except BaseException:
            os.close(output)
            raise
        self._output = output
        return child

    def _refuse(self, waiting: socket.socket) -> None:
        """Close every connection that waits: whoever made it sees its end."""
        self._in_vain = 0
        with contextlib.suppress(EOFError):
            while (connection := take_connection(waiting)) is not None:
                connection.close()

    def _note_death(self, child: Child, waiting: socket.socket) -> None:
        log.debug("builder.ended", pid=child.pid, how=child.how_it_ended(1.0))
        self._let_go(child)
        self._in_vain += _is_readable(waiting)
        self._untaken_since = None

    def _end(self) -> None:
        child = self._child
        if child is not None:
            child.signal(signal.SIGKILL)
            child.wait(_UNTIL_ENDED_S)
            self._let_go(child)

    def _let_go(self, child: Child) -> None:
        child.close()
        self._child = self._killed = None
        output, self._output = self._output, None
        if output is not None:
            os.close(output)


def _pidfd_of(child: Child | None) -> tuple[int, ...]:
    return () if child is None else (child.pidfd,)


def _is_readable(connection: socket.socket) -> bool:
    return bool(wait_for((connection.fileno(),), 0.0))
