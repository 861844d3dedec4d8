"""Finds the tensors and values in scratch memory that have bytes in common with a place."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from cudnn_actor.engines.cuda.running.recipe import Scratch

__all__ = ["Overlaps"]

T = TypeVar("T")
_OFFSET = itemgetter(0)


class _Entry(NamedTuple, Generic[T]):
    """A thing, and the bytes at which its place begins and ends."""

    offset: int
    end: int
    thing: T


class Overlaps(Generic[T]):
    """Things at places, which may overlap.

    Things whose places have about the same size are in one list, in the order of their offsets. Only a short
    part of each list can reach a given place, so a search looks at few of many things that lie side by side.
    """

    def __init__(self, things: Iterable[tuple[Scratch, T]] = ()) -> None:
        self._of_size: dict[int, list[_Entry[T]]] = {}
        """The things, by the number of bits in the size of their places."""
        for place, thing in sorted(things, key=lambda each: each[0].offset):
            self._like(place).append(_Entry(place.offset, place.offset + place.nbytes, thing))

    def add(self, place: Scratch, thing: T) -> None:
        """Add a thing at a place."""
        entry = _Entry(place.offset, place.offset + place.nbytes, thing)
        bisect.insort(self._like(place), entry, key=_OFFSET)

    def of(self, place: Scratch) -> Iterator[T]:
        """The things that have bytes in common with a place, in no particular order."""
        end = place.offset + place.nbytes
        for bits, entries in self._of_size.items():
            first = bisect.bisect_left(entries, place.offset - (1 << bits), key=_OFFSET)
            for number in range(first, len(entries)):
                entry = entries[number]
                if entry.offset >= end:
                    break
                if entry.end > place.offset:
                    yield entry.thing

    def _like(self, place: Scratch) -> list[_Entry[T]]:
        return self._of_size.setdefault(place.nbytes.bit_length(), [])
