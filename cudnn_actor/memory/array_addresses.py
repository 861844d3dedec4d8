"""The addresses of NumPy arrays in the memory of this process. The places of buffers are in
`memory_table`."""

from __future__ import annotations

import ctypes

import numpy as np

__all__ = ["address_of"]


def address_of(array: np.ndarray) -> int:
    """The address of an array's first element."""
    flags = array.flags
    if flags.c_contiguous and flags.writeable:
        try:  # takes a tenth of the time of what follows, and most runs of models ask for two addresses
            return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]  # it is one
        except (TypeError, ValueError, BufferError):  # no elements, or a dtype that the buffer protocol lacks
            pass
    address: int = array.__array_interface__["data"][0]
    return address
