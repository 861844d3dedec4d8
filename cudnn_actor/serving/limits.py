"""How many inferences are under way, and how many bytes their requests have: in all processes that serve."""

from __future__ import annotations

import mmap
import os

import numpy as np

__all__ = ["Limits", "SharedLimits", "shared_table"]

_RUNNING, _BYTES = 0, 1


class Limits:
    """What is under way in this process, which serves alone. On one event loop.

    Parameters
    ----------
    most_running
        How many inferences may be under way.
    most_bytes
        How many bytes the requests of all of them may have.
    """

    def __init__(self, most_running: int, most_bytes: int) -> None:
        self.most_running, self.most_bytes = most_running, most_bytes
        self.bytes = 0
        self._running = 0

    def begin(self) -> bool:
        """Count one more inference. Returns False, and counts none, if there are enough."""
        if self._running >= self.most_running:
            return False
        self._running += 1
        return True

    def end(self, nbytes: int) -> None:
        """Count one less, and as many bytes less."""
        self._running -= 1
        self.bytes -= nbytes

    def take(self, nbytes: int) -> bool:
        """Count bytes of a request. Returns False, and counts none, if there are too many."""
        if self.bytes + nbytes > self.most_bytes:
            return False
        self.bytes += nbytes
        return True


class SharedLimits(Limits):
    """As `Limits`, where several processes serve: the bounds hold for all of them together.

    Each process has a row of a table in memory that all have mapped, and writes to no other: so no count is
    lost. It counts a request first, and looks at the sum then. So of two that come at once, at least one sees
    the other, but for the nanoseconds that a processor's write takes to be seen by another one; and both may
    be refused where one of them had room.

    Parameters
    ----------
    most_running, most_bytes
        As in `Limits`, for all processes.
    table
        What `shared_table` gives.
    row
        This process's.
    """

    def __init__(self, most_running: int, most_bytes: int, table: np.ndarray, row: int) -> None:
        super().__init__(most_running, most_bytes)
        self._table, self._own = table, table[row]

    def begin(self) -> bool:
        """Count one more inference. Returns False, and counts none, if there are enough."""
        self._own[_RUNNING] += 1
        if self._table[:, _RUNNING].sum() > self.most_running:
            self._own[_RUNNING] -= 1
            return False
        return True

    def end(self, nbytes: int) -> None:
        """Count one less, and as many bytes less."""
        self._own[_RUNNING] -= 1
        self._own[_BYTES] -= nbytes
        self.bytes -= nbytes

    def take(self, nbytes: int) -> bool:
        """Count bytes of a request. Returns False, and counts none, if there are too many."""
        self._own[_BYTES] += nbytes
        if self._table[:, _BYTES].sum() > self.most_bytes:
            self._own[_BYTES] -= nbytes
            return False
        self.bytes += nbytes
        return True


def shared_table(descriptor: int, rows: int) -> np.ndarray:
    """The table of so many processes in the memory of a descriptor, which stays open. Raises `OSError`."""
    nbytes = rows * 2 * 8
    if os.fstat(descriptor).st_size < nbytes:
        os.ftruncate(descriptor, nbytes)
    return np.frombuffer(mmap.mmap(descriptor, nbytes), np.int64).reshape(rows, 2)
