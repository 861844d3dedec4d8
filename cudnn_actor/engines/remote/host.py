"""Starts a service's builder process when a client connects, and replaces it when it dies.

The process belongs to the service, not to an incarnation of its actor: a build that is running when a worker
dies goes on, and the next worker gets the plan. The host does not see what is built or for whom, because
connections go directly to the process (`queue`).

Threads share the queue's two ends and `_closing`, which is set once, by `close` or by the host's thread when
it fails. Only the host's thread uses the process. The lock orders the thread's start and `close`. The queue's
receiving end is readable while a connection waits. A working process accepts connections at once; while one
is left waiting, the thread watches the process:

==============================================  =====================================================
the process is stopped while a client waits     it is killed
a connection is not accepted for a minute       the process is killed: it hangs in its start, or in a
                                                build whose client has gone
four processes in a row have accepted none,     the waiting connections are closed: their clients
or no process can be started                    build without the process
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
from cudnn_actor.actors.logs import Log, carry_service
from cudnn_actor.actors.threads import ThreadRefused, start_thread
from cudnn_actor.engines.remote.kill_mark import mark_killed
from cudnn_actor.engines.remote.queue import BuilderQueue, take_connection
from cudnn_actor.processes.launching import Child, Launcher
from cudnn_actor.processes.process_state import is_stopped, own_pidfd
from cudnn_actor.processes.waiting import wait_for

__all__ = ["SERVING", "BuilderHost"]

SERVING = "cudnn_actor.engines.remote.serving"
"""The module that a builder process runs. It must be among the modules that the forkserver preloads."""
_LOOK_EVERY_S = 0.05
_LONGEST_S = 60.0
_MOST_IN_VAIN = 4
_UNTIL_ENDED_S = 5.0

log = Log("cudnn_actor")


class BuilderHost:
    """Runs one builder process while clients need one. Implements `engines.base.BuilderAccess`. Any thread.

    Nothing is started before `connect` or `start`. Its maker must call `close`.

    Parameters
    ----------
    preload
        Modules that the forkserver imports before it forks the process. See `Launcher`.
    executable
        Path of the Python that runs the forkserver; None for what `find_python` finds.
    """

    def __init__(
        self, preload: tuple[str, ...] = (SERVING,), executable: str | os.PathLike[str] | None = None
    ) -> None:
        self._preload = preload
        self._executable = None if executable is None else os.fspath(executable)
        self._journal = f"cudnn-actor-{uuid.uuid4().hex}.journal"
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._queue: BuilderQueue | None = None
        self._waiting: socket.socket | None = None
        """The receiving end."""
        self._wake_event = -1
        self._thread: threading.Thread | None = None
        self._child: Child | None = None
        self._killed: Child | None = None
        """The process that has been killed, until it has ended."""
        self._output: int | None = None
        """The file that the process prints to."""
        self._in_vain = 0
        """Processes in a row that ended without accepting the waiting connections."""
        self._untaken_since: float | None = None
        forks.watch(self)

    @property
    def journal(self) -> str:
        """Path of the file in which builder processes record the plans that they check.

        May block: for the first caller in a process, Python looks for a folder in which it can write a file.
        """
        return str(Path(tempfile.gettempdir()) / self._journal)

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is no process."""
        child = self._child
        return None if child is None else child.pid

    def start(self) -> BuilderQueue:
        """Start serving connections; returns the queue to send them to. Never blocks. Idempotent.

        Raises `OSError` if this is closed, or no descriptor is left or no thread can be started.
        """
        with self._lock:
            if self._closing.is_set():
                raise OSError("the service has ended, and its builder process with it")
            if self._queue is None:
                self._queue = self._start()
            return self._queue

    def _start(self) -> BuilderQueue:
        with contextlib.ExitStack() as undone:
            ours, waiting = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undone.enter_context(ours)
            undone.enter_context(waiting)
            waiting.setblocking(False)
            wake_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undone.callback(os.close, wake_event)
            run = carry_service(functools.partial(self._run, waiting, wake_event))
            thread = threading.Thread(target=run, name="builder", daemon=True)
            try:
                start_thread(thread)
            except ThreadRefused as error:
                raise OSError(str(error)) from error
            undone.pop_all()
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
        """Kill the process and refuse connections from now on. Blocks until it has ended. Idempotent."""
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
        """Drop the process and the thread in a forked child: they belong to the parent."""
        self._lock = threading.Lock()
        self._closing = threading.Event()  # a new one: the old one's lock may have been held at the fork
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
            self._closing.set()  # refuses new connections; waiting ones must not wait forever
            self._refuse(waiting)
        finally:
            self._end()

    def _look_at(self, child: Child) -> None:
        """Kill a process, once, that is stopped or has not accepted the waiting connection for too long."""
        now = time.monotonic()
        self._untaken_since = since = self._untaken_since or now
        if child is not self._killed and (is_stopped(child.pid) or now - since > _LONGEST_S):
            self._killed = child
            log.warning("builder.killed", pid=child.pid, why="it is stopped or hangs, and a build waits")
            assert self._output is not None, "a running process has an output file"
            mark_killed(self._output)
            child.signal(signal.SIGKILL)

    def _launch(self, waiting: socket.socket) -> None:
        self._untaken_since = None
        if self._in_vain >= _MOST_IN_VAIN:
            self._refuse(waiting)
            return
        try:
            self._child = self._launch_child(waiting)
        except OSError as error:  # also `LaunchFailed`
            if not self._closing.is_set():
                log.warning("builder.not_started", error=str(error))
                self._refuse(waiting)

    def _launch_child(self, waiting: socket.socket) -> Child:
        output = os.memfd_create("builder-output", os.MFD_CLOEXEC)
        try:
            with own_pidfd() as parent:
                launcher = Launcher.of_process(self._preload, self._executable)
                descriptors = (waiting.fileno(), output, parent)
                child = launcher.launch(f"{SERVING}:main", descriptors, self._closing.is_set)
        except BaseException:
            os.close(output)
            raise
        self._output = output
        return child

    def _refuse(self, waiting: socket.socket) -> None:
        """Close every waiting connection; its client sees that it is closed."""
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
