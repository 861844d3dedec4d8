"""Events from a pool: marks in the stream that can be asked whether the device has passed them."""

from __future__ import annotations

from typing import Any

from cudnn_actor.engines.cuda.library.failures import NOT_READY, raise_status
from cudnn_actor.engines.cuda.library.libraries import libraries

__all__ = ["Fences"]


class Fences:
    """The events of one stream. Making one costs more than recording one, so they are used again.

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
        """A mark behind all that the stream has been given."""
        event = self._free.pop() if self._free else libraries().cupy.cuda.Event(disable_timing=True)
        event.record(self._stream)
        return event

    def passed(self, event: Any) -> bool:
        """Whether the device has come by a mark, which is void then. Never blocks.

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
        """Wait for a mark, which is void then. Blocks. Raises `StickyError`, `EngineFailure`."""
        event.synchronize()
        self._free.append(event)
