"""Arrays that keep something alive: a hold on the memory that they show."""

from __future__ import annotations

import numpy as np

__all__ = ["keeping"]


def keeping(array: np.ndarray, owner: object) -> np.ndarray:
    """The same memory as another array, whose base keeps `owner` alive for as long as anything shows it."""
    return np.asarray(_Kept(array, owner)).view(array.dtype)


class _Kept:
    """What NumPy takes as the base of another array: an array, and what is to live as long."""

    def __init__(self, array: np.ndarray, owner: object) -> None:
        self.__array_interface__ = array.view(f"u{array.itemsize}").__array_interface__
        self.kept = array, owner
