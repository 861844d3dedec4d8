"""Shared memory of clients on this machine: regions that they have registered. Tensors are copied from them
and to them.

A region is a file in /dev/shm. It is read and written through its descriptor, and never mapped. A client may
shorten the file at any time. That would kill a process that had mapped it; here it is only a short read.
"""

from __future__ import annotations

import os
import resource
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.serving.failures import NotOffered, Refused, TooLarge
from cudnn_actor.serving.requests import Place
from cudnn_actor.serving.tensors import NAMES, array_of_bytes, bytes_of, nbytes_of

__all__ = ["Region", "SharedMemory"]

_FOLDER = "/dev/shm"
_MOST = 1024
"""The most regions that may be registered at a time: each has a descriptor."""
_SHARE = 4
"""Regions may take one part in this many of the descriptors that a process may have. If there are serving
processes, each has one of every region, and the owner has another one of each that is on its way to a new
process."""


@dataclass(frozen=True)
class Region:
    """A registered region: a part of a file of shared memory."""

    name: str
    key: str
    offset: int
    nbytes: int
    descriptor: int


class SharedMemory:
    """The registered regions. Only files that belong to this process's user can be registered.

    Parameters
    ----------
    offered
        Whether regions may be registered: not if clients on other machines are served.
    """

    def __init__(self, *, offered: bool) -> None:
        self._offered = offered
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft // _SHARE)
        self._regions: dict[str, Region] = {}
        # Threads copy tensors, too: if a descriptor were closed meanwhile, its number might be another
        # file's.
        self._moving = threading.Lock()

    def register(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Open a region. Raises `Refused`, and `NotOffered` if no region may be registered."""
        if not self._offered:
            raise NotOffered(what="shared memory: it listens to other machines, too")
        if not name or name in self._regions:
            problem = (
                f"shared memory region {name[:100]!r} is registered already" if name else "it has no name"
            )
            raise Refused(problem=problem, fix="unregister it first, or use another name")
        if len(self._regions) >= self._most:
            fix = "unregister some" + (
                "" if self._most == _MOST else ", or allow more descriptors: ulimit -n"
            )
            raise Refused(problem=f"{self._most:,} regions are registered", fix=fix)
        if not 0 < nbytes < 1 << 62 or not 0 <= offset < 1 << 62:
            raise Refused(problem="a region's bytes are out of range", fix="give one byte or more")
        descriptor = _open(key)
        if os.fstat(descriptor).st_size < offset + nbytes:
            os.close(descriptor)
            raise Refused(
                problem=f"shared memory {key[:100]!r} is shorter than that", fix="register less of it"
            )
        self._regions[name] = Region(name, key, offset, nbytes, descriptor)

    def adopt(self, region: Region) -> None:
        """Add a region that another process has opened. This object owns its descriptor from now on."""
        self._regions[region.name] = region

    def unregister(self, name: str = "") -> None:
        """Forget a region, or, for "", all regions. Nothing happens if the region is not registered."""
        for each in [name] if name else list(self._regions):
            region = self._regions.pop(each, None)
            if region is not None:
                with self._moving:
                    os.close(region.descriptor)

    def status(self, name: str = "") -> list[Region]:
        """A region, or, for "", all regions. Raises `Refused` if the region is not registered."""
        return [self._region(name)] if name else list(self._regions.values())

    def read(self, place: Place, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
        """A copy of the tensor at a place. Raises `Refused`, and `TooLarge` if there is no memory for it."""
        wanted = nbytes_of(dtype, shape)
        if place.nbytes != wanted:
            problem = f"a place in region {place.region[:100]!r} has {place.nbytes:,} bytes"
            raise Refused(problem=problem, fix=f"{NAMES[dtype]} of shape {list(shape)} has {wanted:,}")
        with self._moving:
            region = self._region_around(place, wanted)  # before so much memory is allocated
            try:
                data = np.empty(wanted, np.uint8).data
            except MemoryError:  # a file in shared memory may be longer than all memory
                problem = f"there is no memory for the {wanted:,} bytes of a place"
                raise TooLarge(problem=problem, fix="send fewer at a time") from None
            self._move(region, place, data, os.preadv)
        return array_of_bytes(place.region, dtype, shape, data)

    def write(self, place: Place, array: np.ndarray) -> None:
        """Copy a tensor to a place. Raises `Refused` if it does not fit."""
        if array.nbytes > place.nbytes:
            problem = f"a place in region {place.region[:100]!r} has {place.nbytes:,} bytes"
            raise Refused(problem=problem, fix=f"the output has {array.nbytes:,}")
        with self._moving:
            self._move(self._region_around(place, place.nbytes), place, bytes_of(array), _within)

    def close(self) -> None:
        """Forget all regions."""
        self.unregister()

    def _region(self, name: str) -> Region:
        if name not in self._regions:
            problem = f"shared memory region {name[:100]!r} is not registered"
            raise Refused(problem=problem, fix="register it first")
        return self._regions[name]

    def _region_around(self, place: Place, nbytes: int) -> Region:
        """The region that has so many bytes at a place. Raises `Refused` if it is not registered, or ends
        before."""
        region = self._region(place.region)
        if place.offset + nbytes > region.nbytes:
            problem = f"a place ends behind its region {place.region[:100]!r}, of {region.nbytes:,} bytes"
            raise Refused(problem=problem, fix="register more of the shared memory")
        return region

    @staticmethod
    def _move(
        region: Region, place: Place, data: memoryview, move: Callable[[int, list[memoryview], int], int]
    ) -> None:
        """Read or write all of `data` at a place, by `move`. A client may shorten the region at any time."""
        done = 0
        while done < data.nbytes:
            moved = move(region.descriptor, [data[done:]], region.offset + place.offset + done)
            if not moved:
                problem = f"the shared memory of region {place.region[:100]!r} has become shorter"
                raise Refused(problem=problem, fix="keep its size while it is registered")
            done += moved


def _within(descriptor: int, data: list[memoryview], at: int) -> int:
    """Write the part of `data` that lies within the file. A write past its end would make the file longer."""
    room = os.fstat(descriptor).st_size - at
    return os.pwritev(descriptor, [data[0][:room]], at) if room > 0 else 0


def _open(key: str) -> int:
    """A descriptor of a file of shared memory that belongs to this process's user. Raises `Refused`."""
    name = key.removeprefix("/")
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise Refused(problem=f"{key[:100]!r} is no name of shared memory", fix="give it as to shm_open")
    try:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(f"{_FOLDER}/{name}", flags)
    except (OSError, UnicodeEncodeError) as error:
        why = getattr(error, "strerror", None) or "its name is not text"
        raise Refused(
            problem=f"shared memory {key[:100]!r} cannot be opened: {why}", fix="create it first"
        ) from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise Refused(
            problem=f"shared memory {key[:100]!r} belongs to another user", fix="create it as this one"
        )
    return descriptor
