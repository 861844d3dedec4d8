"""Values that the parent copies to staging memory while the worker already has the request that reads them.

The parent sends the request first, and then copies a large array, part by part. For each part, a word in the
same segment says whether the part has arrived. The worker waits for a part's word, has its device copy that
part, and goes on to the next. So the worker is woken, the host copies, and the device copies at the same
time. A run that reads the array where it lies (`RunAnywhere`) begins when all parts are there.

The worker never reads bytes of an earlier request. The parent clears the words before the request is sent,
and the worker reads and writes them only between receiving the request and answering it. A word is set after
the part has been copied. On both sides there is a barrier (`status`) between the word and the bytes.

A worker that is awake may help: the parent copies parts from the front, and meanwhile the worker reads parts
from the back, out of the caller's array in the parent's memory (`child.parent_memory`). The parent gives the
array's address in a word before it sends the request, and each side says in another how many parts it has
begun. These two words need no barrier. If one side sees the other's too late, both copy the same bytes to the
same place. The parent itself copies what the worker has begun and does not finish soon. So once the parent's
copy has been made, all parts are there, whether the worker has helped or not.

The words lie with the values, not on the status page, so they live as long as the values. A request that runs
again is sent as it is: the next worker finds the words set, or waits as the first one did.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence

import numpy as np

from cudnn_actor.isolation.process.status import barrier
from cudnn_actor.isolation.staging import NOTE_BYTES
from cudnn_actor.memory.free_list import round_up

__all__ = ["LATE_BYTES", "Arrival", "Part", "parts_of", "shared_parts_of"]

Part = tuple[int, int, int]
"""The number of a part, and the bytes at which it begins and ends."""

LATE_BYTES = 256 << 10
"""A larger array is copied behind its request. To copy this much takes as long as to wake up a worker."""
_LEAST_BYTES = 256 << 10
"""The least bytes of a part of an array of more than `_SHORT_BYTES`. A device copies them in a fifth of the
time that the host takes."""
_SHORT_BYTES, _LAST_BYTES = 1 << 20, 64 << 10
"""An array of up to so many bytes has three parts, the last of about so many. A part takes the host and the
worker some microseconds besides its copy, and once the last is there, the caller waits for the device."""
_WORD_BYTES = 8
_MOST_PARTS = 16
_PAGE_BYTES = 4096
_ADDRESS, _FRONT, _BACK, _WORDS = range(_MOST_PARTS, _MOST_PARTS + 4)
"""Behind the words of the parts: the address of the caller's array if the worker may help, how many parts the
parent has begun, and how many the worker has; and how many words there are."""
_FIRST_SHARE, _LAST_SHARE, _BETWEEN = 5 / 16, 3 / 16, 8
"""Of an array that both copy: the shares of the first part, which the parent copies while the worker wakes
up, and of the last, and the number of parts between them. The two sides meet there, so these are short."""
_LEAST_SHARED_BYTES = 64 << 10
_NONE_THERE = memoryview(bytes(_WORDS * _WORD_BYTES)).cast("Q")
_ALL_THERE = memoryview((1).to_bytes(_WORD_BYTES, sys.byteorder) * _MOST_PARTS).cast("Q")
assert _WORDS * _WORD_BYTES <= NOTE_BYTES
assert _BETWEEN + 2 <= _MOST_PARTS


@functools.lru_cache(maxsize=64)
def parts_of(nbytes: int) -> tuple[Part, ...]:
    """The parts of an array of this size, in order: at most as many as there are words."""
    if LATE_BYTES < nbytes <= _SHORT_BYTES:
        last = (nbytes - _LAST_BYTES) // _PAGE_BYTES * _PAGE_BYTES
        second = round_up(last * 3 // 5, _PAGE_BYTES)
        return (0, 0, second), (1, second, last), (2, last, nbytes)
    step = max(_LEAST_BYTES, round_up(-(-nbytes // _MOST_PARTS), _PAGE_BYTES))
    starts = range(0, nbytes, step)
    return tuple([(number, begin, min(begin + step, nbytes)) for number, begin in enumerate(starts)])


@functools.lru_cache(maxsize=64)
def shared_parts_of(nbytes: int) -> tuple[Part, ...]:
    """The parts of an array of this size that both sides copy, in order."""
    first = round_up(int(nbytes * _FIRST_SHARE), _PAGE_BYTES)
    last = int(nbytes * (1 - _LAST_SHARE)) // _PAGE_BYTES * _PAGE_BYTES
    step = max(_LEAST_SHARED_BYTES, round_up(-(-(last - first) // _BETWEEN), _PAGE_BYTES))
    ends = [*range(first, last, step), last, nbytes]
    return tuple([(number, begin, end) for number, (begin, end) in enumerate(itertools.pairwise([0, *ends]))])


class Arrival:
    """The words of one array.

    Parameters
    ----------
    segment
        The whole segment.
    offset
        Where its words begin, a multiple of 8.
    """

    def __init__(self, segment: memoryview, offset: int) -> None:
        self._words = segment[offset : offset + _WORDS * _WORD_BYTES].cast("Q")

    def is_there(self, number: int) -> bool:
        """Whether a part is there. If so, its bytes can be read from now on."""
        if not self._words[number]:
            return False
        barrier()
        return True

    def reached(self, number: int, count: int) -> int:
        """The first of `count` parts, from this one on, that is not there; `count` if all are. The bytes of
        those before it can be read from now on."""
        there = self._words[number:count].tolist()
        if 0 in there:
            count = number + there.index(0)
        barrier()
        return count

    # The parent's side.

    def clear(self, address: int = 0) -> None:
        """Note that nothing is there. No worker has a request that reads the array. The worker may help if it
        is given the address of the caller's array in this process."""
        words = self._words
        words[:] = _NONE_THERE
        words[_ADDRESS] = address

    def note(self, number: int) -> None:
        """Note that a part is there. Any thread."""
        barrier()
        self._words[number] = 1

    def note_all(self) -> None:
        """Note that all parts are there. No worker has a request that reads the array."""
        self._words[:_MOST_PARTS] = _ALL_THERE

    def copy_from_front(self, dst: np.ndarray, src: np.ndarray, parts: Sequence[Part]) -> int:
        """Copy parts of a shared array of bytes, in order, until the worker has begun the next one. Returns
        how many."""
        words, count = self._words, len(parts)
        for number, begin, end in parts:
            if number + words[_BACK] >= count:
                return number
            words[_FRONT] = number + 1
            dst[begin:end] = src[begin:end]
            barrier()
            words[number] = 1
        return count

    # The worker's side.

    @property
    def address(self) -> int:
        """The address of the caller's array in the parent's memory if this worker may help; else 0."""
        return self._words[_ADDRESS]

    def read_from_back(self, read: Callable[[int, int], bool], parts: Sequence[Part]) -> bool:
        """Call `read` with the begin and the end of each part, from the back, until the parent has begun the
        next one. Returns False once `read` does: then the worker does not help."""
        words, count = self._words, len(parts)
        for number, begin, end in reversed(parts):
            if number < words[_FRONT] or words[number]:
                break
            words[_BACK] = count - number
            if not read(begin, end):
                words[_BACK] = 0
                return False
            barrier()
            words[number] = 1
        return True
