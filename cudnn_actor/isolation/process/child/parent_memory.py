"""The parent's memory, from which a worker reads callers' arrays that the parent is copying for it.

The kernel may refuse: process_vm_readv(2) needs the right to trace the parent, which Yama (a `ptrace_scope`
above 0) and filters of system calls take away. A worker that was refused once does not ask again, and the
parent copies all by itself. The worker reads only what the parent has named for the request that it runs, and
the parent keeps an array until it has the answer.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cudnn_actor.isolation.process.arrivals import Arrival, Part
from cudnn_actor.memory.array_addresses import address_of

__all__ = ["ParentMemory"]


class _Range(ctypes.Structure):
    """An `iovec`."""

    _fields_ = (("begin", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class ParentMemory:
    """The memory of one process. Used by one thread.

    Parameters
    ----------
    pidfd
        Refers to the process. The caller keeps it.
    """

    def __init__(self, pidfd: int) -> None:
        self._pid = _process_of(pidfd)
        self._here, self._there = _Range(), _Range()
        self._ranges = ctypes.byref(self._here), 1, ctypes.byref(self._there), 1, 0
        self._read = getattr(ctypes.CDLL(None), "process_vm_readv", None)
        if self._read is not None:
            self._read.argtypes = (
                ctypes.c_int,
                *(ctypes.c_void_p, ctypes.c_ulong) * 2,
                ctypes.c_ulong,
            )
            self._read.restype = ctypes.c_ssize_t
        self.is_readable = self._pid > 0 and self._read is not None
        """Whether the kernel may let this process read it, as far as is known."""

    def fetch(self, target: np.ndarray, arrival: Arrival, parts: Sequence[Part]) -> None:
        """Read parts of a caller's array from the back, until the parent has begun the next one.

        `target` has the bytes of the array, and is in staging memory. Blocks meanwhile.
        """
        if self.is_readable:
            here, there = address_of(target), arrival.address
            self.is_readable = arrival.read_from_back(
                lambda begin, end: self._copy(here + begin, there + begin, end - begin), parts
            )

    def _copy(self, here: int, there: int, nbytes: int) -> bool:
        self._here.begin, self._there.begin = here, there
        self._here.nbytes = self._there.nbytes = nbytes
        assert self._read is not None
        return bool(self._read(self._pid, *self._ranges) == nbytes)


def _process_of(pidfd: int) -> int:
    """The id of the process to which a pidfd refers; 0 if it cannot be found."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "Pid":
                return max(0, int(value))
    return 0
