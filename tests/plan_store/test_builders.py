"""A builder behind a store: what is kept is not built again, and what is kept wrongly harms nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.typing import EventDict

from cudnn_actor.engines.base import (
    Builder,
    Effort,
    EngineFailure,
    Plan,
    ProgressCallback,
    StickyError,
    unheard,
)
from cudnn_actor.engines.cpu.exact.compiler import compile_plan
from cudnn_actor.plan_store.builders import NotStored, RestoringBuilder, StoringBuilder
from cudnn_actor.plan_store.plan_file import PlanKey
from cudnn_actor.plan_store.store import PlanStore
from cudnn_actor.protocol import UnsupportedGraph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

from .kept_plans import GraphBuilder, graph, plan

GRAPH = graph()


def key_of(builder: GraphBuilder, limit: int | None = None) -> PlanKey:
    return PlanKey(graph=GRAPH.digest(), fingerprint=builder.fingerprint, workspace_limit=limit)


def test_a_builder_behind_a_store_is_a_builder(store: PlanStore) -> None:
    inner = GraphBuilder()
    builder: Builder = StoringBuilder(store, inner)
    builder.open()
    assert inner.is_open
    assert builder.fingerprint == inner.fingerprint
    made = builder.build(GRAPH, workspace_limit=None)
    data = builder.export(made)
    assert data is not None
    assert builder.restore(GRAPH, data).tag == made.tag
    builder.close()
    assert not inner.is_open


def test_the_second_process_restores_what_the_first_has_built(store: PlanStore) -> None:
    first, second = GraphBuilder(), GraphBuilder()
    built = StoringBuilder(store, first).build(GRAPH, workspace_limit=None)
    restored = StoringBuilder(store, second).build(GRAPH, workspace_limit=None)
    assert (first.work, second.work) == (["build"], ["restore"])
    assert (restored.tag, restored.workspace) == (built.tag, built.workspace)
    assert restored.tag == compile_plan(GRAPH, None).tag


def test_another_library_and_another_limit_build_their_own(store: PlanStore) -> None:
    StoringBuilder(store, GraphBuilder()).build(GRAPH, workspace_limit=None)
    newer, modest = GraphBuilder("numpy of next year"), GraphBuilder()
    StoringBuilder(store, newer).build(GRAPH, workspace_limit=None)
    StoringBuilder(store, modest).build(GRAPH, workspace_limit=1 << 20)
    assert (newer.work, modest.work) == (["build"], ["build"])


def test_another_library_or_device_and_another_limit_are_tuned_anew(store: PlanStore) -> None:
    StoringBuilder(store, GraphBuilder()).tune(GRAPH, workspace_limit=None, progress=unheard)
    newer, other, modest = GraphBuilder("numpy of next year"), GraphBuilder("numpy on a gpu"), GraphBuilder()
    for builder, limit in ((newer, None), (other, None), (modest, 1 << 20)):
        StoringBuilder(store, builder).tune(GRAPH, workspace_limit=limit, progress=unheard)
        assert builder.work == ["tune"]


def test_what_only_asks_the_store_never_measures(store: PlanStore) -> None:
    asks, tunes = GraphBuilder(), GraphBuilder()
    kept = RestoringBuilder(store, asks)
    with pytest.raises(NotStored):
        kept.tune(GRAPH, workspace_limit=None, progress=unheard)
    StoringBuilder(store, tunes).build(GRAPH, workspace_limit=None)
    with pytest.raises(NotStored):
        kept.tune(GRAPH, workspace_limit=None, progress=unheard)
    StoringBuilder(store, tunes).tune(GRAPH, workspace_limit=None, progress=unheard)
    kept.tune(GRAPH, workspace_limit=None, progress=unheard)
    assert (tunes.work, asks.work) == (["build", "tune"], ["restore"])


def test_a_tuned_plan_serves_builds_and_later_tunings(store: PlanStore) -> None:
    first, second = GraphBuilder(), GraphBuilder()
    told: list[str] = []
    StoringBuilder(store, first).tune(
        GRAPH, workspace_limit=None, progress=lambda done, of, what: told.append(what)
    )
    assert told == ["the only one"]
    behind = StoringBuilder(store, second)
    behind.build(GRAPH, workspace_limit=None)
    behind.tune(GRAPH, workspace_limit=None, progress=unheard)
    assert (first.work, second.work) == (["tune"], ["restore", "restore"])


def test_a_plan_that_was_only_built_is_tuned_when_that_is_asked_for(store: PlanStore) -> None:
    builder = GraphBuilder()
    behind = StoringBuilder(store, builder)
    behind.build(GRAPH, workspace_limit=None)
    behind.tune(GRAPH, workspace_limit=None, progress=unheard)
    assert builder.work == ["build", "tune"]
    kept = store.load(key_of(builder))
    assert kept is not None
    assert kept.tuned


def test_a_plan_that_the_library_refuses_is_said_built_again_and_replaced(
    store: PlanStore, logs: list[EventDict]
) -> None:
    builder = GraphBuilder()
    store.save(key_of(builder), plan(b"what the library does not know", tuned=True))
    StoringBuilder(store, builder).build(GRAPH, workspace_limit=None)
    assert builder.work == ["build"]
    assert [entry["event"] for entry in logs] == ["plan_store.bad_file"]
    assert "BAD_PLAN" in logs[0]["reason"]
    StoringBuilder(store, builder).build(GRAPH, workspace_limit=None)
    assert builder.work == ["build", "restore"]


def test_a_plan_whose_restoring_kills_the_context_is_not_met_again(store: PlanStore) -> None:
    builder = GraphBuilder()
    behind = StoringBuilder(store, builder)
    behind.build(GRAPH, workspace_limit=None)
    builder.refuses = StickyError("DEAD", "restoring it was too much")
    with pytest.raises(StickyError):
        behind.build(GRAPH, workspace_limit=None)
    assert store.load(key_of(builder)) is None


def test_a_plan_that_cannot_be_exported_serves_and_is_not_kept(
    store: PlanStore, logs: list[EventDict]
) -> None:
    builder = GraphBuilder()
    builder.refuses = EngineFailure("NOT_SUPPORTED", "no such export")
    made = StoringBuilder(store, builder).build(GRAPH, workspace_limit=None)
    assert made.tag == compile_plan(GRAPH, None).tag
    assert [entry["event"] for entry in logs] == ["plan_store.not_exported"]
    assert store.load(key_of(builder)) is None


class KeepsNothing(GraphBuilder):
    def export(self, plan: object) -> None:
        return None


def test_a_plan_that_is_not_to_be_kept_is_not_kept(store: PlanStore, logs: list[EventDict]) -> None:
    builder = KeepsNothing()
    StoringBuilder(store, builder).build(GRAPH, workspace_limit=None)
    assert not Path(store.directory).exists()
    assert logs == []


class RefusesAll(GraphBuilder):
    def build(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: ProgressCallback = unheard,
        effort: Effort = "best",
    ) -> Plan:
        raise UnsupportedGraph(engine="cpu", digest=GRAPH.digest(), detail="as told")


def test_what_cannot_be_built_raises_as_it_does_without_a_store(store: PlanStore) -> None:
    with pytest.raises(UnsupportedGraph):
        StoringBuilder(store, RefusesAll()).build(GRAPH, workspace_limit=None)


def test_a_store_that_cannot_be_used_changes_nothing_for_the_builder(tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file")
    builder = GraphBuilder()
    behind = StoringBuilder(PlanStore(tmp_path / "plans"), builder)
    for _ in range(2):
        assert behind.build(GRAPH, workspace_limit=None).tag == compile_plan(GRAPH, None).tag
    assert builder.work == ["build", "build"]
