"""Memory for what divided plans keep between runs, and runs that prepare it before the first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from cudnn_actor.engines.cuda.device.place import Place
from cudnn_actor.engines.cuda.running.divided import Kept

__all__ = ["KeptValues", "PreparedRun"]


class KeptValues:
    """Memory that is there as long as the buffers are whose values it has. Used by one thread only.

    Plans that prepare the same buffers in the same way share it: the plans of a model for several batch
    sizes. Each of them writes it before its own first run, all on one stream. So a run reads what an earlier
    step on the stream has written. A step writes other values there only after a write to the buffers, and
    behind such a write each plan prepares its runs anew.

    Parameters
    ----------
    allocate
        Gives device memory of so many bytes, which is free when it is dropped. Raises `MemoryError`.
    """

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self._allocate = allocate
        self._of: WeakKeyDictionary[Place, dict[Hashable, tuple[Any, int]]] = WeakKeyDictionary()

    def of(self, kept: Sequence[Kept], buffers: Sequence[Place]) -> list[Any] | None:
        """The memory for each of these, on these buffers; None if there is no room for all of them."""
        memory, added = list[Any](), list[tuple[dict[Hashable, tuple[Any, int]], Hashable]]()
        for each in kept:
            known = self._of.setdefault(buffers[each.reads[0]], {})
            # A plan may count more bytes for the same value than another one.
            key = each.value, each.nbytes, tuple(buffers[place].pointer for place in each.reads)
            if key not in known:
                try:
                    known[key] = self._allocate(each.nbytes), each.nbytes
                except MemoryError:
                    for others, other in added:  # no run would use it
                        del others[other]
                    return None
                added.append((known, key))
            memory.append(known[key][0])
        return memory

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(nbytes for known in self._of.values() for _, nbytes in known.values())

    def clear(self) -> None:
        """Drop all of it."""
        self._of.clear()


class PreparedRun:
    """A run of a divided plan.

    Parameters
    ----------
    once
        Enqueues the steps that are run once.
    each
        Enqueues the others.
    """

    def __init__(self, once: Callable[[], None], each: Callable[[], None]) -> None:
        self._once: Callable[[], None] | None = once
        self._each = each

    def __call__(self) -> None:
        """Enqueue a run. Raises what the engine's `execute` raises."""
        if self._once is not None:
            self._once()
            self._once = None
        self._each()
