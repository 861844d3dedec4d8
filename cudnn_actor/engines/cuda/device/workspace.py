"""The scratch memory that all plans of an engine share; they run one after the other."""

from __future__ import annotations

from typing import Any

from cudnn_actor.engines.cuda.library.libraries import libraries

__all__ = ["Workspace"]

_LEAST_BYTES = 1 << 20


class Workspace:
    """Device memory as large as the largest plan needs.

    `resize` moves it: no work may be using it then, and graphs captured before must not be replayed after.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.pointer = 0
        self._mark = libraries().runtime.malloc(256)
        """What `touch` writes to."""
        self.resize(_LEAST_BYTES)

    def resize(self, nbytes: int) -> None:
        """Resize it to `nbytes`. If it raises `MemoryError`, it has its old size, or is empty."""
        runtime = libraries().runtime
        before = self.nbytes
        self._free()
        for wanted in (nbytes, before):
            try:
                self.pointer = runtime.malloc(wanted)
            except (MemoryError, libraries().cupy.cuda.runtime.CUDARuntimeError):
                continue
            self.nbytes = wanted
            break
        if self.nbytes < nbytes:
            raise MemoryError(f"no room for a workspace of {nbytes:,} bytes")

    def poison(self, stream: Any) -> None:
        """Enqueue filling it with NaN."""
        libraries().runtime.memsetAsync(self.pointer, 0xFF, self.nbytes, stream.ptr)

    def touch(self, stream: Any) -> None:
        """Write to the device and wait for it. Raises if the context is dead. Blocks."""
        libraries().runtime.memsetAsync(self._mark, 0, 256, stream.ptr)
        stream.synchronize()

    def close(self) -> None:
        """Free the memory."""
        self._free()
        libraries().runtime.free(self._mark)

    def _free(self) -> None:
        if self.pointer:
            libraries().runtime.free(self.pointer)
        self.pointer = self.nbytes = 0
