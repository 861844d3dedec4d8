"""Values that the parent copies to staging memory while the worker already has the request that reads them.

The parent sends the request first, and then copies a large array, part by part. For each part, a word in the
same segment says whether the part has arrived. The worker waits for a part's word, has its device copy that
part, and goes on to the next. So the worker is woken, the host copies, and the device copies at the same
time. A run that reads the array where it lies (`RunAnywhere`) begins when all parts are there.

The worker never reads bytes of an earlier request, because only the parent writes the words. It clears them
before the request is sent, and the worker reads them only after it has received the request. The parent sets
a word after it has copied the part. On both sides there is a barrier (`status`) between the word and the
bytes.

The words lie with the values, not on the status page, so they live as long as the values. A request that runs
again is sent as it is: the next worker finds the words set, or waits as the first one did.

Behind them lie three words by which the worker answers an upload that has the device to itself, before it
sends the answer. The parent's thread that has copied the array may look there (`straight_upload`), which
takes 20 us less than the way through the socket. The answer is sent in any case.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable

from cudnn_actor.isolation.process.status import barrier
from cudnn_actor.isolation.staging import NOTE_BYTES
from cudnn_actor.memory.free_list import round_up

__all__ = ["LATE_BYTES", "Arrival", "Part", "parts_of"]

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
_NONE_THERE = memoryview(bytes(_MOST_PARTS * _WORD_BYTES)).cast("Q")
_ALL_THERE = memoryview((1).to_bytes(_WORD_BYTES, sys.byteorder) * _MOST_PARTS).cast("Q")
_NUMBER, _STARTED, _TOOK = range(3)
_ANSWER_WORDS = 3
assert (_MOST_PARTS + _ANSWER_WORDS) * _WORD_BYTES <= NOTE_BYTES


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
        end = offset + _MOST_PARTS * _WORD_BYTES
        self._words = segment[offset:end].cast("Q")
        self._answer = segment[end : end + _ANSWER_WORDS * _WORD_BYTES].cast("Q")

    def is_there(self, number: int) -> bool:
        """Whether a part is there. If so, its bytes can be read from now on."""
        if not self._words[number]:
            return False
        barrier()
        return True

    def first_missing(self, number: int, count: int) -> int:
        """The first of `count` parts, from this one on, that is not there; `count` if all are. The bytes of
        those before it can be read from now on."""
        there = self._words[number:count].tolist()
        if 0 in there:
            count = number + there.index(0)
        barrier()
        return count

    def answer(self, number: int, started_ns: int, took_ns: int) -> None:
        """Answer the request with this number, which began at `started_ns` and took so long. Worker only."""
        words = self._answer
        words[_STARTED], words[_TOOK] = started_ns, took_ns
        barrier()
        words[_NUMBER] = number

    # The parent's side.

    def forget_answer(self) -> None:
        """Forget what lies where the answer will be. No worker has a request that reads the array."""
        self._answer[_NUMBER] = 0

    @property
    def answer_words(self) -> memoryview:
        """Its first element is the number of the request that was answered last; it does not come again."""
        return self._answer

    def times(self) -> tuple[int, int]:
        """When the request that was answered last began, and how long it took, in ns, as the worker says. It
        may write any numbers below 2**64."""
        barrier()
        _, started_ns, took_ns = self._answer
        return started_ns, took_ns

    def clear(self) -> None:
        """Note that nothing is there. No worker has a request that reads the array."""
        self._words[:] = _NONE_THERE

    def note(self, number: int) -> None:
        """Note that a part is there. Any thread."""
        barrier()
        self._words[number] = 1

    def quick_note(self) -> Callable[[int], None]:
        """A function that does what `note` does, in fewer steps, for one thread at a time."""
        fence, words = threading.Lock(), self._words
        fence.acquire()
        release, acquire = fence.release, fence.acquire

        def note(number: int) -> None:
            try:  # `barrier`, with a lock that nobody else takes
                release()
            except RuntimeError:  # a signal handler has raised before the next line
                barrier()
            acquire()
            words[number] = 1

        return note

    def note_all(self) -> None:
        """Note that all parts are there. No worker has a request that reads the array."""
        self._words[:] = _ALL_THERE
