"""Requests that the service's process has, and what its answers to them say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cudnn_actor.actors import ActorStopped, Envelope
from cudnn_actor.attached.wire import (
    INLINE_BYTES,
    Arrays,
    Done,
    Exported,
    Given,
    Place,
    Refused,
    WireArray,
)
from cudnn_actor.isolation.staging import Block, Staging
from cudnn_actor.memory import ExportedRange
from cudnn_actor.memory.exhaustion import exhaustion
from cudnn_actor.processes.channel import Channel
from cudnn_actor.protocol.errors import ErrorRecord, MalformedMessage
from cudnn_actor.protocol.messages.codec import decode_reply
from cudnn_actor.protocol.messages.messages import Download, RunModel

if TYPE_CHECKING:
    from cudnn_actor.attached.client.link import Link

__all__ = ["Outcomes", "Sent"]

_STEP = 64


class Sent:
    """A request that was sent: its envelope, its message, and the client's memory that it uses."""

    __slots__ = ("blocks", "envelope", "is_answered", "link", "number", "room")

    def __init__(self, link: Link, envelope: Envelope) -> None:
        self.link, self.number, self.envelope = link, 0, envelope
        """`number`: it gets one when it is put into a frame."""
        self.blocks: Sequence[Block] = ()
        """The blocks of memory in which the message's arrays lie."""
        self.room: Block | None = None
        """The block of memory to which the arrays of the answer may be written."""
        self.is_answered = False
        """Whether the caller was told that there is no room for the answer, which comes all the same."""

    def withdraw(self) -> bool | None:
        """Withdraw the request: see `actors.envelope.Elsewhere`. The server knows whether it has started."""
        expired = self.envelope.timed_out
        self.link.call(self.link.withdraw, self, expired)
        return None if expired else False


class Outcomes:
    """The values and errors that answers say, and the client's memory for their arrays. One thread.

    Parameters
    ----------
    staging
        The client's memory.
    channel
        The connection.
    """

    def __init__(self, staging: Staging, channel: Channel) -> None:
        self._staging, self._channel = staging, channel
        self._rooms: dict[Any, int] = {}
        """How many bytes each model's last answer had."""

    def make_room(self, sent: Sent, message: Any) -> None:
        """Take memory for the arrays of the answer, if as far as is known they are large. Raises
        `CudnnActorError`."""
        nbytes = 0
        if isinstance(message, Download):
            nbytes = message.src.spec.nbytes
        elif isinstance(message, RunModel):
            nbytes = self._rooms.get(message.model, 0)
        if nbytes > INLINE_BYTES:
            sent.room = self._staging.take(-(-nbytes // _STEP) * _STEP)

    def of(self, sent: Sent, answer: Any) -> tuple[Any, Exception | None]:
        """The value or the error of an answer. Frees the request's memory. Raises `BadFrame`."""
        value: Any = None
        error: Exception | None = None
        try:
            if type(answer) is Done:
                value = answer.receipt
            elif type(answer) is Given:
                value = decode_reply(answer.body)
            elif type(answer) is Arrays:
                value = self._arrays(sent, answer.arrays)
            elif type(answer) is Exported:
                value = ExportedRange(self._channel.take_descriptor(), answer.arena_bytes, answer.offset)
            elif type(answer) is Refused:
                error = answer.error.to_error()
            else:
                error = ActorStopped(reason="withdrawn")
            if isinstance(value, ErrorRecord):
                value, error = None, value.to_error()
        except (MalformedMessage, ValueError, MemoryError) as failure:
            value, error = None, failure
        except OSError as failure:  # there was no room for the descriptor
            value, error = None, exhaustion(failure, requested=0, in_use=0) or failure
        self.free(sent)
        return value, error

    def _arrays(self, sent: Sent, arrays: list[tuple[str | None, WireArray]]) -> Any:
        """The arrays of an answer: small ones as copies, large ones in the client's memory itself, which is
        freed with them."""
        room, wired = sent.room, [wire for _, wire in arrays]
        if room is None or not all(isinstance(wire.data, Place) for wire in wired):
            given = [wire.inline().copy() for wire in wired]
        else:
            places = []
            for wire in wired:
                assert isinstance(wire.data, Place)
                at = wire.data.offset - room.offset
                if wire.data.segment != room.segment or at < 0 or at + wire.nbytes > room.nbytes:
                    raise MalformedMessage(detail="an array of an answer that lies outside of its room")
                places.append((at, wire.dims, wire.dtype.numpy))
            sent.room = None
            given = self._staging.results(room, places)
        if isinstance(sent.envelope.message, RunModel):
            self._note_room(sent.envelope.message, sum(-(-wire.nbytes // _STEP) * _STEP for wire in wired))
        names = [name for name, _ in arrays]
        return given[0] if names == [None] else dict(zip(names, given, strict=True))

    def _note_room(self, message: RunModel, nbytes: int) -> None:
        if len(self._rooms) > 256:
            self._rooms.clear()
        self._rooms[message.model] = nbytes

    def free(self, sent: Sent) -> None:
        """Give back a request's memory."""
        blocks, sent.blocks = sent.blocks, ()
        for block in blocks:
            self._staging.give_back(block)
        if sent.room is not None:
            self._staging.give_back(sent.room)
            sent.room = None
