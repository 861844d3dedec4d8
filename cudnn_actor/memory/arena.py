"""A piece of device memory, identified by the file descriptor that keeps it alive."""

from __future__ import annotations

import os

from cudnn_actor.memory.free_list import FreeList

__all__ = ["ARENA_STEP", "Arena"]

ARENA_STEP = 2 << 20
"""Arenas are multiples of 2 MiB, the granularity of CUDA's exportable memory."""


class Arena:
    """An arena. Its memory lives as long as its descriptor or an engine's mapping of it.

    Parameters
    ----------
    number
        Its number within the service; never reused.
    nbytes
        Its size in bytes.
    fd
        The file descriptor of its memory; the arena owns it from here on. None for one that was imported: of
        that, an engine's mapping alone keeps the memory.
    """

    __slots__ = ("_open", "fd", "free", "imported", "nbytes", "number")

    def __init__(self, number: int, nbytes: int, fd: int | None) -> None:
        self.number = number
        self.nbytes = nbytes
        self.fd = -1 if fd is None else fd
        self.free = FreeList(nbytes)
        self._open = fd is not None
        self.imported = fd is None

    def __repr__(self) -> str:
        return f"<arena {self.number}: {self.free.free_bytes:,} of {self.nbytes:,} bytes free>"

    @property
    def idle(self) -> bool:
        """Whether no buffer has bytes in the arena."""
        return self.free.idle

    def close(self) -> None:
        """Close the descriptor. Further calls do nothing, since the number may have been reused by then."""
        if self._open:
            self._open = False
            os.close(self.fd)
