"""The scratch memory that all plans of an engine share; they run one after the other.

It lies in a reserved range of addresses, and grows at its end. So it never moves: work that runs meanwhile is
not disturbed, and captured graphs stay valid.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
"""

from __future__ import annotations

from typing import Any

from cudnn_actor.engines.cuda.device.virtual_memory import access, properties, round_up
from cudnn_actor.engines.cuda.library.failures import check
from cudnn_actor.engines.cuda.library.libraries import libraries

__all__ = ["Workspace"]

_LEAST_BYTES = 1 << 20


class Workspace:
    """Device memory as large as the largest plan needs.

    Parameters
    ----------
    ordinal
        The device's number. Addresses for all of its memory are reserved, which takes none of it.
    """

    def __init__(self, ordinal: int) -> None:
        driver, runtime = libraries().driver, libraries().runtime
        self._ordinal = ordinal
        self._reserved = round_up(ordinal, runtime.memGetInfo()[1])
        self._address = check(driver.cuMemAddressReserve(self._reserved, 0, 0, 0))
        self.pointer = int(self._address)
        """The address of its first byte."""
        self.nbytes = 0
        self._parts: list[tuple[int, int]] = []
        """Address and bytes of each mapping."""
        self._mark = runtime.malloc(256)
        """The memory that `touch` writes to."""
        self.grow(_LEAST_BYTES)

    def grow(self, nbytes: int) -> None:
        """Grow to at least `nbytes`, also while work uses the workspace. If this raises `MemoryError`,
        nothing has changed."""
        driver = libraries().driver
        more = round_up(self._ordinal, nbytes) - self.nbytes
        if more <= 0:
            return
        if nbytes > self._reserved:
            raise MemoryError(f"no room for a workspace of {nbytes:,} bytes")
        memory = check(driver.cuMemCreate(more, properties(self._ordinal), 0))
        place = self.pointer + self.nbytes
        try:
            check(driver.cuMemMap(place, more, 0, memory, 0))
            try:
                check(driver.cuMemSetAccess(place, more, [access(self._ordinal)], 1))
            except Exception:
                driver.cuMemUnmap(place, more)
                raise
        finally:
            driver.cuMemRelease(memory)  # the mapping keeps it
        self._parts.append((place, more))
        self.nbytes += more

    def poison(self, stream: Any) -> None:
        """Enqueue filling the workspace with NaN."""
        libraries().runtime.memsetAsync(self.pointer, 0xFF, self.nbytes, stream.ptr)

    def touch(self, stream: Any) -> None:
        """Write to the device and wait for it. Raises if the context is dead. Blocks."""
        libraries().runtime.memsetAsync(self._mark, 0, 256, stream.ptr)
        stream.synchronize()

    def close(self) -> None:
        """Free the memory. No work may be using it."""
        driver = libraries().driver
        for place, nbytes in self._parts:
            driver.cuMemUnmap(place, nbytes)
        self._parts.clear()
        driver.cuMemAddressFree(self._address, self._reserved)
        self.nbytes = 0
        libraries().runtime.free(self._mark)
