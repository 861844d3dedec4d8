"""Host arrays that another process is still filling when the work that reads them is enqueued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.engines.base import Binding
from cudnn_actor.execution.executor import Executor

__all__ = ["Arriving", "Awaits", "copy_of"]


class Arriving(NamedTuple):
    """A C-contiguous array, filled part by part.

    Attributes
    ----------
    array
        The array. A part of it may be read once it is there.
    parts
        For each part: its number, and the bytes at which it begins and ends.
    is_there
        Whether the part with this number is there.
    first_missing
        Takes a number and a count of parts. Returns the first part that is not there, from that number on;
        the count if all are there.
    answer
        Answers the request with the array where the array arrives: its number, when it began, and how long it
        took, in ns.
    """

    array: np.ndarray
    parts: Sequence[tuple[int, int, int]]
    is_there: Callable[[int], bool]
    first_missing: Callable[[int, int], int]
    answer: Callable[[int, int, int], None]


Awaits = Callable[[Arriving, int], None]
"""Waits until the part with this number is there."""


def copy_of(
    executor: Executor[Any], tag: str, arriving: Arriving, place: Binding, awaits: Awaits
) -> Callable[[], None] | None:
    """A function that enqueues copies of an array's parts into a buffer, each part once it has arrived.

    Parts that have arrived are copied together. The function may be called again for later parts of the same
    array. None if the values have to be rearranged for the copy. `tag` is for errors.
    """
    copy = executor.call(tag, executor.engine.part_copy, arriving.array, place)
    if copy is None:
        return None
    parts, first_missing = arriving.parts, arriving.first_missing

    def enqueue() -> None:
        number, count = 0, len(parts)
        while number < count:
            awaits(arriving, number)
            last = first_missing(number, count) if number + 1 < count else count
            copy(parts[number][1], parts[last - 1][2])
            number = last

    return enqueue
