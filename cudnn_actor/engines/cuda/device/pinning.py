"""Page-locks the caller's mappings, so that the device can read and write them directly.

The device copies by physical address, so pages must not move meanwhile: the driver locks them, and records
the locked ranges by virtual address. An array that lies wholly in one such range is copied without staging
memory. The system may refuse to lock; then copies are slower, but nothing fails.
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html
"""

from __future__ import annotations

import numpy as np

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import StickyError
from cudnn_actor.engines.cuda.library.failures import translate
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.memory.array_addresses import address_of

__all__ = ["PinnedMemory"]

_READ_ONLY = 8
"""cudaHostRegisterReadOnly: required for a mapping that this process may not write."""

log = Log("cudnn_actor")


class PinnedMemory:
    """The mappings that one engine has page-locked. Used by one thread only."""

    def __init__(self) -> None:
        self._locked: dict[int, np.ndarray] = {}
        """The bytes of each mapping, by address. There are few mappings, and they are large.

        The arrays keep the mappings from being closed. Otherwise another mapping could get the address of a
        closed one, and its pages would not be those that the driver has locked.
        """

    def add(self, memory: memoryview) -> None:
        """Lock the pages of a mapping. If that is refused, log a warning. Blocks. Raises `StickyError`."""
        whole = np.frombuffer(memory, np.uint8)
        start = address_of(whole)
        if start in self._locked:
            return
        try:
            libraries().runtime.hostRegister(start, whole.nbytes, _READ_ONLY if memory.readonly else 0)
        except Exception as error:
            known = translate(error)
            if isinstance(known, StickyError):
                raise known from error
            log.warning("memory.not_pinned", nbytes=whole.nbytes, error=str(known))
        else:
            self._locked[start] = whole

    def remove(self, memory: memoryview) -> None:
        """Unlock a mapping if it is locked. The device must have finished with it."""
        start = address_of(np.frombuffer(memory, np.uint8))
        if self._locked.pop(start, None) is not None:
            libraries().runtime.hostUnregister(start)

    def holds(self, array: np.ndarray) -> bool:
        """Whether a C-contiguous array lies wholly in one of these mappings."""
        if not self._locked:
            return False
        first = address_of(array)
        last = first + array.nbytes
        return any(start <= first and last <= start + whole.nbytes for start, whole in self._locked.items())

    def clear(self) -> None:
        """Unlock all mappings. The device must have finished with them."""
        while self._locked:
            libraries().runtime.hostUnregister(self._locked.popitem()[0])

    def forget(self) -> None:
        """Drop all mappings without unlocking them, because the context has died."""
        self._locked.clear()
