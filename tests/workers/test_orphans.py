"""However the process with a service ends, none of its workers is left, and nothing holds its end up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .crash_rigs import HERE, PATIENCE_S, readable

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def parent(name: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A parent of the rigs that has said which processes there are, and the ids of those."""
    code = f"from {HERE} import {name}; {name}()"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = next((line for line in process.stdout if line.startswith("pids ")), "")
            assert said, process.stderr.read() if process.stderr is not None else ""
            yield process, [int(pid) for pid in said.split()[1:]]
        finally:
            process.kill()


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
        ("parent_loses_its_forkserver", 0),
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


def test_no_process_outlives_a_killed_parent_whose_sockets_a_fork_keeps_open() -> None:
    with parent("parent_is_killed_with_a_copy_about") as (process, pids), pidfds(pids) as watched:
        *ours, lingering = watched
        try:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait(PATIENCE_S) == -signal.SIGKILL
            for pid, fd in zip(pids, ours, strict=False):
                assert readable(fd, PATIENCE_S), f"{pid} is left over"
            assert not readable(lingering, 0.0)
        finally:
            signal.pidfd_send_signal(lingering, signal.SIGKILL)
