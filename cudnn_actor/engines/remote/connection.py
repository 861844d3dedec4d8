"""A client's connection to a service's builder process.

The only wait for messages is in `_receive`: a poll on the socket, during which other threads run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable

from cudnn_actor.actors.diverting import write_line
from cudnn_actor.engines.base import BuilderAccess, EngineFailure, ProgressCallback, blame
from cudnn_actor.engines.remote.builder_messages import (
    ANSWERS,
    Accepted,
    Answer,
    Began,
    Build,
    Built,
    Busy,
    Failed,
    Leaving,
    Logged,
    Open,
    Piece,
    Progress,
    Ready,
    Refused,
)
from cudnn_actor.engines.remote.kill_mark import is_marked_killed, mark_killed
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.processes.process_state import LOOK_EVERY_S, is_stopped
from cudnn_actor.processes.waiting import wait_for
from cudnn_actor.protocol.errors import MalformedMessage

__all__ = ["Connection", "ProcessLeft", "ProcessLost", "ProcessSilent", "ProcessStopped"]

_LAST_WORDS = 8 << 10


class ProcessLost(Exception):
    """Raised when the process has ended, or must not be used any more.

    Carries `why` (empty if the process ended by itself) and `began`: whether work on the request had begun,
    or the answer to it was invalid.
    """

    def __init__(self, why: str = "") -> None:
        super().__init__(why or "the builder process has ended")
        self.why = why
        self.began = False


class ProcessLeft(ProcessLost):
    """Raised when the process has exited after `renew_after` builds: another one takes over."""


class ProcessSilent(ProcessLost):
    """Raised when the process sends nothing for too long: it is assumed to hang."""


class ProcessStopped(ProcessLost):
    """Raised when the process is stopped, by SIGSTOP or a debugger. No graph is to blame."""


class Connection:
    """A connection to the builder process. Its maker must call `close`. Only `interrupt` may be called on
    other threads.

    Parameters
    ----------
    access
        Makes the connection.
    opening
        The builder that the process opens, if none is open yet.

    Raises
    ------
    OSError
        The connection cannot be made.
    """

    def __init__(self, access: BuilderAccess, opening: Open) -> None:
        self._socket = access.connect()
        self._channel = Channel(self._socket, ANSWERS)
        self.made = time.monotonic()
        self.accepted: float | None = None
        """When the process accepted it or last reported to be busy, in `time.monotonic()` seconds."""
        self.pid = 0
        """The process's id; 0 until it has accepted the connection."""
        self.fingerprint: str | None = None
        """The fingerprint of its builder; None until it is ready."""
        self._pidfd = self._output = -1
        self._send(opening)

    @property
    def last_words(self) -> str:
        """The end of what the process has printed, 8 KiB at most."""
        if self._output < 0:
            return ""
        start = max(0, os.fstat(self._output).st_size - _LAST_WORDS)
        return os.pread(self._output, _LAST_WORDS, start).decode(errors="replace").strip()

    def becomes_ready(self, until: Callable[[], float]) -> bool:
        """Whether the process takes requests; waits until the time `until()` while it starts.

        Raises `ProcessLost`, also if the process has ended since its last answer.
        """
        if self.fingerprint is not None:
            until = _at(0.0)  # it is ready and sends nothing now: only check whether it has ended
        while isinstance(said := self._receive(until), Busy):
            self.accepted = time.monotonic()  # it is busy with other clients' requests, and not hanging
        match said:
            case None:
                return self.fingerprint is not None
            case Ready(fingerprint) if self.fingerprint is None:
                self.fingerprint = fingerprint
                return True
            case other:
                raise ProcessLost(f"it sent {type(other).__name__} without a request")

    def ask(
        self,
        request: Build,
        progress: ProgressCallback,
        within_s: float,
        on_piece: Callable[[bytes], object] = lambda _: None,
    ) -> Built | Exception:
        """Send a request and return the answer; an error is returned, not raised. Blocks.

        `on_piece` is called with each `Piece`; it must not raise.

        Raises `ProcessSilent` if the process sends nothing for `within_s` seconds (twice that while it may be
        working for other clients), `ProcessLost` if it is lost otherwise, and whatever `progress` raises.
        After any of these, the connection must be closed.
        """
        try:
            self._send(request)
        except BadFrame as error:  # nothing was sent
            return EngineFailure("GRAPH_TOO_LONG", f"for the builder process: {error}")
        began = False
        try:
            while True:
                answer = self._receive(_at(time.monotonic() + (within_s if began else 2 * within_s)))
                if isinstance(answer, Busy):
                    began = False  # or set aside: what the process dies of now is another's
                    progress(0, 0, "waits for another client's")
                    continue
                if isinstance(answer, Progress):
                    progress(answer.done, answer.of, answer.what)
                elif isinstance(answer, Piece):
                    on_piece(answer.data)
                elif not isinstance(answer, Began):
                    break
                began = True
            return _outcome(answer, within_s)
        except (ProcessSilent, ProcessStopped) as loss:
            loss.began = began
            raise
        except ProcessLost as loss:
            loss.began = began or bool(loss.why)
            raise

    def interrupt(self) -> None:
        """Make a current or later wait for an answer raise `ProcessLost`. Any thread, before `close`.

        Shutting the socket down wakes a poll and a send on it, and leaves the descriptor open for its owner.
        """
        with contextlib.suppress(OSError):  # the process has gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def kill(self, *, blameless: bool) -> None:
        """Kill the process. Does nothing if it has not accepted the connection yet. Never blocks.

        `blameless`: whether the graph that it may be building, for this or another client, is not the reason.
        """
        if blameless and self._output >= 0:
            mark_killed(self._output)
        if self._pidfd >= 0:
            with contextlib.suppress(OSError):  # it has gone
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def has_ended(self, within_s: float) -> bool:
        """Whether the process ends within `within_s` seconds. Blocks.

        True if it never accepted the connection.
        """
        if self._pidfd < 0:
            return True
        return bool(wait_for((self._pidfd,), within_s))

    def was_killed(self) -> bool:
        """Whether the process was killed for a reason other than the graph that it was building."""
        return self._output >= 0 and is_marked_killed(self._output)

    def close(self) -> None:
        """Close the connection. The process finishes its current build and keeps the plan. Idempotent."""
        self.interrupt()  # the process sees the end even if a fork of this process has a copy of the socket
        self._channel.close()
        for descriptor in (self._pidfd, self._output):
            if descriptor >= 0:
                os.close(descriptor)
        self._pidfd = self._output = -1

    def _send(self, frame: Open | Build) -> None:
        """Send a frame. If the process has ended, `_receive` notices."""
        self._channel.send(frame)
        self._channel.send_all()

    def _receive(self, until: Callable[[], float]) -> Answer | None:
        """The next message; None if there is none by the time `until()`. Blocks. Raises `ProcessLost`."""
        while (answer := self._next()) is None:
            left = max(0.0, until() - time.monotonic())
            wait_for((self._channel.fileno(),), min(left, LOOK_EVERY_S))
            if (answer := self._next()) is not None:
                break
            if self._channel.ended:
                raise ProcessLost
            if self.pid and is_stopped(self.pid):
                raise ProcessStopped("it was stopped")
            if left == 0:
                return None
        if isinstance(answer, Leaving):
            raise ProcessLeft
        return answer

    def _next(self) -> Answer | None:
        channel = self._channel
        try:
            while channel.frames or channel.fetch():
                if not channel.frames:
                    continue
                answer: Answer = channel.frames.popleft()
                if isinstance(answer, Logged):
                    write_line(answer.line)
                elif isinstance(answer, Accepted):
                    self._take_accepted(answer)
                else:
                    return answer
        except (BadFrame, OSError) as error:
            raise ProcessLost(f"it sent an invalid frame: {error}") from error
        return None

    def _take_accepted(self, accepted: Accepted) -> None:
        self.pid, self.accepted = accepted.pid, time.monotonic()
        self._pidfd = self._channel.take_descriptor()
        self._output = self._channel.take_descriptor()


def _at(moment: float) -> Callable[[], float]:
    """A deadline that does not change."""
    return lambda: moment


def _outcome(answer: Answer | None, within_s: float) -> Built | Exception:
    """The result, or the error as a value. Raises `ProcessLost` for None and for any other message."""
    match answer:
        case None:
            raise ProcessSilent(f"it sent nothing for {within_s:g} s")
        case Built():
            return answer
        case Refused(record):
            with contextlib.suppress(MalformedMessage):
                return record.to_error()
            raise ProcessLost(f"it refused with an unknown {record.kind}")
        case Failed("sticky", status, detail, _):
            raise ProcessLost(f"its device context died of {status}: {detail}")
        case Failed("memory", _, detail, operations):
            error = MemoryError(detail)
            blame(error, operations)
            return error
        case Failed(_, status, detail, operations):
            return EngineFailure(status, detail, operations)
    raise ProcessLost(f"it answered with {type(answer).__name__}")
