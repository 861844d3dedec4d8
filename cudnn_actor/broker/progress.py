"""The progress of an incarnation."""

from __future__ import annotations

import msgspec

__all__ = ["Progress"]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of an incarnation.

    Parameters
    ----------
    working
        Whether it has unfinished work.
    last_s
        When the unfinished work last made progress; without such work, when the last request ended. In
        `time.monotonic()` seconds; 0 for never.
    """

    working: bool = False
    last_s: float = 0.0
