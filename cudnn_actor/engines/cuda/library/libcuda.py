"""The driver's library, by ctypes, for calls that CuPy and `cuda.bindings` lack or make too slowly."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

__all__ = ["libcuda"]


@functools.cache
def libcuda() -> Any:
    """The library. Its calls keep the interpreter's lock, because each that is made so is short."""
    return ctypes.PyDLL("libcuda.so.1")
