"""The thread that builds plans: which job is next, what counts as getting on, how it ends."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from cudnn_actor import BufferRef, ConvFwd, TensorSpec
from cudnn_actor.engines.base import StickyError
from cudnn_actor.execution.building import BuildThread, Job, Result, close_all
from cudnn_actor.execution.planning import less_workspace
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.lowering import lower

from ..patience import PATIENCE_S
from .rigs import ONE_BY_ONE
from .workshops import Workshop, WorkshopBuilder


class Bench:
    """A build thread of the test's, and what comes out of it."""

    def __init__(self, workshop: Workshop, *, newest_first: bool = False) -> None:
        self.workshop = workshop
        self.nudged = threading.Semaphore(0)
        self.thread = BuildThread(
            WorkshopBuilder(workshop), self.nudged.release, lambda _: None, newest_first=newest_first
        )
        self.thread.start()

    def result(self) -> Result:
        assert self.nudged.acquire(timeout=PATIENCE_S)
        return next(self.thread.collect())

    def until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < deadline


@contextmanager
def bench(*, newest_first: bool = False) -> Iterator[Bench]:
    made = Bench(Workshop(), newest_first=newest_first)
    try:
        yield made
    finally:
        made.thread.close()
        made.workshop.building.open()
        made.workshop.tuning.open()


def job(width: int, *, tune: bool = False) -> Job:
    wide, one = [TensorSpec.packed((1, 1, 1, size)) for size in (width, 1)]
    x, w, y = [BufferRef(slot=n, generation=1, spec=s, device="cpu") for n, s in enumerate((wide, one, wide))]
    graph = lower(ConvFwd(x=x, w=w, y=y, conv=ONE_BY_ONE)).graph
    return Job(graph.digest(), graph, None, tune)


@pytest.mark.parametrize(
    ("newest_first", "order"), [(False, [1, 3, 2, 4]), (True, [1, 3, 4, 2])], ids=["oldest", "newest"]
)
def test_a_build_that_is_hurried_is_the_next(newest_first: bool, order: list[int]) -> None:
    with bench(newest_first=newest_first) as made:
        with made.workshop.building.closed():
            made.thread.ask(job(1))
            made.workshop.building.wait_for_arrival()
            for width in (2, 3, 4):
                made.thread.ask(job(width))
            made.thread.hurry(job(3).digest)
            made.thread.hurry("a graph that nobody has asked for")
        assert [made.result().job for _ in order] == [job(width) for width in order]


def test_each_candidate_is_progress_and_a_thread_without_work_never_hangs() -> None:
    with bench() as made:
        gate = made.workshop.tuning
        made.until(lambda: made.thread.working_since() is None)
        gate.catch_one()
        made.thread.ask(job(1, tune=True))
        gate.wait_for_arrival()
        first = made.thread.working_since()
        gate.release_caught()
        gate.wait_for_arrival()
        second = made.thread.working_since()
        assert first is not None
        assert second is not None
        assert second > first
        gate.open()
        made.result()
        made.until(lambda: made.thread.working_since() is None)


def test_so_is_each_plan_that_a_build_tries() -> None:
    with bench() as made, made.workshop.trying.closed():
        with made.workshop.building.closed():
            made.thread.ask(job(1))
            made.workshop.building.wait_for_arrival()
            first = made.thread.working_since()
        made.workshop.trying.wait_for_arrival()
        second = made.thread.working_since()
        assert first is not None
        assert second is not None
        assert second > first


def test_a_job_counts_from_when_it_is_asked_for() -> None:
    with bench() as made, made.workshop.building.closed():
        made.until(lambda: made.thread.working_since() is None)
        made.thread.ask(job(1))
        assert made.thread.working_since() is not None


def test_tuning_that_nobody_waits_for_any_more_ends_at_the_next_candidate() -> None:
    with bench() as made, made.workshop.tuning.closed():
        made.thread.ask(job(1, tune=True))
        made.workshop.tuning.wait_for_arrival()
        made.thread.close()
        made.workshop.tuning.open()
        assert isinstance(made.result().outcome, Exception)


def test_a_tuning_that_is_abandoned_ends_at_the_next_candidate_and_the_next_job_is_done() -> None:
    with bench() as made, made.workshop.tuning.closed():
        unwanted = job(1, tune=True)
        made.thread.ask(unwanted)
        made.workshop.tuning.wait_for_arrival()
        made.thread.ask(job(2))
        made.thread.abandon(unwanted)
        made.workshop.tuning.open()
        assert isinstance(made.result().outcome, Exception)
        assert made.workshop.tuning.passed == 1
        assert made.result().job == job(2)


def test_a_tuning_that_is_abandoned_before_it_begins_has_no_result() -> None:
    with bench() as made:
        with made.workshop.building.closed():
            made.thread.ask(job(1))
            made.workshop.building.wait_for_arrival()
            unwanted = job(2, tune=True)
            made.thread.ask(unwanted)
            made.thread.ask(job(3))
            made.thread.abandon(unwanted)
        assert [made.result().job for _ in range(2)] == [job(1), job(3)]
        assert made.workshop.tuning.passed == 0


class WatchedGraph(OperationGraph, frozen=True, kw_only=True, weakref=True):
    """One whose end a test can see."""


def test_a_thread_that_waits_for_work_keeps_no_graph_of_the_last() -> None:
    with bench() as made:
        plain = job(1)
        graph = WatchedGraph(tensors=plain.graph.tensors, operations=plain.graph.operations)
        seen = weakref.ref(graph)
        made.thread.ask(plain._replace(graph=graph))
        del graph
        made.result()
        made.until(lambda: made.thread.working_since() is None)
        assert seen() is None


def test_a_sticky_error_ends_the_thread_and_says_what_it_was_at() -> None:
    with bench() as made:
        made.workshop.failures = [StickyError("DEAD", "the test says so")]
        made.thread.ask(job(1))
        result = made.result()
        assert result.job is None
        assert isinstance(result.outcome, StickyError)
        assert made.thread.digest_in_work == job(1).digest


def test_closing_waits_for_the_build_in_work_only_as_long_as_it_is_told() -> None:
    with bench() as made, made.workshop.building.closed():
        made.thread.ask(job(1))
        made.workshop.building.wait_for_arrival()
        made.thread.close(wait_s=0.01)


def test_several_threads_are_closed_together() -> None:
    """The build of the first ends only once the second has ended."""

    class Last(WorkshopBuilder):
        def close(self) -> None:
            busy.workshop.building.open()

    with bench() as busy:
        busy.workshop.building.shut()
        busy.thread.ask(job(1))
        busy.workshop.building.wait_for_arrival()
        idle = BuildThread(Last(Workshop()), lambda: None, lambda _: None)
        idle.start()
        close_all([busy.thread, idle], PATIENCE_S)
        assert busy.result().job is not None


@pytest.mark.parametrize(
    ("needed", "limit", "next_limit"),
    [(100, None, 99), (100, 100, 99), (1, None, 0), (0, None, None), (100, 99, None), (0, 0, None)],
)
def test_the_next_plan_must_need_less_than_the_one_for_which_there_was_no_room(
    needed: int, limit: int | None, next_limit: int | None
) -> None:
    assert less_workspace(needed, limit) == next_limit
