"""What the CPU engine keeps, and how many threads of BLAS its plans may use."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cpu import CpuEngine, engine, measuring, transfer
from cudnn_actor.engines.cpu.fast.plan import FastPlan, FastProgram
from cudnn_actor.protocol import DType, GraphBuilder
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

from ..devices import EXACT, SESSIONS, factory

THREADS = 3


@contextlib.contextmanager
def opened(made: Any) -> Iterator[CpuEngine]:
    made.open()
    try:
        yield made
    finally:
        made.close()


def product(dtype: DType = DType.FLOAT32, channels: int = 3) -> OperationGraph:
    b = GraphBuilder()
    x, w = (b.input(name, (2, channels, 4, 4), dtype=dtype) for name in "xw")
    return b.build(y=b.conv(x, w)).body


def buffers_of(graph: OperationGraph) -> list[np.ndarray]:
    tensors = map(graph.tensor, graph.bound)
    return [np.ones(tensor.dims, tensor.dtype.numpy) for tensor in tensors]


@pytest.mark.parametrize("name", ["cpu", EXACT, SESSIONS])
def test_what_a_plan_was_measured_on_is_not_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, drawn = product(), list[weakref.ref[np.ndarray]]()
    draw = measuring.operands

    def noted(graph: OperationGraph) -> list[np.ndarray]:
        arrays = draw(graph)
        drawn.extend(map(weakref.ref, arrays))
        return arrays

    monkeypatch.setattr(engine, "operands", noted)
    with opened(factory(name)()) as made:
        plan = made.build(graph, workspace_limit=None)
        made.measure(plan, graph)
        gc.collect()
        assert len(drawn) == 3
        assert [each() for each in drawn] == [None] * 3


def test_other_plans_stay_bound_while_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    bind, bound = FastPlan.bind, list[object]()

    def noted(plan: FastPlan, *args: Any) -> Any:
        bound.append(plan)
        return bind(plan, *args)

    monkeypatch.setattr(FastPlan, "bind", noted)
    graph = product()
    buffers = buffers_of(graph)
    with opened(CpuEngine()) as made:
        one, other = (made.build(graph, workspace_limit=None) for _ in range(2))
        made.execute(one, buffers, ())
        made.measure(other, graph)
        made.execute(one, buffers, ())
    assert bound.count(one) == 1


@pytest.mark.parametrize(
    ("exact", "dtype", "channels", "threads"),
    [
        (False, DType.FLOAT32, 65, [1]),
        (False, DType.FLOAT32, 31, []),
        (False, DType.INT8, 3, [THREADS]),
        (True, DType.FLOAT32, 3, [THREADS]),
    ],
)
def test_blas_has_one_thread_only_where_large_products_run_side_by_side(
    exact: bool, dtype: DType, channels: int, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    @contextlib.contextmanager
    def noted(count: int) -> Iterator[None]:
        limits.append(count)
        yield

    monkeypatch.setattr(engine, "threads_of_blas", noted)
    graph = product(dtype, channels)
    with opened(CpuEngine(exact, THREADS)) as made:
        plan, buffers = made.build(graph, workspace_limit=None), buffers_of(graph)
        for _ in range(2):  # in the second one, these buffers are known
            made.execute(plan, buffers, ())
    assert limits == 2 * threads


def test_what_a_small_plan_does_not_take_is_refused_on_buffers_that_it_has_run_on() -> None:
    graph = product()
    buffers = buffers_of(graph)
    with opened(CpuEngine()) as made:
        plan = made.build(graph, workspace_limit=None)
        made.execute(plan, buffers, ())
        buffers[-1][:] = 0
        for given, scalars in ((buffers, (1.0,)), (buffers[:2], ())):
            with pytest.raises(EngineFailure, match="3 buffers and 0 scalars"):
                made.execute(plan, given, scalars)
        assert not buffers[-1].any()
        made.execute(plan, buffers, ())
        assert buffers[-1].all()


def test_an_error_of_a_run_is_the_same_on_buffers_that_a_small_plan_has_run_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("the test")

    graph = product()
    buffers = buffers_of(graph)
    with opened(CpuEngine()) as made:
        plan = made.build(graph, workspace_limit=None)
        monkeypatch.setattr(FastProgram, "run", fails)
        for _ in range(2):  # in the second one, these buffers are known
            with pytest.raises(EngineFailure, match="the test"):
                made.execute(plan, buffers, ())


def test_no_part_of_a_copy_goes_on_when_a_handler_has_interrupted_it(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, interrupted, ended = np.copyto, threading.Event(), list[int]()

    def copyto(dst: np.ndarray, src: np.ndarray) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            interrupted.set()
            raise KeyboardInterrupt
        interrupted.wait()
        copy(dst, src)
        ended.append(len(dst))

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(np, "copyto", copyto)
    array = np.zeros(8 << 20, np.uint8)
    with pytest.raises(KeyboardInterrupt):
        transfer.store(np.empty_like(array), array)
    assert ended == [2 << 20] * 3
