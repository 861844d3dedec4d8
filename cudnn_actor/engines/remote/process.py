"""A builder process as its parent sees it: started, asked, listened to, ended.

The parent's only wait is `receive`: a poll on the socket and on the pipe of what the child prints, which lets
other threads run, and never lets a child that prints a lot wait for a reader.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.remote.frames import (
    ANSWERS,
    Answer,
    BadFrame,
    Built,
    Failed,
    Frames,
    Progress,
    Ready,
    Refused,
    Request,
    Start,
    encode,
)
from cudnn_actor.engines.remote.lines import written
from cudnn_actor.engines.remote.spare import Spare
from cudnn_actor.engines.remote.spare import take as take_spare
from cudnn_actor.processes.interpreter import environment, find_python
from cudnn_actor.processes.process_state import LOOK_EVERY_S, is_stopped
from cudnn_actor.protocol.errors import MalformedMessage

__all__ = ["BuilderProcess", "ChildLost", "ChildSilent", "ChildStopped"]

_CHUNK = 1 << 16
_LAST_WORDS = 8 << 10
_UNTIL_KILLED_S = 5.0


class ChildLost(Exception):
    """Raised when a child has ended, or is not to be asked again.

    Carries `why`; empty when it has ended by itself, which its exit status explains.
    """

    def __init__(self, why: str = "") -> None:
        super().__init__(why or "the builder process has ended")
        self.why = why


class ChildSilent(ChildLost):
    """Raised when a child takes too long for its next word: it hangs, as far as anybody can tell."""


class ChildStopped(ChildLost):
    """Raised when a child is stopped, by SIGSTOP or a debugger, which no graph is to blame for."""


class BuilderProcess:
    """One child: the one that was forked ahead, where there is one, else a new one.

    Its maker must call `end`. All but `interrupt` is for one thread.

    Parameters
    ----------
    make, arguments
        As in `Start`.
    executable
        Path of the Python that runs it; None for what `find_python` finds.

    Raises
    ------
    OSError
        There is no process to be had.
    InvalidRequest
        There is no Python to run it by.
    """

    def __init__(
        self,
        make: str,
        arguments: tuple[str | int | float | bool | None, ...],
        executable: str | None = None,
    ) -> None:
        self._socket, self._process = _found(executable)
        self.started = time.monotonic()
        self.asked = 0
        """Builds that it was asked for, and candidates that it has tuned with."""
        self.fingerprint: str | None = None
        """What its builder says; None until it is ready."""
        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._printed = bytearray()
        self._frames: Frames[Any] = Frames(ANSWERS)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(self._output, select.POLLIN)
        self._send(Start(make, arguments, os.getpid()))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def last_words(self) -> str:
        """The last that it printed, 8 KiB at most."""
        return self._printed.decode(errors="replace").strip()

    def becomes_ready(self, until: float) -> bool:
        """Whether it takes requests; waits `until` then (`time.monotonic()`) for one that is starting.

        Raises `ChildLost`, also for one that has ended since its last answer.
        """
        if self.fingerprint is not None:
            until = 0.0  # nothing is to come from it: this only looks for its end
        match self._receive(until):
            case None:
                return self.fingerprint is not None
            case Ready(fingerprint) if self.fingerprint is None:
                self.fingerprint = fingerprint
                return True
            case other:
                raise ChildLost(f"it said {type(other).__name__} and had not been asked")

    def ask(
        self, request: Request, progress: Callable[[int, int, str], None], within_s: float
    ) -> Built | Exception:
        """The answer to a request, an error as a value. Blocks.

        Raises `ChildSilent` when the child says nothing for `within_s` seconds, else `ChildLost`, and
        whatever `progress` raises: after any of them, the child must be ended.
        """
        self.asked += 1
        self._send(request)
        while isinstance(answer := self._receive(time.monotonic() + within_s), Progress):
            self.asked += 1
            progress(answer.done, answer.of, answer.what)
        if answer is None:
            raise ChildSilent(f"it said nothing for {within_s:g} s")
        match answer:
            case Built():
                return answer
            case Refused(record):
                with contextlib.suppress(MalformedMessage):
                    return record.to_error()
                raise ChildLost(f"it refused with an unknown {record.kind}")
            case Failed("sticky", status, detail):
                raise ChildLost(f"its device context died of {status}: {detail}")
            case Failed("memory", _, detail):
                return MemoryError(detail)
            case Failed(_, status, detail):
                return EngineFailure(status, detail)
        raise ChildLost(f"it answered with {type(answer).__name__}")

    def interrupt(self) -> None:
        """End the wait for an answer in `ChildLost`, now or when it begins. Any thread, before `end`.

        Shutting the socket down wakes a poll and a send on it, and leaves the descriptor to its owner.
        """
        with contextlib.suppress(OSError):  # the child has gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self, grace_s: float) -> str:
        """Let it go, kill it after `grace_s` seconds, and say how it ended. Blocks so long, and for the kill.

        A process that the kernel does not let go within 5 s more is left to it.
        """
        self.interrupt()  # the child sees the end, whoever has a copy of the socket: a fork of this process
        self._socket.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_UNTIL_KILLED_S)
        while self._listen():
            pass
        self._output.close()
        return _status(self._process.returncode)

    def _send(self, frame: Start | Request) -> None:
        """Send to a child that is waiting for it; the end of one that is not shows in what it answers."""
        with contextlib.suppress(OSError):
            self._socket.sendall(encode(frame), socket.MSG_NOSIGNAL)

    def _receive(self, until: float | None) -> Answer | None:
        """The next frame; None when there is none `until` then. Blocks. Raises `ChildLost`."""
        while (frame := self._next()) is None:
            left = LOOK_EVERY_S if until is None else max(0.0, until - time.monotonic())
            self._gather(min(left, LOOK_EVERY_S))
            if (frame := self._next()) is not None:
                break
            if is_stopped(self.pid):
                raise ChildStopped("it was stopped")
            if left == 0:
                return None
        return frame

    def _next(self) -> Answer | None:
        frame: Answer | None
        try:
            while written(frame := self._frames.next()):
                pass
        except BadFrame as error:
            raise ChildLost(f"it sent what is not a frame: {error}") from error
        return frame

    def _gather(self, wait_s: float | None) -> None:
        for fd, _ in self._poll.poll(None if wait_s is None else 1000 * wait_s):
            if fd == self._socket.fileno():
                self._frames.feed(self._received())
            elif not self._listen():
                self._poll.unregister(fd)

    def _received(self) -> bytes:
        data = b""
        with contextlib.suppress(ConnectionError):  # it ended with a request unread
            data = self._socket.recv(_CHUNK)
        if not data:
            raise ChildLost
        return data

    def _listen(self) -> bool:
        """Keep the last of what it prints; False when there is nothing to be read."""
        try:
            data = os.read(self._output.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        self._printed += data
        del self._printed[:-_LAST_WORDS]
        return bool(data)


def _found(executable: str | None) -> tuple[socket.socket, Spare | subprocess.Popen[bytes]]:
    """This end of a child's socket pair, and the child. Raises `OSError`, `InvalidRequest`."""
    spare = take_spare()
    if spare is not None:
        return spare.socket, spare
    python = find_python(executable)
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return ours, _launched(python, theirs)
        except OSError:
            ours.close()
            raise


def _launched(python: str, theirs: socket.socket) -> subprocess.Popen[bytes]:
    """The child, with its end of the socket pair and no other descriptor of ours.

    It finds its modules where this process does, in the same order (`-P`: and nowhere else). A process group
    of its own keeps the terminal's Ctrl-C from it while it cannot ignore it yet.
    """
    fd = theirs.fileno()
    return subprocess.Popen(
        [python, "-P", "-X", "faulthandler", "-m", "cudnn_actor.engines.remote.child", str(fd)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        pass_fds=(fd,),
        close_fds=True,
        process_group=0,
        env=environment(),
    )


def _status(returncode: int | None) -> str:
    if returncode is None:
        return "cannot be killed"
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal
        return f"was ended by signal {-returncode}"
