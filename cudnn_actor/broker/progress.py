"""What progress an incarnation makes."""

from __future__ import annotations

import msgspec

__all__ = ["Progress"]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What progress an incarnation makes with its work.

    Parameters
    ----------
    working
        Whether it has work in hand.
    last_s
        When the work in hand last made progress; without work, when the last of it ended. In
        `time.monotonic()` seconds; 0 for never.
    """

    working: bool = False
    last_s: float = 0.0
