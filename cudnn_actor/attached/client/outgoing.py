"""Messages and frames that only clients send, their encoding, and checks of messages before they are sent."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import numpy as np

from cudnn_actor.attached.client.announced_segments import AnnouncedSegments
from cudnn_actor.attached.client.sent import Sent
from cudnn_actor.attached.wire import (
    INLINE_BYTES,
    LONGEST_MESSAGE,
    ExportBuffer,
    ImportBuffer,
    Place,
    writing,
)
from cudnn_actor.broker.service_state import Export, Import
from cudnn_actor.isolation.staging import Block, Staging
from cudnn_actor.memory.exhaustion import exhaustion
from cudnn_actor.protocol.errors import InvalidRequest, OutOfMemory, Words
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["ShareWeights", "Writing", "as_answer", "check_length", "move_frame", "place_of"]


class ShareWeights(msgspec.Struct, frozen=True, eq=False):
    """A request for a buffer of these values that other processes may share, and that is only read.

    The answer is a `BufferRef`, or, without `data`, None if no process has shared such values.
    """

    control: ClassVar[bool] = False
    spec: TensorSpec
    digest: str
    data: np.ndarray | None = None


def move_frame(number: int, message: Export | Import, timeout_s: float | None) -> tuple[Any, tuple[int, ...]]:
    """The frame of a message that moves a buffer, and the descriptors that go with it."""
    if isinstance(message, Export):
        return ExportBuffer(number, message.buffer, timeout_s), ()
    memory = message.memory
    frame = ImportBuffer(number, memory.arena_bytes, memory.offset, message.spec, timeout_s)
    return frame, (memory.descriptor,)


def place_of(block: Block) -> Place:
    """The place of a block, as the server is told of it."""
    return Place(block.segment, block.offset)


def check_length(what: str, nbytes: int) -> None:
    """Raise `InvalidRequest` for a message or a graph that is too long for a frame."""
    if nbytes > LONGEST_MESSAGE:
        raise InvalidRequest(
            field="message",
            value=Words(what),
            problem=f"takes {nbytes:,} bytes, and a service's process accepts at most {LONGEST_MESSAGE:,}",
            fix="cut it into several",
        )


def as_answer(error: Exception) -> Exception:
    """The error that answers a message which could not be encoded, or whose descriptor could not be sent."""
    if isinstance(error, TypeError):
        return InvalidRequest(
            field="message",
            value=str(error),
            problem="cannot be sent",
            fix="send plain data",
        )
    if isinstance(error, MemoryError) and not isinstance(error, OutOfMemory):
        return OutOfMemory(requested=0, in_use=0, limit=None)
    if isinstance(error, OSError):
        return exhaustion(error, requested=0, in_use=0) or error
    return error


class Writing:
    """Encodes messages, and finds places for their large arrays in the client's memory. One thread.

    Parameters
    ----------
    staging
        The client's memory.
    shared
        Segments that other clients have, too.
    """

    def __init__(self, staging: Staging, shared: AnnouncedSegments) -> None:
        self._staging, self._shared = staging, shared
        self.without_arrays = writing(self._put)
        """Encodes a message that has no arrays."""
        self._blocks: list[Block] = []
        """The blocks in which the arrays of the message that is being encoded lie."""

    def write(self, sent: Sent, message: Any) -> bytes:
        """Encode a message. The request gets the blocks that its arrays take, also if this raises."""
        sent.blocks = self._blocks = []
        return self.without_arrays(message)

    def _put(self, array: np.ndarray) -> Place | None:
        """Find a place for an array of a message, and copy it there, unless it lies in the client's memory
        already."""
        if array.nbytes <= INLINE_BYTES:
            return None
        found = self._staging.locate(array) or self._shared.locate(array)
        if found is not None and not found[1] % array.itemsize:
            return Place(*found)
        block = self._staging.take(array.nbytes)
        self._blocks.append(block)
        np.copyto(self._staging.array(block, array.shape, array.dtype), array)
        return place_of(block)
