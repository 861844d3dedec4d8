"""Requests that move buffers between services: how they are decoded, and which client may send them."""

from __future__ import annotations

from cudnn_actor.attached.wire import ExportBuffer, ImportBuffer
from cudnn_actor.broker.service_state import Export, Import
from cudnn_actor.memory import GRANULARITY, ExportedRange
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.protocol.errors import InvalidRequest, Words

__all__ = ["message_of", "require_mover"]

_MOST_BYTES = 1 << 44
"""The most bytes that an arena may have."""


def message_of(frame: ExportBuffer | ImportBuffer, channel: Channel) -> Export | Import:
    """The message of a frame that has just arrived by a channel, with its descriptor.

    Raises `BadFrame` for sizes that no arena can have, and `OSError` if there was no room for the descriptor.
    """
    if isinstance(frame, ExportBuffer):
        return Export(buffer=frame.buffer)
    memory = _receive(channel, frame.arena_bytes, frame.offset, frame.spec.nbytes)
    return Import(memory=memory, spec=frame.spec)


def _receive(channel: Channel, arena_bytes: int, offset: int, nbytes: int) -> ExportedRange:
    """The range of a buffer of `nbytes` bytes in an arena whose descriptor has arrived.

    Only the engine can check what the descriptor refers to.
    """
    found = ExportedRange(channel.take_descriptor(), arena_bytes, offset)
    whole = not (arena_bytes % GRANULARITY or offset % GRANULARITY)
    inside = 0 < arena_bytes <= _MOST_BYTES and 0 <= offset <= arena_bytes - max(nbytes, 1)
    if not whole or not inside:
        found.close()
        raise BadFrame(f"{nbytes:,} bytes at {offset} of an arena of {arena_bytes} bytes")
    return found


def require_mover(pid: int, mover: int | None, message: Export | Import) -> None:
    """Raise `InvalidRequest` unless the client with this process id may move buffers."""
    if pid != mover:
        raise InvalidRequest(
            field="message",
            value=Words(type(message).__name__),
            problem="is only for the pool that this service is a member of",
            fix="download the buffer, and upload it",
        )
