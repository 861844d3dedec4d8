"""The number of BLAS's threads while engines compute."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import threadpoolctl

from cudnn_actor.engines.cpu.blas import threads_of_blas


def _threads() -> list[int]:
    return [
        library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"
    ]


def test_each_thread_can_limit_the_threads_of_blas() -> None:
    before = _threads()
    if max(before, default=1) < 2:
        pytest.skip("BLAS has one thread here")

    def limited() -> list[int]:
        with threads_of_blas(1):
            return _threads()

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for pool in (first, second, first, second):
            assert max(pool.submit(limited).result()) == 1
            assert _threads() == before
