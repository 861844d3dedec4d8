"""The limits of the container, a control group of Linux, in which this process runs.

A process that takes more memory is killed by the kernel; one that takes more time of processors waits.
https://docs.kernel.org/admin-guide/cgroup-v2.html (memory, cpu),
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html, https://docs.kernel.org/scheduler/sched-bwc.html
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from cudnn_actor.memory.arena import ARENA_STEP

__all__ = [
    "GROUPS",
    "OWN_GROUPS",
    "available",
    "default_limit",
    "processors",
    "room_here",
    "room_in_container",
    "staging_limit",
]

_OWN_BYTES = 64 << 20
"""The bytes that the processes of a service take for themselves: 58 MiB were measured in process
isolation."""
_FOR_ARENAS = 3 / 4
"""The share of the remaining room that arenas may take. The rest is for arrays of the program, and for values
that are being copied."""

GROUPS = Path("/sys/fs/cgroup")
"""The folder of the groups, which have the limits."""
OWN_GROUPS = Path("/proc/self/cgroup")
"""The file that names the groups of this process."""


class _Files(NamedTuple):
    """The files of a group, in one version of control groups."""

    limit: str
    usage: str
    inactive: str
    """The name, in `memory.stat`, of the bytes of files that the kernel drops when memory is short."""


_FILES = {
    1: _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _Files("memory.max", "memory.current", "inactive_file"),
}
"""The files of each version of control groups."""


def default_limit() -> int | None:
    """Bytes that the arenas of a service that starts now may take in this container; None without a limit."""
    room = room_in_container()
    if room is None:
        return None
    return max(ARENA_STEP, int((room - _OWN_BYTES) * _FOR_ARENAS) // ARENA_STEP * ARENA_STEP)


def staging_limit() -> int:
    """Bytes that staging arrays of a service that starts now may take: those of the machine's memory, or
    the part of the container's that arenas may take."""
    limit = default_limit()
    return _machine() if limit is None else limit


def available(*, swapping: bool = False) -> int | None:
    """Bytes that the machine can give without swapping, or with it; None if it does not say. Does not wait
    for a disk."""
    try:
        descriptor = os.open("/proc/meminfo", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        lines = os.pread(descriptor, 4096, 0).decode().splitlines()
    finally:
        os.close(descriptor)
    left = _bytes_of(lines, "MemAvailable:")
    return left if left is None or not swapping else left + (_bytes_of(lines, "SwapFree:") or 0)


def _bytes_of(lines: list[str], name: str) -> int | None:
    """The value of a line of /proc/meminfo, which has it in KiB; None if there is no such line."""
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(name)), None)


def _machine() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def room_in_container(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int | None:
    """Bytes that this process may still take in its container; None if no container limits them.

    The limits of all groups around its own hold as well, so the least room counts. A limit of at least the
    machine's memory is none. Reads some small files.
    """
    machine = _machine()
    rooms = [
        max(0, limit - _usage(folder, files))
        for folder, version in _folders(groups, own, "memory")
        for files in (_FILES[version],)
        if (limit := _number(folder / files.limit)) is not None and limit < machine
    ]
    return min(rooms, default=None)


def room_here() -> int | None:
    """The less of what `available` and `room_in_container` say; None if neither says anything."""
    return min((room for room in (available(), room_in_container()) if room is not None), default=None)


def processors(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """How many threads of this process can run at the same time: at least 1. Reads some small files.

    The processors that it may run on, or the time of processors that its container may take, rounded up.
    """
    quotas = [
        quota
        for folder, version in _folders(groups, own, "cpu")
        if (quota := _QUOTAS[version](folder)) is not None
    ]
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, quotas)]))


def _quota_v2(folder: Path) -> float | None:
    """How many processors a group may keep busy; None for no limit."""
    quota, _, period = next(iter(_lines(folder / "cpu.max")), "").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _quota_v1(folder: Path) -> float | None:
    """See `_quota_v2`."""
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


_QUOTAS = {1: _quota_v1, 2: _quota_v2}
"""The function that reads the quota of each version of control groups."""


def _folders(groups: Path, own: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The folders of this process's groups that have a controller, and the version: 1 or 2.

    A container often sees its own group as the root, but its path from outside. So paths that are not there
    are passed over, and the root is always looked at.
    """
    for root, version, path in _memberships(groups, own, controller):
        for part in (path, *path.parents):
            yield root / part.relative_to("/"), version


def _memberships(groups: Path, own: Path, controller: str) -> Iterator[tuple[Path, int, PurePosixPath]]:
    for line in _lines(own):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if not controllers:
            yield groups, 2, PurePosixPath(path)
            yield groups / "unified", 2, PurePosixPath(path)
        elif controller in controllers.split(","):
            yield groups / controllers, 1, PurePosixPath(path)
            yield groups / controller, 1, PurePosixPath(path)


def _usage(folder: Path, files: _Files) -> int:
    """Bytes in use that the kernel cannot drop."""
    fields = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    return (_number(folder / files.usage) or 0) - int(fields.get(files.inactive, 0))


def _number(path: Path) -> int | None:
    """The number in a file; None for "max", and if there is no such file."""
    text = next(iter(_lines(path)), "")
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
