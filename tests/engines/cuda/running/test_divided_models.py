"""Runs of deployed models with divided plans, between buffers of their callers: what is prepared of weights
is shared by all of them, and renewed for all of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cudnn_actor.broker.message_cache import Bound, CachedMessage
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.execution import model_runs
from cudnn_actor.execution.executor import Executor
from cudnn_actor.execution.expected_runs import ExpectedRuns
from cudnn_actor.execution.model_runs import ModelPlaces, ModelRuns
from cudnn_actor.memory import Slot

from .test_divided_plans import OnHost, engine, padded_sum, plan_of

__all__ = ["engine"]

_OFTEN = 8
"""Runs after which copies come to an end."""
_KEPT = 4 * 3 * 8
"""Bytes of the weight with zeros behind it."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runs, "_OFTEN", _OFTEN)


class Deployed:
    """A model that adds a weight, which its plan pads with zeros, to its input."""

    def __init__(self, on: Any, plan: CudaPlan) -> None:
        self.engine, self.plan, self.copies = on, plan, 0
        on.direct_copy = self.direct_copy
        executor: Executor[Any] = Executor(on, cast(Any, None))
        self.expected = ExpectedRuns(executor, lambda: None)
        self.runs = ModelRuns(executor, self.expected, lambda: None, lambda *_: None)
        graph = padded_sum()
        names = {graph.ports[place].uid: name for name, place in graph.places.items()}
        self.names = [names[uid] for uid in graph.body.bound]
        self.own = {name: slot(number, name) for number, name in enumerate(self.names)}
        self.bound = Bound(1, list(self.own.values()), ())
        lowered = SimpleNamespace(buffers=self.names, outputs=["y"], graph=graph.body)
        self.cached = CachedMessage(cast(Any, None), cast(Any, lowered))

    def direct_copy(self, src: OnHost, dst: OnHost) -> Any:
        def copy() -> None:
            self.copies += 1
            dst.owner[...] = src.owner

        return copy

    def between(self, x: Slot, y: Slot) -> ModelPlaces:
        places = [self.names.index(name) for name in "xy"]
        return ModelPlaces(
            bound=self.bound, sources=[(places[0], x)], targets=[(places[1], y)], slots=[x, y], repeats=True
        )

    @property
    def w(self) -> np.ndarray:
        return array_of(self.own["w"])

    def write(self, w: np.ndarray) -> None:
        self.expected.note_writes([self.own["w"]])
        self.w[...] = w

    def run(self, places: ModelPlaces, times: int = 1, plan: CudaPlan | None = None) -> None:
        """Run it, and check each answer."""
        (_, x), (_, y) = places.sources[0], places.targets[0]
        assert isinstance(x, Slot)
        assert isinstance(y, Slot)
        for _ in range(times):
            array_of(x)[...] += 1.0
            prepared = self.runs.prepare(self.cached, plan or self.plan, places)
            assert prepared is not None
            prepared.enqueue()
            wide = np.pad(self.w, ((0, 0), (0, 2)))
            np.testing.assert_array_equal(array_of(y), array_of(x) + wide)


def slot(number: int, name: str) -> Slot:
    """A buffer for the input, the weight or the output."""
    found = Slot(number, 1)
    values = np.random.default_rng(number).normal(size=(3, 6) if name == "w" else (3, 3, 8))
    found.binding = OnHost(values.astype(np.float32))
    found.spec = found.binding.spec
    return found


def array_of(of: Slot) -> np.ndarray:
    array: np.ndarray = of.binding.owner
    return array


def places_of(model: Deployed, sets: Sequence[int]) -> list[ModelPlaces]:
    return [model.between(slot(2 * each, "x"), slot(2 * each + 1, "y")) for each in sets]


@contextmanager
def no_garbage_collected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_runs_on_callers_buffers_share_what_is_kept_and_all_read_a_weight_that_was_written(
    engine: Any,
) -> None:
    model = Deployed(engine, plan_of(padded_sum()))
    sets = places_of(model, (10, 20, 30))
    for places in sets[:2]:
        model.run(places, _OFTEN + 2)
    copies = model.copies
    for places in sets[:2]:
        model.run(places)
    assert model.copies == copies, "these run on their callers' buffers"
    model.run(sets[2], 2)
    assert model.copies > copies, "these do not yet"
    assert engine.converted_bytes == _KEPT
    for factor in (2, 3):
        model.write(model.w * factor)
        for places in (*sets, *reversed(sets)):
            model.run(places)
    assert engine.converted_bytes == _KEPT
    model.write(model.w + 1)
    del sets[0]  # before it has run again: another one prepares the weight
    for places in sets:
        model.run(places)


def test_a_plan_that_replaces_another_comes_to_run_on_callers_buffers_too(engine: Any) -> None:
    model = Deployed(engine, plan_of(padded_sum()))
    (places,) = places_of(model, (10,))
    model.run(places, _OFTEN + 2)
    better = plan_of(padded_sum())
    for turn in range(2):
        model.write(model.w + turn + 1)
        before = model.copies
        model.run(places, _OFTEN, better)
        assert (model.copies > before) == (turn == 0)
    assert engine.converted_bytes == _KEPT


@pytest.mark.parametrize("written", [False, True])
def test_a_model_that_is_gone_leaves_nothing_to_the_garbage_collector(engine: Any, written: bool) -> None:
    """It would destroy plans on whatever thread it runs."""
    model = Deployed(engine, plan_of(padded_sum()))
    sets = places_of(model, (10, 20))
    for places in sets:
        model.run(places, _OFTEN + 2)
    if written:
        model.write(model.w + 1)
    plan, weight = weakref.ref(model.plan), weakref.ref(model.own["w"].binding)
    with no_garbage_collected():
        del engine.direct_copy, model, sets, places
        assert (plan(), weight()) == (None, None)
        assert engine.converted_bytes == 0


def test_neither_does_an_engine_that_is_gone_while_the_model_stays(engine: Any) -> None:
    model = Deployed(engine, plan_of(padded_sum()))
    (places,) = places_of(model, (10,))
    model.run(places, _OFTEN + 2)
    plan, kept = weakref.ref(model.plan), model.cached
    with no_garbage_collected():
        del engine.direct_copy, model, places
        assert plan() is None
    assert kept.bound is None
