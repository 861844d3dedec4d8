"""A service that is made and never started holds nothing."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

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


def test_one_that_is_used_says_how_to_start_it() -> None:
    never_started: Any = spawn(device="cpu")
    with pytest.raises(AttributeError, match=r"no 'upload' .* use `async with spawn"):
        never_started.upload()
    with pytest.raises(TypeError, match="plain `with`: use `async with spawn"), never_started:
        pass
