"""A range of an arena that another process may map: a buffer's bytes, behind the arena's descriptor."""

from __future__ import annotations

import os

__all__ = ["ExportedRange"]


class ExportedRange:
    """A descriptor of an arena, and the place of a buffer in it.

    It keeps the memory, not the buffer: once the buffer has ended, its bytes may be another buffer's. So the
    process that copies them asks afterwards whether the buffer was still live, and drops the copy if it was
    not.

    Parameters
    ----------
    descriptor
        The descriptor. This object owns it: `close` closes it, or the object's end.
    arena_bytes
        The size of the arena.
    offset
        Where the buffer begins, in bytes.
    """

    __slots__ = ("_open", "arena_bytes", "descriptor", "offset")

    def __init__(self, descriptor: int, arena_bytes: int, offset: int) -> None:
        self._open = True
        self.descriptor, self.arena_bytes, self.offset = descriptor, arena_bytes, offset

    def __repr__(self) -> str:
        return f"<bytes from {self.offset:,} of an arena of {self.arena_bytes:,} bytes>"

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._open:
            self._open = False
            os.close(self.descriptor)

    def __del__(self) -> None:
        self.close()
