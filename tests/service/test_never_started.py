"""A service that is made and never started holds nothing."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import pytest

from cudnn_actor import child_spec, spawn


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("make", [spawn, child_spec])
def test_one_that_is_dropped_leaves_no_descriptor(make: Callable[..., object]) -> None:
    gc.collect()
    before = descriptors()
    for _ in range(10):
        made = make(device="cpu", isolation="process")
        del made
    gc.collect()
    assert descriptors() <= before
