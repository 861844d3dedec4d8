"""Where arrays lie."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cudnn_actor.memory.array_addresses import address_of

from ..in_one_test import cases_in_one_test

WHOLE = np.zeros((4, 6), np.float32)
FIXED = WHOLE.view()
FIXED.flags.writeable = False


@cases_in_one_test
@pytest.mark.parametrize(
    "array",
    [
        WHOLE,
        WHOLE[2:],
        WHOLE[1, 3:],
        WHOLE.T,
        WHOLE[::2, ::3],
        WHOLE[::-1],
        FIXED,
        WHOLE[:0],
        np.array(3.0),
        np.zeros(3, bool),
        np.zeros(3, ml_dtypes.bfloat16),
        np.zeros(3, np.dtype(">f4")),
    ],
    ids=str,
)
def test_an_array_begins_at_its_first_element(array: np.ndarray) -> None:
    assert address_of(array) == array.ctypes.data


def test_nothing_of_an_array_is_kept() -> None:
    array = np.zeros(64)
    address_of(array)
    array.resize(128, refcheck=True)  # NumPy refuses this where anything still refers to the memory
