"""Converts the system's refusals (memory, file descriptors) to errors that name the limit."""

from __future__ import annotations

import errno
import resource

from cudnn_actor.protocol.errors import CudnnActorError, OutOfDescriptors, OutOfMemory

__all__ = ["exhaustion", "ulimit_of"]

_NO_ROOM = frozenset({errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EINVAL})
"""`ftruncate` fails with EINVAL for a size that no file can have."""
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})


def exhaustion(
    error: BaseException, *, requested: int, in_use: int, arena_bytes: int = 0
) -> CudnnActorError | None:
    """The error for a request that failed for lack of memory or descriptors; None for any other failure.

    Parameters
    ----------
    error
        The exception that a call in this process raised.
    requested
        Bytes that the request needed.
    in_use, arena_bytes
        Bytes that the service's buffers take, and that it has taken for them.
    """
    if isinstance(error, CudnnActorError):
        return error
    number = error.errno if isinstance(error, OSError) else None
    if number in _NO_DESCRIPTOR:
        mine = number == errno.EMFILE
        return OutOfDescriptors(limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0] if mine else None)
    if number in _NO_ROOM or isinstance(error, MemoryError | OverflowError):
        return OutOfMemory(
            requested=requested,
            in_use=in_use,
            arena_bytes=arena_bytes,
            limit=None,
            ulimit=ulimit_of(error),
        )
    return None


def ulimit_of(error: BaseException) -> str:
    """The letter of the process's limit that may be the cause of a lack of memory, as `OutOfMemory` has it.

    Empty if this process has no such limit. Arenas and staging memory are files, so the limit on the size of
    files holds for them.
    """
    reasons = (error, error.__cause__)
    of_files = any(getattr(each, "errno", None) == errno.EFBIG for each in reasons)
    letter, limit = ("f", resource.RLIMIT_FSIZE) if of_files else ("v", resource.RLIMIT_AS)
    return "" if resource.getrlimit(limit)[0] == resource.RLIM_INFINITY else letter
