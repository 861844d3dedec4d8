"""Kernels of cuBLASLt's products are loaded on another thread while pieces are built, and run nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.library import libraries
from cudnn_actor.engines.cuda.library.libcublaslt import ALGORITHM_BYTES
from cudnn_actor.engines.cuda.operations.cublaslt import LtProduct
from cudnn_actor.engines.cuda.planning.loading_ahead import loading_ahead
from cudnn_actor.protocol import GraphBuilder, OperationGraph

from ....patience import PATIENCE_S

LIMIT = 1 << 20


def product(rows: int) -> OperationGraph:
    g = GraphBuilder()
    x, w = g.input("x", (rows, 64), "bfloat16"), g.input("w", (64, 32), "bfloat16")
    return g.build(y=g.relu(g.matmul(x, w))).body


def convolution(size: int, pad: int) -> OperationGraph:
    g = GraphBuilder()
    x = g.input("x", (2, 64, 14, 14), "bfloat16", layout="NHWC")
    w = g.input("w", (32, 64, size, size), "bfloat16", layout="NHWC")
    return g.build(y=g.relu(g.conv(x, w, pad=pad))).body


class CuBlasLt:
    """In the place of cuBLASLt, of CuPy's stream, and of the driver.

    `captured` has what was captured, as (rows of the result, addresses, thread). `asked`: set with each
    question for an algorithm. `may_answer`: the first answer waits for it.
    """

    def __init__(self) -> None:
        self.capturing = False
        self.captured: list[tuple[int, int, threading.Thread]] = []
        self.launched = 0
        self.refuses: set[int] = set()
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.done = threading.Semaphore(0)

    def with_algorithms(self, of: LtProduct, limit: int, most: int) -> Iterator[LtProduct]:
        assert (limit, most) == (LIMIT, 1)
        self.asked.set()
        assert self.may_answer.wait(PATIENCE_S)
        yield msgspec.structs.replace(of, algorithm=bytes(ALGORITHM_BYTES), workspace=512)

    def run_of(self, of: LtProduct) -> Any:
        def run(addresses: Sequence[int], _: Sequence[float]) -> None:
            rows = of.matrices[2].columns
            if not self.capturing:
                self.launched += 1
            if rows in self.refuses:
                raise EngineFailure("CUBLAS_STATUS_NOT_SUPPORTED", "cublasLtMatmul")
            self.captured.append((rows, len(addresses), threading.current_thread()))

        return run

    def begin_capture(self, _: int) -> None:
        assert not self.capturing
        self.capturing = True

    def end_capture(self) -> None:
        assert self.capturing
        self.capturing = False
        self.done.release()


def called(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a class can have as a method: it gets the object."""
    return lambda *given: function(*given)  # noqa: PLW0108 - a bound method would not get it


@pytest.fixture
def cublaslt(monkeypatch: pytest.MonkeyPatch) -> CuBlasLt:
    library, cupy = CuBlasLt(), MagicMock()
    stream = cupy.cuda.Stream.return_value
    stream.begin_capture, stream.end_capture = library.begin_capture, library.end_capture
    cupy.cuda.alloc.return_value.ptr = 4096
    driver = MagicMock()
    driver.cuThreadExchangeStreamCaptureMode.return_value = (0, 0)
    for name, module in (("cupy", cupy), ("runtime", MagicMock()), ("driver", driver)):
        monkeypatch.setitem(vars(libraries.libraries()), name, module)
    monkeypatch.setattr(LtProduct, "with_algorithms", called(library.with_algorithms))
    monkeypatch.setattr(LtProduct, "run", called(library.run_of))
    return library


def loaded(library: CuBlasLt, *pieces: OperationGraph, products: int) -> list[int]:
    """The rows of the products that were loaded while the first piece was built."""
    library.may_answer.set()
    with loading_ahead(pieces, LIMIT):
        for _ in range(products):
            assert library.done.acquire(timeout=PATIENCE_S)
    return [rows for rows, _, _ in library.captured]


def test_products_and_convolutions_of_single_pixels_are_loaded_in_order(cublaslt: CuBlasLt) -> None:
    pieces = convolution(3, 1), product(8), convolution(1, 0), product(16)
    assert loaded(cublaslt, *pieces, products=3) == [8, 2 * 14 * 14, 16]


def test_a_kernel_is_loaded_on_another_thread_and_is_not_run(cublaslt: CuBlasLt) -> None:
    loaded(cublaslt, product(8), products=1)
    ((_, addresses, thread),) = cublaslt.captured
    assert thread is not threading.current_thread()
    assert addresses == len("abd") + len("w")  # the workspace's, too
    assert not cublaslt.launched


def test_equal_products_are_loaded_once(cublaslt: CuBlasLt) -> None:
    assert loaded(cublaslt, product(8), product(8), product(16), products=2) == [8, 16]


def test_a_product_that_cublaslt_refuses_leaves_no_capture_behind(cublaslt: CuBlasLt) -> None:
    cublaslt.refuses = {8}
    assert loaded(cublaslt, product(8), product(16), products=2) == [16]
    assert not cublaslt.capturing


def test_the_end_of_a_build_waits_for_one_kernel_and_leaves_out_the_rest(
    cublaslt: CuBlasLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer_and_join(thread: threading.Thread) -> None:
        cublaslt.may_answer.set()
        join(thread)

    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", answer_and_join)
    with loading_ahead([product(8), product(16)], LIMIT):
        assert cublaslt.asked.wait(PATIENCE_S)
        assert not cublaslt.captured
    assert [rows for rows, _, _ in cublaslt.captured] == [8]


def test_without_products_there_is_no_thread(cublaslt: CuBlasLt) -> None:
    with loading_ahead([convolution(3, 1)], LIMIT):
        assert not [each for each in threading.enumerate() if each.name == "cudnn-loader"]
