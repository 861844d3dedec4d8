"""Memory of other services that a client has this one read, as it comes."""

from __future__ import annotations

from cudnn_actor.memory import GRANULARITY, ExportedRange
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.protocol.errors import InvalidRequest, Words

__all__ = ["moves_refused", "received_range"]

_MOST_BYTES = 1 << 44


def received_range(channel: Channel, arena_bytes: int, offset: int, nbytes: int) -> ExportedRange:
    """The range of an arena whose descriptor has come, with a buffer of `nbytes` in it.

    What the descriptor is of, only the engine finds out. Raises `BadFrame` for numbers that no arena has, and
    `OSError` if there was no room for the descriptor.
    """
    found = ExportedRange(channel.take_descriptor(), arena_bytes, offset)
    whole = not (arena_bytes % GRANULARITY or offset % GRANULARITY)
    inside = 0 < arena_bytes <= _MOST_BYTES and 0 <= offset <= arena_bytes - max(nbytes, 1)
    if not whole or not inside:
        found.close()
        raise BadFrame(f"{nbytes:,} bytes at {offset} of an arena of {arena_bytes} bytes")
    return found


def moves_refused(kind: str) -> InvalidRequest:
    """The error for a client that may not move buffers."""
    return InvalidRequest(
        field="message",
        value=Words(kind),
        problem="is only for the pool that this service is a member of",
        fix="download the buffer, and upload it",
    )
