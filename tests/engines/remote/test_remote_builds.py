"""Plans from another process are as good as plans from this one, and so are its errors."""

from __future__ import annotations

import gc
import os
import signal
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor.actors.logs import speaking_for
from cudnn_actor.engines.base import Builder, EngineFailure, blamed_operations
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.remote import RemoteBuilder
from cudnn_actor.protocol import OutOfMemory, TensorSpec, UnsupportedGraph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

from ...patience import PATIENCE_S
from .conftest import NewBuilder, processes
from .craft import Craft, Player, Stage, graph, maker_of, wait_for_exit

HERE = os.getpid()
GRAPH = graph()


def starting(builder: RemoteBuilder, stage: Stage, *commands: str) -> Player:
    """The first process, which is starting, told what to do at its steps."""
    assert not builder.wait_ready(0.0)
    return stage.enter(*commands)


def ready(builder: RemoteBuilder, stage: Stage, *commands: str) -> Player:
    """The child that builds from here on, told what to do at its steps."""
    player = starting(builder, stage, "go", *commands)
    assert builder.wait_ready(PATIENCE_S)
    player.at("open")
    return player


def build(builder: RemoteBuilder, size: int = 4) -> int:
    """Where a plan was built."""
    return maker_of(builder.build(graph(size), workspace_limit=None))


def test_what_an_open_builder_has_is_frozen_in_its_process(builder: RemoteBuilder, stage: Stage) -> None:
    ready(builder, stage, "look")
    with pytest.raises(EngineFailure) as caught:
        build(builder)
    assert caught.value.detail == "they do not"


def test_a_plan_is_built_in_the_other_process_and_runs_in_this_one(
    builder: RemoteBuilder, stage: Stage
) -> None:
    player = ready(builder, stage, "go")
    a_builder: Builder = builder
    plan = a_builder.build(GRAPH, workspace_limit=None)
    assert maker_of(plan) == player.at("build") != HERE
    engine, spec = CpuEngine(exact=True), TensorSpec.packed((1, 1, 4, 4))
    engine.open()
    engine.prepare(plan)
    x, y = np.full(spec.dims, 3, np.float32), np.zeros(spec.dims, np.float32)
    engine.execute(plan, [x, np.full((1, 1, 1, 1), 2, np.float32), y], [1.0] * len(GRAPH.scalars))
    assert (y == 6).all()
    engine.close()


def exported(graph: OperationGraph = GRAPH) -> bytes:
    """A plan that this process has built, as bytes."""
    elsewhere = Craft()
    data = elsewhere.export(elsewhere.build(graph, workspace_limit=None))
    assert data is not None
    return data


def test_there_is_no_other_process_before_the_first_build(
    builder: RemoteBuilder, stage: Stage, thread: ThreadPoolExecutor
) -> None:
    before = processes()
    plan = builder.restore(GRAPH, exported())
    assert builder.export(plan) is not None
    assert processes() == before
    made = thread.submit(build, builder)
    pid = stage.enter("go", "go").at("open")
    assert processes() - before == {str(pid)}
    assert made.result(PATIENCE_S) == pid


def test_a_builder_that_is_never_asked_starts_no_process(new_builder: NewBuilder) -> None:
    before = processes()
    builder = new_builder()
    assert processes() == before
    builder.close()


def test_no_plan_is_built_here_while_the_other_process_starts(
    builder: RemoteBuilder, stage: Stage, thread: ThreadPoolExecutor
) -> None:
    made = thread.submit(build, builder)
    player = stage.enter()
    pid = player.at("open")  # and stays there
    assert not made.done()
    player.told("go", "go")
    assert made.result(PATIENCE_S) == pid != HERE


def test_builds_that_are_expected_find_the_other_process_started(
    builder: RemoteBuilder, stage: Stage
) -> None:
    builder.expect_builds()
    pid = stage.enter("go", "go").at("open")
    assert build(builder) == pid


def test_a_process_that_has_built_its_share_ends_and_the_next_build_is_anothers(
    new_builder: NewBuilder, stage: Stage, thread: ThreadPoolExecutor, logs: list[EventDict]
) -> None:
    builder = new_builder(renew_after=2)
    first = ready(builder, stage, "go", "go")
    assert build(builder, 1) == build(builder, 2) == first.at("build")
    wait_for_exit(first.pid)
    made = thread.submit(build, builder, 3)
    second = stage.enter("go", "go")
    assert made.result(PATIENCE_S) == second.at("open") != first.pid
    (said,) = [entry for entry in logs if entry["event"] == "builder.renewed"]
    assert (said["log_level"], said["pid"], said["after"]) == ("info", first.pid, 2)
    assert not [entry for entry in logs if entry["event"] == "builder.died"]


def test_a_build_tells_what_it_tries(builder: RemoteBuilder, stage: Stage) -> None:
    told: list[tuple[int, int, str]] = []

    def progress(done: int, of: int, what: str) -> None:
        told.append((done, of, what))

    ready(builder, stage, "go")
    builder.build(GRAPH, workspace_limit=None, progress=progress)
    assert told == [(0, 0, "the only plan")]


def test_tuning_waits_for_the_other_process_and_tells_how_far_it_is(
    builder: RemoteBuilder, stage: Stage, thread: ThreadPoolExecutor
) -> None:
    told: list[tuple[int, int, str]] = []

    def progress(done: int, of: int, what: str) -> None:
        told.append((done, of, what))

    tuned = thread.submit(builder.tune, GRAPH, workspace_limit=None, progress=progress)
    player = stage.enter()
    player.at("open")
    player.told("go", "go", "go", "go")
    assert maker_of(tuned.result(PATIENCE_S)) == player.at("tune") != HERE
    assert told == [(number, 3, f"candidate {number}") for number in range(3)]


def test_a_refusal_comes_with_all_its_facts(builder: RemoteBuilder, stage: Stage) -> None:
    ready(builder, stage, "unsupported", "go")
    with pytest.raises(UnsupportedGraph) as caught:
        builder.build(GRAPH, workspace_limit=None)
    refusal = caught.value
    assert (refusal.engine, refusal.detail, refusal.reproduce) == ("craft", "not here", "token")
    assert build(builder) != HERE


def test_the_limit_on_workspace_goes_with_the_request(builder: RemoteBuilder, stage: Stage) -> None:
    ready(builder, stage, "go")
    with pytest.raises(OutOfMemory) as caught:
        builder.build(GRAPH, workspace_limit=0)
    assert caught.value.limit == 0
    assert caught.value.requested > 0


@pytest.mark.parametrize(
    ("command", "kind", "text"),
    [
        ("failure", EngineFailure, "CRAFT_FAILED: as told"),
        ("bug", EngineFailure, "ZeroDivisionError: of the library's own"),
        ("memory", MemoryError, "the device has no room"),
    ],
)
def test_a_failure_comes_as_it_is_and_the_next_build_goes_there_again(
    builder: RemoteBuilder, stage: Stage, command: str, kind: type[Exception], text: str
) -> None:
    player = ready(builder, stage, command, "go")
    with pytest.raises(kind, match=text) as caught:
        builder.build(GRAPH, workspace_limit=None)
    assert type(caught.value) is kind
    assert blamed_operations(caught.value) == (() if command == "bug" else (0,))
    player.at("build")
    assert build(builder) == player.at("build")


@pytest.mark.parametrize("command", ["alien", "mute", "unexportable"])
def test_a_plan_that_does_not_travel_is_built_here(
    builder: RemoteBuilder, stage: Stage, command: str
) -> None:
    ready(builder, stage, command, "go")
    assert build(builder) == HERE
    assert build(builder) != HERE


def test_exporting_a_plan_gives_the_bytes_that_it_came_as(builder: RemoteBuilder, stage: Stage) -> None:
    local = builder.restore(GRAPH, exported())
    player = ready(builder, stage, "go")
    plan = builder.build(GRAPH, workspace_limit=None)
    data = builder.export(plan)
    assert data is not None
    assert data != builder.export(local)
    assert data is builder.export(plan)  # nothing is exported anew
    assert maker_of(builder.restore(GRAPH, data)) == player.at("build")


def test_bytes_are_kept_no_longer_than_their_plan(builder: RemoteBuilder, stage: Stage) -> None:
    ready(builder, stage, "go")
    plan = builder.build(GRAPH, workspace_limit=None)
    bytes_of_it, alive = builder.export(plan), weakref.ref(plan)
    assert bytes_of_it is not None
    held = sys.getrefcount(bytes_of_it)
    del plan
    gc.collect()
    assert alive() is None
    assert sys.getrefcount(bytes_of_it) == held - 1


def test_other_versions_in_the_other_process_are_not_used(
    new_builder: NewBuilder, stage: Stage, logs: list[EventDict]
) -> None:
    builder = new_builder("another library's")
    starting(builder, stage, "go")
    assert not builder.wait_ready(PATIENCE_S)
    assert build(builder) == HERE
    (said,) = [entry for entry in logs if entry["event"] == "builder.differs"]
    assert (said["log_level"], said["there"]) == ("warning", "another library's")


def test_what_a_library_prints_holds_up_nothing(builder: RemoteBuilder, stage: Stage) -> None:
    player = ready(builder, stage, "chatter")
    assert build(builder) == player.at("build")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_signals_for_the_whole_service_are_left_to_the_parent(
    builder: RemoteBuilder, stage: Stage, thread: ThreadPoolExecutor, sent: signal.Signals
) -> None:
    player = ready(builder, stage)
    made = thread.submit(build, builder)
    pid = player.at("build")
    os.kill(pid, sent)
    player.told("go")
    assert made.result(PATIENCE_S) == pid
    assert os.getsid(pid) != os.getsid(0)  # the terminal's Ctrl-C does not even reach it


def test_a_line_that_the_builder_process_logs_is_written_here_for_the_service_that_builds(
    builder: RemoteBuilder, stage: Stage, logs: list[EventDict]
) -> None:
    with speaking_for("left"):
        player = starting(builder, stage, "log", "log")
        assert builder.wait_ready(PATIENCE_S)
        assert player.at("open") == build(builder) == player.at("build")
    said = {"event": "craft.said", "log_level": "warning", "service": "left", "what": "1.5"}
    assert [line for line in logs if line["event"] == "craft.said"] == [
        {**said, "step": "open"},
        {**said, "step": "build"},
    ]
