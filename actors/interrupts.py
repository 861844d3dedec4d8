"""Signal handlers may raise at many places. This module says where, and how code is written so that this does
no harm.

CPython runs signal handlers on the main thread, between two instructions of whatever runs there: at
the entry of a Python function, at the back-edge of a loop, and after a call. An exception that a handler
raises (an alarm's `TimeoutError`, `KeyboardInterrupt`) appears at that very place. At the same places, and
in calls that wait, the GIL may pass to another thread.

So a run of lines is **one step** (atomic: it happens or it does not, for exceptions and for other threads)
if it only reads and writes attributes, elements and names, and if its only call, if any, comes last and goes
straight to C. The rules:

- Objects that the garbage collector tracks are created before the step: creating one may run finalizers.
- `deque += entry` and `del deque[0]` are not calls.
- `with` on a C lock always releases it. `acquire(); try:` does not, nor does a context manager in Python.
- If an exception follows a call in C, the call's result is lost. So C itself must record what must be known
  (how many bytes the kernel took): `noted.extend(starmap(send, arguments))`.
- The condition of a `while` is not part of a step at the start of the loop's body: the back-edge lies
  between them.

Work that takes several steps is written so that the next caller continues where it stopped: the step that
removes an item from a queue also stores the item's outcome in its final place.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from typing import Any

__all__ = ["is_interruptible", "is_of_a_handler", "run_through"]

_OF_THE_SYSTEM = frozenset(
    {errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF}
    | {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS}
)
run_through = deque[Any](maxlen=0).extend
"""Runs an iterator to its end in a single call of a C function. If that calls C functions alone, no handler
runs meanwhile."""
_get_ident = threading.get_ident
_main = threading.main_thread().ident


def is_interruptible() -> bool:
    """Whether this is the main thread, where signal handlers run."""
    return _get_ident() == _main


def _look_again() -> None:
    """Note that the thread that has forked is the main thread of the forked child."""
    global _main  # noqa: PLW0603 - of the process
    _main = threading.main_thread().ident


os.register_at_fork(after_in_child=_look_again)


def is_of_a_handler(error: OSError) -> bool:
    """Whether an error from a system call was raised by a signal handler (usually a `TimeoutError`).

    It was if this is the main thread and the error is not one that sockets and descriptors fail with.
    """
    return is_interruptible() and error.errno not in _OF_THE_SYSTEM
