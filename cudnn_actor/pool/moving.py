"""Moves a buffer from one member to another: from device to device, or through the host.

From device to device, the source's process gives a descriptor of the buffer's arena. The target's worker maps
that memory only for reading, and copies the values to a buffer of its own. Nothing is locked meanwhile:

- The source answers once all earlier work on the buffer is done, and keeps no note of it. The memory exists
  as long as a process has a descriptor or a mapping of it. So a process that ends meanwhile leaves nothing to
  clean up, and the target never reads memory that is gone.
- The bytes are the buffer's as long as it is live. The answer to its `Free`, after the copy, says whether it
  still was. If not, the copy may have another buffer's bytes, and is dropped.
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
"""Buffers of fewer bytes go through the host: mapping memory takes longer than copying these bytes twice."""

_MOST_FAILURES = 2
"""After this many failed copies in a row, buffers go through the host, because the copies may be the cause of
the ends of the target's workers. A third failure would use up one more of the three restarts that a service
has by default."""


class Moving:
    """Moves buffers between members. Used on the pool's event loop."""

    def __init__(self) -> None:
        self.direct = 0
        """How many buffers have gone from device to device."""
        self.by_host = 0
        """How many buffers have gone through the host."""
        self._refused: set[tuple[str, str]] = set()
        """The pairs of devices whose second device cannot read the first one's memory."""
        self._failed: Counter[tuple[str, str]] = Counter()
        """For each pair of devices: how many copies in a row have failed."""

    async def move(
        self, buffer: BufferRef, source: CudnnRef, target: CudnnRef, deadline: Deadline
    ) -> BufferRef:
        """Copy a buffer of `source` to `target`, and free it. Returns the new buffer.

        Raises `CudnnActorError`. Then the old buffer stays, and there is no new one.
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
        """A copy made from device to device, or None if the buffer has to go through the host."""
        pair = source.device, target.device
        if buffer.nbytes < DIRECT_BYTES or pair in self._refused or _kind(pair[0]) != _kind(pair[1]):
            return None
        failed = self._failed[pair]
        try:
            copied = await _copy(buffer, source, target, deadline)
        except _Refused as refused:
            if refused.in_copy:  # several copies may fail by one end of a worker
                self._failed[pair] = failed + 1
            if refused.for_good or self._failed[pair] >= _MOST_FAILURES:
                self._refused.add(pair)
            log.info("move.through_host", source=pair[0], target=pair[1], why=str(refused.__cause__))
            return None
        self._failed[pair] = 0
        return copied


async def _copy(buffer: BufferRef, source: CudnnRef, target: CudnnRef, deadline: Deadline) -> BufferRef:
    """Copy from device to device. Raises `_Refused` if that is impossible, and the errors of `move`."""
    lender: Any = source._service
    reader: Any = target._service
    try:
        memory = await lender.export_buffer(buffer, deadline.left_s)
    except (ServiceStopped, DeadlineExceeded, StaleBufferError):
        raise
    except CudnnActorError as error:  # no descriptor is left, for example
        raise _Refused(for_good=False) from error
    try:
        mapped: BufferRef = await reader.import_buffer(memory, buffer.spec, deadline.left_s)
    except (ServiceStopped, DeadlineExceeded):
        raise
    except CudnnActorError as error:
        raise _Refused(for_good=isinstance(error, ExecutionFailed | QuarantinedRequest)) from error
    finally:
        memory.close()  # the mapping keeps the memory
    try:
        return await _copied_here(mapped, buffer.spec, target, deadline)
    finally:
        target._discard(mapped)


async def _copied_here(
    mapped: BufferRef, spec: TensorSpec, target: CudnnRef, deadline: Deadline
) -> BufferRef:
    """Copy a buffer that was imported. Raises as `_copy`: the worker may end, and its mapping with it."""
    own: BufferRef = await target.ask(Allocate(spec=spec), timeout=deadline.left_s)
    try:
        await target.ask(Copy(src=mapped, dst=own), timeout=deadline.left_s)
    except BaseException as error:
        target._discard(own)
        if isinstance(error, CudnnActorError) and not isinstance(error, ServiceStopped | DeadlineExceeded):
            raise _Refused(for_good=False, in_copy=True) from error
        raise
    return own


def _has_ended(error: BaseException, *, directly: bool) -> bool:
    """Whether a buffer has certainly ended, so that only the copy is left, although its `Free` has failed
    with `error`."""
    if isinstance(error, DeadlineExceeded):
        return error.started  # a `Free` that starts ends the buffer; one of a stale buffer never starts
    # If its process has ended, so has the buffer. Downloaded values are its values in any case. After a
    # direct copy, nobody can tell whether the buffer was live until the copy was done.
    return isinstance(error, ServiceStopped) and not directly


class _Refused(Exception):
    """Raised when a buffer cannot go from device to device, so that it goes through the host.

    `for_good`: whether no other buffer can between these devices. `in_copy`: whether the target had mapped
    the memory. The cause is the error.
    """

    def __init__(self, *, for_good: bool, in_copy: bool = False) -> None:
        super().__init__()
        self.for_good, self.in_copy = for_good, in_copy


def _kind(device: str) -> str:
    return device.partition(":")[0]
