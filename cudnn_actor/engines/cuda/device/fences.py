"""Fences: pooled CUDA events that mark a point in a stream and tell whether the device has passed it."""

from __future__ import annotations

from typing import Any

from cudnn_actor.engines.cuda.library.failures import NOT_READY, raise_status
from cudnn_actor.engines.cuda.library.libraries import libraries

__all__ = ["Fences"]


class Fences:
    """The events of one stream. Making an event costs more than recording one, so events are reused.

    Parameters
    ----------
    stream
        The CuPy stream that is fenced.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._free: list[Any] = []
        self._query = libraries().runtime.eventQuery

    def record(self) -> Any:
        """A fence after all work enqueued on the stream so far."""
        event = self._free.pop() if self._free else libraries().cupy.cuda.Event(disable_timing=True)
        event.record(self._stream)
        return event

    def has_passed(self, event: Any) -> bool:
        """Whether the device has passed a fence, which must then not be used again. Never blocks.

        Raises `StickyError`, `EngineFailure`.
        """
        status = self._query(event.ptr)
        if status == NOT_READY:
            return False
        if status:
            raise_status(status)
        self._free.append(event)
        return True

    def outlast(self, event: Any) -> None:
        """Wait for a fence, which must then not be used again. Raises `StickyError`, `EngineFailure`."""
        event.synchronize()
        self._free.append(event)
