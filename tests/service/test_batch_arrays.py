"""How the results of a batch are divided, without a service."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from cudnn_actor.models.batch_arrays import divide_results

ROW = 501
"""The fewest elements of a row for whose copy NumPy releases the interpreter's lock."""


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often another thread has had the interpreter's lock, which it gets only if this one releases it."""
    interval, counted, over = sys.getswitchinterval(), [0], threading.Event()
    sys.setswitchinterval(1e6)

    def count() -> None:
        while not over.wait(1e-5):
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield counted
    finally:
        over.set()
        sys.setswitchinterval(interval)
        thread.join()


def test_no_other_thread_has_a_turn_while_rows_are_copied_with_the_lock(turns: list[int]) -> None:
    results = {"y": np.zeros((32, ROW), np.float32)}
    before = turns[0]
    for _ in range(200):
        divide_results(results, [1] * 32, 32, locked=True)
    assert turns[0] == before


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("dims", [(ROW,), (3, 501), (2, 3, 500), (4,), (), (0, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, ml_dtypes.bfloat16])
def test_each_request_gets_its_own_rows(dtype: type, dims: tuple[int, ...], locked: bool) -> None:
    whole: np.ndarray = np.arange(8 * int(np.prod(dims))).reshape(8, *dims).astype(dtype)
    parts = divide_results({"y": whole, "z": whole.T[..., :8].T}, [1, 4, 2], 8, locked=locked)
    assert [len(part["y"]) for part in parts] == [1, 4, 2]
    for begin, part in zip((0, 1, 5), parts, strict=True):
        for array in part.values():
            end = begin + len(array)
            assert array.dtype == whole.dtype
            np.testing.assert_array_equal(array, whole[begin:end])
            assert array.flags.writeable
            assert array.flags.aligned
            assert not np.shares_memory(array, whole)


@pytest.mark.parametrize("locked", [False, True])
def test_a_request_that_is_the_whole_batch_gets_the_results_themselves(locked: bool) -> None:
    whole = np.zeros((8, ROW))
    (part,) = divide_results({"y": whole}, [8], 8, locked=locked)
    assert part["y"] is whole
