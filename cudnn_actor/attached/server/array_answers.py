"""Answers that have arrays, which are copied to memory of the client once it has given room for them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.attached.server.asked import Asked
from cudnn_actor.attached.server.failures import failure_answer
from cudnn_actor.attached.server.segments import Segments, room_needed
from cudnn_actor.attached.wire import (
    INLINE_BYTES,
    Answer,
    Arrays,
    Dropped,
    NeedsRoom,
    Refused,
    Room,
    WireArray,
)
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.protocol.errors import MalformedMessage, OutOfMemory
from cudnn_actor.protocol.messages.messages import Download, RunModel

__all__ = ["ArrayAnswers"]

_LONG_COPY_BYTES = 1 << 20
"""Answers of more bytes are copied by a thread, so that other clients do not wait for it."""
_MOST_UNPLACED = 1 << 30
"""While answers of this many bytes wait for a client's memory, requests for more of them are refused."""

NamedArrays = list[tuple[str | None, np.ndarray]]


class ArrayAnswers:
    """The answers of one client that have arrays. On the server's loop only.

    Parameters
    ----------
    segments
        The client's memory.
    answer
        This sends an answer that does not end its request.
    end_request
        This sends an answer that ends its request.
    in_task
        This runs a coroutine in a task, which is cancelled at the end of the session.
    """

    def __init__(
        self,
        segments: Segments,
        *,
        answer: Callable[[Answer], None],
        end_request: Callable[[Asked, Answer], None],
        in_task: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._segments, self._answer = segments, answer
        self._end_request, self._in_task = end_request, in_task
        self._unplaced = 0
        """The bytes of answers that wait for room."""

    def check_room(self, message: Any) -> None:
        """Raise `OutOfMemory` if the answer to a message has arrays, and too many bytes wait for room."""
        if isinstance(message, Download | RunModel) and self._unplaced >= _MOST_UNPLACED:
            raise OutOfMemory(
                requested=0,
                in_use=self._unplaced,
                limit=_MOST_UNPLACED,
                where="answers to this client that wait until it has room",
            )

    def give(self, asked: Asked, arrays: NamedArrays) -> None:
        """Answer a request with arrays: at once if they are small or there is room, else ask for room."""
        needed = room_needed([array for _, array in arrays])
        if needed <= INLINE_BYTES:
            self._end_request(asked, _inline(asked, arrays))
        elif asked.room is None or needed > asked.room_bytes:
            asked.results = arrays
            self._unplaced += needed
            self._answer(NeedsRoom(asked.number, needed))
        elif needed > _LONG_COPY_BYTES:
            self._in_task(self._give_from_a_thread(asked, arrays))
        else:
            self._end_request(asked, self._place(asked, arrays))

    def take_room(self, frame: Room, asked: Asked | None) -> None:
        """Answer a request whose arrays have waited for room. Raises `BadFrame` if there is none."""
        if asked is None or asked.results is None:
            raise BadFrame(f"room for request {frame.number}, which needs none")
        arrays, asked.results = asked.results, None
        needed = room_needed([array for _, array in arrays])
        self._unplaced -= needed
        if frame.place is None or needed > frame.nbytes:
            self._end_request(asked, Dropped(asked.number))
            return
        asked.room, asked.room_bytes = frame.place, frame.nbytes
        self.give(asked, arrays)

    async def _give_from_a_thread(self, asked: Asked, arrays: NamedArrays) -> None:
        try:
            answer = await in_own_thread(self._place, asked, arrays)
        except Exception as error:  # noqa: BLE001 - no thread could be started: the answer says it
            answer = failure_answer(asked.number, error)
        self._end_request(asked, answer)

    def _place(self, asked: Asked, arrays: NamedArrays) -> Answer:
        """Copy arrays to the client's memory, and return the answer that names their places. Any thread."""
        assert asked.room is not None
        try:
            wired = self._segments.write(asked.room, asked.room_bytes, [array for _, array in arrays])
        except ValueError as error:
            return Refused(asked.number, MalformedMessage(detail=str(error)).to_record())
        except Exception as error:  # noqa: BLE001 - no memory: the answer says it
            return failure_answer(asked.number, error)
        return Arrays(asked.number, list(zip([name for name, _ in arrays], wired, strict=True)))


def _inline(asked: Asked, arrays: NamedArrays) -> Answer:
    """The answer that has arrays in its frame, or says why they cannot be there."""
    try:
        return Arrays(asked.number, [(name, WireArray.of(array)) for name, array in arrays])
    except Exception as error:  # noqa: BLE001 - no memory, or a dtype that does not travel: the answer says it
        return failure_answer(asked.number, error)
