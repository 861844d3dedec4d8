"""How many elements NumPy's functions have in buffers.

Where an operand is one number for a row, or the same row for many, they copy it to a buffer until that is
full, if the rows are shorter than it. With buffers of 8192 elements, as it has them by default, NumPy 2.4
takes 2.4 times as long to add one number to each row of 3136.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

__all__ = ["BUFFERED", "with_small_buffers"]

BUFFERED = 1024
"""Elements of a buffer. With fewer, operations on short rows and conversions take longer."""


@contextlib.contextmanager
def with_small_buffers() -> Iterator[None]:
    """Limit the buffers of NumPy's functions to so many elements, in this thread, while the body runs."""
    before = np.getbufsize()
    if before <= BUFFERED:
        yield
        return
    np.setbufsize(BUFFERED)
    try:
        yield
    finally:
        np.setbufsize(before)
