"""Waiting for descriptors, however many a process has open: `select` takes none above 1,023."""

from __future__ import annotations

import select
from collections.abc import Sequence

__all__ = ["wait_for"]


def wait_for(descriptors: Sequence[int], timeout_s: float | None, sending: int | None = None) -> set[int]:
    """Those of some descriptors that have something to read, or have ended. Blocks until one has.

    One of them may be waited for until it has room to send, too: `sending`. Raises `ValueError` for one that
    is closed, -1.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if descriptor == sending else 0))
    return {
        descriptor for descriptor, _ in poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1e3)
    }
