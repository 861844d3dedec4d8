"""What the times of events are read from."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Clock"]


class Clock(NamedTuple):
    """Two clocks that are read together, in seconds: that on the wall, and one that is never set back."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
