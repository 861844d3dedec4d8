"""The free bytes of one arena.

Best fit: the smallest hole that is large enough, the lowest among equals. A
service's requests repeat a few sizes (the shapes of its network). So a freed
place is nearly always refilled exactly, and the large holes stay whole; first
fit would cut them up for small buffers. The known weakness of best fit, holes
too small for any buffer, is bounded by the granularity of 256 bytes.
"""

from __future__ import annotations

import bisect

__all__ = ["GRANULARITY", "FreeList"]

GRANULARITY = 256
"""Places start at multiples of this many bytes, and sizes are rounded up to a multiple."""


class FreeList:
    """Allocates places within `nbytes` bytes. Adjacent holes are always merged.

    Allocating and releasing cost a few dictionary operations and a bisection; only the list of sizes is
    shifted, by one memmove. Not thread-safe. Never blocks.

    Parameters
    ----------
    nbytes
        Size of the arena in bytes, a multiple of 256.

    Raises
    ------
    ValueError
        `nbytes` is not a positive multiple of 256.
    """

    __slots__ = ("_by_size", "_end_of", "_start_of", "_taken", "free_bytes", "nbytes")

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0 or nbytes % GRANULARITY:
            raise ValueError(f"nbytes={nbytes} is not a positive multiple of {GRANULARITY}")
        self.nbytes = nbytes
        self.free_bytes = 0
        self._taken: dict[int, int] = {}
        # Each hole is in all three: by its start, by its end, and in order of (size, start).
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._add_hole(0, nbytes)

    @property
    def largest(self) -> int:
        """Bytes of the largest hole: 0 when there is none."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def holes(self) -> int:
        """The number of holes: 1 when nothing is taken."""
        return len(self._by_size)

    @property
    def places(self) -> int:
        """The number of places that are taken."""
        return len(self._taken)

    @property
    def idle(self) -> bool:
        """Whether nothing is taken."""
        return not self._taken

    def allocate(self, nbytes: int) -> int | None:
        """Take `nbytes` (rounded up to 256, also 0) and return their offset; None if there is no room."""
        size = round_up(max(nbytes, 1), GRANULARITY)
        found = bisect.bisect_left(self._by_size, (size, 0))
        if found == len(self._by_size):
            return None
        _, start = self._by_size[found]
        end = self._end_of[start]
        self._remove_hole(start, end)
        if start + size < end:
            self._add_hole(start + size, end)
        self._taken[start] = size
        return start

    def take(self, offset: int, nbytes: int) -> None:
        """Take the place at `offset`, a multiple of 256, of an arena in which nothing is taken yet.

        Raises `ValueError` if it does not lie in the arena, or something is taken.
        """
        size = round_up(max(nbytes, 1), GRANULARITY)
        if self._taken or offset < 0 or offset % GRANULARITY or offset + size > self.nbytes:
            raise ValueError(f"{size} bytes at {offset} are no place that could be taken")
        self._remove_hole(0, self.nbytes)
        if offset:
            self._add_hole(0, offset)
        if offset + size < self.nbytes:
            self._add_hole(offset + size, self.nbytes)
        self._taken[offset] = size

    def release(self, offset: int) -> None:
        """Release the place that starts at `offset`, and merge it with the holes on both sides.

        Raises `KeyError` when no taken place starts there, so no place is released twice.
        """
        start, end = offset, offset + self._taken.pop(offset)
        if start in self._start_of:
            start = self._start_of[start]
            self._remove_hole(start, offset)
        if end in self._end_of:
            right, end = end, self._end_of[end]
            self._remove_hole(right, end)
        self._add_hole(start, end)

    def _add_hole(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        bisect.insort(self._by_size, (end - start, start))
        self.free_bytes += end - start

    def _remove_hole(self, start: int, end: int) -> None:
        del self._end_of[start], self._start_of[end]
        del self._by_size[bisect.bisect_left(self._by_size, (end - start, start))]
        self.free_bytes -= end - start


def round_up(nbytes: int, step: int) -> int:
    """`nbytes` rounded up to a multiple of `step`."""
    return -(-nbytes // step) * step
