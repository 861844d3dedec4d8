"""Where a signal's handler may raise, and how code is written that it cannot tear apart.

CPython runs the handlers of signals on the main thread, between two instructions of whatever runs there: at
the entry of a Python function, at the back-edge of a loop, and after a call. An exception of theirs (an
alarm's `TimeoutError`, `KeyboardInterrupt`) comes out at that very place. The same places, and calls that
wait, are where the GIL goes to another thread.

So lines that only read and write attributes, elements and names, and whose one call, if any, is the last and
goes straight to C, are **one step**: it happens or it does not, for exceptions and for other threads alike.
Objects that the collector knows are made before it, since making one may run finalizers. `deque += entry`
and `del deque[0]` are no calls. `with` on a C lock gives it back in any case; `acquire(); try:` does not, nor
does a context manager in Python. What a call in C answers is lost when an exception follows it, so what must
be known (how many bytes the kernel took) is written down by C: `noted.extend(starmap(send, arguments))`. The
condition of a `while` is no part of a step that the loop's body begins with: the back-edge lies between them.

What takes several steps is made so that whoever comes next goes on where it was left: an item leaves a queue
with the step that puts what has become of it where it belongs.
"""

from __future__ import annotations

import errno
import os
import threading

__all__ = ["is_interruptible", "is_of_a_handler"]

_OF_THE_SYSTEM = frozenset(
    {errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF}
    | {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS}
)
_get_ident = threading.get_ident
_main = threading.main_thread().ident


def is_interruptible() -> bool:
    """Whether this is the main thread, where handlers of signals run."""
    return _get_ident() == _main


def _look_again() -> None:
    """In a forked child the main thread is the one that forked."""
    global _main  # noqa: PLW0603 - of the process
    _main = threading.main_thread().ident


os.register_at_fork(after_in_child=_look_again)


def is_of_a_handler(error: OSError) -> bool:
    """Whether an error that came out of a call to the system is a signal handler's (`TimeoutError`, mostly).

    That is, whether it is on the main thread and none of those that sockets and descriptors end in.
    """
    return is_interruptible() and error.errno not in _OF_THE_SYSTEM
