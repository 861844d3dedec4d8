"""The number of BLAS's threads while engines compute."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import threadpoolctl

from cudnn_actor.engines.cpu import blas
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


def test_a_limit_that_cannot_be_set_whole_is_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a handler of a signal, which may raise while a limit is set."""
    before, setting = _threads(), blas.set_threads

    def interrupted(library: Any, count: int) -> None:
        setting(library, count)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(blas, "set_threads", interrupted)
        with pytest.raises(KeyboardInterrupt), threads_of_blas(1):
            pass
    with threads_of_blas(1):
        pass
    assert _threads() == before
    assert not blas.shared_setting.limits
