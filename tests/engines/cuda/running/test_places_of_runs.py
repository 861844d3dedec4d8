"""Runs of deployed models that come from the same places: which of them have their copies prepared."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cudnn_actor.broker.message_cache import Bound, CachedMessage
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.execution.executor import Executor
from cudnn_actor.execution.expected_runs import ExpectedRuns
from cudnn_actor.execution.model_runs import ModelPlaces, ModelRuns
from cudnn_actor.memory import Slot
from cudnn_actor.protocol import GraphBuilder
from cudnn_actor.protocol.types.tensor import TensorSpec

SIDE = 256


@pytest.fixture
def engine() -> Iterator[CpuEngine]:
    engine = CpuEngine()
    engine.open()
    yield engine
    engine.close()


def slot(number: int, array: np.ndarray) -> Slot:
    found = Slot(number, 1)
    found.binding, found.spec = array, TensorSpec.packed(array.shape, array.dtype)
    return found


@pytest.mark.parametrize(("rows", "prepared"), [(1, True), (SIDE, False)])
def test_copies_of_small_values_are_prepared_also_where_the_weights_are_large(
    engine: CpuEngine, rows: int, prepared: bool
) -> None:
    """The plan could run elsewhere, as its buffers are large together. To look for that in each run takes
    longer than to copy a row."""
    g = GraphBuilder()
    graph = g.build(y=g.matmul(g.input("x", (rows, SIDE)), g.input("w", (SIDE, SIDE))))
    names = [graph.names_of[uid] for uid in graph.body.bound]
    x, w = (np.random.default_rng(n).standard_normal((n, SIDE)).astype(np.float32) for n in (rows, SIDE))
    own = {"x": np.zeros_like(x), "w": w, "y": np.zeros_like(x)}
    executor: Executor[Any] = Executor(engine, cast(Any, None))
    runs = ModelRuns(executor, ExpectedRuns(executor, lambda: None), lambda: None, lambda *_: None)
    lowered = SimpleNamespace(buffers=names, outputs=["y"], graph=graph.body)
    cached = CachedMessage(cast(Any, None), cast(Any, lowered))
    y = np.zeros_like(x)
    places = ModelPlaces(
        bound=Bound(1, [slot(number, own[name]) for number, name in enumerate(names)], ()),
        sources=[(names.index("x"), x)],
        targets=[(names.index("y"), y)],
        slots=[],
        repeats=True,
    )
    found = runs.prepare(cached, engine.build(graph.body, workspace_limit=None), places)
    assert (found is not None, places.repeats) == (prepared, prepared)
    if found is not None:
        found.enqueue()
        np.testing.assert_allclose(y, x @ w, rtol=1e-3, atol=1e-3)
