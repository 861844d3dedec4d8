"""Pinned host memory between NumPy arrays and the device: a ring, used again as the device gets on."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from cudnn_actor.engines.cuda.device.fences import Fences
from cudnn_actor.engines.cuda.library.libraries import libraries

__all__ = ["Piece", "StagingRing"]

_ALIGNMENT = 256


class Piece:
    """Some bytes of the ring: `bytes` for NumPy, `pointer` for the device."""

    __slots__ = ("bytes", "end", "fence", "in_use", "pointer")

    def __init__(self, bytes: np.ndarray, pointer: int, end: int) -> None:
        self.bytes = bytes
        self.pointer = pointer
        self.end = end
        self.fence: Any = None
        """Behind the copy that uses it."""
        self.in_use = True
        """Whether the host still has to read it."""


class StagingRing:
    """A ring of pinned bytes, handed out in order and given back in order.

    A piece is free again when its copy has passed its fence and the host has read what it wants of it; one
    that is not holds up those behind it. One thread's own. The memory is taken at the first use.

    Parameters
    ----------
    nbytes
        The ring's size.
    fences
        Of the stream that copies.
    """

    def __init__(self, nbytes: int, fences: Fences) -> None:
        self.nbytes = nbytes
        self._fences = fences
        self._memory: Any = None
        self._bytes = np.empty(0, np.uint8)
        self._pieces: deque[Piece] = deque()
        self._next = 0

    def take(self, nbytes: int) -> Piece | None:
        """`nbytes` of the ring; None when they are not free now. Never waits for the device."""
        self._collect()
        start = self._place_for(-(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        if start is None:
            return None
        if self._memory is None:
            self._memory = libraries().cupy.cuda.alloc_pinned_memory(self.nbytes)
            self._bytes = np.frombuffer(self._memory, np.uint8, self.nbytes)
        end = start + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        piece = Piece(self._bytes[start : start + nbytes], self._memory.ptr + start, end)
        self._pieces.append(piece)
        self._next = end
        return piece

    def take_soon(self, nbytes: int) -> Piece:
        """`nbytes` of the ring, as soon as the device has used what is in the way. Blocks.

        For a ring whose pieces the host has no more business with once they are fenced.
        """
        while (piece := self.take(nbytes)) is None:
            oldest = self._pieces.popleft()
            self._fences.outlast(oldest.fence)
        return piece

    def fence(self, piece: Piece) -> None:
        """Note that the copy that uses a piece has just been enqueued."""
        piece.fence = self._fences.record()

    def give_up(self) -> None:
        """Free all pieces, each behind the copy that uses it: what wanted them has failed half-way.

        One whose copy was not enqueued, or not whole, is fenced here: nothing later reaches it.
        """
        for piece in self._pieces:
            piece.in_use = False
            if piece.fence is None:
                self.fence(piece)

    def _collect(self) -> None:
        while self._pieces and not self._pieces[0].in_use and self._passed(self._pieces[0]):
            self._pieces.popleft()

    def _passed(self, piece: Piece) -> bool:
        return piece.fence is not None and self._fences.passed(piece.fence)

    def _place_for(self, nbytes: int) -> int | None:
        """Where `nbytes` in a row are free: behind the newest piece, or at the start again."""
        if not self._pieces:
            return 0 if nbytes <= self.nbytes else None
        oldest = self._pieces[0].end - -(-len(self._pieces[0].bytes) // _ALIGNMENT) * _ALIGNMENT
        if self._next > oldest:
            if nbytes <= self.nbytes - self._next:
                return self._next
            return 0 if nbytes <= oldest else None
        return self._next if nbytes <= oldest - self._next else None
