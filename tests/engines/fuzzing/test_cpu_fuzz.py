"""The GPU's fuzzer on the CPU engine: it passes, and it notices what it is there to notice."""

from __future__ import annotations

import multiprocessing.resource_tracker
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.protocol import DType, UnsupportedGraph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

from ...gpu.cases import Kind
from ...gpu.drawing import MOST_PRODUCTS, MOST_VALUES, draw
from ...gpu.fuzz import fuzz
from ...gpu.pairs import all_pairs
from ..refusals import may_refuse

SEED = 20
"""Of the tests that look for a mistake: its cases are known to show each of them."""


@pytest.fixture(scope="module", autouse=True)
def resource_tracker() -> None:
    """Of multiprocessing; it stays as long as the interpreter, so it is there before leaks are looked for."""
    multiprocessing.resource_tracker.ensure_running()


def test_the_cpu_engine_in_its_own_dtypes_agrees_with_itself_in_float64() -> None:
    report = fuzz(opened(CpuEngine(exact=True)), secrets.randbelow(1 << 32), range(50))
    assert not report.failures, str(report)
    assert report.ran == 50


def test_answers_that_are_computed_ahead_are_the_same() -> None:
    here, ahead = (fuzz(opened(CpuEngine(exact=True)), SEED, range(12), processes=n) for n in (0, 1))
    assert here.largest == ahead.largest
    assert not ahead.failures


def test_a_case_is_the_same_whatever_was_drawn_before_it() -> None:
    assert draw(SEED, 7) == draw(SEED, 7)
    assert draw(SEED, 7) != draw(SEED, 8)
    assert draw(SEED, 7) != draw(SEED + 1, 7)


def test_everything_that_a_request_can_say_is_drawn() -> None:
    cases = [draw(SEED, number) for number in range(400)]
    assert {case.kind for case in cases} == set(Kind)
    assert {case.x.rank for case in cases} == {3, 4, 5}
    assert {case.dtype for case in cases} == {dtype for dtype in DType if dtype.is_floating} | {
        DType.INT8,
        DType.UINT8,
    }
    assert len({(case.x.layout, case.y.layout) for case in cases}) == 9
    assert len({case.epilogue.activation for case in cases}) == 10
    assert {case.beta != 0 for case in cases} == {case.bias is not None for case in cases} == {True, False}
    assert {case.numerics.tf32 for case in cases} == {case.whole for case in cases} == {True, False}
    assert any(case.conv.groups > 1 and case.w.dims[1] > 1 for case in cases)
    assert any(case.conv.pre_padding != case.conv.post_padding for case in cases)
    assert all(case.products <= MOST_PRODUCTS and case.result.size <= MOST_VALUES for case in cases)


# What the fuzzer is there to notice.


class Mistaken(CpuEngine):
    """The CPU engine with a mistake in what it reads back."""

    def __init__(self, mistake: Callable[[np.ndarray], None]) -> None:
        super().__init__()
        self._mistake = mistake

    def read(self, src: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
        values = super().read(src, into)
        self._mistake(values)
        return values


class Refusing(CpuEngine):
    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Any:
        raise UnsupportedGraph(engine="cpu", digest=graph.digest(), detail="it will not")


class WithoutBeta(CpuEngine):
    """Takes every scalar for 1."""

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        super().execute(plan, buffers, [1.0 for _ in scalars])


class Lazy(CpuEngine):
    """Leaves the result as it was."""

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        pass


def one_value_missing(values: np.ndarray) -> None:
    values.flat[values.size // 2] = np.nan if values.dtype.kind != "i" else 0


def computed_in_half(values: np.ndarray) -> None:
    if values.dtype in (np.float32, np.float64):
        values[...] = values.astype(np.float16)


def truncated(values: np.ndarray) -> None:
    """Half a percent off: less than the least of half types can tell, more than sums of theirs may be."""
    if values.dtype.kind == "f" or values.dtype.itemsize == 2:
        values[...] = (values.astype(np.float64) * 1.005).astype(values.dtype)


@pytest.mark.parametrize(
    ("engine", "least"),
    [
        (Mistaken(one_value_missing), 18),
        (Mistaken(computed_in_half), 5),
        (Mistaken(truncated), 14),
        (WithoutBeta(), 3),
        (Lazy(), 22),
        (Refusing(), 24),
    ],
    ids=["one value missing", "computed in half", "half a percent off", "scalars lost", "lazy", "refusing"],
)
def test_a_mistake_is_noticed(engine: CpuEngine, least: int) -> None:
    report = fuzz(opened(engine), SEED, range(24))
    assert len(report.failures) >= least
    number, text = next(iter(report.failures.items()))
    assert f"python -m tests.gpu.fuzz --seed {SEED} --only {number} --engine cpu" in text


def test_what_the_table_lets_an_engine_refuse_is_counted_not_failed() -> None:
    def table(engine: str, graph: OperationGraph) -> str | None:
        return f"{engine} and bytes" if any(t.dtype is DType.INT8 for t in graph.tensors) else None

    numbers = range(60)
    refusable = {n for n in numbers if table("cpu", draw(SEED, n).graph())}
    report = fuzz(opened(Refusing()), SEED, numbers, table=table)
    assert set(report.failures) == {*numbers} - refusable
    assert report.refused == {"cpu and bytes": len(refusable)}
    assert len(refusable) > 3


def test_what_the_table_lets_an_engine_refuse_and_it_does_not_is_counted_too() -> None:
    report = fuzz(opened(CpuEngine(exact=True)), SEED, range(5), table=lambda engine, graph: "anything")
    assert (report.ran, report.unrefused, report.refused) == (5, 5, {})


def test_nothing_that_is_drawn_may_be_refused_on_the_gpu() -> None:
    assert not [n for n in range(300) if may_refuse("cuda", draw(SEED, n).graph())]


def test_every_pair_occurs_in_few_rows() -> None:
    columns = ("ab", range(3), "xyz", range(5))
    rows = list(all_pairs(*columns))
    for a in range(4):
        for b in range(a):
            assert {(row[a], row[b]) for row in rows} == {(p, q) for p in columns[a] for q in columns[b]}
    assert 15 <= len(rows) <= 20


def opened(engine: CpuEngine) -> CpuEngine:
    engine.open()
    return engine
