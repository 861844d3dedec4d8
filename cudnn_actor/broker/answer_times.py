"""Times of answered requests, which are kept as they are for a while, and then added to histograms together.

Counting an answer appends five numbers to a list. A list of 64 answers is packed, which takes 3 µs. If the
numbers stayed Python's objects, the next ones would be elsewhere in memory, out of the caches: with a
thousand answers in the list, a request took half a microsecond more. Thousands of packed answers are added by
NumPy, in 30 µs for each thousand.

Bucket k of a histogram's `BUCKETS` counts times of less than 2**k ns, but at least half of that.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "ANSWERS_ADDED",
    "BUCKETS",
    "MOST_WAITING",
    "NO_TIME_US",
    "AnswerTimes",
    "Stamps",
    "Times",
    "together",
]

BUCKETS = 72
"""The buckets of a histogram: more than the bits of any difference of two clocks, even if a worker writes
nonsense."""
NO_TIME_US = 1e15
Stamps = tuple[int, int, int, int, float]
"""The record of an answer: the number of its message type or model; when its request was admitted, when it
started (0: when it was admitted), and when the answer arrived, by `time.perf_counter_ns`; and how many
microseconds it ran (negative: until the answer arrived)."""
_FORMAT = "nnnnd"
"""Of `Stamps`. A number of format "n" has eight bytes, as one of "q" has, but is packed in half the time."""
_PACKED = np.dtype(
    [("number", "i8"), ("admitted", "i8"), ("started", "i8"), ("here", "i8"), ("run_us", "f8")]
)
MOST_WAITING = 64 * len(_FORMAT)
"""Numbers in a list that is full."""
_FULL_BYTES = 64 * _PACKED.itemsize
ANSWERS_ADDED = 64 * 64
"""Packed answers that are added to the histograms together. NumPy's calls cost as much as their work does.
The arrays of more answers would be new pages of memory each time."""
_MOST_BYTES = ANSWERS_ADDED * _PACKED.itemsize
_HISTOGRAMS = np.array([[0], [BUCKETS], [2 * BUCKETS]], np.intc)
"""The first bucket of each of the three histograms."""
_LAST_NS = (1 << 63) - 1


class Times(NamedTuple):
    """The times of one message type's or model's answers: in the queue, in the run, and together."""

    sums_ns: tuple[int, int, int]
    counts: npt.NDArray[np.int64]
    """Dims (3, BUCKETS): their histograms. Nobody changes them."""
    last_ns: int
    """When the last answer was here."""


class AnswerTimes:
    """The times of all answers, by the numbers of message types and models.

    One thread at a time writes; any thread may read, without a lock. Everything is kept in one tuple, which
    is replaced in one step (`actors.interrupts`) when answers are packed or added: a reader gets the old
    tuple or the new one. A writer appends all of an answer's stamps at once, and a reader copies the list in
    one call of a C function, during which no other thread runs.
    """

    __slots__ = ("_packed", "kept")

    def __init__(self) -> None:
        self._packed = bytearray(_MOST_BYTES)
        """Packed answers. It is written again when they have been added."""
        self.kept: tuple[Mapping[int, Times], int, list[Any]] = ({}, 0, [])
        """The times of the answers that are added; how many bytes of packed answers are not added yet; and
        the `Stamps` of the answers that are not packed, one after the other."""

    def replace(self, times: Mapping[int, Times]) -> None:
        """Replace everything that is kept by these times. Only the writer calls it."""
        self.kept = times, 0, []

    def pack(self) -> list[Any]:
        """Pack the full list. Returns a new one. By the writer."""
        times, nbytes, waiting = self.kept
        _pack(self._packed, nbytes, waiting)
        nbytes += _FULL_BYTES
        if nbytes == _MOST_BYTES:
            times, nbytes = _with_answers(times, self._packed), 0
        emptied: list[Any] = []
        self.kept = times, nbytes, emptied
        return emptied

    def read(self) -> Mapping[int, Times]:
        """The times of all answers. Any thread."""
        while True:
            times, nbytes, growing = self.kept
            waiting, packed = tuple(growing), self._packed[:nbytes]  # each in one call of a C function
            if self.kept[0] is times:  # else these were added meanwhile, and overwritten perhaps
                break
        packed += bytes(len(waiting) // len(_FORMAT) * _PACKED.itemsize)
        _pack(packed, nbytes, waiting)
        return _with_answers(times, packed) if packed else times


def together(one: Times, other: Times) -> Times:
    """The times of two."""
    queue, run, total = map(int.__add__, one.sums_ns, other.sums_ns)
    return Times((queue, run, total), one.counts + other.counts, max(one.last_ns, other.last_ns))


def _pack(memory: bytearray, start: int, stamps: Sequence[Any]) -> None:
    """Write stamps to memory from a byte on."""
    form = _FORMAT * (len(stamps) // len(_FORMAT))
    try:
        struct.pack_into(form, memory, start, *stamps)
    except struct.error:  # a worker has written nonsense, which no clock tells
        clipped = (each if isinstance(each, float) else min(max(each, 0), _LAST_NS) for each in stamps)
        struct.pack_into(form, memory, start, *clipped)


def _with_answers(times: Mapping[int, Times], packed: bytearray) -> dict[int, Times]:
    """New times: the given ones, and those of packed answers."""
    found = dict(times)
    stamps: npt.NDArray[Any] = np.frombuffer(packed, _PACKED)
    changes = _changes(stamps)
    if len(changes):
        stamps = stamps[np.argsort(stamps["number"], kind="stable")]
        changes = _changes(stamps)
    each = _times_of(stamps)
    buckets: npt.NDArray[np.intc] = np.frexp(each)[1]  # at most 64
    np.maximum(buckets, 0, out=buckets)
    buckets += _HISTOGRAMS
    starts = [0, *changes.tolist(), len(stamps)]
    for start, stop in itertools.pairwise(starts):
        queue, run, total = map(int, each[:, start:stop].sum(axis=1).tolist())
        counts = np.bincount(buckets[:, start:stop].ravel(), minlength=3 * BUCKETS).reshape(3, BUCKETS)
        last = stamps[stop - 1]
        more, number = Times((queue, run, total), counts, int(last["here"])), int(last["number"])
        found[number] = together(found[number], more) if number in found else more
    return found


def _changes(stamps: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Where the number is another than before."""
    numbers = stamps["number"]
    return np.flatnonzero(numbers[1:] != numbers[:-1]) + 1


def _times_of(stamps: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The times in the queue, in the run, and together, in ns."""
    admitted, here, run_us = stamps["admitted"], stamps["here"], stamps["run_us"]
    started = np.where(stamps["started"] == 0, admitted, stamps["started"])
    # A worker that writes nonsense may send a number that is no time.
    run = np.where(run_us < 0, here - started, np.where(run_us < NO_TIME_US, run_us, 0.0) * 1e3)
    return np.stack([started - admitted, run, here - admitted])
