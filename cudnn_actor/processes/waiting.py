"""Waits for descriptors of any number. (`select` accepts none above 1,023.)"""

from __future__ import annotations

import select
from collections.abc import Sequence

__all__ = ["wait_for"]


def wait_for(descriptors: Sequence[int], timeout_s: float | None, sending: int | None = None) -> set[int]:
    """Wait until a descriptor has something to read or has ended. Returns those that have.

    For `sending`, which is one of them, room to send counts, too. Raises `ValueError` for a closed one, -1.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if descriptor == sending else 0))
    return {
        descriptor for descriptor, _ in poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1e3)
    }
