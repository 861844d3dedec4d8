"""However a builder ends, or its process, or the process that it is in: nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.remote import RemoteBuilder
from cudnn_actor.engines.remote.frames import Start, encode

from .conftest import NewBuilder, processes
from .craft import MAKE, PATIENCE_S, Craft, Stage, wait_for_exit
from .test_remote_builds import GRAPH, HERE, build, ready, starting

ROOT = Path(__file__).parents[3]


def interrupted(builder: RemoteBuilder) -> bool:
    """Whether a build is refused because somebody gave up."""
    with pytest.raises(EngineFailure) as caught:
        build(builder)
    return caught.value.status == "BUILDER_INTERRUPTED"


def test_closing_lets_the_process_close_its_builder_and_reaps_it(
    builder: RemoteBuilder, stage: Stage
) -> None:
    player = ready(builder, stage)
    builder.close()
    pid = player.at("close")
    assert str(pid) not in processes()


def test_closing_twice_is_safe_and_so_is_interrupting_afterwards(
    builder: RemoteBuilder, stage: Stage
) -> None:
    ready(builder, stage)
    builder.close()
    builder.close()
    builder.interrupt()


def test_closing_does_not_wait_for_a_process_that_is_starting(new_builder: NewBuilder, stage: Stage) -> None:
    builder = new_builder(grace_s=1000)
    pid = starting(builder, stage).at("open")  # and stays there
    builder.close()
    assert str(pid) not in processes()


def test_a_process_that_does_not_end_is_killed(new_builder: NewBuilder, stage: Stage) -> None:
    builder = new_builder("a test's", "stubborn", grace_s=0.01)
    player = ready(builder, stage)
    builder.close()
    assert str(player.pid) not in processes()


def test_a_builder_is_closed_here_even_if_it_could_not_be_opened() -> None:
    class Unopened(Craft):
        def open(self) -> None:
            raise EngineFailure("NO_DEVICE", "the test's machine has none")

    builder = RemoteBuilder("nowhere:at_all", (), Unopened())
    with pytest.raises(EngineFailure, match="NO_DEVICE"):
        builder.open()
    builder.close()


def test_interrupting_ends_the_wait_for_a_build_and_the_process(
    builder: RemoteBuilder, stage: Stage, thread: ThreadPoolExecutor
) -> None:
    player = ready(builder, stage)
    waiting = thread.submit(interrupted, builder)
    pid = player.at("build")
    builder.interrupt()
    assert waiting.result(PATIENCE_S)
    assert str(pid) not in processes()
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
    assert str(first.pid) not in processes()


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


def test_one_whose_parent_died_before_it_could_look_opens_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(PATIENCE_S)
        ours.sendall(encode(Start(MAKE, (), os.getppid())))
        command = [sys.executable, "-m", "cudnn_actor.engines.remote.child", str(theirs.fileno())]
        with subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()]) as child:
            theirs.close()
            assert ours.recv(1) == b""
            assert child.wait(PATIENCE_S) == 0


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


def test_one_that_is_let_go_ends_whoever_else_holds_the_parents_end(stage: Stage) -> None:
    with family(stage, "closed") as parent:
        player = stage.enter("go", "go")
        pid = player.at("open")
        assert parent.stdout is not None
        copy = int(parent.stdout.readline())
        try:
            assert player.at("close") == pid
            assert parent.stdout.readline() == b"closed\n"
            wait_for_exit(pid)
        finally:
            os.kill(copy, signal.SIGKILL)
