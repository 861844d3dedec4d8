"""Checksums of what was uploaded, for as long as nothing else is written to its buffer.

A sum is that of the values, C-contiguous in the buffer's dtype, so it is the same wherever they lie. It is
taken when they are on their way, and kept when they have arrived: unless another writer has been handed over
in between, which the count of a slot's writers tells.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cudnn_actor.memory import Slot

__all__ = ["Checksums", "Sum"]


class Sum(NamedTuple):
    """A CRC-32 of values, and how many writers their buffer's slot had had by then."""

    value: int
    writers: int


class Checksums:
    """The sums that hold, by slot. One thread's at a time."""

    def __init__(self) -> None:
        self._writers: dict[int, int] = {}
        self._kept: dict[int, tuple[Slot, int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def note_writes(self, slots: Iterable[int]) -> None:
        """Something is about to write to these: what was known of them holds no more."""
        for slot in slots:
            self._writers[slot] = self._writers.get(slot, 0) + 1
            self._kept.pop(slot, None)

    def of(self, slot: Slot, values: np.ndarray) -> Sum:
        """The sum of values that are written to a slot, whose writer has been noted."""
        return Sum(checksum(values), self._writers.get(slot.index, 0))

    def keep(self, slot: Slot, sum_: Sum) -> None:
        """The values have arrived: their sum holds, unless there has been another writer."""
        if self._writers.get(slot.index, 0) == sum_.writers:
            self._kept[slot.index] = slot, slot.generation, sum_.value

    def held(self) -> list[tuple[Slot, int]]:
        """The slots whose sums hold, with them; those that have ended are forgotten."""
        for index, (slot, generation, _) in tuple(self._kept.items()):
            if not slot.live or slot.generation != generation:
                del self._kept[index]
        return [(slot, value) for slot, _, value in self._kept.values()]

    def forget(self, slot: Slot) -> None:
        """Know nothing of a slot any more."""
        self._kept.pop(slot.index, None)


def checksum(values: np.ndarray) -> int:
    """The CRC-32 of an array's elements in C order."""
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
