"""Arenas: device memory behind file descriptors, so that it can outlive the process that made it.

Uses the driver's virtual memory management, because only that provides memory
that a process without a CUDA context can keep alive by a plain descriptor.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
"""

from __future__ import annotations

import os
import threading
from typing import Any

from cudnn_actor.actors import forks
from cudnn_actor.engines.cuda.device.virtual_memory import access, properties, require_access, round_up
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
        """Allocate and map `nbytes`, rounded up to the device's granularity; the caller owns the descriptor.

        Raises `MemoryError`, `EngineFailure`.
        """
        driver = libraries().driver
        kind, size = properties(self._ordinal, exported=True), round_up(self._ordinal, nbytes)
        memory = check(driver.cuMemCreate(size, kind, 0))
        try:
            fd = int(check(driver.cuMemExportToShareableHandle(memory, kind.requestedHandleTypes, 0)))
            try:
                self._mapped[arena] = Mapping(memory, size, self._ordinal)
            except BaseException:
                os.close(fd)  # the caller never gets it, and it would keep the memory
                raise
        finally:
            driver.cuMemRelease(memory)  # the descriptor and the mapping keep it
        return fd

    def map(self, arena: int, fd: int, nbytes: int) -> None:
        """Map an arena by its descriptor, which the caller keeps. Raises `EngineFailure`."""
        driver = libraries().driver
        memory = _import(fd)
        try:
            self._mapped[arena] = Mapping(memory, round_up(self._ordinal, nbytes), self._ordinal)
        finally:
            driver.cuMemRelease(memory)

    def map_for_reading(self, arena: int, fd: int, nbytes: int) -> None:
        """Map another service's arena for reading. Raises `EngineFailure`.

        The memory may be on another device if this one can read that device's memory. The descriptor may be
        of anything: the driver finds out whether it is memory, and of at least `nbytes`.
        """
        driver = libraries().driver
        memory = _import(fd)
        try:
            require_access(self._ordinal, memory)
            size = round_up(self._ordinal, nbytes)
            self._mapped[arena] = Mapping(memory, size, self._ordinal, writes=False)
        finally:
            driver.cuMemRelease(memory)

    def unmap(self, arena: int) -> None:
        """Drop an arena. Raises `KeyError`. It stays mapped while a view of it exists."""
        self._mapped.pop(arena).drop()

    def clear(self) -> None:
        """Drop every arena."""
        while self._mapped:
            self._mapped.popitem()[1].drop()

    def __getitem__(self, arena: int) -> Mapping:
        return self._mapped[arena]


def _import(fd: int) -> Any:
    driver = libraries().driver
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return check(driver.cuMemImportFromShareableHandle(fd, kind))


class Mapping:
    """Device memory mapped into this process, with a count of its users.

    The users are the engine and every view that was handed out. A view may be destroyed on any thread, also
    during garbage collection, so the count has its own lock. Unmapping is the only CUDA call made on such a
    thread: it needs no context, and no work can be using the memory any more.
    """

    def __init__(self, memory: Any, nbytes: int, ordinal: int, *, writes: bool = True) -> None:
        driver = libraries().driver
        self.nbytes = nbytes
        self._lock = threading.RLock()  # re-entrant: garbage collection may run while it is held
        self._users = 1
        self._address = check(driver.cuMemAddressReserve(nbytes, 0, 0, 0))
        try:
            check(driver.cuMemMap(self._address, nbytes, 0, memory, 0))
            try:
                check(driver.cuMemSetAccess(self._address, nbytes, [access(ordinal, writes=writes)], 1))
            except Exception:
                driver.cuMemUnmap(self._address, nbytes)
                raise
        except Exception:
            driver.cuMemAddressFree(self._address, nbytes)
            raise
        self.pointer = int(self._address)

    def keep_for(self, user: object) -> None:
        """Stay mapped until `user` is collected."""
        with self._lock:
            self._users += 1
        # At exit, the system removes the mappings. A forked child has none, and cannot use CUDA.
        forks.finalize(user, self.drop).atexit = False

    def drop(self) -> None:
        """Remove one user; unmap after the last one."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        driver = libraries().driver
        driver.cuMemUnmap(self._address, self.nbytes)
        driver.cuMemAddressFree(self._address, self.nbytes)
