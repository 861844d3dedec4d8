"""Counts of the inferences under way and of their requests' bytes, in all processes that serve."""

from __future__ import annotations

import mmap
import os

import numpy as np

__all__ = ["Limits", "SharedLimits", "shared_table"]

_RUNNING, _BYTES = 0, 1


class Limits:
    """The counts of a process that serves alone. They are used on one event loop.

    Parameters
    ----------
    most_running
        How many inferences may be under way.
    most_bytes
        How many bytes the requests of all these inferences may have.
    """

    def __init__(self, most_running: int, most_bytes: int) -> None:
        self.most_running, self.most_bytes = most_running, most_bytes
        self.bytes = 0
        self._running = 0

    def begin(self) -> bool:
        """Count one more inference. Returns False, and counts none, if there are `most_running`."""
        if self._running >= self.most_running:
            return False
        self._running += 1
        return True

    def end(self, nbytes: int) -> None:
        """Count one inference less, and `nbytes` bytes less."""
        self._running -= 1
        self.bytes -= nbytes

    def take(self, nbytes: int) -> bool:
        """Count bytes of a request. Returns False, and counts none, if there would be more than
        `most_bytes`."""
        if self.bytes + nbytes > self.most_bytes:
            return False
        self.bytes += nbytes
        return True


class SharedLimits(Limits):
    """`Limits` of several processes, which hold for all of them together.

    All processes map a table. Each process writes only to its own row, so no count is lost. It first counts a
    request, and then looks at the sum. So of two requests at the same time, at least one sees the other,
    except in the nanoseconds until a processor's write is seen by another one. Both may be refused although
    there was room for one.

    Parameters
    ----------
    most_running, most_bytes
        See `Limits`. They hold for all processes together.
    table
        The table, as `shared_table` returns it.
    row
        This process's row.
    """

    def __init__(self, most_running: int, most_bytes: int, table: np.ndarray, row: int) -> None:
        super().__init__(most_running, most_bytes)
        self._table, self._own = table, table[row]

    def begin(self) -> bool:
        """Count one more inference. Returns False, and counts none, if there are `most_running`."""
        self._own[_RUNNING] += 1
        if self._table[:, _RUNNING].sum() > self.most_running:
            self._own[_RUNNING] -= 1
            return False
        return True

    def end(self, nbytes: int) -> None:
        """Count one inference less, and `nbytes` bytes less."""
        self._own[_RUNNING] -= 1
        self._own[_BYTES] -= nbytes
        self.bytes -= nbytes

    def take(self, nbytes: int) -> bool:
        """Count bytes of a request. Returns False, and counts none, if there would be more than
        `most_bytes`."""
        self._own[_BYTES] += nbytes
        if self._table[:, _BYTES].sum() > self.most_bytes:
            self._own[_BYTES] -= nbytes
            return False
        self.bytes += nbytes
        return True


def shared_table(descriptor: int, rows: int) -> np.ndarray:
    """Map the table of `rows` processes in the memory of a descriptor, which stays open. Raises `OSError`."""
    nbytes = rows * 2 * 8
    if os.fstat(descriptor).st_size < nbytes:
        os.ftruncate(descriptor, nbytes)
    return np.frombuffer(mmap.mmap(descriptor, nbytes), np.int64).reshape(rows, 2)
