"""The clocks that events are stamped with."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Clock"]


class Clock(NamedTuple):
    """Two clocks, in seconds: wall-clock time, and monotonic time."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
