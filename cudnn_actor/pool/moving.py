"""How a buffer moves from one member to another: from device to device, or through the host.

Device to device, the source's process gives a descriptor of the arena in which the buffer lies. The target's
worker maps that memory, for reading alone, and copies it to a buffer of its own. Nothing is locked meanwhile:

- The source answers once all earlier work on the buffer is done, and keeps no note of it. The memory exists
  as long as anybody has a descriptor or a mapping of it. So whoever ends in the middle leaves nothing to
  clean up, and the target never reads memory that is gone.
- The bytes are the buffer's as long as it is live. Freeing it, after the copy, says whether it still was. If
  it was not, the copy may be of another buffer's bytes, and is dropped.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from cudnn_actor.actors import Deadline
from cudnn_actor.actors.logs import Log
from cudnn_actor.protocol.errors import (
    CudnnActorError,
    DeadlineExceeded,
    ExecutionFailed,
    QuarantinedRequest,
    ServiceStopped,
    StaleBufferError,
)
from cudnn_actor.protocol.messages.messages import Allocate, Copy
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec
from cudnn_actor.service.client import CudnnRef

__all__ = ["DIRECT_BYTES", "Moving"]

log = Log("cudnn_actor.pool")

DIRECT_BYTES = 4 << 20
"""Buffers of fewer bytes go through the host: to map memory takes longer than to copy so little twice."""

_MOST_FAILURES = 2
"""After this many failed copies in a row, the copies may be what ends the target's workers. A third failure
would cost one more of the three restarts that a service has by default."""


class Moving:
    """Moves buffers between members. Used on the pool's event loop."""

    def __init__(self) -> None:
        self.direct = 0
        """How many buffers have gone from device to device."""
        self.by_host = 0
        """How many have gone through the host."""
        self._refused: set[tuple[str, str]] = set()
        """Pairs of devices of which the second cannot read the memory of the first."""
        self._failed: Counter[tuple[str, str]] = Counter()
        """How many copies, one after the other, have failed since one has not, by pairs of devices."""

    async def move(
        self, buffer: BufferRef, source: CudnnRef, target: CudnnRef, deadline: Deadline
    ) -> BufferRef:
        """Copy a buffer of `source` to `target`, and free it. Returns the new buffer.

        Raises `CudnnActorError`. The old buffer stays then, and there is no new one.
        """
        copied = await self._copied_directly(buffer, source, target, deadline)
        directly = copied is not None
        if copied is None:
            values = await source.download(buffer, timeout=deadline.left_s)
            copied = await target.ask(Allocate(spec=buffer.spec, data=values), timeout=deadline.left_s)
        try:
            await source.free(buffer, timeout=deadline.left_s)
        except BaseException as error:
            if not _has_ended(error, directly=directly):
                target._discard(copied)
                raise
        self.direct += directly
        self.by_host += not directly
        return copied

    async def _copied_directly(
        self, buffer: BufferRef, source: CudnnRef, target: CudnnRef, deadline: Deadline
    ) -> BufferRef | None:
        """A copy, or None if it has to go through the host."""
        pair = source.device, target.device
        if buffer.nbytes < DIRECT_BYTES or pair in self._refused or _kind(pair[0]) != _kind(pair[1]):
            return None
        failed = self._failed[pair]
        try:
            copied = await _copy(buffer, source, target, deadline)
        except _Refused as refused:
            if refused.in_copy:  # of several at a time, one worker's end has been the end of all
                self._failed[pair] = failed + 1
            if refused.for_good or self._failed[pair] >= _MOST_FAILURES:
                self._refused.add(pair)
            log.info("move.through_host", source=pair[0], target=pair[1], why=str(refused.__cause__))
            return None
        self._failed[pair] = 0
        return copied


async def _copy(buffer: BufferRef, source: CudnnRef, target: CudnnRef, deadline: Deadline) -> BufferRef:
    """A copy by way of the memory itself. Raises `_Refused` if it cannot be made, and what `move` raises."""
    lender: Any = source._service
    reader: Any = target._service
    try:
        memory = await lender.export_buffer(buffer, deadline.left_s)
    except (ServiceStopped, DeadlineExceeded, StaleBufferError):
        raise
    except CudnnActorError as error:  # no descriptor is left, for example
        raise _Refused(for_good=False) from error
    try:
        theirs: BufferRef = await reader.import_buffer(memory, buffer.spec, deadline.left_s)
    except (ServiceStopped, DeadlineExceeded):
        raise
    except CudnnActorError as error:
        raise _Refused(for_good=isinstance(error, ExecutionFailed | QuarantinedRequest)) from error
    finally:
        memory.close()  # the mapping keeps the memory
    try:
        return await _copied_here(theirs, buffer.spec, target, deadline)
    finally:
        target._discard(theirs)


async def _copied_here(
    theirs: BufferRef, spec: TensorSpec, target: CudnnRef, deadline: Deadline
) -> BufferRef:
    """A copy of a buffer that was imported. Raises likewise: its worker may end, and its mapping with it."""
    own: BufferRef = await target.ask(Allocate(spec=spec), timeout=deadline.left_s)
    try:
        await target.ask(Copy(src=theirs, dst=own), timeout=deadline.left_s)
    except BaseException as error:
        target._discard(own)
        if isinstance(error, CudnnActorError) and not isinstance(error, ServiceStopped | DeadlineExceeded):
            raise _Refused(for_good=False, in_copy=True) from error
        raise
    return own


def _has_ended(error: BaseException, *, directly: bool) -> bool:
    """Whether the copy is all that is left of a buffer, though its free was not answered in time."""
    if isinstance(error, DeadlineExceeded):
        return error.started  # a free ends the buffer where it starts; one of a stale buffer never starts
    # If its process has ended, so has the buffer. Values that were downloaded are its values in any case; but
    # nobody can say of what was copied directly that the buffer was live until then.
    return isinstance(error, ServiceStopped) and not directly


class _Refused(Exception):
    """Raised when a buffer cannot go from device to device: so it goes through the host.

    `for_good`: whether the next one between the same devices cannot either. `in_copy`: whether the target had
    mapped the memory. The cause is the error.
    """

    def __init__(self, *, for_good: bool, in_copy: bool = False) -> None:
        super().__init__()
        self.for_good, self.in_copy = for_good, in_copy


def _kind(device: str) -> str:
    return device.partition(":")[0]
