"""Copies of large arrays by several threads."""

from __future__ import annotations

import _thread
import os
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu import transfer

from ...in_one_test import cases_in_one_test


def two_arrays(nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to copy, and where to."""
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8), np.zeros(nbytes, np.uint8)


@cases_in_one_test
@pytest.mark.parametrize("nbytes", [1, 3, 4, 1001, 4096, 100_003])
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_all_bytes_are_copied(nbytes: int, threads: int) -> None:
    src, dst = two_arrays(nbytes)
    transfer.copy_together(dst, src, threads)
    np.testing.assert_array_equal(dst, src)


@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_copy_is_whole_if_the_system_gives_few_threads(given: int, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Any] = []
    start = _thread.start_new_thread

    def few(*arguments: Any) -> int:
        if len(starts) == given:
            raise RuntimeError("can't start new thread")
        starts.append(arguments)
        return start(*arguments)

    monkeypatch.setattr(_thread, "start_new_thread", few)
    src, dst = two_arrays(1000)
    transfer.copy_together(dst, src, 4)
    np.testing.assert_array_equal(dst, src)
    assert len(starts) == given


def test_a_small_copy_does_not_ask_the_system_how_many_processors_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes five times as long to ask as to copy."""

    def refuse(pid: int) -> set[int]:
        raise AssertionError(f"the processors of {pid} are asked for")

    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    src, dst = two_arrays(1000)
    transfer.store(dst, src)
    np.testing.assert_array_equal(dst, src)
    dst.fill(0)
    assert transfer.copy_parts(dst, src, [(0, 0, 600), (1, 600, 1000)], lambda number: None, rounds=1)
    np.testing.assert_array_equal(dst, src)
