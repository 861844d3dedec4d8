"""Rehearsals of self-checks, on the host: what is rehearsed, once for each kind, and who waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from cudnn_actor.engines.cuda.checking import evaluated_reference, rehearsal, self_check_memory
from cudnn_actor.engines.cuda.checking.rehearsal import Rehearsals
from cudnn_actor.engines.cuda.checking.self_check import BuildContext
from cudnn_actor.engines.cuda.library import libraries
from cudnn_actor.protocol import GraphBuilder, OperationGraph
from cudnn_actor.protocol.types.dtypes import DTypeName

from .host_cuda import CUPY, Stream

PATIENCE_S = 60.0
DTYPES: tuple[DTypeName, ...] = ("float16", "float32", "float64")


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in (("cupy", CUPY), ("runtime", CUPY.cuda.runtime)):
        monkeypatch.setitem(vars(libraries.libraries()), name, module)
    yield
    for function in (self_check_memory._kernel, self_check_memory._module, evaluated_reference._product):
        function.cache_clear()


@pytest.fixture
def rehearsals() -> Iterator[Rehearsals]:
    made = Rehearsals(lambda: BuildContext(None, Stream()))
    yield made
    made.close()


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[OperationGraph]:
    """The graphs that have been rehearsed, in order; the last may be under way."""
    found: list[OperationGraph] = []
    rehearse = rehearsal._rehearse

    def noted(graph: OperationGraph, context: BuildContext) -> None:
        found.append(graph)
        rehearse(graph, context)

    monkeypatch.setattr(rehearsal, "_rehearse", noted)
    return found


def rooted(rows: int, dtype: DTypeName = "float32") -> OperationGraph:
    g = GraphBuilder()
    return g.build(y=g.sqrt(g.input("x", (rows, 512), dtype))).body


LARGE = 1 << 14
"""Rows of a graph that is evaluated on the device."""


def wait(rehearsals: Rehearsals, graph: OperationGraph) -> None:
    """Until what was asked for has ended."""
    waiting = threading.Thread(target=rehearsals.wait_for, args=(graph,))
    waiting.start()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_each_kind_of_operation_is_rehearsed_once(
    rehearsals: Rehearsals, rehearsed: list[OperationGraph]
) -> None:
    first = rooted(8)
    rehearsals.ask([first, rooted(16)])
    rehearsals.ask([rooted(24), other := rooted(8, "float16")])
    wait(rehearsals, rooted(LARGE))
    wait(rehearsals, rooted(LARGE, "float16"))
    assert sorted(each.digest() for each in rehearsed) == sorted([first.digest(), other.digest()])


def test_what_is_evaluated_on_the_device_anyway_or_has_a_kernel_for_that_is_not_rehearsed(
    rehearsals: Rehearsals, rehearsed: list[OperationGraph]
) -> None:
    g = GraphBuilder()
    x, w = g.input("x", (1, 4, 8, 8), "float32"), g.input("w", (4, 4, 3, 3), "float32")
    rehearsals.ask([g.build(y=g.conv(x, w)).body, rooted(LARGE)])
    wait(rehearsals, rooted(LARGE))
    assert not rehearsed


def test_a_check_waits_for_the_rehearsal_of_its_operations(
    rehearsals: Rehearsals, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow(graph: OperationGraph, context: BuildContext) -> None:
        del graph, context
        begun.set()
        assert may_end.wait(PATIENCE_S)

    monkeypatch.setattr(rehearsal, "_rehearse", slow)
    rehearsals.ask([rooted(8)])
    assert begun.wait(PATIENCE_S)
    rehearsals.wait_for(rooted(16))  # evaluated on the host: it needs no functions of CuPy
    rehearsals.wait_for(rooted(LARGE, "float16"))  # nobody has asked for these
    waiting = threading.Thread(target=rehearsals.wait_for, args=(rooted(LARGE),))
    waiting.start()
    may_end.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_what_goes_wrong_in_a_rehearsal_ends_neither_the_thread_nor_the_wait(
    rehearsals: Rehearsals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(graph: OperationGraph, context: BuildContext) -> None:
        raise MemoryError

    monkeypatch.setattr(rehearsal, "_rehearse", fails)
    monkeypatch.setattr(rehearsal, "_LONGEST_WAIT_S", PATIENCE_S)
    rehearsals.ask([rooted(8), rooted(8, "float16")])
    wait(rehearsals, rooted(LARGE))
    wait(rehearsals, rooted(LARGE, "float16"))


def test_closed_rehearsals_wait_for_nothing(rehearsals: Rehearsals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_LONGEST_WAIT_S", PATIENCE_S)
    rehearsals.ask(rooted(8, dtype) for dtype in DTYPES)
    rehearsals.close()
    wait(rehearsals, rooted(LARGE))
    rehearsals.close()
