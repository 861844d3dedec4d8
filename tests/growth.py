"""How the time of a piece of work grows with its size, told on a machine that others use, too."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable

__all__ = ["takes_in_proportion"]

_TIMES = 4
_MOST = 2.5**2
"""How many times as long work of four times the size may take. In proportion, it takes 4 times as long; where
it grows with the square of the size, 16 times."""
_TRIES = 20


def takes_in_proportion(prepare: Callable[[int], Callable[[], object]], size: int) -> None:
    """Fail if work of four times the size takes more than 2.5 times 2.5 times as long.

    What others do on the machine only makes work longer, also in the time of the thread alone. So the least
    of some tries counts, small and large in turn, and one try is enough if it is good.

    Parameters
    ----------
    prepare
        From a size to the work, which is done once.
    size
        The smaller size.
    """
    small = large = math.inf
    for _ in range(_TRIES):
        small = min(small, _seconds(prepare(size)))
        large = min(large, _seconds(prepare(_TIMES * size)))
        if large <= _MOST * small:
            return
    raise AssertionError(f"{size}: {small:.3f} s, {_TIMES * size}: {large:.3f} s, {large / small:.1f} times")


def _seconds(work: Callable[[], object]) -> float:
    """The thread's own time. The collector looks at what else there is, which says nothing of the work."""
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
