"""A builder process that dies takes one build with it, and nothing else."""

from __future__ import annotations

import os
import signal
import struct
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from structlog.typing import EventDict

from cudnn_actor.engines.base import EngineFailure, StickyError
from cudnn_actor.engines.remote import BuilderHost, RemoteBuilder
from cudnn_actor.engines.remote.builder_messages import Progress, Ready, Refused
from cudnn_actor.processes.frames import LONGEST, encode
from cudnn_actor.protocol.errors import ErrorRecord

from ...patience import PATIENCE_S
from .conftest import NewBuilder
from .craft import Stage, wait_for_exit
from .test_remote_builds import GRAPH, HERE, build, ready, starting

UNKNOWN = Refused(ErrorRecord(kind="NoSuchError", facts={}))
MADE_OF_NONSENSE = Refused(ErrorRecord(kind="UnsupportedGraph", facts={"nonsense": 1}))


def dying(builder: RemoteBuilder, size: int = 4) -> EngineFailure:
    """How a build fails whose process dies."""
    with pytest.raises(EngineFailure) as caught:
        build(builder, size)
    assert caught.value.status == "BUILDER_DIED"
    assert not isinstance(caught.value, StickyError)
    return caught.value


def said(logs: list[EventDict], event: str) -> list[EventDict]:
    return [entry for entry in logs if entry["event"] == event]


def test_a_process_that_is_killed_fails_its_build_and_the_next_has_a_new_one(
    builder: RemoteBuilder, stage: Stage, thread: ThreadPoolExecutor, logs: list[EventDict]
) -> None:
    player = ready(builder, stage)
    failed = thread.submit(dying, builder)
    first = player.at("build")
    os.kill(first, signal.SIGKILL)
    assert f"the builder process {first} has ended" in failed.result(PATIENCE_S).detail
    made = thread.submit(build, builder)
    second = stage.enter("go", "go")
    assert made.result(PATIENCE_S) == second.at("open") not in (first, HERE)
    (death,) = said(logs, "builder.died")
    assert death["log_level"] == "warning"
    assert (death["pid"], death["graph"]) == (first, GRAPH.digest()[:8])


@pytest.mark.parametrize("tries", [2, 3])
def test_a_build_that_may_cost_several_processes_is_made_by_the_last(
    new_builder: NewBuilder, stage: Stage, tries: int
) -> None:
    builder = new_builder(tries=tries)
    ready(builder, stage, "crash")
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(build, builder)
        for _ in range(tries - 2):
            stage.enter("go", "crash")
        last = stage.enter("go", "go")
        assert made.result(PATIENCE_S) == last.at("open")


def test_a_tuning_that_costs_every_process_that_it_may_fails_and_no_other_builder_refuses_the_graph(
    new_builder: NewBuilder, stage: Stage
) -> None:
    tunes, builds = new_builder(tries=2), new_builder(tries=2)
    ready(tunes, stage, "go", "crash")
    with ThreadPoolExecutor(1) as thread:
        failed = thread.submit(tunes.tune, GRAPH, workspace_limit=None, progress=lambda *_: None)
        stage.enter("go", "crash")
        with pytest.raises(EngineFailure, match="BUILDER_DIED"):
            failed.result(PATIENCE_S)
        last = stage.enter("go", "go")
        assert build(builds) == last.at("open") != HERE


def test_a_build_that_costs_every_process_that_it_may_fails(new_builder: NewBuilder, stage: Stage) -> None:
    builder = new_builder(tries=2)
    ready(builder, stage, "crash")
    with ThreadPoolExecutor(1) as thread:
        failed = thread.submit(dying, builder)
        stage.enter("go", "crash")
        assert failed.result(PATIENCE_S).status == "BUILDER_DIED"
        stage.enter("go")


def test_a_build_that_hangs_ends_with_its_process_and_the_next_has_a_new_one(
    new_builder: NewBuilder, stage: Stage
) -> None:
    builder = new_builder(tries=2, answer_within_s=2.0)
    first = ready(builder, stage)  # told nothing of the build, it waits at it
    with pytest.raises(EngineFailure, match="sent nothing for") as caught:
        build(builder)
    assert caught.value.status == "BUILDER_SILENT"
    wait_for_exit(first.at("build"))
    second = stage.enter("go", "go")
    assert build(builder) == second.at("open")


def test_a_build_whose_process_is_stopped_is_made_by_another(new_builder: NewBuilder, stage: Stage) -> None:
    builder = new_builder(tries=1, answer_within_s=3600.0)
    first = ready(builder, stage)
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(build, builder)
        pid = first.at("build")
        os.kill(pid, signal.SIGSTOP)
        second = stage.enter("go", "go")
        assert made.result(PATIENCE_S) == second.at("open") != pid
    wait_for_exit(pid)


def test_one_that_is_stopped_between_builds_fails_none(
    builder: RemoteBuilder, stage: Stage, thread: ThreadPoolExecutor
) -> None:
    ready(builder, stage, "go")
    pid = build(builder)
    os.kill(pid, signal.SIGSTOP)
    made = thread.submit(build, builder)
    second = stage.enter("go", "go")
    assert made.result(PATIENCE_S) == second.at("open") != pid


def test_what_a_dying_process_said_is_in_the_error_and_in_the_log(
    builder: RemoteBuilder, stage: Stage, logs: list[EventDict]
) -> None:
    ready(builder, stage, "leave")
    failure = dying(builder)
    assert "the library is upset" in failure.detail
    (death,) = said(logs, "builder.died")
    assert "the library is upset" in death["stderr"]


def test_a_fault_inside_the_library_is_the_other_process_s_and_says_where_it_was(
    builder: RemoteBuilder, stage: Stage
) -> None:
    ready(builder, stage, "fault")
    detail = dying(builder).detail
    assert "Segmentation fault" in detail
    assert "in build" in detail  # the interpreter's stack


def test_a_dead_context_in_the_other_process_is_not_one_in_this(builder: RemoteBuilder, stage: Stage) -> None:
    ready(builder, stage, "sticky")
    assert "CRAFT_DEAD: as told" in dying(builder).detail
    second = stage.enter("go", "go")
    assert build(builder) == second.at("open")


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(struct.pack("<I", LONGEST + 1), id="too long"),
        pytest.param(struct.pack("<I", 3) + b"\xc1\xc1\xc1", id="no MessagePack"),
        pytest.param(struct.pack("<I", 2000) + b"\x91" * 2000, id="nested without end"),
        pytest.param(struct.pack("<I", 1) + msgspec.msgpack.encode(7), id="no frame"),
        pytest.param(encode(Ready("again")), id="no answer"),
        pytest.param(encode(UNKNOWN), id="an unknown error"),
        pytest.param(encode(MADE_OF_NONSENSE), id="an error without its facts"),
    ],
)
def test_garbage_ends_the_process_that_sends_it(builder: RemoteBuilder, stage: Stage, frame: bytes) -> None:
    player = ready(builder, stage, f"utter {frame.hex()}")
    assert "was killed: it " in dying(builder).detail
    wait_for_exit(player.at("build"))


def test_a_process_that_speaks_unasked_is_replaced(
    builder: RemoteBuilder, stage: Stage, thread: ThreadPoolExecutor
) -> None:
    frames = encode(Ready(builder.fingerprint)) + encode(Progress(1, 2, "of nothing"))
    first = starting(builder, stage, f"utter {frames.hex()}")
    assert builder.wait_ready(PATIENCE_S)
    made = thread.submit(build, builder)
    second = stage.enter("go", "go")
    assert made.result(PATIENCE_S) == second.at("open") != first.at("open")


def test_one_that_dies_between_builds_fails_none(
    builder: RemoteBuilder, stage: Stage, thread: ThreadPoolExecutor
) -> None:
    first = ready(builder, stage, "go")
    pid = build(builder)
    first.at("build")
    os.kill(pid, signal.SIGKILL)
    wait_for_exit(pid)
    made = thread.submit(build, builder)
    second = stage.enter("go", "go")
    assert made.result(PATIENCE_S) == second.at("open")


def test_a_graph_of_which_two_processes_died_is_not_built_again_and_others_are(
    builder: RemoteBuilder, stage: Stage
) -> None:
    ready(builder, stage, "crash")
    dying(builder)
    stage.enter("go", "crash")
    dying(builder)
    third = stage.enter("go", "go")
    assert "not built again" in dying(builder).detail
    assert build(builder, size=5) == third.at("open")


def test_after_four_deaths_plans_are_built_here_but_for_those_that_killed(
    builder: RemoteBuilder, stage: Stage, logs: list[EventDict]
) -> None:
    ready(builder, stage, "crash")
    dying(builder, size=1)
    for size in (2, 3, 4):
        stage.enter("go", "crash")
        dying(builder, size)
    assert build(builder, size=5) == HERE
    assert "not built in this one" in dying(builder, size=2).detail
    (given_up,) = said(logs, "builder.given_up")
    assert (given_up["log_level"], given_up["deaths"]) == ("warning", 4)


@pytest.mark.parametrize("make", ["tests.engines.remote.nowhere:Craft", "os:getpid", "no colon"])
def test_a_builder_that_cannot_be_made_there_is_used_here(
    new_builder: NewBuilder, make: str, logs: list[EventDict]
) -> None:
    builder = new_builder(make=make)
    assert build(builder) == HERE
    assert not builder.wait_ready(PATIENCE_S)
    assert build(builder) == HERE
    deaths = said(logs, "builder.died")
    assert len(deaths) == 4
    assert all("Traceback" in death["stderr"] for death in deaths)
    assert len(said(logs, "builder.given_up")) == 1


def test_without_an_interpreter_to_start_plans_are_built_here(
    new_builder: NewBuilder, logs: list[EventDict]
) -> None:
    with BuilderHost(executable="/nowhere/python") as host:
        builder = new_builder(access=host)
        assert build(builder) == HERE
    assert said(logs, "builder.not_started")
    assert len(said(logs, "builder.given_up")) == 1
    assert build(builder, size=5) == HERE


def test_a_process_that_does_not_become_ready_is_replaced(
    new_builder: NewBuilder, stage: Stage, logs: list[EventDict]
) -> None:
    builder = new_builder(start_within_s=0.01)
    assert not builder.wait_ready(PATIENCE_S)
    (death, *_) = said(logs, "builder.died")
    assert "not ready within 0.01 s" in death["why"]
    assert build(builder) == HERE
