"""Arenas: device memory behind file descriptors, so that it can outlive the process that made it.

The driver's virtual memory calls, because only they give memory that a
process without a CUDA context can keep by a plain descriptor.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
"""

from __future__ import annotations

import os
import threading
from typing import Any

from cudnn_actor.actors import forks
from cudnn_actor.engines.cuda.library.failures import check
from cudnn_actor.engines.cuda.library.libraries import libraries

__all__ = ["Arenas", "Mapping"]


class Arenas:
    """The arenas that one engine has mapped, by number.

    Parameters
    ----------
    ordinal
        The device's number.
    """

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._mapped: dict[int, Mapping] = {}

    def create(self, arena: int, nbytes: int) -> int:
        """Take and map `nbytes`, rounded up to the device's granularity; the descriptor is the caller's.

        Raises `MemoryError`, `EngineFailure`.
        """
        driver = libraries().driver
        properties = self._properties()
        memory = check(driver.cuMemCreate(self._rounded(nbytes), properties, 0))
        try:
            fd = int(check(driver.cuMemExportToShareableHandle(memory, properties.requestedHandleTypes, 0)))
            try:
                self._mapped[arena] = Mapping(memory, self._rounded(nbytes), self._ordinal)
            except BaseException:
                os.close(fd)  # it is nobody's, and would keep the memory
                raise
        finally:
            driver.cuMemRelease(memory)  # the descriptor and the mapping keep it
        return fd

    def map(self, arena: int, fd: int, nbytes: int) -> None:
        """Map an arena by its descriptor, which stays the caller's. Raises `EngineFailure`."""
        driver = libraries().driver
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        memory = check(driver.cuMemImportFromShareableHandle(fd, kind))
        try:
            self._mapped[arena] = Mapping(memory, self._rounded(nbytes), self._ordinal)
        finally:
            driver.cuMemRelease(memory)

    def unmap(self, arena: int) -> None:
        """Forget an arena. Raises `KeyError`. It stays mapped for as long as a view of it lives."""
        self._mapped.pop(arena).drop()

    def clear(self) -> None:
        """Forget every arena."""
        while self._mapped:
            self._mapped.popitem()[1].drop()

    def __getitem__(self, arena: int) -> Mapping:
        return self._mapped[arena]

    def _properties(self) -> Any:
        driver = libraries().driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._ordinal
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties.requestedHandleTypes = kind
        return properties

    def _rounded(self, nbytes: int) -> int:
        driver = libraries().driver
        which = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        step = int(check(driver.cuMemGetAllocationGranularity(self._properties(), which)))
        return -(-nbytes // step) * step


class Mapping:
    """Device memory at an address of this process, for as long as somebody uses it.

    Its users are the engine and every view that was given away. A view ends on whatever thread drops it,
    the collector's included, so the count has a lock of its own, and unmapping is the one CUDA call that is
    made there: it needs no context, and nothing can be running in the memory any more.
    """

    def __init__(self, memory: Any, nbytes: int, ordinal: int) -> None:
        driver = libraries().driver
        self.nbytes = nbytes
        self._lock = threading.RLock()  # re-entrant: the collector may run while it is held
        self._users = 1
        self._address = check(driver.cuMemAddressReserve(nbytes, 0, 0, 0))
        try:
            check(driver.cuMemMap(self._address, nbytes, 0, memory, 0))
            try:
                check(driver.cuMemSetAccess(self._address, nbytes, [_access(ordinal)], 1))
            except Exception:
                driver.cuMemUnmap(self._address, nbytes)
                raise
        except Exception:
            driver.cuMemAddressFree(self._address, nbytes)
            raise
        self.pointer = int(self._address)

    def keep_for(self, user: object) -> None:
        """Stay mapped until `user` has gone."""
        with self._lock:
            self._users += 1
        # The process takes its mappings with it; a forked child has none, and no CUDA to undo them with.
        forks.finalize(user, self.drop).atexit = False

    def drop(self) -> None:
        """One user less; the last one unmaps."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        driver = libraries().driver
        driver.cuMemUnmap(self._address, self.nbytes)
        driver.cuMemAddressFree(self._address, self.nbytes)


def _access(ordinal: int) -> Any:
    driver = libraries().driver
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access
