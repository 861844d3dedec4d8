"""Staging memory between NumPy arrays and the device: a ring of pinned host memory."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from cudnn_actor.engines.cuda.device.fences import Fences
from cudnn_actor.engines.cuda.library.libraries import libraries

__all__ = ["Piece", "StagingRing"]

_ALIGNMENT = 256


class Piece:
    """A part of the ring: `bytes` for NumPy, `pointer` for the device; `start` is its offset in the ring."""

    __slots__ = ("bytes", "fence", "in_use", "pointer", "start")

    def __init__(self, bytes: np.ndarray, pointer: int, start: int) -> None:
        self.bytes = bytes
        self.pointer = pointer
        self.start = start
        self.fence: Any = None
        """The fence after the copy that uses the piece."""
        self.in_use = True
        """Whether the host still uses the piece."""


class StagingRing:
    """A ring of pinned bytes, allocated and freed in order.

    A piece is free again once its fence has passed and the host no longer uses it. Until then, the pieces
    allocated after it are not freed either. Used by one thread only. The memory is allocated at first use.

    Parameters
    ----------
    nbytes
        The ring's size.
    fences
        The fences of the stream that copies.
    """

    def __init__(self, nbytes: int, fences: Fences) -> None:
        self.nbytes = nbytes
        self._fences = fences
        self._memory: Any = None
        self._bytes = np.empty(0, np.uint8)
        self._pieces: deque[Piece] = deque()
        self._next = 0
        """The offset behind the newest piece."""

    def take(self, nbytes: int) -> Piece | None:
        """Allocate `nbytes` of the ring; None if they are not free now. Never waits for the device."""
        self._collect()
        needed = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        start = self._place_for(needed)
        if start is None:
            return None
        if self._memory is None:
            self._memory = libraries().cupy.cuda.alloc_pinned_memory(self.nbytes)
            self._bytes = np.frombuffer(self._memory, np.uint8, self.nbytes)
        piece = Piece(self._bytes[start : start + nbytes], self._memory.ptr + start, start)
        self._pieces.append(piece)
        self._next = start + needed
        return piece

    def take_soon(self, nbytes: int) -> Piece:
        """Allocate `nbytes` of the ring, waiting until the device has finished with enough pieces. Blocks.

        Only for a ring whose pieces the host no longer uses once they are fenced.
        """
        while (piece := self.take(nbytes)) is None:
            oldest = self._pieces.popleft()
            self._fences.outlast(oldest.fence)
        return piece

    def fence(self, piece: Piece) -> None:
        """Record a fence for a piece; call it just after enqueuing the copy that uses the piece."""
        piece.fence = self._fences.record()

    def give_up(self) -> None:
        """Free all pieces after a transfer has failed half-way, each once its copy has finished.

        A piece whose copy was not fully enqueued is fenced here, because no later call will do so.
        """
        for piece in self._pieces:
            piece.in_use = False
            if piece.fence is None:
                self.fence(piece)

    def _collect(self) -> None:
        while self._pieces and not self._pieces[0].in_use and self._has_passed(self._pieces[0]):
            self._pieces.popleft()

    def _has_passed(self, piece: Piece) -> bool:
        return piece.fence is not None and self._fences.has_passed(piece.fence)

    def _place_for(self, nbytes: int) -> int | None:
        """The offset of `nbytes` contiguous free bytes: after the newest piece, or at the ring's start."""
        if not self._pieces:
            return 0 if nbytes <= self.nbytes else None
        oldest = self._pieces[0].start
        if self._next > oldest:
            if nbytes <= self.nbytes - self._next:
                return self._next
            return 0 if nbytes <= oldest else None
        return self._next if nbytes <= oldest - self._next else None
