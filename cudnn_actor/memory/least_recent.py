"""A cache bounded by number and by bytes: the least recently used entries are dropped first.

The lock is held only briefly. It is re-entrant, because the garbage collector may run a finalizer while it is
held, and the finalizer may use the same cache. Each step keeps the entries and the sum of their sizes
consistent, so a finalizer or an exception of a signal handler does no harm between two steps.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

__all__ = ["LeastRecent"]

K = TypeVar("K")
V = TypeVar("V")

_ABSENT = (None, 0)
_NOTHING = (0, None, None)


class LeastRecent(Generic[K, V]):
    """Entries by key, each with a size. Any thread.

    The latest entry is kept whatever its size.

    Parameters
    ----------
    most
        How many entries it may have.
    nbytes
        How many bytes the entries may take together.
    """

    def __init__(self, *, most: int, nbytes: int) -> None:
        self.most = most
        self.limit = nbytes
        self.nbytes = 0
        """The sum of the entries' sizes."""
        self.evictions = 0
        """How many entries were dropped to make room."""
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._newest: tuple[int, K | None, V | None] = _NOTHING
        """The hash of the key that was used last, which is mostly the next, too; the key and its value."""
        self._lock: Any = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """The entry, which counts as used now; None if there is none."""
        hashed, newest, value = self._newest
        if newest is key or (hashed == hash(key) and newest == key):
            return value
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._newest = hash(key), key, entry[0]  # from now on, dropping or replacing it clears this
            try:  # each request comes here, and `suppress` takes as long as all the rest
                self._entries.move_to_end(key)
            except KeyError:  # a finalizer has dropped it since
                self._newest = _NOTHING
            if self._entries.get(key) is not entry:
                self._newest = _NOTHING
            return entry[0]

    def peek(self, key: K) -> V | None:
        """The entry, as `get` returns it, but without counting this as a use."""
        with self._lock:
            return self._entries.get(key, _ABSENT)[0]

    def __iter__(self) -> Iterator[K]:
        """The keys as they are now, the least recently used first."""
        return iter(tuple(self._entries))

    def values(self) -> tuple[V, ...]:
        """The values, the least recently used first."""
        return tuple(value for _, value in self.items())

    def items(self) -> tuple[tuple[K, V], ...]:
        """Keys and values, the least recently used first."""
        return tuple((key, value) for key, (value, _) in tuple(self._entries.items()))

    def put(self, key: K, value: V, nbytes: int) -> None:
        """Add or replace an entry, then drop the least recently used ones that are over a bound."""
        entry = (value, nbytes)
        with self._lock:
            before = self._entries.get(key, _ABSENT)[1]
            # One step.
            self._newest = _NOTHING
            self.nbytes += nbytes - before
            self._entries[key] = entry
            with contextlib.suppress(KeyError):
                self._entries.move_to_end(key)
            while len(self._entries) > 1 and (len(self._entries) > self.most or self.nbytes > self.limit):
                self.evictions += 1
                self._drop(next(iter(self._entries)))

    def pop(self, key: K) -> None:
        """Drop an entry, if it is there."""
        with self._lock:
            self._drop(key)

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            for key in tuple(self._entries):
                self._drop(key)

    def _drop(self, key: K) -> None:
        entry = self._entries.get(key)
        if entry is not None:
            # One step. `entry` keeps the value alive until all is done: its end could run a finalizer.
            self._newest = _NOTHING
            self.nbytes -= entry[1]
            del self._entries[key]
