"""The hazard queue: the order of requests that wait for a plan, and of those that must not overtake them.

Two requests conflict when one writes a buffer that the other reads or writes. Requests that do not conflict
may run in any order. So a request whose plan is being built delays only the requests that conflict with it,
and those that conflict with these.

Each entry counts the entries that it must wait for. For a buffer that it reads, this is the last earlier
entry that writes the buffer; for a buffer that it writes, also the entries that read the buffer since that
write. It need not count earlier ones, because an entry leaves only when it waits for no other. So entries may
leave in an order that differs from that of their arrival, but two conflicting entries never change places.
The time to enter or leave is proportional to the number of entries that an entry waits for or that wait for
it, not to the number of all entries.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from typing import Generic, TypeVar

import msgspec

from cudnn_actor.broker.footprints import NOTHING, Footprint

__all__ = ["Entry", "HazardQueue"]

T = TypeVar("T")


class Entry(msgspec.Struct, Generic[T], eq=False):
    """An item that waits; `HazardQueue.add` makes it."""

    item: T
    footprint: Footprint
    number: int
    ready: bool
    predecessors: int = 0
    followers: list[Entry[T]] = msgspec.field(default_factory=list)


class HazardQueue(Generic[T]):
    """Entries in order, and which of them may run. Does no I/O. Truthy while it has entries."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, Entry[T]] = OrderedDict()
        self._numbers = itertools.count()
        self._runnable: list[tuple[int, Entry[T]]] = []
        self._barriers: deque[Entry[T]] = deque()
        self._writer: dict[int, Entry[T]] = {}
        self._readers: dict[int, dict[int, Entry[T]]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> list[T]:
        """All items, in order of arrival."""
        return [entry.item for entry in self._entries.values()]

    def conflicts(self, footprint: Footprint) -> bool:
        """Whether a request that is ready to run conflicts with an entry and must wait behind it."""
        reads, writes = footprint
        return any(slot in self._writer for slot in reads) or any(
            slot in self._writer or slot in self._readers for slot in writes
        )

    def add(self, item: T, footprint: Footprint = NOTHING, *, ready: bool = True) -> Entry[T]:
        """Add an entry behind those that conflict with it. If not `ready`, it also waits for `make_ready`."""
        entry = self._enter(item, footprint, ready=ready)
        before = {found.number: found for found in self._before(footprint)}
        for found in before.values():
            found.followers.append(entry)
        entry.predecessors = len(before)
        self._note(entry)
        self._offer(entry)
        return entry

    def add_barrier(self, item: T) -> None:
        """Add an entry that waits for all present entries. No later entry waits for it."""
        self._barriers.append(self._enter(item, NOTHING, ready=True))

    def make_ready(self, entry: Entry[T]) -> None:
        """Mark an entry as ready: it now waits only for its turn. Call once per entry."""
        entry.ready = True
        self._offer(entry)

    def may_run(self) -> bool:
        """Whether `take` would return an item."""
        return bool(self._runnable) or self._barrier_is_first()

    def take(self) -> T | None:
        """Remove and return the next item that may run, in order of arrival. None if all must wait."""
        if self._barrier_is_first():
            return self._entries.pop(self._barriers.popleft().number).item
        if not self._runnable:
            return None
        _, entry = heapq.heappop(self._runnable)
        self._leave(entry)
        return entry.item

    def clear(self) -> list[T]:
        """Remove and return all items, in order of arrival."""
        items = self.items()
        for index in (self._entries, self._runnable, self._barriers, self._writer, self._readers):
            index.clear()
        return items

    def _enter(self, item: T, footprint: Footprint, *, ready: bool) -> Entry[T]:
        entry = Entry(item, footprint, next(self._numbers), ready=ready)
        self._entries[entry.number] = entry
        return entry

    def _before(self, footprint: Footprint) -> list[Entry[T]]:
        reads, writes = footprint
        before = [self._writer[slot] for slot in (*reads, *writes) if slot in self._writer]
        for slot in writes:
            before.extend(self._readers.get(slot, {}).values())
        return before

    def _note(self, entry: Entry[T]) -> None:
        for slot in entry.footprint.reads:
            self._readers.setdefault(slot, {})[entry.number] = entry
        for slot in entry.footprint.writes:
            self._writer[slot] = entry
            self._readers.pop(slot, None)  # later entries wait for this writer, which waits for these readers

    def _offer(self, entry: Entry[T]) -> None:
        if entry.ready and not entry.predecessors:
            heapq.heappush(self._runnable, (entry.number, entry))

    def _leave(self, entry: Entry[T]) -> None:
        del self._entries[entry.number]
        for slot in entry.footprint.reads:
            readers = self._readers.get(slot, {})
            readers.pop(entry.number, None)
            if not readers:
                self._readers.pop(slot, None)
        for slot in entry.footprint.writes:
            if self._writer.get(slot) is entry:
                del self._writer[slot]
        for follower in entry.followers:
            follower.predecessors -= 1
            self._offer(follower)

    def _barrier_is_first(self) -> bool:
        return bool(self._barriers) and next(iter(self._entries)) == self._barriers[0].number
