"""The shared segments that this process has announced to one service."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import numpy as np

from cudnn_actor.attached.client.shared_segments import SharedSegment, place_in_shared

__all__ = ["AnnouncedSegments"]

_FIRST = 1 << 30
"""The number of the first segment. The link's own memory has the numbers below."""
_MOST = 128
"""How many segments are announced to a service at a time. It maps 256 for each client."""


class AnnouncedSegments:
    """The shared segments that were announced to a service, by number. Used on the link's loop only.

    Parameters
    ----------
    announce
        This is called with the number, the size in bytes and the descriptor of a segment, before an array in
        it is used.
    retire
        This is called on any thread, with the number of a segment that was collected.
    """

    def __init__(self, announce: Callable[[int, int, int], None], retire: Callable[[int], None]) -> None:
        self._announce, self._retire = announce, retire
        self._numbers: weakref.WeakKeyDictionary[SharedSegment, int] = weakref.WeakKeyDictionary()
        self._unused = itertools.count(_FIRST)

    def locate(self, array: np.ndarray) -> tuple[int, int] | None:
        """The number of an array's segment, and the array's offset in it in bytes. A new segment is announced
        first.

        None for an array that lies in no segment, or in one that would be more than `_MOST`: such arrays are
        copied like any other.
        """
        found = place_in_shared(array)
        if found is None or found[1] % array.itemsize:
            return None
        segment, offset = found
        number = self._numbers.get(segment)
        if number is None:
            if len(self._numbers) >= _MOST:
                return None
            number = next(self._unused)
            self._announce(number, len(segment), segment.descriptor)
            self._numbers[segment] = number
            # This is a weak reference, since a segment lives longer than the links to members that have
            # ended.
            weakref.finalize(segment, _collect, weakref.ref(self), number).atexit = False
        return number, offset


def _collect(announced: weakref.ref[AnnouncedSegments], number: int) -> None:
    if (those := announced()) is not None:
        those._retire(number)
