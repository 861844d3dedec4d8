"""The way back from a worker: answers, log lines and last words, sent in batches.

To the actor this is what an event loop's bridge is in a service of one process: it posts answers here and
wakes it when a batch is through. Only the actor's thread posts answers; log lines come from any.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from cudnn_actor.actors import Envelope
from cudnn_actor.processes.channel import Channel
from cudnn_actor.protocol.codec import encode_reply
from cudnn_actor.protocol.errors import CudnnActorError, ExecutionFailed
from cudnn_actor.workers.process.errand import Errand
from cudnn_actor.workers.status import StatusPage
from cudnn_actor.workers.wire import (
    Answer,
    Answers,
    Done,
    Dropped,
    FromWorker,
    Given,
    InternalDone,
    Logged,
    Refused,
    Strike,
)

__all__ = ["InternalReplies", "Outbox"]

_NOTHING = encode_reply(None)


class Outbox:
    """Answers on their way to the parent.

    Parameters
    ----------
    channel
        The worker's end.
    page
        Where it is noted what has finished.
    """

    def __init__(self, channel: Channel, page: StatusPage) -> None:
        self._channel = channel
        self._finish, self._finish_otherwise, self._forget = page.finish, page.finish_otherwise, page.forget
        self.notes = True
        """Whether downloads that have finished are noted on the page. Not of an engine that has several
        requests at work: a crash would find the download done, and not what had written its buffer."""
        self._answers: list[Answer] = []
        self.add = self._answers.append
        """Queues an answer as it is."""
        self._lines: deque[Logged] = deque()

    def post(self, envelope: Envelope, value: Any, error: BaseException | None) -> None:
        """Queue an answer; `wake` sends it.

        Until then the page says that the request has finished (see `notes`), so that a crash in between finds
        it done and not begun. It has no room for an error: that is sent at once.
        """
        assert isinstance(envelope, Errand)
        number, place = envelope.number, envelope.place
        answer: Answer
        if type(value) is Done:
            answer = value
            self._finish(place, number, value.plan, value.started_ns, value.run_us)
        elif envelope.dropped:
            answer = Dropped(number, place)
        elif error is not None:
            self._answers.append(Refused(number, place, _known(error).to_record()))
            self.wake()
            return
        elif isinstance(value, np.ndarray):  # it is where it was wanted
            answer = Done(number, place, "download", envelope.started_ns, 0.0)
            if self.notes:
                self._finish(place, number, "download", envelope.started_ns, 0.0)
        else:
            answer = Given(number, place, encode_reply(value))
            if type(envelope.message) is Strike:
                self._forget(place)
            elif not envelope.message.control:  # else it is asked again, whatever had become of it
                self._finish_otherwise(place, number)
        self._answers.append(answer)

    def wake(self) -> None:
        """Send what has been posted. Waits for room in the socket when the parent does not read."""
        self.send_lines()
        if self._answers:
            answers, self._answers = self._answers, []
            self.add = self._answers.append
            self.say(Answers(answers))

    def say(self, frame: FromWorker, descriptors: tuple[int, ...] = ()) -> None:
        """Send a frame behind all that was sent before. Waits for room in the socket."""
        self._channel.send(frame, descriptors)
        self._channel.send_all()

    def log(self, line: Logged) -> None:
        """Queue a line. Any thread: appending is one step under the GIL."""
        self._lines.append(line)

    @property
    def has_lines(self) -> bool:
        """Whether lines wait to be sent."""
        return bool(self._lines)

    def send_lines(self) -> None:
        """Send the lines that were logged, in order."""
        while self._lines:
            self.say(self._lines.popleft())


class InternalReplies:
    """Where answers of internal errands are posted: each is sent at once, as an `InternalDone`.

    Parameters
    ----------
    outbox
        The way to the parent.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def post(self, envelope: Envelope, value: Any, error: BaseException | None) -> None:  # noqa: ARG002
        """Send that it is done, behind all answers so far."""
        self._outbox.wake()
        self._outbox.say(InternalDone(-envelope.number, None if error is None else _known(error).to_record()))

    def wake(self) -> None:
        """Nothing: `post` has sent it."""


def _known(error: BaseException) -> CudnnActorError:
    """An error that travels: what is none of ours says its name."""
    if isinstance(error, CudnnActorError):
        return error
    return ExecutionFailed(status=type(error).__name__, detail=str(error), plan="worker")
