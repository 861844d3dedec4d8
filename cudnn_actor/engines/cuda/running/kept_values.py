"""Memory for the values that divided plans keep between runs, and runs that prepare it before the first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from cudnn_actor.engines.cuda.device.place import Place
from cudnn_actor.engines.cuda.running.divided import Kept
from cudnn_actor.engines.cuda.running.plan import CudaPlan

__all__ = ["KeptValues", "PreparedRun"]


class _Memory(NamedTuple):
    """Memory for a value, and the plans that have asked for it."""

    memory: Any
    nbytes: int
    plans: WeakSet[CudaPlan]


class KeptValues:
    """Memory for kept values. It lives as long as the buffers they are computed from, and a plan that reads
    it.

    Used by one thread only. Plans that compute the same values from the same buffers share the memory, such
    as the plans of a model for several batch sizes. Each of them writes it before its own first run, all on
    one stream, so each run reads values that an earlier step on the stream has written. The values there
    change only after a write to the buffers, and then each plan prepares its runs anew. The memory of a plan
    that has been replaced by another is dropped at the next call of `of`.

    Parameters
    ----------
    allocate
        Returns device memory of a number of bytes, which is freed when it is dropped. Raises `MemoryError`.
    """

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self._allocate = allocate
        self._of: WeakKeyDictionary[Place, dict[Hashable, _Memory]] = WeakKeyDictionary()

    def of(self, plan: CudaPlan, kept: Sequence[Kept], buffers: Sequence[Place]) -> list[Any] | None:
        """The memory for each of these values of these buffers; None if there is no room for all of them.

        It is kept for as long as `plan`, which reads it, exists.
        """
        self._drop_unused()
        found = list[_Memory]()
        for each in kept:
            known = self._of.setdefault(buffers[each.reads[0]], {})
            # A plan may count more bytes for the same value than another one.
            key = each.value, each.nbytes, tuple(buffers[place].pointer for place in each.reads)
            if key not in known:
                try:
                    known[key] = _Memory(self._allocate(each.nbytes), each.nbytes, WeakSet())
                except MemoryError:
                    self._drop_unused()  # memory that was allocated here for this plan alone
                    return None
            found.append(known[key])
        for memory in found:
            memory.plans.add(plan)
        return [memory.memory for memory in found]

    def _drop_unused(self) -> None:
        for known in self._of.values():
            for key in [key for key, memory in known.items() if not memory.plans]:
                del known[key]

    @property
    def nbytes(self) -> int:
        """Bytes of all this memory."""
        return sum(memory.nbytes for known in self._of.values() for memory in known.values())

    def clear(self) -> None:
        """Drop all memory."""
        self._of.clear()


class PreparedRun:
    """A run of a divided plan.

    Parameters
    ----------
    once
        Enqueues the steps that run once.
    each
        Enqueues the steps of each run.
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
