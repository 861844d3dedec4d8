"""NumPy's settings while a plan runs: the size of its functions' buffers, and no warnings.

An operand may have one number for each row, or the same row for all rows. If rows are shorter than a buffer,
NumPy's functions fill the buffer with copies of such an operand. With buffers of 8192 elements, NumPy 2.4's
default, it takes 2.4 times as long to add one number to each row of 3136 elements.

Overflow to infinity, and NaN, are valid results, as on a GPU.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import numpy as np

__all__ = ["BUFFERED", "IN_CONTEXTS", "Calling", "caller_with_settings", "with_settings"]

BUFFERED = 1024
"""Elements of a buffer. With smaller buffers, conversions and operations on short rows take longer."""
IN_CONTEXTS = int(np.__version__.partition(".")[0]) >= 2
"""Whether NumPy keeps its settings in a context variable. NumPy 1 keeps them for each thread."""

Calling = Callable[..., None]
"""A function that calls another one with these arguments."""


@contextlib.contextmanager
def with_settings() -> Iterator[None]:
    """Set NumPy's functions for plans, in this thread, while the body runs. Smaller buffers stay."""
    before = np.getbufsize()
    with np.errstate(all="ignore"):
        np.setbufsize(min(before, BUFFERED))
        try:
            yield
        finally:
            np.setbufsize(before)


def caller_with_settings() -> Calling:
    """A function that calls another one with NumPy set for plans. One thread at a time may call it, and none
    within such a call. If NumPy's buffers are smaller now, they keep their size.

    To enter a context that has the settings takes less than a tenth of a microsecond, and to set them and to
    set them back takes four.
    """
    if not IN_CONTEXTS:
        return _call_with_settings
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    context.run(np.setbufsize, min(np.getbufsize(), BUFFERED))
    return context.run


def _call_with_settings(function: Callable[..., None], *args: object) -> None:
    with with_settings():
        function(*args)
