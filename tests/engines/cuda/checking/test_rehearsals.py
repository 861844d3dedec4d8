"""Rehearsals of self-checks, on the host: what is rehearsed, once for each kind, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from cudnn_actor.engines.cuda.checking import rehearsal
from cudnn_actor.engines.cuda.checking.evaluated_reference import OnDevice, OnHost, OnHostInPart
from cudnn_actor.engines.cuda.checking.rehearsal import Rehearsals
from cudnn_actor.engines.cuda.checking.self_check import BuildContext
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.operations import Cumulative, ReductionMode
from cudnn_actor.protocol import GraphBuilder, OperationGraph
from cudnn_actor.protocol.types.dtypes import DTypeName

from ....patience import PATIENCE_S
from ...host_cuda import CUPY, Stream

DTYPES: tuple[DTypeName, ...] = ("float16", "float32", "float64")


pytestmark = pytest.mark.usefixtures("on_the_host")


@pytest.fixture
def rehearsals() -> Iterator[Rehearsals]:
    made = Rehearsals(lambda: BuildContext(None, Stream()))
    yield made
    made.close()


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[OperationGraph]:
    """The graphs whose rehearsals have begun."""
    found = SimpleQueue[OperationGraph]()

    def noted(graph: OperationGraph, context: BuildContext, place: type[OnDevice]) -> None:
        del context
        found.put(graph)
        assert place.xp.float64 is CUPY.float64

    monkeypatch.setattr(rehearsal, "rehearse", noted)
    return found


def rooted(rows: int, dtype: DTypeName = "float32", width: int = 512) -> OperationGraph:
    g = GraphBuilder()
    return g.build(y=g.sqrt(g.input("x", (rows, width), dtype))).body


LARGE = 1 << 14
"""Rows of a graph that is evaluated on the device."""


def test_each_kind_of_operation_is_rehearsed_once(
    rehearsals: Rehearsals, rehearsed: SimpleQueue[OperationGraph]
) -> None:
    first = rooted(8)
    rehearsals.ask([first, rooted(16)])
    rehearsals.ask([rooted(24), other := rooted(8, "float16")])
    found = {rehearsed.get(timeout=PATIENCE_S).digest() for _ in range(2)}
    assert found == {first.digest(), other.digest()}
    rehearsals.close()
    assert rehearsed.empty()


def test_what_is_evaluated_on_the_device_anyway_or_has_a_kernel_for_that_is_not_rehearsed(
    rehearsals: Rehearsals, rehearsed: SimpleQueue[OperationGraph]
) -> None:
    g = GraphBuilder()
    x, w = g.input("x", (1, 4, 8, 8), "float32"), g.input("w", (4, 4, 3, 3), "float32")
    whole = g.build(y=g.apply(Cumulative(x=g.input("z", (4096, 1024)), axis=0, mode=ReductionMode.SUM))).body
    rehearsals.ask([g.build(y=g.conv(x, w)).body, whole, last := rooted(8, "float16")])
    assert rehearsed.get(timeout=PATIENCE_S).digest() == last.digest()
    rehearsals.close()
    assert rehearsed.empty()


def test_a_large_graph_is_evaluated_on_the_device_once_its_kinds_have_been_rehearsed(
    rehearsals: Rehearsals, rehearsed: SimpleQueue[OperationGraph]
) -> None:
    large = rooted(LARGE)
    assert rehearsals.evaluator(large) is OnHostInPart
    rehearsals.ask([large])
    part = rehearsed.get(timeout=PATIENCE_S)
    assert 0 < part.tensors[0].spec.size <= 1 << 20, "of a large graph, a part"
    rehearsals.ask([rooted(8, "float16")])
    rehearsed.get(timeout=PATIENCE_S)
    rehearsals.close()  # the threads have ended
    assert rehearsals.evaluator(large) is OnDevice
    assert rehearsals.evaluator(rooted(8)) is OnHost


def test_a_build_that_a_run_waits_for_evaluates_a_part_on_the_host_all_the_same(
    rehearsals: Rehearsals, rehearsed: SimpleQueue[OperationGraph]
) -> None:
    """CuPy may have to compile what has not been rehearsed: other functions for other strides and dims."""
    builder, graph = CudaBuilder(0), rooted(1100)
    builder.rehearsals = rehearsals
    builder._context = BuildContext(None, Stream(), evaluator=rehearsals.evaluator)
    rehearsals.ask([graph])
    rehearsed.get(timeout=PATIENCE_S)
    rehearsals.close()  # the threads have ended
    assert rehearsals.evaluator(graph) is OnDevice
    plan = builder.build(graph, workspace_limit=None, effort="soon")
    assert plan.checked, "what stands for CuPy here has no sqrt"


def test_it_evaluates_on_the_device_what_another_build_has_evaluated_there(rehearsals: Rehearsals) -> None:
    g = GraphBuilder()  # no part of it is evaluated by itself, so it has no other place
    whole = g.build(y=g.apply(Cumulative(x=g.input("x", (4096, 1024)), axis=0, mode=ReductionMode.SUM))).body
    rehearsals.note(whole)
    rehearsals.note(rooted(LARGE))  # on the host, in part
    assert rehearsals.evaluator_soon(rooted(LARGE)) is OnHostInPart
    rehearsals.ready.update(rehearsal.kinds_of(rooted(LARGE)))
    rehearsals.note(rooted(LARGE))
    assert rehearsals.evaluator_soon(rooted(LARGE + 1)) is OnDevice
    assert rehearsals.evaluator_soon(rooted(LARGE, "float16")) is OnHostInPart
    assert rehearsals.evaluator_soon(rooted(1, width=LARGE * 512)) is OnHostInPart, "another dim is 1"


def test_what_could_not_be_rehearsed_is_evaluated_on_the_host(
    rehearsals: Rehearsals, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fails(graph: OperationGraph, context: BuildContext, place: type[OnDevice]) -> None:
        del graph, context, place
        failed.set()
        raise MemoryError

    monkeypatch.setattr(rehearsal, "rehearse", fails)
    rehearsals.ask([rooted(8)])
    assert failed.wait(PATIENCE_S)
    rehearsals.close()
    assert rehearsals.evaluator(rooted(LARGE)) is OnHostInPart


def test_rehearsals_pause_while_something_is_built(
    rehearsals: Rehearsals, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, looked_up = SimpleQueue[None](), SimpleQueue[Any]()
    may_look = threading.Event()

    def evaluates(graph: OperationGraph, context: BuildContext, place: type[OnDevice]) -> None:
        del graph, context
        arrived.put(None)
        assert may_look.wait(PATIENCE_S)
        looked_up.put(place.xp.float64)

    looks = SimpleQueue[None]()
    await_pause = Rehearsals.await_pause

    def noted(self: Rehearsals) -> None:
        looks.put(None)
        await_pause(self)

    monkeypatch.setattr(rehearsal, "rehearse", evaluates)
    monkeypatch.setattr(Rehearsals, "await_pause", noted)
    rehearsals.ask([rooted(8)])
    arrived.get(timeout=PATIENCE_S)
    looks.get(timeout=PATIENCE_S)
    with rehearsals.pause():
        may_look.set()
        looks.get(timeout=PATIENCE_S)  # at the function
        rehearsals.ask([rooted(8, "float16")])
        assert looked_up.empty()
        assert arrived.empty()
    for _ in range(2):
        assert looked_up.get(timeout=PATIENCE_S) is CUPY.float64


def test_what_goes_wrong_in_a_rehearsal_does_not_end_its_thread(
    rehearsals: Rehearsals, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = SimpleQueue[OperationGraph]()

    def fails(graph: OperationGraph, context: BuildContext, place: type[OnDevice]) -> None:
        del context, place
        failed.put(graph)
        raise MemoryError

    monkeypatch.setattr(rehearsal, "rehearse", fails)
    monkeypatch.setattr(rehearsal, "_MOST_THREADS", 1)
    rehearsals.ask(rooted(8, dtype) for dtype in DTYPES)
    for _ in DTYPES:
        failed.get(timeout=PATIENCE_S)


def test_closing_abandons_a_rehearsal_that_pauses(
    rehearsals: Rehearsals, rehearsed: SimpleQueue[OperationGraph]
) -> None:
    with rehearsals.pause():
        rehearsals.ask(rooted(8, dtype) for dtype in DTYPES)
        rehearsals.close()
        assert rehearsed.empty()
        rehearsals.close()
