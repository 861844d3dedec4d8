"""Checksums of uploaded values. A checksum is valid until something else writes to its buffer.

The checksum is computed over the values, C-contiguous in the buffer's dtype, so it does not depend on where
they lie. It is computed when the upload is sent, and kept when the upload has finished, unless another writer
of the same slot was dispatched in between. A count of each slot's writers shows that.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cudnn_actor.memory import Slot

__all__ = ["Checksums", "Sum"]


class Sum(NamedTuple):
    """A CRC-32 of values, and the number of writers that their slot had had when it was computed."""

    value: int
    writers: int


class Checksums:
    """The valid checksums, by slot. Used by one thread at a time."""

    def __init__(self) -> None:
        self._writers: dict[int, int] = {}
        self._kept: dict[int, tuple[Slot, int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def note_writes(self, slots: Iterable[int]) -> None:
        """Note that something is about to write to these slots. Their checksums become invalid."""
        for slot in slots:
            self._writers[slot] = self._writers.get(slot, 0) + 1
            self._kept.pop(slot, None)

    def of(self, slot: Slot, values: np.ndarray) -> Sum:
        """The checksum of values that are being written to a slot. Call `note_writes` first."""
        return Sum(checksum(values), self._writers.get(slot.index, 0))

    def keep(self, slot: Slot, sum_: Sum) -> None:
        """Keep the checksum of values that have been written, unless there has been another writer."""
        if self._writers.get(slot.index, 0) == sum_.writers:
            self._kept[slot.index] = slot, slot.generation, sum_.value

    def slots(self) -> list[Slot]:
        """The slots with valid checksums. Removes the checksums of buffers that have ended."""
        for index, (slot, generation, _) in tuple(self._kept.items()):
            if not slot.live or slot.generation != generation:
                del self._kept[index]
        return [slot for slot, _, _ in self._kept.values()]

    def matches(self, slot: Slot, values: np.ndarray) -> bool:
        """Whether a slot's valid checksum is the checksum of these values."""
        return self._kept[slot.index][2] == checksum(values)

    def forget(self, slot: Slot) -> None:
        """Remove a slot's checksum."""
        self._kept.pop(slot.index, None)


def checksum(values: np.ndarray) -> int:
    """The CRC-32 of an array's elements in C order."""
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
