"""However a builder ends, or its process, or the process that it is in: nothing is left."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.remote import BuilderHost, RemoteBuilder
from cudnn_actor.engines.remote.builder_messages import (
    ANSWERS,
    Accepted,
    Began,
    Build,
    Built,
    Busy,
    Open,
    Ready,
)
from cudnn_actor.processes.channel import Channel

from ...patience import PATIENCE_S
from .conftest import NewBuilder
from .craft import MAKE, Craft, Stage, graph, maker_of, wait_for_exit
from .test_remote_builds import GRAPH, HERE, build, ready, starting

ROOT = Path(__file__).parents[3]


def interrupted(builder: RemoteBuilder) -> bool:
    """Whether a build is refused because somebody gave up."""
    with pytest.raises(EngineFailure) as caught:
        build(builder)
    return caught.value.status == "BUILDER_INTERRUPTED"


def test_closing_twice_is_safe_and_so_is_interrupting_afterwards(
    builder: RemoteBuilder, stage: Stage
) -> None:
    ready(builder, stage)
    builder.close()
    builder.close()
    builder.interrupt()


def test_a_builder_is_closed_here_even_if_it_could_not_be_opened(host: BuilderHost) -> None:
    class Unopened(Craft):
        def open(self) -> None:
            raise EngineFailure("NO_DEVICE", "the test's machine has none")

    builder = RemoteBuilder("nowhere:at_all", (), Unopened(), host)
    with pytest.raises(EngineFailure, match="NO_DEVICE"):
        builder.open()
    builder.close()


def test_closing_a_builder_leaves_the_process_to_the_next_one(new_builder: NewBuilder, stage: Stage) -> None:
    first = new_builder()
    player = ready(first, stage, "go")
    first.close()
    assert build(new_builder()) == player.at("build")


def test_closing_the_host_ends_the_process_whatever_it_does(
    builder: RemoteBuilder, stage: Stage, thread: ThreadPoolExecutor, host: BuilderHost
) -> None:
    player = ready(builder, stage, "stick")
    failed = thread.submit(outcome_of, builder)
    pid = player.at("build")
    host.close()
    wait_for_exit(pid)
    assert failed.result(PATIENCE_S) in ("BUILDER_DIED", HERE)


def test_closing_the_host_does_not_wait_for_a_process_that_is_starting(
    new_builder: NewBuilder, stage: Stage, host: BuilderHost
) -> None:
    pid = starting(new_builder(), stage).at("open")  # and stays there
    host.close()
    wait_for_exit(pid)
    with pytest.raises(OSError, match="has ended"):
        host.connect()


def test_a_build_goes_on_when_its_owner_has_gone_and_the_next_one_gets_its_plan(
    new_builder: NewBuilder, stage: Stage, thread: ThreadPoolExecutor
) -> None:
    first = new_builder()
    player = ready(first, stage)
    given_up = thread.submit(interrupted, first)
    pid = player.at("build")
    first.interrupt()
    assert given_up.result(PATIENCE_S)
    second = new_builder()
    made = thread.submit(build, second)
    player.told("go")
    assert made.result(PATIENCE_S) == pid
    player.told("go")
    assert build(second, size=5) == player.at("build")  # it has not built the first one twice


def test_a_tuning_whose_owner_has_gone_ends_at_its_next_candidate(
    new_builder: NewBuilder, stage: Stage, thread: ThreadPoolExecutor
) -> None:
    first = new_builder()
    player = ready(first, stage)
    given_up = thread.submit(first.tune, GRAPH, workspace_limit=None, progress=lambda *_: None)
    player.at("tune")
    first.interrupt()
    with pytest.raises(EngineFailure, match="BUILDER_INTERRUPTED"):
        given_up.result(PATIENCE_S)
    second = new_builder()
    made = thread.submit(build, second)
    player.told("go", "go")
    assert made.result(PATIENCE_S) == player.at("build")


def test_another_that_waits_is_told_that_a_tuning_gets_on(
    new_builder: NewBuilder, stage: Stage, thread: ThreadPoolExecutor, host: BuilderHost
) -> None:
    tunes = new_builder()
    player = ready(tunes, stage)
    tuned = thread.submit(tunes.tune, GRAPH, workspace_limit=None, progress=lambda *_: None)
    player.at("tune")
    other = Channel(host.connect(), ANSWERS)
    player.told("go", "go", "go")
    assert maker_of(tuned.result(PATIENCE_S)) == player.pid
    heard: list[type] = []
    while Busy not in heard:
        assert select.select([other], (), (), PATIENCE_S)[0]
        heard += [type(frame) for frame in other.receive()]
    assert heard[0] is Accepted
    other.close()


def until(channel: Channel, last: type) -> list[Any]:
    """What a client hears, up to a message of that kind. Blocks."""
    heard: list[Any] = []
    while last not in map(type, heard):
        assert select.select([channel], (), (), PATIENCE_S)[0]
        heard += channel.receive()
    return heard[: [*map(type, heard)].index(last) + 1]


def opened(host: BuilderHost, stage: Stage) -> Channel:
    """Another client of the builder process, for which it is ready."""
    channel = Channel(host.connect(), ANSWERS)
    channel.send(Open(MAKE, (stage.address,), 100))
    channel.send_all()
    until(channel, Ready)
    return channel


def test_builds_of_others_are_made_between_two_candidates_of_a_tuning(
    new_builder: NewBuilder, stage: Stage, thread: ThreadPoolExecutor, host: BuilderHost
) -> None:
    tunes = new_builder(renew_after=100)
    player, other = ready(tunes, stage), opened(host, stage)
    tuned = thread.submit(tunes.tune, GRAPH, workspace_limit=None, progress=lambda *_: None)
    player.at("tune")
    other.send(Build(graph(5), None))
    other.send_all()
    player.told("go")
    assert player.at("build") == player.pid
    player.told("go")
    player.at("tune")
    assert until(other, Built)[-1].data is not None
    assert not tuned.done()
    other.close()
    player.told("go", "go")
    assert maker_of(tuned.result(PATIENCE_S)) == player.at("tune")


def test_a_tuning_is_not_to_blame_for_what_is_built_between_two_of_its_candidates(
    new_builder: NewBuilder, stage: Stage, thread: ThreadPoolExecutor, host: BuilderHost
) -> None:
    tunes = new_builder(tries=1, renew_after=100)
    player, other = ready(tunes, stage), opened(host, stage)
    tuned = thread.submit(tunes.tune, GRAPH, workspace_limit=None, progress=lambda *_: None)
    player.at("tune")
    other.send(Build(graph(5), None))
    other.send_all()
    player.told("go", "crash")
    last = stage.enter("go", "go", "go", "go")
    assert maker_of(tuned.result(PATIENCE_S)) == last.at("open")
    other.close()


def test_what_is_waited_for_is_made_before_what_is_built_behind(
    new_builder: NewBuilder, stage: Stage, thread: ThreadPoolExecutor, host: BuilderHost
) -> None:
    builder = new_builder(renew_after=100)
    player = ready(builder, stage)
    behind, soon = others = [Channel(host.connect(), ANSWERS) for _ in range(2)]
    for other in others:
        other.send(Open(MAKE, (stage.address,), 100))
        other.send_all()
        until(other, Ready)
    made = thread.submit(builder.build, GRAPH, workspace_limit=None)
    player.at("build")
    behind.send(Build(graph(6), None, effort="behind"))
    soon.send(Build(graph(5), None, effort="soon"))
    for other in others:
        other.send_all()
    player.told("go", "go")
    assert maker_of(made.result(PATIENCE_S)) == player.at("build")
    assert until(soon, Built)[-1].data is not None
    player.at("build")
    assert until(behind, Began)
    player.told("go")
    assert until(behind, Built)[-1].data is not None
    for other in others:
        other.close()


def test_what_is_built_behind_is_not_begun_shortly_after_a_build_that_was_waited_for(
    new_builder: NewBuilder, stage: Stage, host: BuilderHost
) -> None:
    builder = new_builder(renew_after=100, quiet_s=1e6)
    player = ready(builder, stage, "go", "go", "go")
    build(builder)
    behind = Channel(host.connect(), ANSWERS)
    behind.send(Open(MAKE, (stage.address,), 100, 1e6))
    behind.send(Build(graph(6), None, effort="behind"))
    behind.send_all()
    until(behind, Ready)
    for size in (5, 7):
        assert build(builder, size) == player.pid
    assert Began not in map(type, behind.receive())
    behind.close()


def test_without_a_process_nothing_is_tuned_and_plans_are_built_here(
    new_builder: NewBuilder, stage: Stage
) -> None:
    builder = new_builder("another library")
    starting(builder, stage, "go")
    with pytest.raises(EngineFailure, match="NO_BUILDER_TO_TUNE"):
        builder.tune(GRAPH, workspace_limit=None, progress=lambda *_: None)
    assert build(builder) == HERE


def test_a_stopped_process_that_another_has_killed_is_no_graphs_fault(
    new_builder: NewBuilder,
    stage: Stage,
    thread: ThreadPoolExecutor,
    host: BuilderHost,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cudnn_actor.engines.remote.connection.is_stopped", lambda _: False)
    builder = new_builder(tries=1)
    player = ready(builder, stage)
    made = thread.submit(build, builder)
    pid = player.at("build")
    os.kill(pid, signal.SIGSTOP)
    other = host.connect()  # which the process does not take, so its host looks at it
    second = stage.enter("go", "go")
    assert made.result(PATIENCE_S) == second.at("open") != pid
    other.close()


def test_a_process_with_many_descriptors_can_have_plans_built(stage: Stage) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    many = [os.dup(0) for _ in range(1100)]
    try:
        with BuilderHost() as host:
            builder = RemoteBuilder(MAKE, (stage.address,), Craft(), host)
            builder.open()
            ready(builder, stage, "go")
            pid = build(builder)
            builder.close()
            assert pid not in (None, os.getpid())
    finally:
        for fd in many:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_is_stopped_while_somebody_waits_is_replaced(
    new_builder: NewBuilder, stage: Stage, thread: ThreadPoolExecutor
) -> None:
    first = new_builder()
    player = ready(first, stage)
    first.close()
    os.kill(player.pid, signal.SIGSTOP)
    made = thread.submit(build, new_builder())
    second = stage.enter("go", "go")
    assert made.result(PATIENCE_S) == second.at("open") != player.pid


def test_interrupting_ends_the_wait_for_a_build(
    builder: RemoteBuilder, stage: Stage, thread: ThreadPoolExecutor
) -> None:
    player = ready(builder, stage)
    waiting = thread.submit(interrupted, builder)
    player.at("build")
    builder.interrupt()
    assert waiting.result(PATIENCE_S)
    assert interrupted(builder)


def test_interrupting_ends_the_wait_for_a_process_that_is_starting(
    builder: RemoteBuilder, stage: Stage, thread: ThreadPoolExecutor
) -> None:
    waiting = thread.submit(builder.tune, GRAPH, workspace_limit=None, progress=print)
    stage.enter().at("open")
    builder.interrupt()
    with pytest.raises(EngineFailure, match="BUILDER_INTERRUPTED"):
        waiting.result(PATIENCE_S)


def test_interrupting_before_the_build_is_not_too_early(builder: RemoteBuilder, stage: Stage) -> None:
    ready(builder, stage, "go")
    builder.interrupt()
    assert interrupted(builder)


def test_tuning_that_nobody_wants_any_more_ends_the_process_and_the_next_plan_has_a_new_one(
    builder: RemoteBuilder, stage: Stage, thread: ThreadPoolExecutor
) -> None:
    class UnwantedError(Exception):
        pass

    def progress(done: int, of: int, what: str) -> None:
        raise UnwantedError

    first = ready(builder, stage, "stick")
    with pytest.raises(UnwantedError):
        builder.tune(GRAPH, workspace_limit=None, progress=progress)
    made = thread.submit(build, builder)
    second = stage.enter("go", "go")
    assert made.result(PATIENCE_S) == second.at("open") != HERE
    wait_for_exit(first.pid)


def outcome_of(builder: RemoteBuilder) -> str | int:
    """Where a plan was built, or the status of the failure."""
    try:
        return build(builder)
    except EngineFailure as error:
        return error.status


@contextlib.contextmanager
def family(stage: Stage, mode: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a builder process. It is killed at the end, whatever happens."""
    command = [sys.executable, "-m", "tests.engines.remote.family", stage.address, mode]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as parent:
        try:
            yield parent
        finally:
            parent.kill()


def test_an_idle_process_does_not_outlive_its_parent(stage: Stage) -> None:
    with family(stage, "idle") as parent:
        pid = stage.enter("go").at("open")
        parent.kill()
        wait_for_exit(pid)


def test_one_that_is_starting_does_not_outlive_its_parent(stage: Stage) -> None:
    with family(stage, "idle") as parent:
        pid = stage.enter().at("open")  # and stays there
        parent.kill()
        wait_for_exit(pid)


def test_one_deep_in_a_library_that_holds_the_interpreter_does_not_outlive_its_parent(stage: Stage) -> None:
    with family(stage, "building") as parent:
        player = stage.enter("go", "stick")
        player.at("open")
        pid = player.at("build")
        parent.kill()
        wait_for_exit(pid)


def test_it_does_not_matter_who_else_holds_the_parents_end(stage: Stage) -> None:
    with family(stage, "copied") as parent:
        player = stage.enter("go", "stick")
        player.at("open")
        assert parent.stdout is not None
        copy = int(parent.stdout.readline())
        pid = player.at("build")
        try:
            parent.kill()
            wait_for_exit(pid)
        finally:
            os.kill(copy, signal.SIGKILL)
