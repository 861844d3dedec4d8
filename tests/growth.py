"""How the time of a piece of work grows with its size, told on a machine that others use, too."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable

__all__ = ["takes_in_proportion", "thread_seconds"]

_TIMES = 16
_MOST = 2.5**4
"""How many times as long work of 16 times the size may take: 2.5 times for each time that the size doubles.

In proportion, it takes 16 times as long, and 39 are allowed. So caches that others use and the allocator may
make each part of the larger work take twice as long. Where it grows with the square of the size, it takes 256
times as long: the part that does is found if it takes 1.7 times as long as the rest, at the larger size.
"""
_TRIES = 20


def takes_in_proportion(prepare: Callable[[int], Callable[[], object]], size: int) -> None:
    """Fail if work of 16 times the size takes more than 2.5 times as long for each of the four doublings.

    What others do on the machine only makes work longer, also in the time of the thread alone. So the least
    of some tries counts, small and large in turn, and one try is enough if it is good.

    Parameters
    ----------
    prepare
        From a size to the work, which is done once.
    size
        The smaller size. The larger one must be large enough that what grows with its square counts: 400
        operations or more, for what takes some microseconds for each.
    """
    small = large = math.inf
    for _ in range(_TRIES):
        small = min(small, thread_seconds(prepare(size)))
        large = min(large, thread_seconds(prepare(_TIMES * size)))
        if large <= _MOST * small:
            return
    raise AssertionError(f"{size}: {small:.3f} s, {_TIMES * size}: {large:.3f} s, {large / small:.1f} times")


def thread_seconds(work: Callable[[], object]) -> float:
    """How long the thread itself computes.

    The collector is off: how long it takes depends on all that there is besides the work.
    """
    gc.collect()
    gc.disable()
    try:
        begin = time.thread_time()
        kept = work()
        taken = time.thread_time() - begin
        del kept
        return taken
    finally:
        gc.enable()
