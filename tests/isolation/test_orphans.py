"""However the process with a service ends, none of its workers is left, and nothing holds its end up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..forked_programs import Program
from ..patience import PATIENCE_S
from .crash_rigs import HERE, readable

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def parent(name: str) -> Iterator[tuple[Program, list[int]]]:
    """A parent of the rigs that has said which processes there are, and the ids of those."""
    code = f"from {HERE} import run_parent; run_parent({name!r})"
    words = ["-X", "faulthandler", "-W", "error", "-c", code]
    pipe = subprocess.PIPE
    streams: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": pipe}
    with (
        Program(words, cwd=ROOT, **streams, start_new_session=True, spare=True) as process,
        dumped_after(PATIENCE_S, process),
    ):
        try:
            said = next((line for line in process.stdout if line.startswith("pids ")), "")
            assert said, process.stderr.read()
            yield process, [int(pid) for pid in said.split()[1:]]
        finally:
            process.kill()


@contextlib.contextmanager
def dumped_after(seconds: float, process: Program) -> Iterator[None]:
    """Have a process and its forks, if they take longer for the block, end with all stacks on stderr."""

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGABRT)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@contextlib.contextmanager
def pidfds(pids: list[int]) -> Iterator[list[int]]:
    fds = [os.pidfd_open(pid) for pid in pids]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("parent_is_killed", -signal.SIGKILL),
        ("parent_returns", 0),
        ("parent_exits_at_once", 0),
        ("parent_never_closes", 0),
        ("parent_loses_its_forkserver", -signal.SIGKILL),
        ("parent_loses_its_forkserver_and_returns", 0),
        ("parent_loses_its_forkserver_in_a_library", -signal.SIGKILL),
        ("parent_adopts_its_workers", 0),
        ("parent_forks_and_its_fork_exits", 0),
        ("parent_forks_and_both_serve", 0),
    ],
)
def test_no_process_outlives_its_parent(name: str, status: int) -> None:
    with parent(name) as (process, pids), pidfds(pids) as watched:
        assert not any(readable(fd, 0.0) for fd in watched), "one has ended too early"
        _, stderr = process.communicate("\n", timeout=PATIENCE_S)
        assert process.returncode == status, stderr
        assert "Traceback" not in stderr
        for pid, fd in zip(pids, watched, strict=True):
            assert readable(fd, PATIENCE_S), f"{pid} is left over"


def test_a_worker_that_is_stopped_does_not_outlive_its_parent_either() -> None:
    with parent("parent_loses_its_forkserver") as (process, pids), pidfds(pids) as watched:
        for fd in watched[1:]:
            signal.pidfd_send_signal(fd, signal.SIGSTOP)
        process.communicate("\n", timeout=PATIENCE_S)
        for pid, fd in zip(pids, watched, strict=True):
            assert readable(fd, PATIENCE_S), f"{pid} is left over"


@pytest.mark.parametrize(
    "name", ["parent_is_killed_with_a_copy_about", "parent_loses_its_forkserver_with_copies_about"]
)
def test_no_process_outlives_a_killed_parent_whose_descriptors_a_fork_keeps_open(name: str) -> None:
    with parent(name) as (process, pids), pidfds(pids) as watched:
        *ours, lingering = watched
        try:
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait(PATIENCE_S) == -signal.SIGKILL
            for pid, fd in zip(pids, ours, strict=False):
                assert readable(fd, PATIENCE_S), f"{pid} is left over"
            assert not readable(lingering, 0.0)
        finally:
            signal.pidfd_send_signal(lingering, signal.SIGKILL)
