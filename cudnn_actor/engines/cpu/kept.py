"""Arrays that keep another object alive, such as the owner of their memory."""

from __future__ import annotations

import numpy as np

__all__ = ["keeping"]


def keeping(array: np.ndarray, owner: object) -> np.ndarray:
    """A new array on the same memory; `owner` stays alive as long as the array or any view of it does."""
    return np.asarray(_Kept(array, owner)).view(array.dtype)


class _Kept:
    """The base of another array: keeps an array and its owner alive."""

    def __init__(self, array: np.ndarray, owner: object) -> None:
        self.__array_interface__ = array.view(f"u{array.itemsize}").__array_interface__
        self.kept = array, owner
