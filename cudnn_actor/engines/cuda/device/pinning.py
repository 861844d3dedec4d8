"""Host memory of others that the device may read and write on its own: mappings that the caller page-locks.

The device copies by physical addresses, so pages must stay where they are while it does: the driver locks
them, and remembers by address which they are. What lies in one such range, wholly, is copied without a stop
in staging memory. To lock is a favour that the system may refuse: then nothing is faster, and nothing fails.
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html
"""

from __future__ import annotations

import numpy as np

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import StickyError
from cudnn_actor.engines.cuda.library.failures import translate
from cudnn_actor.engines.cuda.library.libraries import libraries

__all__ = ["PinnedMemory", "address_of"]

_READ_ONLY = 8
"""cudaHostRegisterReadOnly: for a mapping that this process may not write, which no other flag takes."""

log = Log("cudnn_actor")


class PinnedMemory:
    """The mappings that one engine has page-locked. One thread's own."""

    def __init__(self) -> None:
        self._locked: dict[int, np.ndarray] = {}
        """By its address, the bytes of each mapping: few, and large.

        Holding them is no mere convenience. While they are held, the mapping cannot be closed, so no other
        one can come to lie at its address, whose pages would not be those that the driver has locked.
        """

    def add(self, memory: memoryview) -> None:
        """Lock the pages of a mapping; where that is refused, log it. Blocks. Raises `StickyError`."""
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
        """Unlock a mapping that the device has finished with, if it is locked."""
        start = address_of(np.frombuffer(memory, np.uint8))
        if self._locked.pop(start, None) is not None:
            libraries().runtime.hostUnregister(start)

    def holds(self, array: np.ndarray) -> bool:
        """Whether a C-contiguous array lies wholly in one mapping of these."""
        if not self._locked:
            return False
        first = address_of(array)
        last = first + array.nbytes
        return any(start <= first and last <= start + whole.nbytes for start, whole in self._locked.items())

    def clear(self) -> None:
        """Unlock all: the device has finished with them."""
        while self._locked:
            libraries().runtime.hostUnregister(self._locked.popitem()[0])

    def forget(self) -> None:
        """Let go of all, of a context that has died: nothing can be unlocked in it any more."""
        self._locked.clear()


def address_of(array: np.ndarray) -> int:
    """Where a C-contiguous array's bytes begin."""
    return int(array.__array_interface__["data"][0])
