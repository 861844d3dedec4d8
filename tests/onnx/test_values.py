"""Values of a model that are computed once somebody asks for them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cudnn_actor.onnx.values import Pending, Value

CONSTANTS, VALUES, THREADS = 1000, 80, 4
ONE = np.ones(1, np.float32)


@pytest.fixture
def often_interrupted() -> Iterator[None]:
    """Threads of Python take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def value(array: Callable[[], np.ndarray] | Pending) -> Value:
    return Value(ONE.shape, ONE.dtype, pytest.fail, array)


def computed() -> Value:
    """A value that is computed from many constants, which are read when they are needed."""
    return value(Pending([value(lambda: ONE) for _ in range(CONSTANTS)], lambda: ONE))


@pytest.mark.usefixtures("often_interrupted")
def test_several_threads_may_ask_for_elements_at_a_time() -> None:
    """As those do that upload a model's weights, which may be computed from the same constants."""
    values = [computed() for _ in range(VALUES)]
    ready = threading.Barrier(THREADS)

    def sums() -> float:
        ready.wait()
        return float(sum(each.elements[0] for each in values))

    with ThreadPoolExecutor(THREADS) as threads:
        found = [threads.submit(sums) for _ in range(THREADS)]
        assert [each.result() for each in found] == [VALUES] * THREADS
